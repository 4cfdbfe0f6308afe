"""The Python interface: the model's own tokens, input order, settings checked as on the command line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specgen
from specgen import loading
from specgen.draft.load import FAMILY
from specgen.errors import CapacityError, ConfigError, DataError
from tests.jobs import SMALL, rows_of, start
from tests.toys import toy_folder

TEXTS = ["def add(a, b):", "class Point:\n    def __init__(self, x, y):", "import os\n\n\ndef walk(root):"]
TARGET = str(toy_folder() / "target")
DRAFT = {"method": "draft_model", "path": str(toy_folder() / "draft_perfect"), "num_steps": 3}
END, CYCLE = [11, 12, 13, 14, 2], [31, 32, 33, 34, 30]


@cache
def greedy(text: str, tokens: int) -> list[int]:
    """transformers' own greedy tokens of the embedded target, up to its end of sequence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FAMILY / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "target")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


def toy(prompts: Any, **options: Any) -> list[specgen.types.Completion]:
    return specgen.generate(prompts, **{"model": TARGET, "draft": DRAFT, "sampling": {"max_tokens": 5}} | options)


# -- generate ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["eagle", "none", {"method": "eagle", "topk": 4, "num_steps": 3}, {"method": "mtp", "num_steps": 2}])
def test_the_embedded_family_generates_the_targets_own_tokens(draft: Any) -> None:
    found = specgen.generate(TEXTS, draft=draft, sampling={"max_tokens": 12})
    assert [completion.token_ids for completion in found] == [greedy(text, 12) for text in TEXTS]
    assert [completion.index for completion in found] == [0, 1, 2]
    accepted = sum(sum(completion.counts.accepted) for completion in found)
    assert accepted == 0 if draft == "none" else accepted > 0


def test_the_command_line_writes_what_python_returns(tmp_path: Path) -> None:
    assert start(tmp_path / "o", *SMALL, "sampling.temperature=0.9", "sampling.n=2") == 0
    rows = list(rows_of(tmp_path / "o").values())
    prompts = [{"id": row["id"], "prompt": row["prompt"]} for row in rows[::2]]
    found = specgen.generate(prompts, sampling={"max_tokens": 12, "temperature": 0.9, "n": 2})
    assert [(c.id, c.index, c.sample, c.token_ids, c.text) for c in found] == [
        (row["id"], row["index"], row["sample"], row["token_ids"], row["text"]) for row in rows
    ]


def test_order_is_the_inputs_and_samples_are_adjacent_whatever_ends_first() -> None:
    prompts = [{"prompt": "w30", "max_tokens": 20, "n": 2}, "w10", {"prompt": "w40", "max_tokens": 1, "n": 3}]
    found = toy(prompts, engine={"max_batch": 2})
    assert [(c.index, c.sample, len(c.token_ids)) for c in found] == [(0, 0, 20), (0, 1, 20), (1, 0, 5), (2, 0, 1), (2, 1, 1), (2, 2, 1)]


def test_a_prompt_is_text_ids_messages_or_a_row() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "w10"}]}
    prompts = ["w10", [1, 10], (1, 10), np.array([1, 10]), torch.tensor([1, 10]), [message], {"token_ids": (1, 10)}]
    found = toy([*prompts, {"id": "c", "turns": ["w10", "w30"]}])
    assert [c.token_ids for c in found[:-1]] == [END] * 7
    assert [c.prompt for c in found[:2]] == ["w10", "<s> w10"]
    assert message == {"role": "user", "content": [{"type": "text", "text": "w10"}]}, "what was given is left as it was"
    last = found[-1]
    assert (last.id, last.token_ids, [turn["token_ids"] for turn in last.turns], last.output_tokens) == ("c", CYCLE, [END, CYCLE], 10)
    assert toy("w10")[0].token_ids == toy({"prompt": "w10"})[0].token_ids == END
    assert toy([]) == []


def test_data_settings_say_how_a_row_is_read() -> None:
    found = toy([{"q": "w10"}], data={"prompt_field": "q", "as_chat": True})
    assert (found[0].prompt, found[0].token_ids) == ("<s>w10 ", END)


def test_errors_are_raised_before_anything_runs_or_returned_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["w10", {"prompt": 7}, "w10"]
    found = toy(prompts, on_error="return")
    assert [c.finish_reason for c in found] == ["stop", "error", "stop"]
    message = "prompt 1: field 'prompt': a prompt is text, got an integer"
    assert found[1].error == {"type": "DataError", "message": message}
    monkeypatch.setattr(specgen.api, "make_engine", lambda *_: pytest.fail("something ran"))
    with pytest.raises(DataError, match=f"^{message}$"):
        toy(prompts)


