"""Where a run took place, and what it ran: versions, device, source revision, configuration and checkpoint fingerprints.

Boundary: reads facts about the process and small parts of files. Imports no heavy package: torch is asked only where someone else has
imported it already.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import specgen
from specgen.config import Config
from specgen.errors import CheckpointError
from specgen.report.disk import dumps

ENVIRONMENT_NAME = "environment.json"
# Keys that do not decide what the rows are; a configuration's hash leaves them out.
NOT_HASHED = ("engine", "output.dir", "output.fsync_seconds", "model.device", "data.shard", "baseline", "verify_lossless", "resume", "resume_errors")
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def environment(device: Any = None) -> dict[str, Any]:
    """What ``environment.json`` and ``stats.json`` say about the process.

    device: the torch device the job runs on, so that its name can be given; None names the first CUDA device, if torch is loaded and has one.
    """
    packages = ("torch", "triton", "transformers", "tokenizers", "datasets", "hydra-core", "pyarrow", "numpy", "llguidance")
    return {
        "specgen": specgen.__version__,
        "git": git_revision(Path(specgen.__file__).resolve().parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in packages},
        **_torch_facts(device),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_facts(device: Any) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"device": None, "cuda": None, "threads": None}
    facts: dict[str, Any] = {"device": "cpu", "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    if torch.cuda.is_available() and (device is None or str(device).startswith("cuda")):
        chip = torch.cuda.get_device_properties(device if device is not None else 0)
        facts["device"], facts["device_memory_gb"] = chip.name, round(chip.total_memory / 2**30, 1)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def git_revision(root: Path) -> dict[str, Any] | None:
    """``{revision, dirty}`` of the checkout at ``root``; None when it is not one, or git is not there."""
    if not (root / ".git").exists():
        return None
    try:
        # Without --no-optional-locks `git status` would rewrite the index of the user's checkout.
        revision = _git(root, "rev-parse", "HEAD")
        return {"revision": revision, "dirty": bool(_git(root, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def config_record(config: Config) -> dict[str, Any]:
    """The configuration as plain nested dicts, for ``environment.json``."""
    return asdict(config)


def environment_record(config: Config, models: dict[str, Any], device: Any = None) -> dict[str, Any]:
    """The whole of ``environment.json``: the process, the configuration with its hash, and the fingerprints of the checkpoints by role."""
    return {**environment(device), "config": config_record(config), "config_hash": config_hash(config), "models": models}


def config_hash(config: Config | dict[str, Any]) -> str:
    """SHA-256 (hex) of every setting that decides what the rows are; the keys in ``NOT_HASHED`` are left out.

    Shards of one job, and starts of one run, have equal hashes.
    """
    record = config_record(config) if isinstance(config, Config) else config
    kept = {key: value for key, value in flatten(record).items() if not _matches(key, NOT_HASHED)}
    return hashlib.sha256(dumps(sorted(kept.items())).encode()).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], ignore: tuple[str, ...] = NOT_HASHED) -> list[str]:
    """``key: old -> new`` for every setting that differs between two configuration records, outside ``ignore`` (keys or groups of keys)."""
    before, after = flatten(old), flatten(new)
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key) and not _matches(key, ignore)]
    return [f"{key}: {dumps(before.get(key))} -> {dumps(after.get(key))}" for key in changed]


def flatten(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``. An empty dict is a value; lists and tuples compare equal."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(key == pattern or key.startswith(f"{pattern}.") for pattern in patterns)


def model_fingerprint(path: str | Path) -> dict[str, Any]:
    """What tells one local checkpoint from another without reading it whole; a moved copy has the same fingerprint.

    ``config`` and ``tokenizer``: SHA-256 of config.json and tokenizer.json (null when absent). ``weights``: name, size in bytes, and SHA-256 of
    the safetensors header and of 16 evenly spaced 4 KiB samples, so that two fine-tunes of one shape differ. Raises CheckpointError
    when ``path`` is not a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the local folder of the checkpoint")
    weights = sorted(file for file in folder.iterdir() if file.suffix in {".safetensors", ".bin", ".gguf", ".pt"})
    return {
        "config": _file_hash(folder / "config.json"),
        "tokenizer": _file_hash(folder / "tokenizer.json"),
        "weights": [{"name": file.name, "bytes": file.stat().st_size, "sha256": _sampled_hash(file)} for file in weights],
    }


def _file_hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _sampled_hash(path: Path) -> str:
    size, seen = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            header = file.read(8)
            length = int.from_bytes(header, "little")
            if len(header) < 8 or 8 + length > size:
                raise CheckpointError(f"{path} is cut off or not a safetensors file; fetch the checkpoint again")
            try:
                json.loads(body := file.read(length))
            except ValueError:
                raise CheckpointError(f"{path} has no valid safetensors header; fetch the checkpoint again") from None
            seen.update(header + body)
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            seen.update(file.read(_SAMPLE_BYTES))
    return seen.hexdigest()
