"""Everything that can be checked before torch is loaded: support, ranges, combinations, local files, the device.

Boundary: reads configuration and small files; imports no torch and no transformers, loads no weights. The command line and the Python API share it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specgen import checkpoint_files
from specgen.config import GROUPS, RANGES, Config, DataConfig, DraftConfig, max_draft_tokens, num_draft_tokens
from specgen.data.files import check_head, input_files
from specgen.data.sampling import params_from_config
from specgen.data.sources import SUFFIXES_OF, check_dataset_folder, read_rows
from specgen.draft.checkpoints import check_kind, check_steps
from specgen.draft.mtp_layouts import check_modules
from specgen.errors import CheckpointError, ConfigError, DataError, SpecgenError
from specgen.grammar_text import compiled, split_form
from specgen.pasting import setting
from specgen.schema import SELECTORS, shown

ANYTHING = object()

# Settings that this version refuses. An entry goes when the feature lands.
UNSUPPORTED: tuple[tuple[str, Any], ...] = ()

NEEDS_PATH = ("draft_model", "eagle", "eagle3", "dflash")  # drafters with weights of their own
CHAIN_ONLY = ("ngram", "dflash")
TREE_WINDOW = 256  # nodes that attention's ancestor masks can name
RANDOM_WEIGHTS = ("draft_model", "eagle", "eagle3")  # drafters that draft.load_format=dummy can make
FAMILY = Path(__file__).parent / "embedded" / "family"
DRAFT_CHECKS: list[Callable[[str, Path], None]] = [check_kind]  # (method, folder): a local drafter's files against its method
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def validate(config: Config, given: Iterable[str] = ()) -> None:
    """Check one job. Raises a SpecgenError of one line. ``given``: the dotted keys the user set, for rules about what may be set at all."""
    check_values(config, given)
    check_device(config.model.device)
    check_local(config)


def check_values(config: Config, given: Iterable[str] = ()) -> None:
    """Support, ranges and combinations: needs the configuration alone."""
    given = frozenset(given)
    _check_draft_none(config, given)
    _check_supported(config)
    _check_ranges(config)
    _check_paths_given(config, given)
    _check_draft(config.draft)
    params_from_config(config.sampling)
    _check_sampling(config)
    _check_grammar(config)
    _check_data(config, given)
    _check_job(config)


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _check_supported(config: Config) -> None:
    for key, refused in UNSUPPORTED:
        value = get(config, key)
        if value == refused or (refused is ANYTHING and value is not None):
            raise ConfigError(f"{SELECTORS.get(key, key)}={shown(value)} is not supported in this version")


def _check_ranges(config: Config) -> None:
    for key, allowed in RANGES.items():
        value = get(config, key)
        if value is None or (key == "draft.num_steps" and config.draft.method == "none"):
            continue
        if complaint := allowed.complaint(value):
            instead = "; use draft=none for plain decoding" if key == "draft.num_steps" and value == 0 else ""
            raise ConfigError(f"{key}={shown(value)}: {complaint}{instead}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.model.device):
        raise ConfigError(f"model.device={config.model.device}: must be auto, cpu, cuda or cuda:N")


def _check_draft_none(config: Config, given: frozenset[str]) -> None:
    if config.draft.method != "none":
        return
    plain = DraftConfig(method="none", num_steps=0)
    differing = [name for name in vars(plain) if f"draft.{name}" in given or getattr(config.draft, name) != getattr(plain, name)]
    if differing:
        name = differing[0]
        raise ConfigError(f"draft.{name}={shown(getattr(config.draft, name))} has no meaning with draft=none; leave it out, or choose a drafter")


def _check_paths_given(config: Config, given: frozenset[str]) -> None:
    model, draft, data = config.model, config.draft, config.data
    if model.source == "embedded":
        if model.path is not None:
            raise ConfigError(
                f"model.path={model.path} is given, but model=embedded brings its own weights; use model=hf {setting('model.path', model.path)}"
            )
        if model.revision is not None:
            raise ConfigError(f"model.revision={model.revision} is given, but model=embedded has none; use model=hf model.path=HUB_ID")
    elif model.path is None:
        raise ConfigError("model=hf needs model.path=FOLDER_OR_HUB_ID")
    if draft.path is not None and draft.method not in NEEDS_PATH:
        why = "reads the target's own weights" if draft.method == "mtp" else "has no weights"
        raise ConfigError(f"draft.path={draft.path} is given, but draft={draft.method} {why}; leave it out")
    if model.source == "hf" and draft.path is None and draft.method in NEEDS_PATH:
        raise ConfigError(f"draft={draft.method} needs weights: give draft.path=FOLDER_OR_HUB_ID, or draft=none for plain decoding")
    if data.path is not None and data.source in ("embedded", "random"):
        instead = f"data={data_source_for(data.path)} {setting('data.path', data.path)}"
        raise ConfigError(f"data.path={data.path} is given, but data={data.source} makes its own rows; use {instead}")
    if data.path is None and data.source not in ("embedded", "random"):
        raise ConfigError(f"data={data.source} needs data.path={'DATASET_ID' if data.source == 'hub' else 'FILE'}")


SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def data_source_for(path: str) -> str:
    """The data group's name that reads ``path``: by suffix, else jsonl for what exists here and hub for what does not."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix in SUFFIXES]
    return SUFFIXES[suffixes[-1]] if suffixes else "jsonl" if os.path.exists(path) else "hub"