def test_an_error_met_while_running_is_raised_as_its_kind() -> None:
    tight = {"kv_memory_gb": 0.0003, "page_size": 4}
    with pytest.raises(CapacityError, match=r"row index 0: the row may need \d+ KV slots and the pool holds \d+: raise engine.kv_memory_gb"):
        toy("w30", engine=tight, sampling={"max_tokens": 200})
    assert toy("w30", engine=tight, sampling={"max_tokens": 200}, on_error="return")[0].error["type"] == "CapacityError"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": {"topk": 3}}, "sampling.topk"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature=hot: must be a number"),
        ({"sampling": {"max_tokens": -1}}, "sampling.max_tokens must be between 0"),
        ({"draft": {"topk": 2}}, "draft: method is missing; one of none,"),
        ({"draft": {"method": "none", "topk": 2}}, "draft.topk=2 has no meaning with draft=none"),
        ({"draft": "egle"}, "draft=egle: must be one of"),
        ({"draft": 3}, "draft=3: must be a mapping of keys"),
        ({"model": {"path": TARGET, "source": "embedded"}}, "use model=hf model.path="),
        ({"model": {"path": TARGET, "device": "cuda:99"}}, "model.device=cuda:99: "),
        ({"data": {"limit": 3}}, "data.limit: rows are given in Python"),
        ({"engine": {"max_batch": 0}}, "engine.max_batch=0: must be at least 1"),
        ({"on_error": "ignore"}, "on_error=ignore: must be raise or return"),
        ({"data": {"system_prompt": "w11"}}, "prompt 0: data.system_prompt cannot be added to a raw prompt row"),
    ],
)
def test_settings_are_refused_as_on_the_command_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        toy(["w10"], **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_prompt_is_refused() -> None:
    for wrong in (3, None, ["a", "b"], [1.5], [True]):
        with pytest.raises(DataError, match=r"^prompt 1: must be a text, token ids, chat messages or a row with one of these, got "):
            toy(["w10", wrong])


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (bare / name).symlink_to(toy_folder() / "target" / name)
    assert toy([[1, 10]], model=bare, draft="none")[0].token_ids == END
    with pytest.raises(ConfigError, match="the model has no tokenizer; only token_ids rows can run"):
        toy(["w10"], model=bare, draft="none")


def test_the_target_stays_loaded_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    toy("w10")
    monkeypatch.setattr(loading, "load_target", lambda *_: pytest.fail("loaded again"))
    assert toy("w30", draft="none")[0].token_ids == CYCLE


def test_a_relative_path_is_another_model_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in (("a", "target"), ("b", "target_tied")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "model").symlink_to(toy_folder() / name)
    found = []
    for place in ("a", "b"):
        monkeypatch.chdir(tmp_path / place)
        found.append(toy("w10", model="model", draft="none")[0].token_ids)
    assert found == [END, [10] * 5]


# -- Engine -----------------------------------------------------------------------------------------------------------------------------------

SETTINGS = {"model": TARGET, "draft": DRAFT, "sampling": {"max_tokens": 5}, "engine": {"max_batch": 4}}


def drained(engine: specgen.Engine) -> dict[tuple[Any, int], list[int]]:
    found = {}
    while engine.has_work:
        for completion in engine.step():
            found[completion.id, completion.sample] = completion.token_ids
    return found


def test_an_engine_takes_prompts_while_others_run() -> None:
    with specgen.Engine(SETTINGS) as engine:
        assert engine.add("w10") == 0 and engine.add({"id": "x", "prompt": "w30"}, {"max_tokens": 2, "n": 2}) == "x"
        first = engine.step()
        assert first == [] and engine.add([1, 40]) == 2
        assert drained(engine) == {(0, 0): END, ("x", 0): [31, 32], ("x", 1): [31, 32], (2, 0): [41, 42, 40, 41, 42]}
        assert engine.step() == [] and not engine.has_work
        assert engine.add({"id": "x", "prompt": "w10"}) == "x", "an id may come again once it has ended"
        assert drained(engine) == {("x", 0): END}


def test_an_aborted_prompt_never_comes_back() -> None:
    with specgen.Engine(SETTINGS) as engine:
        ids = [engine.add({"turns": ["w30", "w10"]}), engine.add("w10", {"n": 3}), engine.add("w30")]
        engine.step()
        ids.append(engine.add("w10", {"max_tokens": 0}))
        assert [engine.abort(id) for id in (0, 1, 3, 1, "none")] == [True, True, True, False, False]
        assert drained(engine) == {(ids[2], 0): CYCLE}
        pages = engine._inner.pages
        assert pages.free_pages == pages.num_pages - 1


def test_an_engine_refuses_what_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"^task: Engine takes model, draft, sampling, engine, data$"):
        specgen.Engine({"task": {}})
    with pytest.raises(ConfigError, match="on_duplicate_id"):
        specgen.Engine({**SETTINGS, "data": {"on_duplicate_id": "keep"}})
    engine = specgen.Engine(SETTINGS)
    with pytest.raises(ConfigError, match=r"^sampling.max_token: add\(\) takes max_tokens,"):
        engine.add("w10", {"max_token": 3})
    with pytest.raises(ConfigError, match=r"^sampling.temperature must be 0"):
        engine.add("w10", {"temperature": 1e-9})
    with pytest.raises(DataError, match="the prompt has 300 tokens and the context limit is 256"):
        engine.add([10] * 300)
    engine.add({"id": 7, "prompt": "w10"})
    with pytest.raises(DataError, match=r"^id 7 is still running"):
        engine.add({"id": 7, "prompt": "w10"})
    assert drained(engine) == {(7, 0): END}
    engine.close()
    engine.close()
    assert not engine.has_work
    with pytest.raises(ConfigError, match="the engine is closed"):
        engine.step()


def test_runs_are_read_by_the_public_names(tmp_path: Path) -> None:
    assert start(tmp_path / "o", *SMALL) == 0
    rows, stats = list(specgen.load_rows(tmp_path / "o")), specgen.load_stats(str(tmp_path / "o"))
    assert len(rows) == stats["samples"] == 3 and sum(row["output_tokens"] for row in rows) == stats["output_tokens"]
    with pytest.raises(DataError):
        specgen.load_rows(tmp_path)
    assert sorted(specgen.__all__) == ["Engine", "SpecgenError", "__version__", "generate", "load_rows", "load_stats"]
