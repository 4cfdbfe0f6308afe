"""Arbitrary rows and settings: each is run or refused in one line, and nothing else happens.

    python -m tests.faults.fuzz --examples 100000

Boundary: rows go through reading, prompts, a toy engine, writing, statistics and the look of a resume, in this process; settings through the Python
form and, a tenth of them, the command line with the run left out. Hypothesis draws the inputs and shrinks what fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from specgen import cli
from specgen.api import config_of
from specgen.config import Config, DataConfig, EngineConfig, SamplingConfig, to_dict
from specgen.data.prompts import load_prompts
from specgen.data.sampling import ROW_KEYS, params_from_config
from specgen.data.sources import count_rows
from specgen.engine.engine import Engine
from specgen.errors import ConfigError, DataError, SpecgenError
from specgen.job import Job
from specgen.report.disk import dumps
from specgen.report.resume import open_for_resume
from specgen.report.stats import compute_stats, load_rows
from specgen.report.writer import RunWriter
from specgen.schema import KEYS, build
from tests.harness import drafter_of, target_of, tokenizer_of

CONTEXT = "target_ctx32"  # no row can run for long
Check = Callable[[Any], None]

# -- rows -------------------------------------------------------------------------------------------------------------------------------------

texts = st.one_of(
    st.sampled_from(["w10", "w30 w31", "w45 </s>", "<|eot|>", "", " ", "w10 " * 40, "\u2028", "\x00", "\ufeff", "None", "nan", "<s> <s>"]),
    st.text(max_size=12),
)
numbers = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"), -0.0, 0.5, 1.0, 1e-5]),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)), max_leaves=8)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": st.one_of(texts, values)}),
        st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), values, max_size=4),
    ),
    max_size=4,
)
contents = st.one_of(
    st.fixed_dictionaries({"prompt": texts}),
    st.fixed_dictionaries({"token_ids": st.lists(st.integers(-1, 50), max_size=34)}),
    st.fixed_dictionaries({"messages": messages}),
    st.fixed_dictionaries({"turns": st.lists(texts, max_size=3)}),
    st.dictionaries(st.sampled_from(["prompt", "token_ids", "messages", "turns", "Prompt", "tools", "category"]), values, max_size=4),
)


@st.composite
def row_lines(draw: st.DrawFn) -> bytes:
    """One line, mostly an object that is nearly a row, sometimes with its bytes changed."""
    row = dict(draw(contents))
    row |= draw(st.dictionaries(st.sampled_from([*ROW_KEYS, "id", "note", "category", "tools"]), values, max_size=3))
    if isinstance(row.get("n"), int) and row["n"] > 3:
        row["n"] = 3  # any number of samples may be asked for; they would all be made
    line = json.dumps(row, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    kind = draw(st.integers(0, 9))
    if kind == 0:
        line = line[: draw(st.integers(0, len(line)))]
    elif kind == 1:
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.binary(min_size=1, max_size=4)) + line[at + draw(st.integers(0, 4)) :]
    elif kind == 2:
        depth = draw(st.sampled_from([50, 400, 900, 3000, 100_000]))
        line = b'{"prompt":"w10","note":' + b"[" * depth + b"]" * depth + b"}"
    elif kind == 3:
        line = draw(st.binary(max_size=24))
    return line.replace(b"\n", b" ")


row_files = st.tuples(
    st.lists(row_lines(), min_size=1, max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "as_chat": st.just(True),
            "on_duplicate_id": st.just("keep"),
            "row_sampling": st.just(False),
            "row_sampling_field": st.just("note"),
            "id_field": st.just("note"),
            "prompt_field": st.sampled_from(["messages", "note", "prompt"]),
            "shard": st.just("1/2"),
            "limit": st.just(2),
        },
    ),
)


@cache
def toy_engine() -> Engine:
    """One engine for all inputs."""
    drafter, draft = drafter_of(CONTEXT, "draft_model:draft_half", num_steps=3)
    config = EngineConfig(max_batch=4, page_size=4, check_indices=True)
    return Engine(target_of(CONTEXT), drafter, config, draft, tokenizer=tokenizer_of(CONTEXT))


def check_rows(drawn: tuple[list[bytes], bytes, bool, dict[str, Any]]) -> None:
    """A file of these lines: as many rows as it has lines, each good or an error, all of them strict JSON, countable and resumable."""
    found, end, last, options = drawn
    content = end.join(found) + (end if last else b"")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        (folder / "in.jsonl").write_bytes(content)
        config = Config(data=DataConfig(source="jsonl", path=str(folder / "in.jsonl"), **options), sampling=SamplingConfig(max_tokens=6))
        try:
            expected = count_rows(config.data)
            prompts = list(load_prompts(config.data, config.sampling, tokenizer_of(CONTEXT), max_length=32, vocab_size=48))
        except (ConfigError, DataError) as refusal:
            check_refusal(refusal)
            return
        assert len(prompts) == expected, (len(prompts), expected)
        engine = toy_engine()
        job = Job(engine, config, tokenizer_of(CONTEXT), params_from_config(config.sampling))
        with RunWriter(folder / "run") as writer:
            for completion in job.run(iter(prompts)):
                writer.append(completion)
        lines = (folder / "run" / "generations.jsonl").read_bytes().split(b"\n")
        assert lines.pop() == b"" and len(lines) == sum(1 if p.error else p.sampling.n for p in prompts)
        for line in lines:
            json.loads(line, parse_constant=lambda constant: _fail(f"{constant} in the output"))
        rows = list(load_rows(folder / "run"))
        assert compute_stats(rows, resamples=2)["samples"] == len(lines)
        assert all((row["error"] is None) == (row["finish_reason"] != "error") for row in rows)
        finished = open_for_resume(folder / "run")
        for prompt in prompts:
            for sample in range(1 if prompt.error else prompt.sampling.n):
                finished.check(prompt, sample)
        pages = engine.pages
        assert pages.free_pages == pages.num_pages - 1 and not engine.has_work


@contextlib.contextmanager
def ordinary_stack() -> Iterator[None]:
    """Python's usual limit from here on; Hypothesis raises it, and would hide an input that is nested too deeply."""
    raised, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 950)
    try:
        yield
    finally:
        sys.setrecursionlimit(raised)