def _check_draft(draft: DraftConfig) -> None:
    if draft.method == "none":
        return
    if draft.topk > 1 and draft.method in CHAIN_ONLY:
        raise ConfigError(f"draft.topk={draft.topk}: draft={draft.method} proposes one chain; use draft.topk=1")
    if draft.load_format == "dummy" and draft.method not in RANDOM_WEIGHTS:
        raise ConfigError(f"draft.load_format=dummy: draft={draft.method} has no random weights; leave it out, or use {', '.join(RANDOM_WEIGHTS)}")
    nodes, most = num_draft_tokens(draft), max_draft_tokens(draft.topk, draft.num_steps)
    if draft.topk == 1 and nodes != draft.num_steps + 1:
        raise ConfigError(f"draft.num_draft_tokens={nodes}: with draft.topk=1 it is draft.num_steps + 1 = {draft.num_steps + 1}; leave it out")
    if nodes > most:
        raise ConfigError(
            f"draft.num_draft_tokens={nodes}: a tree of draft.topk={draft.topk} and draft.num_steps={draft.num_steps} has at most {most} nodes"
        )
    window = draft.topk * (draft.num_steps - 1)
    if draft.topk > 1 and max(window, nodes) > TREE_WINDOW:
        what = f"{nodes} nodes to verify" if nodes > TREE_WINDOW else f"draft.topk x (draft.num_steps - 1) = {window} nodes to draft"
        raise ConfigError(f"draft.topk={draft.topk}, draft.num_steps={draft.num_steps}: a tree may hold {TREE_WINDOW} nodes, this one has {what}")
    length = draft.simulate_acceptance_length
    if length is not None and draft.adaptive:
        raise ConfigError(
            f"draft.simulate_acceptance_length={length:g} cannot be combined with draft.adaptive=true, which goes by real acceptance; leave one out"
        )
    if length is not None and length > draft.num_steps + 1:
        raise ConfigError(f"draft.simulate_acceptance_length={length:g}: draft.num_steps={draft.num_steps} gives at most {draft.num_steps + 1}")


def _check_sampling(config: Config) -> None:
    sampling = config.sampling
    if sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(sampling.banned_token_ids):
        raise ConfigError("sampling.banned_token_ids holds every id of sampling.allowed_token_ids; no token is left")
    if sampling.acceptance == "rejection" and config.draft.adaptive:
        raise ConfigError("sampling.acceptance=rejection cannot be combined with draft.adaptive=true; leave one out")
    draft = config.draft
    comb = 1 + draft.topk * draft.num_steps
    if sampling.acceptance == "rejection" and draft.topk > 1 and num_draft_tokens(draft) != comb:
        raise ConfigError(
            f"draft.num_draft_tokens={num_draft_tokens(draft)}: with sampling.acceptance=rejection every drafted token is verified; "
            f"set it to 1 + draft.topk * draft.num_steps = {comb}"
        )
    if config.verify_lossless > 0:
        if sampling.acceptance == "rejection" and sampling.temperature > 0:
            raise ConfigError(
                "verify_lossless cannot check sampling.acceptance=rejection at a temperature: its text depends on the drafter; leave one out"
            )
        if not config.output.token_ids:
            raise ConfigError("verify_lossless compares token ids, and output.token_ids=false leaves them out; leave one out")
        if config.draft.simulate_acceptance_length is not None:
            raise ConfigError("verify_lossless cannot check draft.simulate_acceptance_length: simulated text is not the target's; leave one out")


