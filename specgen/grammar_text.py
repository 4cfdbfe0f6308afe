"""``sampling.grammar``: the forms its text may have, the file it may name, what the grammar library says of it, and the grammar over a tokenizer.

Boundary: text and tokenizer in, the library's objects out; imports no torch, and the library (llguidance) only when a job has a grammar. What a
grammar allows at a place in an output is ``engine.grammar``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import ConfigError

KEY = "sampling.grammar"
FORMS = ("json", "regex", "ebnf")
FILE_MARK = "@"
LARGEST_FILE = 16 << 20  # bytes of a grammar
# Between the parts of a JSON text. Without a bound a model that has lost the thread writes white space for ever, all of it legal.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,64}"
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
MOST_BEGINNINGS = 16  # first tokens that are tried before a grammar is refused for all of them
END_TOKEN = "<|the text may end here|>"


def library() -> Any:
    """The module ``llguidance``. Raises ConfigError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f"{KEY} needs the package llguidance, which is not installed: pip install llguidance") from error
    return llguidance


def split_form(value: str) -> tuple[str, str]:
    """(form, text) of the key's value; the text may still be ``@FILE``. Raises ConfigError for any other beginning."""
    form, colon, text = value.strip().partition(":")
    if not colon or form not in FORMS:
        looks = "json" if value.lstrip().startswith(("{", FILE_MARK)) else "ebnf" if "::=" in value or "start:" in value else "regex"
        raise ConfigError(f"{KEY}={_short(value)} must begin with json:, regex: or ebnf:, such as {KEY}={looks}:{_short(value, 40)}")
    if not text.strip():
        raise ConfigError(f"{KEY}={form}: has no grammar behind its colon; give one, or {form}:{FILE_MARK}FILE")
    return form, text


def file_of(value: str) -> str | None:
    """The path of a value that names a file, else None."""
    text = split_form(value)[1]
    return text[len(FILE_MARK) :] if text.startswith(FILE_MARK) else None


def read_grammar(value: str) -> tuple[str, str]:
    """(form, text) with the file read where one is named. Raises ConfigError."""
    form, text = split_form(value)
    path = file_of(value)
    if path is None:
        return form, text
    file = Path(path).expanduser()
    if not path.strip() or file.is_dir() or (file.exists() and not file.is_file()) or (file.is_file() and file.stat().st_size > LARGEST_FILE):
        raise ConfigError(f"{KEY}={form}:{FILE_MARK}{path}: name a text file of at most {LARGEST_FILE >> 20} MiB behind {FILE_MARK}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{KEY}: {path} is not UTF-8 text; save it as such") from error
    except OSError as error:
        raise ConfigError(f"{KEY}: {path}: {error.strerror}; write {form}:{FILE_MARK}FILE with a file that can be read") from error
    if not text.strip():
        raise ConfigError(f"{KEY}: {path} is empty")
    # A pattern or a grammar ends where the file's last line does.
    return form, text.rstrip("\r\n") if form == "regex" else text


def under(value: str, folder: Path) -> str:
    """``value`` with a file that exists under ``folder`` named by its absolute path; any other value as it is."""
    path = file_of(value)
    if path is None or not os.path.exists(folder / path):
        return value
    return f"{split_form(value)[0]}:{FILE_MARK}{folder / path}"


def fingerprint(value: str | None) -> str | None:
    """What tells one grammar from another, wherever its file lies; None without a grammar."""
    return None if value is None else hashlib.sha256("\n".join(read_grammar(value)).encode()).hexdigest()


def compiled(value: str, tokenizer: Any = None) -> str:
    """The grammar in the library's form, checked as far as that goes without a tokenizer, or wholly with the library's ``tokenizer``.

    Raises ConfigError of one line that names the mistake.
    """
    form, text = read_grammar(value)
    found = library()
    try:
        if form == "json":
            schema = json.loads(text, parse_constant=_no_constant)
            if schema is None:
                raise ConfigError(f"{KEY}: the JSON schema must be an object or a boolean, not null")
            text = "{}" if schema is True else text  # the same to JSON Schema, and the library can give it options
            grammar: str = found.LLMatcher.grammar_from_json_schema(text, defaults=_white_space(schema))
        else:
            # The library's own guess of the notation takes a grammar in Lark's without its first rule for GBNF, and speaks of that.
            notation = "lark" if form == "ebnf" and not GBNF_RULE.search(text) else form
            grammar = found.grammar_from(notation, text)
    except ValueError as error:
        raise ConfigError(f"{KEY}: {_what(form)} cannot be read: {_one_line(form, str(error))}") from error
    wrong, messages = found.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if wrong:
        raise ConfigError(f"{KEY}: {_what(form)} cannot be used: {_one_line(form, ' '.join(messages))}")
    return grammar


def _white_space(schema: Any) -> dict[str, str] | None:
    """The library's options for white space; None where the schema's own ``x-guidance`` says what it wants, or takes no options."""
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    stated = isinstance(own, dict) and ("whitespace_flexible" in own or "whitespace_pattern" in own)
    return {"whitespace_pattern": WHITE_SPACE} if (isinstance(schema, dict) and not stated) or schema is True else None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _what(form: str) -> str:
    return {"json": "the JSON schema", "regex": "the regular expression", "ebnf": "the EBNF grammar"}[form]


