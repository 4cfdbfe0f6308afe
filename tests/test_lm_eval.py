"""specgen as a model of lm-evaluation-harness: the answers are those of the Python interface, and what cannot be honoured is refused.

The requests are the harness's own where it is installed, else its double's; whole evaluations run with the harness alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specgen
from specgen.errors import CheckpointError, ConfigError, DataError
from specgen.lm_eval import arguments
from specgen.types import SamplingParams
from tests import lm_eval_double
from tests.jobs import ROOT
from tests.toys import toy_folder

HARNESS = lm_eval_double.install()
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CacheHook  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402

from specgen.lm_eval import SpecgenLM  # noqa: E402

TARGET, DRAFT = str(toy_folder() / "target"), str(toy_folder() / "draft_perfect")
TOY = {"pretrained": TARGET, "draft": "draft_model", "draft.path": DRAFT, "num_steps": 3, "device": "cpu"}
TEXTS = ["def add(a, b):", "import os\n\n\ndef walk(root):"]
GREEDY = SamplingParams()


def lm(**given: Any) -> Any:
    return get_model("specgen").create_from_arg_obj(TOY | given, {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"})


def ask(*requests: tuple[str, dict[str, Any]], task: str | None = "t", kind: str = "generate_until") -> list[Instance]:
    return [Instance(kind, {}, request, 0, (task, i, 1)) for i, request in enumerate(requests)]


# -- answers ----------------------------------------------------------------------------------------------------------------------------------


def test_the_model_is_registered_by_its_name() -> None:
    assert get_model("specgen") is SpecgenLM


def test_each_request_has_its_own_sampling_and_answers_keep_their_order() -> None:
    requests = ask(
        ("w30", {"until": ["w33"], "max_gen_toks": 9, "do_sample": False}),
        ("w10", {"until": "w99"}),
        ("w24", {"until": ["", "<|eot|>"], "max_gen_toks": 9}),
        ("w30", {"max_new_tokens": 2, "num_beams": 1, "temperature": None}),
    )
    assert lm().generate_until(requests) == ["w31 w32 ", "w11 w12 w13 w14", "w25", "w31 w32"]
    assert lm().generate_until([]) == []


def test_answers_are_those_of_the_python_interface_with_the_same_ids() -> None:
    arguments = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    requests = [request for request in ask(*((text, arguments) for text in TEXTS)) for _ in range(2)]
    model = SpecgenLM(draft="eagle", topk=2, num_steps=3)
    found = model.generate_until(requests)
    rows = [{"id": f"t:{i // 2}:0", "prompt": TEXTS[i // 2]} for i in range(4)]
    sampling = {"stop": ["\n\n"], "max_tokens": 16, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    expected = specgen.generate(rows, draft="none", sampling=sampling, data={"on_duplicate_id": "keep"})
    assert found == [completion.text for completion in expected]
    assert found[0] != found[1] and found[2] != found[3], "repeats are samples of their own"
    assert model.generate_until(requests[2:]) == found[2:], "a document's answers do not depend on what else is asked"


def test_all_requests_run_in_one_batch() -> None:
    model = lm()
    model.generate_until(ask(*[("w30", {"max_gen_toks": 8})] * 5))
    info = model.get_model_info()["specgen"]
    assert info["acceptance"] == {"requests": 5, "output_tokens": 40, "mean_acceptance_length": 1 + (5 * 6) / (5 * 2)}
    assert info["draft"]["num_steps"] == 3 and model.max_length == 256 and model.eot_token_id == 2


def test_answers_reach_the_harness_cache_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, str] = {}
    hook = CacheHook(None)
    monkeypatch.setattr(hook, "add_partial", lambda attr, args, text: kept.update({f"{attr} {args[0]} {args[1]['max_gen_toks']}": text}))
    model = lm()
    model.set_cache_hook(hook)
    model.generate_until(ask(("w30", {"max_gen_toks": 7}), ("w30", {"max_gen_toks": 1})))
    assert list(kept.items()) == [("generate_until w30 1", "w31"), ("generate_until w30 7", "w31 w32 w33 w34 w30 w31 w32")]


# -- model arguments --------------------------------------------------------------------------------------------------------------------------


def test_arguments_are_keys_of_the_command_line() -> None:
    given = {
        "path": TARGET,
        "draft": "ngram",
        "num_steps": 2,
        "sampling.seed": 7,
        "max_gen_toks": 9,
        "overlap": 0,
        "max_length": 64,
        "revision": "null",
    }
    config = arguments.config_from(given, batch_size="auto:4", max_batch_size=6)
    assert (config.model.path, config.model.source, config.model.max_length, config.model.revision) == (TARGET, "hf", 64, None)
    assert (config.draft.method, config.draft.num_steps, config.engine.max_batch, config.engine.overlap) == ("ngram", 2, 6, "0")
    assert (config.sampling.seed, config.sampling.max_tokens) == (7, 9)
    plain = arguments.config_from({}, device="cuda:0")
    assert (plain.model.source, plain.draft.method, plain.engine.max_batch, plain.model.device) == ("embedded", "eagle", None, "auto")
    assert arguments.config_from({"draft": "none"}, batch_size=8, device="cpu").model.device == "cpu"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_step": 2}, "model_args: unknown key num_step: did you mean draft.num_steps?"),
        ({"load_format": "auto"}, "model_args load_format: write model.load_format or draft.load_format"),
        ({"draft": "none", "num_steps": 2}, "draft.num_steps=2 has no meaning with draft=none; leave it out, or choose a drafter"),
        ({"draft": "egle"}, "draft=egle: must be one of none, draft_model, eagle, eagle3, mtp, dflash, ngram; did you mean eagle?"),
        ({"path": TARGET}, "draft=eagle needs weights: give draft.path=FOLDER_OR_HUB_ID, or draft=none for plain decoding"),
        ({"path": "a", "pretrained": "b"}, "path=a and pretrained=b both set model.path; give one"),
        ({"stop": ["x"]}, "model_args stop: a task's `until` says where an answer ends; leave it out"),
        ({"sampling.n": 2}, "model_args sampling.n: a task's `repeats` says how often it is asked; leave it out"),
        (
            {"output.dir": "o"},
            "model_args output.dir: rows, tasks and files are the harness's; keys of model, draft, engine, sampling and data.chat_template apply",
        ),
        ({"revision": 1000.0}, """model_args revision=1000.0: the harness read a number where a text belongs; quote it: revision='"..."'"""),
        ({"temperature": "hot"}, "sampling.temperature=hot: must be a number"),
        ({"simulate_acceptance_length": 2.0}, "model_args simulate_acceptance_length: simulated text is not the target's; leave it out"),
        ({"engine.max_batch": 2, "batch_size": 4}, "engine.max_batch=2 and --batch_size=4 both set engine.max_batch; give one"),
        ({"batch_size": "many"}, "--batch_size=many: must be auto or a whole number"),
    ],
)
def test_arguments_are_refused_as_on_the_command_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        SpecgenLM(**given)
    assert str(error.value) == message


def test_the_harness_flags_and_model_arguments_meet_once() -> None:
    make = get_model("specgen").create_from_arg_obj
    assert make({"draft": "none", "device": "cpu"}, {"batch_size": 1, "device": "cuda:0"}).config.model.device == "cpu"
    assert make({"draft": "none"}, {"batch_size": 3, "device": "cpu"}).config.engine.max_batch == 3
    with pytest.raises(ConfigError, match=r"^model.device=cpu and --device=cuda:1 both set model.device; give one$"):
        make({"device": "cpu"}, {"device": "cuda:1"})
    with pytest.raises(ConfigError, match=r"^model_args batch_size: give it as --batch_size, or engine.max_batch$"):
        make({"batch_size": 2}, {"batch_size": 1})


def test_a_folder_that_is_not_there_or_has_no_tokenizer_is_refused_before_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder, and not a hub id"):
        SpecgenLM(path=str(tmp_path / "none"), draft="none")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(toy_folder() / "target" / name)
    with pytest.raises(ConfigError, match="the harness sends texts, and there is no tokenizer"):
        SpecgenLM(path=str(tmp_path), draft="none")


# -- generation arguments ---------------------------------------------------------------------------------------------------------------------


def test_do_sample_decides_as_in_the_harness() -> None:
    warm = SamplingParams(temperature=0.5)
    for given, job, expected in (
        ({}, GREEDY, {}),
        ({"temperature": 0.7}, GREEDY, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, GREEDY, {"temperature": 0.0}),
        ({"do_sample": False}, warm, {"temperature": 0.0}),
        ({"do_sample": True}, GREEDY, {"temperature": 1.0}),
        ({"do_sample": True}, warm, {"temperature": 0.5}),
        ({"do_sample": True, "temperature": 0.2, "top_p": 0.9, "seed": 3}, GREEDY, {"temperature": 0.2, "top_p": 0.9, "seed": 3}),
    ):
        assert arguments.row_sampling(given, job) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"typical_p": 0.3}, "generation argument typical_p=0.3 is not supported; until, max_gen_toks, do_sample, min_tokens, temperature, "),
        ({"n": 3}, "generation argument n=3 is not supported; until, "),
        ({"num_beams": 4}, "generation argument num_beams=4: there is no beam search; leave it out"),
        ({"max_gen_toks": 3, "max_tokens": 4}, "generation arguments max_gen_toks=3, max_tokens=4 say the same thing; give one"),
        ({"do_sample": True, "temperature": 0}, "generation arguments do_sample=true and temperature=0 contradict; give do_sample=false, or a temp"),
        ({"do_sample": "yes"}, "generation argument do_sample=yes: must be true or false"),
        ({"until": 3}, "generation argument until=3: must be a text or a list of texts"),
        ({"top_p": 2.0}, "top_p must be in (0, 1], got 2.0"),
        ({"max_gen_toks": "9"}, "max_tokens must be an integer, got '9'"),
    ],
)
def test_a_generation_argument_that_cannot_be_honoured_names_the_task(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.lm_eval.model.load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as error:
        lm().generate_until(ask(("w30", {}), ("w30", given)))
    assert str(error.value).startswith(f"task t: {message}")


def test_a_prompt_that_cannot_run_is_refused_before_anything_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.lm_eval.model.completed", lambda *_: pytest.fail("something ran"))
    with pytest.raises(DataError, match=r"^task t, document 1: prompt 1: the prompt has 301 tokens and the context limit is 256: no room"):
        lm().generate_until(ask(("w30", {}), ("w30 " * 300, {})))


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_scoring_requests_are_refused_in_one_line(kind: str) -> None:
    with pytest.raises(ConfigError) as error:
        getattr(lm(), kind)(ask(("w30", {}), ("w10", {}), task="arc_easy", kind=kind))
    expected = f"task arc_easy asks for {kind}, and --model specgen answers generate_until alone: choose the task's generation variant"
    assert str(error.value) == expected


# -- chat -------------------------------------------------------------------------------------------------------------------------------------


def test_the_chat_template_is_the_tokenizers_or_a_files(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "w30"}]
    plain = lm()
    assert plain.apply_chat_template(turns) == "<s>w30 "
    assert plain.generate_until(ask((plain.apply_chat_template(turns), {"max_gen_toks": 2}))) == ["w31 w32"]
    prefix = [*turns, {"role": "assistant", "content": "w31"}]
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}{{ word }}{% endif %}")
    own = lm(**{"chat_template": str(file), "chat_template_kwargs": {"word": "w10"}})
    assert own.apply_chat_template(turns) == "w30 w10" and own.apply_chat_template(prefix, add_generation_prompt=False) == "w30 w31"
    assert own.generate_until(ask((own.apply_chat_template(turns), {"max_gen_toks": 2}))) == ["w11 w12"]
    assert own.chat_template(True) == file.read_text() and plain.chat_template(True) == plain.tokenizer.chat_template
    assert plain.chat_template(False) is None
    assert plain.tokenizer_name == TARGET.replace("/", "__") and own.tokenizer_name.startswith(plain.tokenizer_name + "__")
    with pytest.raises(ConfigError, match="--apply_chat_template tools: templates have no names here"):
        plain.chat_template("tools")
    with pytest.raises(DataError, match="--apply_chat_template: the chat template refused the row: System role not supported"):
        plain.apply_chat_template([{"role": "system", "content": "w1"}, *turns])
    with pytest.raises(DataError, match="add_generation_prompt=True does not fit a last message of role assistant"):
        plain.apply_chat_template(prefix)


# -- the command line -------------------------------------------------------------------------------------------------------------------------


def run(*words: str, cwd: Path, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(cwd / "hf")}
    return subprocess.run([sys.executable, "-m", "specgen.lm_eval", *words], cwd=cwd, env=settings, capture_output=True, text=True, timeout=120)


def test_without_the_harness_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise ImportError('not here')")
    done = run("--model", "specgen", cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stderr == "specgen: lm-evaluation-harness cannot be imported (not here): pip install 'lm-eval>=0.4.9'\n"


if HARNESS:
    TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: docs.jsonl}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""

    def test_an_evaluation_writes_the_answers_of_the_python_interface(tmp_path: Path) -> None:
        expected = [completion.text for completion in specgen.generate(TEXTS, draft="none", sampling={"max_tokens": 12, "stop": ["\n\n"]})]
        docs = [{"prompt": TEXTS[0], "answer": expected[0]}, {"prompt": TEXTS[1], "answer": "no"}]
        (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        more = 'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}\nmetric_list: [{metric: exact_match}]'
        (tmp_path / "task.yaml").write_text(TASK.format(name="tail", kind="generate_until", more=more))
        words = ("--model", "specgen", "--tasks", "task.yaml", "--output_path", "out", "--log_samples")
        done = run(*words, "--model_args", "draft=eagle,topk=2,num_steps=3", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        samples = [json.loads(line) for line in next(tmp_path.glob("out/*/samples*.jsonl")).read_text().splitlines()]
        assert [sample["resps"] for sample in samples] == [[[text]] for text in expected]
        results = json.loads(next(tmp_path.glob("out/*/results*.json")).read_text())
        assert results["results"]["tail"]["exact_match,none"] == 0.5
        assert (
            results["config"]["specgen"]["acceptance"]["requests"] == 2 and results["config"]["specgen"]["acceptance"]["mean_acceptance_length"] > 1
        )

    def test_arguments_may_be_one_text() -> None:
        model = SpecgenLM.create_from_arg_string("draft=ngram,num_steps=2,device=cpu", {"batch_size": "auto", "device": "cuda:0"})
        assert (model.config.draft.method, model.config.draft.num_steps, model.config.model.device) == ("ngram", 2, "cpu")

    def test_a_scoring_task_is_refused_in_one_line(tmp_path: Path) -> None:
        (tmp_path / "docs.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
        (tmp_path / "task.yaml").write_text(TASK.format(name="scoring", kind="loglikelihood", more="metric_list: [{metric: acc}]"))
        done = run("--model", "specgen", "--tasks", "task.yaml", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(
            "specgen: task scoring asks for loglikelihood, and --model specgen answers generate_until alone"
        )