def _check_grammar(config: Config) -> None:
    value = config.sampling.grammar
    if value is None:
        return
    split_form(value)
    if config.sampling.ignore_eos:
        raise ConfigError("sampling.ignore_eos=true has no meaning with sampling.grammar, which ends a row where its text is complete; leave one out")
    length = config.draft.simulate_acceptance_length
    if length is not None:
        raise ConfigError(f"draft.simulate_acceptance_length={length:g} commits drafts that sampling.grammar need not allow; leave one out")
    if config.engine.overlap == "1":
        raise ConfigError("engine.overlap=1 cannot be combined with sampling.grammar: a step's masks follow from the step before; leave it out")


def _check_data(config: Config, given: frozenset[str]) -> None:
    data = config.data
    for source, names in (("hub", ("name", "split", "revision")), ("random", ("rows", "prompt_tokens", "seed"))):
        for name in names:
            if data.source != source and (f"data.{name}" in given or getattr(data, name) != getattr(type(data)(), name)):
                remedy = "use data.limit" if name == "rows" else "use sampling.seed" if name == "seed" else "leave it out"
                raise ConfigError(f"data.{name}={shown(getattr(data, name))} belongs to data={source}, not to data={data.source}; {remedy}")
    if data.shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", data.shard)
        if not match or int(match[1]) >= int(match[2]):
            raise ConfigError(f"data.shard={data.shard}: must be i/N with i from 0 to N - 1, such as 0/4")
    if data.row_sampling_field is not None and not data.row_sampling:
        raise ConfigError("data.row_sampling_field has no meaning with data.row_sampling=false; leave one out")
    if data.chat_template_kwargs and data.chat_template == "none":
        raise ConfigError("data.chat_template_kwargs has no meaning with data.chat_template=none; leave one out")
    if data.chat_template == "none" and data.as_chat:
        raise ConfigError("data.as_chat=true needs a template, but data.chat_template=none; leave one out")
    if config.task.execute_code and config.task.name != "humaneval":
        raise ConfigError("task.execute_code=true belongs to task=humaneval; leave it out")
    if config.task.path is not None and config.task.name == "none":
        raise ConfigError(f"task.path={config.task.path} is given, but task=none; choose one of {', '.join(GROUPS['task'][1][1:])}")
    if config.task.path is not None and (data.path is not None or data.source != type(data)().source or "data" in given):
        named = f"data={data.source}" if data.path is None else f"data.path={data.path}"
        raise ConfigError(f"{named} and task.path={config.task.path} both name the input; leave one out")


def _check_job(config: Config) -> None:
    if config.baseline and config.draft.method == "none":
        raise ConfigError("baseline=true compares with draft=none, and this job is draft=none already; leave it out")
    if config.resume_errors and config.resume is None:
        raise ConfigError("resume_errors=true belongs to resume=FOLDER; leave it out")


def check_device(device: str) -> None:
    """Refuse ``cuda`` where the driver shows no such device. Raises ConfigError."""
    if not device.startswith("cuda"):
        return
    count, wanted = cuda_devices(), int(device.partition(":")[2] or 0)
    if count == 0:
        raise ConfigError(f"model.device={device}: no CUDA device is visible here; use model.device=cpu or model.device=auto")
    if wanted >= count:
        there = "the only CUDA device visible here is cuda:0" if count == 1 else f"the CUDA devices visible here are cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"model.device={device}: {there}")