_NOISE: tuple[tuple[str, str], ...] = (
    (r"\n\s*\d+ \| .*", ""),  # the library's echo of the line
    (r"\n\s*\^+\s*(?=\n|$)", ""),  # the pointer under it
    (r"regex parse error:\n\s*(.*)\nerror: ", r"\1: "),
    (r"^Failed to convert the grammar from GBNF to Lark: ", ""),
    (r"^no start rule found$", "it has no rule start, with which Lark's notation begins; add start: RULE"),
    (r"^No 'root' rule found", "it has no rule root, with which GBNF begins; add root ::= RULE"),
    (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
)


def _one_line(form: str, message: str) -> str:
    for pattern, instead in _NOISE:
        message = re.sub(pattern, instead, message)
    if form == "regex":  # places in, and quotes of, a grammar that the user never wrote
        message = re.sub(r"^line 1, column \d+: invalid regex .*? \(in regex\): ", "", message, flags=re.DOTALL)
    return _short(" ".join(message.split()), 300)


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


# -- the grammar over a tokenizer -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as the library reads it. ``end``: the id it allows where a text may end, above every id of the model's tokenizer."""

    tokens: Any
    end: int

    @property
    def words(self) -> int:
        """int32 words of a mask."""
        return self.end // 32 + 1


@dataclass(frozen=True)
class Rules:
    """A job's grammar over its vocabulary."""

    grammar: str
    vocabulary: Vocabulary

    def matcher(self) -> Any:
        """A new matcher at the start of a text. Copies of one matcher share a lock and would not run in parallel."""
        return library().LLMatcher(self.vocabulary.tokens, self.grammar, log_level=0)


_last: tuple[Any, Vocabulary] | None = None


def rules_of(value: str, tokenizer: Any | None) -> Rules:
    """The rules of ``sampling.grammar=value`` over a transformers tokenizer.

    Raises ConfigError for a grammar or a tokenizer that cannot be used, and for a grammar under which no text can begin.
    """
    global _last
    if _last is None or _last[0] is not tokenizer:
        _last = tokenizer, _vocabulary(tokenizer)
    vocabulary = _last[1]
    rules = Rules(compiled(value, vocabulary.tokens), vocabulary)
    _check_beginning(split_form(value)[0], rules)
    return rules


def _check_beginning(form: str, rules: Rules) -> None:
    """Raise ConfigError where every row would end before its first token: the library compiles grammars that no text fits, or that pass its limits
    as soon as they are followed."""
    matcher = rules.matcher()
    mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << rules.vocabulary.end) - 1)
    said = limit_passed(matcher)
    if not matcher.is_error():
        if matcher.is_accepting():
            return
        for _ in range(MOST_BEGINNINGS):
            if not mask:
                break
            after = matcher.deep_copy()
            if after.try_consume_tokens([(mask & -mask).bit_length() - 1]) == 1 and not after.is_error():
                return
            said, mask = limit_passed(after) or said, mask & (mask - 1)
    if said:
        raise ConfigError(f"{KEY}: {_what(form)} goes past the library's limits at once ({_short(said)}); make it smaller, and let every text end")
    remedy = "give every rule an alternative that does not lead back to it" if form == "ebnf" else "correct it"
    raise ConfigError(f"{KEY}: no text can begin under {_what(form)}: it allows none, or the model's vocabulary cannot write one; {remedy}")


def limit_passed(matcher: Any) -> str:
    """Which of its limits the library says a matcher ran into, on one line; empty where it is well, or where nothing may follow."""
    said = " ".join(matcher.get_error().partition("<state>")[0].split())
    # "NoExtension..." is the library's word for a place like any other that leaves nothing.
    return "" if said.startswith("NoExtension") else said


def _vocabulary(tokenizer: Any | None) -> Vocabulary:
    found = library()
    if tokenizer is None:
        raise ConfigError(f"{KEY} needs the model's tokenizer, and there is none; copy it to the model's folder")
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"{KEY} needs a tokenizer.json, which this model's {type(tokenizer).__name__} does not have; convert the tokenizer")
    from tokenizers import AddedToken, Tokenizer

    own = tokenizer.backend_tokenizer
    backend = Tokenizer.from_str(own.to_str())
    backend.no_padding()
    backend.no_truncation()
    end, added = None, [END_TOKEN]
    while end is None or end % 32 == 31:  # the sign bit of a mask's last word is never set
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in added])
        end, added = backend.token_to_id(added[-1]), [f"{END_TOKEN}|>"]
    if own.id_to_token(end) is not None:
        raise ConfigError(f"{KEY} needs a tokenizer whose ids have no gaps; this model's skips some below {end}")
    try:
        return Vocabulary(found.LLTokenizer(backend.to_str(), eos_token=end), end)
    except ValueError as error:
        raise ConfigError(f"{KEY} cannot read the tokens of this model's tokenizer as bytes: {' '.join(str(error).split())[:200]}") from error