def _fail(message: str) -> None:
    raise AssertionError(message)


def check_refusal(error: SpecgenError) -> None:
    """One line that says something."""
    text = str(error)
    assert text.strip() and "\n" not in text and "\r" not in text, repr(text)


# -- settings ---------------------------------------------------------------------------------------------------------------------------------

NAMES = sorted({key.rpartition(".")[2] for key in KEYS} | {"topk", "max_new_tokens", "steps", "x"})
SECTIONS = ("model", "draft", "sampling", "engine", "data", "output", "task")
words = st.sampled_from(["auto", "none", "eagle", "mtp", "embedded", "jsonl", "cuda:9", "0/3", "org/name", "./nowhere", "true", "1e3", "~"])
setting_values = st.one_of(words, values)
sections = st.dictionaries(st.sampled_from(NAMES), setting_values, max_size=3)
mappings = st.dictionaries(
    st.sampled_from([*SECTIONS, "baseline", "verify_lossless", "resume", "y"]), st.one_of(sections, setting_values), max_size=3
)


def check_settings(mapping: dict[str, Any]) -> None:
    """A configuration or a refusal, in the shared form and in the Python one; what is built can be built again from its own record."""
    try:
        config = build(mapping)
        again = build(json.loads(dumps(to_dict(config))))
        assert dumps(to_dict(again)) == dumps(to_dict(config))
    except SpecgenError as refusal:
        check_refusal(refusal)
    try:
        config_of(**{name: value for name, value in mapping.items() if name in ("model", "draft", "sampling", "engine", "data")})
    except SpecgenError as refusal:
        check_refusal(refusal)


typed = st.one_of(
    st.sampled_from(
        ["eagle", "none", "4", "0.5", "null", "[a, b]", "{1: 2}", "'x=y'", '"\\n"', "true", "1e400", "-1", "", "~", "${oc.env:HOME}", "a,b"]
    ),
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8),
)
overrides = st.lists(
    st.one_of(
        st.builds(
            lambda sign, key, value: f"{sign}{key}={value}", st.sampled_from(["", "", "", "+", "++", "~"]), st.sampled_from(sorted(KEYS)), typed
        ),
        st.builds(lambda key, value: f"{key}={value}", st.sampled_from([*SECTIONS, "hydra.run.dir", "resume", "merge", "experiment", "x.y"]), typed),
        st.sampled_from(["-m", "--cfg", "job", "--help", "--nonsense", "stray", "=", "a=b=c"]),
    ),
    max_size=3,
)


class NoRun:
    """In the place of the run."""

    def run_job(self, config: Config, folder: Path, overrides: list[str], resume: bool = False) -> int:
        """Does nothing."""
        return 0

    def merge(self, dirs: list[Path], out: Path) -> int:
        """Does nothing."""
        return 0

    def write_sweep(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        """Does nothing."""


def check_overrides(arguments: list[str]) -> None:
    """Exit code 0, or 2 with one line on stderr and nothing left behind."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name, contextlib.chdir(name):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(arguments, runner=NoRun())
        said = err.getvalue()
        assert code in (0, 2), (code, said)
        if code == 2:
            assert said.startswith("specgen: ") and said.count("\n") == 1, said
            assert os.listdir(name) == [], os.listdir(name)


CHECKS: dict[str, tuple[st.SearchStrategy[Any], Check]] = {
    "rows": (row_files, check_rows),
    "settings": (mappings, check_settings),
    "overrides": (overrides, check_overrides),
}


def fuzz(name: str, examples: int, number: int = 0) -> None:
    """Draw and check ``examples`` inputs. Raises what the first failing input, shrunk, raises."""
    strategy, check = CHECKS[name]

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(drawn: Any) -> None:
        with ordinary_stack():
            check(drawn)

    run()


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("specgen").setLevel(logging.CRITICAL)  # every bad row is a line there
    shares = {"rows": 0.5, "settings": 0.45, "overrides": 0.05}
    for name, share in shares.items():
        begun, count = time.monotonic(), round(options.examples * share)
        fuzz(name, count, options.seed)
        print(f"{name}: {count:,} inputs, each run or refused in one line, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