def cuda_devices() -> int:
    """The number of CUDA devices the driver shows to this process, asked without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def check_local(config: Config) -> None:
    """The grammar, local input files and checkpoints, read as small files. Raises ConfigError, DataError or CheckpointError naming the path."""
    _check_input_files(config)
    if config.sampling.grammar is not None:
        compiled(config.sampling.grammar)
    model, draft = config.model, config.draft
    if model.source == "embedded":
        check_token_ids(config, FAMILY / "target")
    if model.source == "hf" and model.path is not None:
        folder = local_folder("model", model.path, model.revision)
        if folder is not None:
            checkpoint_files.check_model(folder, weights=model.load_format == "auto", tokenizer=lambda: _needs_tokenizer(config))
            check_token_ids(config, folder)
            if draft.method == "mtp":
                check_modules(folder, draft.num_steps)
    if draft.path is not None:
        folder = local_folder("draft", draft.path, None)
        if folder is not None:
            check_draft_files(draft, folder, weights=draft.load_format == "auto")
    elif draft.method == "dflash" and model.source == "embedded":
        check_steps(draft.num_steps, FAMILY / "dflash")


def check_draft_files(draft: DraftConfig, folder: Path, *, weights: bool) -> None:
    """A drafter's folder against the configuration. ``weights``: they are there, whole, and of the method's kind."""
    checkpoint_files.check_draft(folder, weights=weights)
    for check in DRAFT_CHECKS:
        check(draft.method, folder)
    if draft.method == "dflash":
        check_steps(draft.num_steps, folder)


def local_folder(group: str, path: str, revision: str | None) -> Path | None:
    """The checkpoint folder ``path`` names, or None for a hub id. Raises CheckpointError when it is neither."""
    folder = Path(path).expanduser()
    if os.path.isdir(folder):
        if revision is not None:
            raise ConfigError(f"{group}.revision={revision} belongs to a hub id, but {group}.path={path} is a local folder; leave it out")
        return folder
    if os.path.exists(folder):
        raise CheckpointError(f"{group}.path={path} is a file; give the folder that holds config.json and the weights")
    name, at, branch = path.partition("@")
    if at and HUB_ID.fullmatch(name):
        instead = f"{group}.path={name}" + (f" {setting('model.revision', branch)}" if group == "model" else "")
        raise ConfigError(f"{group}.path={path} is not a folder, and a hub id has no @; use {instead}")
    if not HUB_ID.fullmatch(path):
        raise CheckpointError(f"{group}.path={path}: no such folder, and not a hub id of the form ORGANISATION/NAME")
    return None


def _check_input_files(config: Config) -> None:
    try:
        _check_data_path(config.data)
    except OSError as error:
        raise DataError(f"data.path={shown(config.data.path)}: {error.strerror}; check data.path") from error
    template = config.data.chat_template
    if template not in ("auto", "none") and not os.path.isfile(Path(template).expanduser()):
        raise ConfigError(f"data.chat_template={template}: no such file; use auto, none or a file")
    if config.task.path is not None and not os.path.exists(Path(config.task.path).expanduser()):
        raise ConfigError(f"task.path={config.task.path}: no such file or folder")


def _check_data_path(data: DataConfig) -> None:
    """``data.path`` against its source: there, of a kind that it reads by name and first bytes, or of a hub id's form."""
    if data.source in SUFFIXES_OF:
        first = input_files(data.path, SUFFIXES_OF[data.source], data.source)[0]
        named = SUFFIXES.get(Path(re.sub(r"\.(gz|zst)$", "", first.name.lower())).suffix, data.source)
        if named != data.source:
            instead = f"data={named} {setting('data.path', data.path)}"
            raise ConfigError(f"data.path={data.path} is no {data.source} file by its name; use {instead}, or rename it")
        try:
            check_head(first, data.source)
        except DataError as error:
            raise DataError(f"data.path={error}") from error
    elif data.source == "hub":
        path = str(data.path)
        folder = Path(path).expanduser()
        if os.path.isdir(folder):
            check_dataset_folder(data)
        elif os.path.exists(folder):
            instead = f"data={data_source_for(path)} {setting('data.path', path)}"
            raise ConfigError(f"data.path={path} is a file, and data=hub reads a hub id or a dataset folder; use {instead}")
        elif not HUB_ID.fullmatch(path):
            raise ConfigError(f"data.path={path}: no such folder, and not a hub id of the form ORGANISATION/NAME; check data.path")


def check_token_ids(config: Config, folder: Path) -> None:
    """Refuse token ids of ``sampling.*`` beyond the vocabulary that the target's folder tells of. Raises ConfigError."""
    params_from_config(config.sampling, checkpoint_files.vocab_size(folder))


def _needs_tokenizer(config: Config) -> bool:
    """Whether there is text, to be read or to follow a grammar: false for random ids and for rows that carry ``token_ids`` (asked only when no
    tokenizer file is there)."""
    data = config.data
    if config.sampling.grammar is not None:
        return True
    if data.source == "random" or data.prompt_field == "token_ids":
        return False
    if data.source == "hub" or data.prompt_field is not None:
        return True
    try:
        first = next(iter(read_rows(data, vocab_size=1)))
    except (SpecgenError, StopIteration):
        return False  # the input's own fault, reported where rows are read
    return "token_ids" not in first.fields or any(name in first.fields for name in ("prompt", "messages", "turns"))
