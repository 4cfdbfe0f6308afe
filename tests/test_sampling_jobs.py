"""Sampling at the level of a job: the lossless check, the model's own defaults, log-probabilities in the rows, deterministic mode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import specgen
from specgen.config import DraftConfig, EngineConfig, ModelConfig
from specgen.draft.load import load_drafter
from specgen.engine.engine import Engine
from specgen.engine.step import DeviceStep
from specgen.errors import CheckpointError, ConfigError
from specgen.models.generation import FOREIGN, sampling_defaults
from specgen.models.loader import load_target
from specgen.types import Prompt, Request, SamplingParams
from tests.jobs import log_of, resume, rows_of, start, stats_of, toy, write_lines
from tests.toys import toy_folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(rows: list[Any]) -> list[str]:
    return ["data=jsonl", f"data.path={write_lines(Path('in.jsonl'), rows)}"]


PROMPTS = [{"prompt": "w10"}, {"prompt": "w30 w31"}, {"prompt": "w40", "temperature": 0.7}, {"prompt": "w24", "n": 2}, {"prompt": ""}]
TURNS = {"turns": ["w30", "w40 w41", "w10"], "id": "talk", "max_tokens": 5}


# -- verify_lossless --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_finished_rows_are_replayed_and_counted(temperature: int) -> None:
    settings = ["sampling.max_tokens=12", f"sampling.temperature={temperature}", "sampling.presence_penalty=0.5", "engine.max_batch=4"]
    assert start("o", *toy("draft_half"), *lines([*PROMPTS[:4], TURNS]), *settings, "verify_lossless=10") == 0
    assert stats_of("o")["lossless"] == {"checked": 6, "equal": 6, "near_tie": 0, "different": 0, "worst_gap": None}
    assert "lossless check: 10 rows again" in log_of("o")


def test_fewer_rows_than_there_are_can_be_asked_for_and_errors_are_not_replayed() -> None:
    rows = [*PROMPTS, {"token_ids": [1, 999]}]
    assert start("o", *toy(), *lines(rows), "sampling.max_tokens=4", "verify_lossless=2") == 3
    assert stats_of("o")["lossless"] == {"checked": 2, "equal": 2, "near_tie": 0, "different": 0, "worst_gap": None}


def test_a_row_that_the_target_would_not_write_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = DeviceStep._commit

    def corrupted(self: DeviceStep, rows: Any, draft: Any, y: torch.Tensor, *more: Any) -> Any:
        if draft is not None:
            y = torch.cat([draft.token_ids[:, :1], y[:, 1:]], 1)  # the first draft is always taken
        return commit(self, rows, draft, y, *more)

    monkeypatch.setattr(DeviceStep, "_commit", corrupted)
    assert start("o", *toy("draft_half"), *lines([{"prompt": "w30"}, {"prompt": "w31"}]), "sampling.max_tokens=12", "verify_lossless=2") == 1
    found = stats_of("o")["lossless"]
    # The draft model is wrong after odd tokens: the other row's first drafts were right anyway.
    assert (found["checked"], found["equal"], found["different"]) == (2, 1, 1) and found["worst_gap"] > 1
    assert "the lossless check failed" in log_of("o") and "row index 0, sample 0: different at output token" in log_of("o")
    assert len(rows_of("o")) == 2, "the rows are kept"


def test_a_run_without_the_check_says_nothing_of_it() -> None:
    assert start("o", *toy(), *lines(PROMPTS[:1]), "sampling.max_tokens=4") == 0
    assert stats_of("o")["lossless"] is None


# -- sampling.from_model ----------------------------------------------------------------------------------------------------------------------


def model_with(generation: dict[str, Any]) -> list[str]:
    """Overrides for a copy of the stochastic toy whose generation_config.json says this."""
    folder = Path("model")
    shutil.copytree(toy_folder() / "stoch_target", folder)
    kept = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(kept | generation))
    return ["model=hf", f"model.path={folder}", "model.device=cpu", "draft=none"]


def test_the_models_values_fill_what_the_user_left_open() -> None:
    model = model_with({"do_sample": True, "temperature": 0.5, "top_p": 0.75, "top_k": 3, "repetition_penalty": 1.5, "max_new_tokens": 7})
    own = ["sampling.from_model=true", "sampling.top_p=1.0", "sampling.top_k=2", "sampling.seed=4"]
    assert start("o", *model, *lines([{"prompt": "w30"}, {"prompt": "w31", "temperature": 0}]), *own) == 0
    effective = stats_of("o")["sampling"]
    shown = {name: effective[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed")}
    assert shown == {"temperature": 0.5, "top_p": 1.0, "top_k": 2, "repetition_penalty": 1.5, "max_tokens": 7, "seed": 4}
    rows = rows_of("o")
    assert rows[0, 0]["output_tokens"] == 7 and rows[1, 0]["sampling"]["temperature"] == 0
    assert rows[1, 0]["sampling"]["repetition_penalty"] == 1.5
    # The rows are those of a run with these values written out.
    explicit = ["sampling.temperature=0.5", "sampling.top_k=2", "sampling.repetition_penalty=1.5", "sampling.max_tokens=7", "sampling.seed=4"]
    assert start("p", *model, *lines([{"prompt": "w30"}, {"prompt": "w31", "temperature": 0}]), *explicit) == 0
    assert [row["token_ids"] for row in rows_of("p").values()] == [row["token_ids"] for row in rows.values()]
    assert resume("o") == 0
    assert stats_of("o")["sampling"] == effective, "a resumed run keeps to what its first start set"


def test_nothing_is_taken_from_the_model_unasked() -> None:
    assert start("o", *model_with({"do_sample": True, "temperature": 0.5}), *lines([{"prompt": "w30"}]), "sampling.max_tokens=3") == 0
    assert stats_of("o")["sampling"]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 1, "top_k": 50, "min_p": None}, {"temperature": 1.0, "top_k": 50}),
        ({"suppress_tokens": [5, 6], "min_new_tokens": 2}, {"banned_token_ids": [5, 6], "min_tokens": 2}),
        ({"num_beams": 1, "length_penalty": 2.0, "no_repeat_ngram_size": 0, "bad_words_ids": []}, {}),
        ({"max_length": 4096, "eos_token_id": 2, "transformers_version": "5"}, {}),
    ],
)
def test_generation_config_is_read_by_its_own_names(generation: dict, expected: dict, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("no_repeat_ngram_size", 3), ("typical_p", 0.5), ("bad_words_ids", [[3]])])
def test_what_the_model_asks_for_and_cannot_have_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    assert name in FOREIGN
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=rf"sets {name}=.*, which is not supported; set sampling\.from_model=false"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["hot", [1], {}])
def test_a_setting_of_the_models_that_is_no_number_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}=.* is not a number"):
        sampling_defaults(tmp_path)


def test_a_damaged_generation_config_is_refused_and_an_absent_one_is_empty(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: cannot be read"):
        sampling_defaults(tmp_path)


def test_the_python_api_takes_the_models_values_too() -> None:
    folder = model_with({"do_sample": True, "temperature": 0.5, "max_new_tokens": 6})[1].partition("=")[2]
    sampling = {"from_model": True, "seed": 4}
    (mine,) = specgen.generate("w30", model=folder, draft="none", sampling=sampling)
    (explicit,) = specgen.generate("w30", model=folder, draft="none", sampling={"temperature": 0.5, "max_tokens": 6, "seed": 4})
    (cold,) = specgen.generate("w30", model=folder, draft="none", sampling=sampling | {"temperature": 0.0})
    assert mine.token_ids == explicit.token_ids and cold.token_ids == [30] * 6


# -- sampling.logprobs ------------------------------------------------------------------------------------------------------------------------


def test_rows_carry_one_entry_a_token_and_infinities_are_null() -> None:
    extra = ["sampling.max_tokens=4", "sampling.logprobs=2", "sampling.allowed_token_ids=[31]"]
    assert start("o", *toy(), *lines([{"prompt": "w30"}]), *extra) == 0
    (row,) = rows_of("o").values()
    assert row["token_ids"] == [31] * 4
    assert row["logprobs"] == [{"id": 31, "logprob": 0.0, "top": [[31, 0.0], [0, None]]}] * 4


# -- engine.deterministic ---------------------------------------------------------------------------------------------------------------------


def family_text(device: str, method: str, topk: int, steps: int, batch: int, chunk: int, temperature: float) -> list[list[int]]:
    """Output ids of the embedded target in bfloat16, deterministic, whatever the rest."""
    model = ModelConfig(device=device)
    target = load_target(model, device, "bfloat16")
    draft = DraftConfig(method=method, topk=topk, num_steps=steps)
    engine = EngineConfig(max_batch=batch, prefill_tokens=chunk, deterministic=True, kv_memory_gb=0.05)
    runner = Engine(target, load_drafter(draft, model, target), engine, draft)
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=2, top_p=0.95 if temperature else 1.0)
    requests = [Request(Prompt(index=i, id=i, key=i, token_ids=[1, *range(40 + i, 60 + 3 * i)]), sampling) for i in range(3)]
    runner.run(requests)
    runner.close()
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_deterministic_text_is_the_same_to_the_last_near_tie(device: str, temperature: float) -> None:
    plain = family_text(device, "none", 1, 0, 1, 2048, temperature)
    assert family_text(device, "eagle", 1, 4, 3, 7, temperature) == plain
    assert family_text(device, "eagle", 4, 3, 3, 2048, temperature) == plain
    assert family_text(device, "draft_model", 1, 3, 2, 16, temperature) == plain


def test_a_deterministic_job_runs_and_its_check_allows_no_tie() -> None:
    extra = ["engine.deterministic=true", "sampling.max_tokens=8", "verify_lossless=3", "sampling.temperature=0.8"]
    assert start("o", *toy("draft_half"), *lines(PROMPTS[:3]), *extra) == 0
    assert stats_of("o")["lossless"] == {"checked": 3, "equal": 3, "near_tie": 0, "different": 0, "worst_gap": None}


def test_the_next_job_on_the_same_target_is_not_deterministic_unless_it_says_so() -> None:
    target = load_target(ModelConfig(), "cpu", "float32")
    for on in (True, False):
        engine = Engine(
            target, load_drafter(DraftConfig(method="none"), ModelConfig(), target), EngineConfig(deterministic=on), DraftConfig(method="none")
        )
        assert target.deterministic is on
        engine.close()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["sampling.repetition_penalty=1e38"], "sampling.repetition_penalty=1e+38 must be between 1e-30 and 1e+30"),
        (["sampling.presence_penalty=-3e38"], "sampling.presence_penalty=-3e+38 is too large: at most 1e+30 in size"),
        (["sampling.logit_bias={50: 1e300}"], "sampling.logit_bias of token 50 is 1e+300: at most 1e+30 in size; see sampling.allowed_token_ids"),
        (
            ["sampling.allowed_token_ids=[2]", "sampling.min_tokens=5"],
            "no token is left to sample: sampling.allowed_token_ids less sampling.banned_token_ids and, before sampling.min_tokens, the ids that end "
            "a row, is empty",
        ),
    ],
)
def test_parameters_with_which_no_row_can_run_end_the_job_before_any_row(
    values: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path / "o", *values) == 2
    assert capsys.readouterr().err == f"specgen: {said}\n"
    assert not (tmp_path / "o").exists()
