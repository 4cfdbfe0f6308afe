"""``sampling.grammar`` as a user writes it: its forms, its files, every refusal in one line before a weight is read, and whole jobs under it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import specgen
from specgen import loading
from specgen.errors import ConfigError
from specgen.grammar_text import KEY, compiled, fingerprint, read_grammar
from tests.grammars import DOCUMENT, SCHEMA, is_document, rules
from tests.jobs import log_of, resume, rows_of, start, stats_of, toy, write_lines

JOB = ("sampling.temperature=0.8", "sampling.max_tokens=48")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- the text ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", "sampling.grammar=x must begin with json:, regex: or ebnf:, such as sampling.grammar=regex:x"),
        ('{"type": 1}', 'sampling.grammar={"type": 1} must begin with json:, regex: or ebnf:, such as sampling.grammar=json:{"type": 1}'),
        ('root ::= "a"', 'sampling.grammar=root ::= "a" must begin with json:, regex: or ebnf:, such as sampling.grammar=ebnf:root ::= "a"'),
        ("json:", "sampling.grammar=json: has no grammar behind its colon; give one, or json:@FILE"),
        (
            "json:{",
            "sampling.grammar: the JSON schema cannot be read: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ('json:{"maximum": NaN}', "sampling.grammar: the JSON schema cannot be read: NaN is not JSON"),
        ("json:[1]", "sampling.grammar: the JSON schema cannot be used: schema must be an object or boolean"),
        ('json:{"type": "text"}', "sampling.grammar: the JSON schema cannot be used: Invalid type: text"),
        ('json:{"not": {}}', 'sampling.grammar: the JSON schema cannot be used: Unimplemented keys: ["not"]'),
        (
            'json:{"type": "integer", "minimum": 3, "maximum": 1}',
            "sampling.grammar: the JSON schema cannot be used: Unsatisfiable schema: minimum (3) is greater than maximum (1)",
        ),
        ("regex:[0-9", "sampling.grammar: the regular expression cannot be used: [0-9: unclosed character class"),
        (
            "regex:a(?=b)",
            "sampling.grammar: the regular expression cannot be used: a(?=b): look-around, including look-ahead and look-behind, is not supported",
        ),
        ('ebnf:start: "a" | c', 'sampling.grammar: the EBNF grammar cannot be used: line 1, column 8: unknown name: "c"'),
        ('ebnf:start: "a', "sampling.grammar: the EBNF grammar cannot be used: line 1, column 10: lexer error"),
        ('ebnf:root ::= "a" | c', "sampling.grammar: the EBNF grammar cannot be read: Rule 'c' not found"),
        *[
            (
                f"ebnf:{text}",
                "sampling.grammar: the EBNF grammar cannot be used: it has no rule start, with which Lark's notation begins; add start: RULE",
            )
            for text in ('root: "a"', 'a: "x"\nb: a a', "DIGIT: /[0-9]/", "// start: a\na: /::=/")
        ],
        ('ebnf:start: "a" | b\nb: /c/ d', 'sampling.grammar: the EBNF grammar cannot be used: line 2, column 4: unknown name: "d"'),
        (
            'ebnf:top ::= "a"',
            "sampling.grammar: the EBNF grammar cannot be read: it has no rule root, with which GBNF begins; add root ::= RULE",
        ),
        ("json:@nowhere.json", "sampling.grammar: nowhere.json: No such file or directory; write json:@FILE with a file that can be read"),
        ("regex:@empty.txt", "sampling.grammar: empty.txt is empty"),
        ("regex:@latin.txt", "sampling.grammar: latin.txt is not UTF-8 text; save it as such"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(value: str, message: str) -> None:
    Path("empty.txt").write_text("\n")
    Path("latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        compiled(value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "value", ["regex:a{20000}", 'ebnf:start: ""', 'ebnf:start: "x" start | "y"', 'ebnf:start: a | "b"\na: a', "regex:()", "json:{}"]
)
def test_a_grammar_under_which_some_text_can_begin_is_taken(value: str) -> None:
    matcher = rules(value).matcher()
    assert any(matcher.compute_bitmask()) and not matcher.is_error()


def test_a_file_holds_what_the_line_would() -> None:
    Path("schema.json").write_text(json.dumps(SCHEMA, indent=2), encoding="utf-8-sig")
    Path("pattern.txt").write_text("[0-9]+\n")
    assert json.loads(read_grammar("json:@schema.json")[1]) == SCHEMA
    assert read_grammar("regex:@pattern.txt") == ("regex", "[0-9]+") == read_grammar("regex:[0-9]+")
    assert fingerprint("regex:@pattern.txt") == fingerprint("regex:[0-9]+") != fingerprint("ebnf:[0-9]+")
    assert fingerprint(None) is None


def test_white_space_in_json_is_bounded_unless_the_schema_says_otherwise() -> None:
    assert "{0,64}" in compiled('json:{"type": "object"}').replace("\\\\", "\\")
    for own in ('{"whitespace_flexible": false}', '{"whitespace_pattern": " ?"}'):
        assert "{0,64}" not in compiled('json:{"type": "object", "x-guidance": ' + own + "}")
    assert "{0,64}" in compiled("json:true")
    assert "{0,64}" in compiled('json:{"x-guidance": {"lenient": true}}')


def test_the_library_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=rf"^{KEY} needs the package llguidance, which is not installed: pip install llguidance$"):
        compiled("regex:a")


# -- the job ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.grammar='regex:(a'"], "sampling.grammar: the regular expression cannot be used: (a: unclosed group"),
        (
            ["sampling.grammar=regex:a", "sampling.ignore_eos=true"],
            "sampling.ignore_eos=true has no meaning with sampling.grammar, which ends a row where its text is complete; leave one out",
        ),
        (
            ["sampling.grammar=regex:a", "draft.simulate_acceptance_length=2"],
            "draft.simulate_acceptance_length=2 commits drafts that sampling.grammar need not allow; leave one out",
        ),
        (
            ["sampling.grammar=regex:a", "engine.overlap=1"],
            "engine.overlap=1 cannot be combined with sampling.grammar: a step's masks follow from the step before; leave it out",
        ),
        (
            ["sampling.grammar=regex:a", *toy(None)],
            "sampling.grammar cannot read the tokens of this model's tokenizer as bytes: can't determine decoder type",
        ),
        *[
            ([f"sampling.grammar='{value}'"], f"sampling.grammar: no text can begin under {what}: it allows none, or the model's vocabulary")
            for value, what in (
                ("ebnf:start: start", "the EBNF grammar"),
                ("ebnf:start: a\na: b | a b\nb: a", "the EBNF grammar"),
                ("ebnf:root ::= root", "the EBNF grammar"),
                ("regex:[^\\x00-\\U0010ffff]", "the regular expression"),
            )
        ],
        *[
            ([f"sampling.grammar='{value}'"], f"sampling.grammar: {what} goes past the library's limits at once ({why}")
            for value, what, why in (
                ("regex:a{1000000}", "the regular expression", "lexer error: too many expressions constructed); make it smaller"),
                ('ebnf:start: "x" start', "the EBNF grammar", "parser error: Too many items"),
            )
        ],
    ],
)
def test_a_job_is_refused_before_a_weight_is_read(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_last", None)
    monkeypatch.setattr(loading, "load_target", lambda *args: pytest.fail("weights were read"))
    assert start("o", *JOB, *overrides) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not Path("o").exists()


def test_a_job_under_a_grammar_writes_documents_and_checks_them() -> None:
    Path("schema.json").write_text(json.dumps(SCHEMA))
    assert start("o", *JOB, "sampling.grammar=json:@schema.json", "verify_lossless=2", "data.limit=6", "baseline=true") == 0
    rows = rows_of("o")
    assert len(rows) == 6 and all(is_document(row["text"]) and row["finish_reason"] == "stop" for row in rows.values())
    stats = stats_of("o")
    assert stats["lossless"] == {"checked": 2, "equal": 2, "near_tie": 0, "different": 0, "worst_gap": None}
    assert stats["sampling"]["grammar"] == "json:@schema.json" and stats["baseline"]["throughput"]["output_tokens_per_s"] > 0
    assert "sampling.grammar: a decode step is two parts with one host read between them, and engine.overlap is 0" in log_of("o")
    assert start("p", *JOB, "data.limit=6", "draft=none", "sampling.grammar=json:@schema.json") == 0
    assert [row["token_ids"] for row in rows_of("p").values()] == [row["token_ids"] for row in rows.values()]


def test_a_resumed_job_keeps_its_grammar_and_refuses_another(capsys: pytest.CaptureFixture[str]) -> None:
    schema = Path("schema.json")
    schema.write_text(json.dumps(SCHEMA))
    assert start("o", *JOB, "baseline=false", "data.limit=6", "sampling.grammar=json:@schema.json") == 0
    whole = rows_of("o")
    path = Path("o/generations.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    schema.write_text(json.dumps({"type": "object"}))
    assert resume("o") == 2
    remedy = "restore it, or start a new run instead of resume=o"
    assert f"sampling.grammar: the grammar has changed since this run was started; {remedy}" in capsys.readouterr().err
    schema.rename("moved.json").write_text(json.dumps(SCHEMA))
    assert resume("o", "sampling.grammar=json:@moved.json") == 0
    assert rows_of("o") == whole


def test_each_turn_is_a_text_of_its_own() -> None:
    row = {"id": "t", "turns": ["A class.", "Another one."]}
    data = ["data=jsonl", f"data.path={write_lines(Path('in.jsonl'), [row])}"]
    Path("schema.json").write_text(json.dumps(SCHEMA))
    assert start("o", *JOB, *data, "sampling.grammar=json:@schema.json") == 0
    (found,) = rows_of("o").values()
    assert [is_document(turn["text"]) for turn in found["turns"]] == [True, True]


def test_from_python() -> None:
    def texts(draft: Any) -> list[str]:
        sampling = {"grammar": DOCUMENT, "temperature": 0.8, "max_tokens": 48}
        return [row.text for row in specgen.generate(["def f():", "class A:"], draft=draft, sampling=sampling)]

    plain = texts("none")
    assert all(map(is_document, plain)) and texts({"method": "mtp", "topk": 2, "num_steps": 2}) == plain
    with pytest.raises(ConfigError, match=r"^sampling\.grammar: the regular expression cannot be used: \(: unclosed group$"):
        specgen.generate("a", sampling={"grammar": "regex:("})


@pytest.mark.parametrize("path", ["", "/dev/zero", "{folder}", "{large}"])
def test_what_is_no_text_file_of_a_sane_size_is_refused_unread(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.grammar_text.LARGEST_FILE", 1 << 20)
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    path = path.format(folder=tmp_path, large=tmp_path / "large")
    with pytest.raises(ConfigError, match=f"^sampling.grammar=json:@{path}: name a text file of at most 1 MiB behind @$"):
        read_grammar(f"json:@{path}")


def test_a_schema_that_is_null_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sampling\.grammar: the JSON schema must be an object or a boolean, not null$"):
        compiled("json:null")
