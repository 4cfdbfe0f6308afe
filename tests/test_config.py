"""The schema, its YAML, and what is refused about values and combinations before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specgen import validate
from specgen.compose import composer, options, to_config
from specgen.config import CHOICES, GROUPS, RANGES, Config, DraftConfig, Range, max_draft_tokens, num_draft_tokens
from specgen.errors import CheckpointError, ConfigError, DataError
from specgen.overrides import parse, split_elements, unescaped
from specgen.schema import KEYS, build
from specgen.suggest import ALIASES, SECTION_ALIASES, suggest_key

CONF = Path(str(files("specgen.conf")))


def composed(*overrides: str) -> Config:
    with composer() as compose:
        return to_config(compose([o.text for o in parse(overrides, lambda group: options(group, []))]), overrides)


def message(*overrides: str) -> str:
    """What the values of a composed job are refused with."""
    with pytest.raises(ConfigError) as caught:
        validate.check_values(composed(*overrides), [text.partition("=")[0] for text in overrides])
    return str(caught.value)


# The schema and its files


def test_the_yaml_defaults_are_the_dataclass_defaults() -> None:
    assert asdict(composed()) == asdict(Config())


@pytest.mark.parametrize(("group", "option"), [(group, option) for group, (_, names) in GROUPS.items() for option in names])
def test_every_option_of_every_group_composes_to_what_the_schema_builds(group: str, option: str) -> None:
    config = composed(f"{group}={option}")
    assert config == build({group: {GROUPS[group][0]: option}})
    assert getattr(getattr(config, group), GROUPS[group][0]) == option


def test_every_group_option_has_a_file_and_every_file_an_option() -> None:
    for group, (_, names) in GROUPS.items():
        assert {path.stem for path in (CONF / group).glob("*.yaml")} == {*names, "base"}


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes_and_its_header_shows_the_command(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# @package _global_\n") and f"python -m specgen +experiment={path.stem}" in text
    assert isinstance(composed(f"experiment={path.stem}"), Config)


def test_every_key_of_every_file_carries_a_comment() -> None:
    for path in CONF.rglob("*.yaml"):
        if path.parent.name == "experiment":
            continue
        for line in path.read_text().split("\nhydra:")[0].splitlines():
            selector = line.startswith(tuple(f"{name}:" for name, _ in GROUPS.values()))
            if ": " in line and not line.lstrip().startswith(("#", "- ")) and not selector:
                assert "  # " in line, (path, line)


def test_tables_name_keys_that_exist() -> None:
    assert set(RANGES) | set(CHOICES) | {key for key, _ in validate.UNSUPPORTED} <= set(KEYS)
    for target in (*ALIASES.values(), *SECTION_ALIASES.values()):
        key, _, option = target.partition("=")
        assert (option in GROUPS[key][1]) if option else (key in KEYS or key in GROUPS), target


def test_every_number_has_a_range() -> None:
    numeric = {key for key, hint in KEYS.items() if str(hint).split(" ")[0] in ("int", "float", "<class 'int'>", "<class 'float'>")}
    in_sampling = {f"sampling.{item.name}" for item in fields(type(Config().sampling))}
    assert numeric - in_sampling <= set(RANGES)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"sampling": {"max_new_tokens": 3}}, "unknown key sampling.max_new_tokens: did you mean sampling.max_tokens?"),
        ({"sampler": {}}, "unknown key sampler: did you mean"),
        ({"sampling": {"max_tokens": 3.0}}, "sampling.max_tokens=3.0: must be a whole number"),
        ({"sampling": {"max_tokens": True}}, "sampling.max_tokens=true: must be a whole number"),
        ({"sampling": {"max_tokens": None}}, "sampling.max_tokens=null: a value is needed"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature=hot: must be a number"),
        ({"sampling": {"temperature": "0.5"}}, "sampling.temperature=0.5: must be a number, not a text"),
        ({"draft": {"topk": "4"}}, "draft.topk=4: must be a whole number, not a text"),
        ({"sampling": {"ignore_eos": "true"}}, "sampling.ignore_eos=true: must be true or false, not a text"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature=nan: must be a finite number"),
        ({"sampling": {"ignore_eos": 1}}, "sampling.ignore_eos=1: must be true or false"),
        ({"sampling": {"stop": ["a", 5]}}, "sampling.stop=[a,5]: 5 must be text; write it in quotes"),
        ({"sampling": {"logit_bias": {"x": 1.0}}}, "sampling.logit_bias: x is not a token id"),
        ({"sampling": {"logit_bias": [1]}}, "sampling.logit_bias=[1]: must be a mapping, such as {50: -3.5}"),
        ({"sampling": 3}, "sampling=3: must be a mapping of keys"),
        ({"model": {"revision": 1234567}}, "model.revision=1234567: must be text; write it in quotes in the file"),
        ({"sampling": {"logit_bias": {5: 1, "5": 2}}}, "sampling.logit_bias={5:1,5:2}: 5 stands in it twice, as a number and as text; keep one"),
        ({"model": {"path": " "}}, "model.path= has no value; give one, or null"),
        ({"draft": {"method": "eagel"}}, "draft=eagel: must be one of none, draft_model, eagle, eagle3, mtp, dflash, ngram; did you mean eagle?"),
        ({"engine": {"overlap": 2}}, "engine.overlap=2: must be one of auto, 0, 1"),
    ],
)
def test_a_mapping_of_the_wrong_shape_is_refused_by_name(mapping: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(mapping)
    assert str(caught.value).startswith(text)


def test_values_take_the_type_of_their_key() -> None:
    config = build(
        {"engine": {"overlap": 1, "cuda_graphs": False}, "sampling": {"temperature": 1, "stop": "x", "stop_token_ids": 7, "logit_bias": {50: -1}}}
    )
    assert (config.engine.overlap, config.engine.cuda_graphs) == ("1", "off")
    sampling = config.sampling
    assert (sampling.temperature, sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (1.0, ["x"], [7], {"50": -1.0})


def test_a_missing_key_or_section_is_refused_when_the_mapping_is_composed() -> None:
    whole = asdict(Config())
    for key, text in (
        (("sampling", "top_p"), "sampling.top_p is missing from the configuration; set it: sampling.top_p=VALUE"),
        (("engine",), "engine is missing from the configuration; a file of your own must leave every section in it"),
        (("baseline",), "^baseline is missing from the configuration; set it: baseline=VALUE$"),
    ):
        mapping = {name: dict(value) if isinstance(value, dict) else value for name, value in whole.items()}
        inner = mapping if len(key) == 1 else mapping[key[0]]
        assert isinstance(inner, dict)
        del inner[key[-1]]
        with pytest.raises(ConfigError, match=text):
            build(mapping, complete=True)


# Ranges and combinations


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_out_of_range_is_refused_with_the_range(key: str) -> None:
    allowed = RANGES[key]
    low = allowed.low if allowed.above else allowed.low - 1
    section, _, name = key.rpartition(".")
    config = Config()
    setattr(getattr(config, section) if section else config, name, int(low))
    with pytest.raises(ConfigError) as caught:
        validate.check_values(config)
    assert str(caught.value).removesuffix("; use draft=none for plain decoding") == f"{key}={int(low)}: {allowed.complaint(low)}"


@given(st.floats(-10, 10), st.floats(0, 5), st.floats(5, 10), st.booleans())
def test_a_range_complains_exactly_outside(value: float, low: float, high: float, above: bool) -> None:
    inside = (low < value if above else low <= value) and value <= high
    assert (Range(low, high, above).complaint(value) is None) == inside


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ("draft=none draft.topk=1", "draft.topk=1 has no meaning with draft=none; leave it out, or choose a drafter"),
        ("draft=none draft.path=x", "draft.path=x has no meaning with draft=none; leave it out, or choose a drafter"),
        ("model.path=x", "model.path=x is given, but model=embedded brings its own weights; use model=hf model.path=x"),
        ("model.revision=x", "model.revision=x is given, but model=embedded has none; use model=hf model.path=HUB_ID"),
        ("model=hf", "model=hf needs model.path=FOLDER_OR_HUB_ID"),
        ("model=hf model.path=a/b", "draft=eagle needs weights: give draft.path=FOLDER_OR_HUB_ID, or draft=none for plain decoding"),
        ("draft=mtp draft.path=a/b", "draft.path=a/b is given, but draft=mtp reads the target's own weights; leave it out"),
        ("draft=ngram draft.path=a/b", "draft.path=a/b is given, but draft=ngram has no weights; leave it out"),
        ("data.path=in.jsonl", "data.path=in.jsonl is given, but data=embedded makes its own rows; use data=jsonl data.path=in.jsonl"),
        ("data=random data.path=a.parquet", "data.path=a.parquet is given, but data=random makes its own rows; use data=parquet data.path=a.parquet"),
        ("data=hub", "data=hub needs data.path=DATASET_ID"),
        ("data=jsonl data.path=x data.split=test", "data.split=test belongs to data=hub, not to data=jsonl; leave it out"),
        ("data.rows=5", "data.rows=5 belongs to data=random, not to data=embedded; use data.limit"),
        (
            "draft.topk=4 draft.num_steps=2 draft.num_draft_tokens=22",
            "draft.num_draft_tokens=22: a tree of draft.topk=4 and draft.num_steps=2 has at most 21 nodes",
        ),
        ("draft.num_draft_tokens=6", "draft.num_draft_tokens=6: with draft.topk=1 it is draft.num_steps + 1 = 5; leave it out"),
        (
            "draft=mtp draft.load_format=dummy",
            "draft.load_format=dummy: draft=mtp has no random weights; leave it out, or use draft_model, eagle, eagle3",
        ),
        ("draft=ngram draft.topk=2", "draft.topk=2: draft=ngram proposes one chain; use draft.topk=1"),
        ("draft.simulate_acceptance_length=5.5", "draft.simulate_acceptance_length=5.5: draft.num_steps=4 gives at most 5"),
        ("sampling.logprobs=101", "sampling.logprobs=101: must be at least 0 and at most 100"),
        (
            "draft.topk=8 draft.num_steps=64",
            "draft.topk=8, draft.num_steps=64: a tree may hold 256 nodes, this one has draft.topk x (draft.num_steps - 1) = 504 nodes to draft",
        ),
        (
            "draft.topk=16 draft.num_steps=5 draft.num_draft_tokens=300",
            "draft.topk=16, draft.num_steps=5: a tree may hold 256 nodes, this one has 300 nodes to verify",
        ),
        (
            "draft.adaptive=true draft.simulate_acceptance_length=2",
            "draft.simulate_acceptance_length=2 cannot be combined with draft.adaptive=true, which goes by real acceptance; leave one out",
        ),
        ("verify_lossless=1 output.token_ids=false", "verify_lossless compares token ids, and output.token_ids=false leaves them out; leave one out"),
        (
            "sampling.acceptance=rejection draft.topk=4 draft.num_draft_tokens=16",
            "draft.num_draft_tokens=16: with sampling.acceptance=rejection every drafted token is verified; "
            "set it to 1 + draft.topk * draft.num_steps = 17",
        ),
        (
            "sampling.acceptance=rejection draft.topk=32",
            "draft.num_draft_tokens=128: with sampling.acceptance=rejection every drafted token is verified; "
            "set it to 1 + draft.topk * draft.num_steps = 129",
        ),
        ("sampling.min_tokens=300", "sampling.min_tokens is 300, above max_tokens 256"),
        ("sampling.top_p=0", "sampling.top_p must be in (0, 1], got 0.0"),
        ("sampling.top_k=-1", "sampling.top_k must be 0 (off) or from 1 to 2147483647, got -1"),
        ("sampling.top_k=10000000000", "sampling.top_k must be 0 (off) or from 1 to 2147483647, got 10000000000"),
        (
            "sampling.allowed_token_ids=[1,2] sampling.banned_token_ids=[2,1,3]",
            "sampling.banned_token_ids holds every id of sampling.allowed_token_ids; no token is left",
        ),
        (
            "verify_lossless=4 draft.simulate_acceptance_length=2",
            "verify_lossless cannot check draft.simulate_acceptance_length: simulated text is not the target's; leave one out",
        ),
        ("data.shard=4/4", "data.shard=4/4: must be i/N with i from 0 to N - 1, such as 0/4"),
        ("data.row_sampling=false data.row_sampling_field=x", "data.row_sampling_field has no meaning with data.row_sampling=false; leave one out"),
        ("data.as_chat=true data.chat_template=none", "data.as_chat=true needs a template, but data.chat_template=none; leave one out"),
        ("task.execute_code=true", "task.execute_code=true belongs to task=humaneval; leave it out"),
        ("baseline=true draft=none", "baseline=true compares with draft=none, and this job is draft=none already; leave it out"),
        ("resume_errors=true", "resume_errors=true belongs to resume=FOLDER; leave it out"),
        ("model.device=gpu", "model.device=gpu: must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_honoured_is_refused(overrides: str, text: str) -> None:
    assert message(*overrides.split()) == text


def test_combinations_that_wait_for_their_features_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "UNSUPPORTED", ())
    assert message("sampling.acceptance=rejection", "draft.adaptive=true") == (
        "sampling.acceptance=rejection cannot be combined with draft.adaptive=true; leave one out"
    )
    hot = ("sampling.acceptance=rejection", "verify_lossless=2", "sampling.temperature=1")
    assert message(*hot) == (
        "verify_lossless cannot check sampling.acceptance=rejection at a temperature: its text depends on the drafter; leave one out"
    )
    validate.check_values(composed(*hot[:2]))


@given(st.integers(1, 12), st.integers(1, 12))
def test_the_default_tree_fits_and_one_node_more_than_the_largest_does_not(topk: int, steps: int) -> None:
    draft = DraftConfig(topk=topk, num_steps=steps)
    assert num_draft_tokens(draft) == (steps + 1 if topk == 1 else min(128, 1 + steps * topk))
    most = max_draft_tokens(topk, steps)
    assert num_draft_tokens(draft) <= most
    most = most if topk == 1 else min(most, validate.TREE_WINDOW)
    validate._check_draft(draft)
    if topk > 1:
        validate._check_draft(replace(draft, num_draft_tokens=most))
    with pytest.raises(ConfigError, match=r"draft\.num_draft_tokens|a tree may hold 256 nodes, this one has 257"):
        validate._check_draft(replace(draft, num_draft_tokens=most + 1))


@pytest.mark.parametrize(
    ("count", "device", "text"),
    [
        (0, "cuda", "model.device=cuda: no CUDA device is visible here; use model.device=cpu or model.device=auto"),
        (1, "cuda:1", "model.device=cuda:1: the only CUDA device visible here is cuda:0"),
        (2, "cuda:2", "model.device=cuda:2: the CUDA devices visible here are cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(count: int, device: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "cuda_devices", lambda: count)
    validate.check_device("cpu")
    with pytest.raises(ConfigError) as caught:
        validate.check_device(device)
    assert str(caught.value) == text


def test_an_empty_cuda_visible_devices_hides_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert validate.cuda_devices() == 0


# Local files


def local(model: Path, *overrides: str) -> None:
    validate.validate(composed("model=hf", f"model.path='{model}'", "draft=ngram", *overrides))


def test_a_whole_checkpoint_passes(checkpoint: Path) -> None:
    local(checkpoint, "data=random")
    local(checkpoint)


def test_a_checkpoint_without_config_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json; give the folder of a Hugging Face checkpoint"):
        local(checkpoint)


def test_a_config_that_is_no_json_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON .*; download it again"):
        local(checkpoint)


def test_a_truncated_weight_file_is_refused(checkpoint: Path) -> None:
    whole = (checkpoint / "model.safetensors").read_bytes()
    for cut in (0, 5, 20, len(whole) - 1):
        (checkpoint / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors (is cut off|has a damaged)"):
            local(checkpoint)
    local(checkpoint, "model.load_format=dummy")


def test_a_shard_that_the_index_lists_must_be_there(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00002-of-00002.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors, which model\.safetensors\.index\.json lists"):
        local(checkpoint)


def test_weights_are_needed_unless_they_are_dummies(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        local(checkpoint)
    local(checkpoint, "model.load_format=dummy")


def test_a_tokenizer_is_needed_for_text_and_not_for_token_ids(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json, and the rows are text"):
        local(checkpoint)
    local(checkpoint, "data=random")
    ids, text = tmp_path / "ids.jsonl", tmp_path / "text.jsonl"
    ids.write_text('{"token_ids": [1, 2]}\n')
    text.write_text('{"prompt": "x", "token_ids": [1]}\n')
    local(checkpoint, "data=jsonl", f"data.path='{ids}'")
    with pytest.raises(CheckpointError, match="the rows are text"):
        local(checkpoint, "data=jsonl", f"data.path='{text}'")
    local(checkpoint, "data=jsonl", f"data.path='{text}'", "data.prompt_field=token_ids")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("./nowhere", "model.path=./nowhere: no such folder, and not a hub id of the form ORGANISATION/NAME"),
        ("a/b/c", "model.path=a/b/c: no such folder, and not a hub id of the form ORGANISATION/NAME"),
        ("org/name@main", "model.path=org/name@main is not a folder, and a hub id has no @; use model.path=org/name model.revision=main"),
    ],
)
def test_what_is_neither_folder_nor_hub_id_is_refused(path: str, text: str) -> None:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        validate.validate(composed("model=hf", f"model.path={path}", "draft=ngram"))
    assert str(caught.value) == text


def test_a_revision_of_a_local_folder_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision=main belongs to a hub id"):
        local(checkpoint, "model.revision=main")


def test_a_file_instead_of_a_folder_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a file; give the folder that holds config\.json and the weights"):
        local(checkpoint / "config.json")


def test_a_drafter_of_another_kind_is_refused_by_its_files(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Path]] = []
    monkeypatch.setattr(validate, "DRAFT_CHECKS", [lambda method, folder: seen.append((method, folder))])
    validate.validate(composed("draft=eagle3", f"draft.path='{checkpoint}'"))
    assert seen == [("eagle3", checkpoint)]


def test_a_draft_longer_than_a_dflash_block_is_refused_by_its_config() -> None:
    own = validate.FAMILY / "dflash"
    for words in (["draft=dflash"], ["draft=dflash", f"draft.path='{own}'"]):
        validate.validate(composed(*words))
        with pytest.raises(ConfigError) as error:
            validate.validate(composed(*words, "draft.num_steps=5"))
        assert str(error.value) == f"draft.num_steps=5: {own} drafts blocks of 5, so at most 4 tokens a step"


def test_the_longest_chain_may_be_named_by_its_nodes() -> None:
    validate.check_values(composed("draft=ngram", "draft.num_steps=1024", "draft.num_draft_tokens=1025"))


def test_an_input_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        validate.validate(composed("data=jsonl", f"data.path='{tmp_path}/none.jsonl'"))
    with pytest.raises(ConfigError, match=r"data\.chat_template=none\.jinja: no such file; use auto, none or a file"):
        validate.validate(composed("data.chat_template=none.jinja"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that passes as a checkpoint: config, tokenizer, one safetensors file of one number."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder


# Small parts


@given(st.lists(st.text(st.characters(categories=("L", "N")), min_size=1), min_size=1))
def test_elements_are_split_at_outer_commas_only(parts: list[str]) -> None:
    assert split_elements(",".join(parts)) == parts
    assert split_elements("[" + ",".join(parts) + "]") == ["[" + ",".join(parts) + "]"]
    assert split_elements(",".join(f"'{part},x'" for part in parts)) == [f"'{part},x'" for part in parts]


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_doubled_backslashes_give_any_text_back(text: str) -> None:
    assert unescaped("sampling.stop", text.replace("\\", "\\\\")) == text


def test_a_suggestion_is_never_a_way_to_add_a_key() -> None:
    for name in (*ALIASES, *SECTION_ALIASES, "sampling.max_tokn", "outputs.dir"):
        meant = suggest_key(name, KEYS)
        assert meant is not None and "+" not in meant


def test_a_dumped_configuration_reads_back_equal_in_yaml_and_omegaconf(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from specgen.folders import dump_yaml

    value = {
        "texts": ["1e3", "0012", "true", "null", "off", "1:30", "\n", "a: b", "#x", "", "\u00e9\U0001f600", "plain", "1_0", "=", "~"],
        "x": 1e-05,
    }
    (tmp_path / "x.yaml").write_text(dump_yaml(value), encoding="utf-8")
    assert yaml.safe_load(dump_yaml(value)) == value
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "x.yaml")) == value
