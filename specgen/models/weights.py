"""Tensor files of a checkpoint: where they are, what they hold, and reading them.

Boundary: names, shapes and tensors. It knows nothing of models; the target and every drafter read their weights through it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specgen.errors import CheckpointError, ConfigError
from specgen.hub import reason

SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
LAYOUTS = (("model.safetensors.index.json", "model.safetensors"), ("pytorch_model.bin.index.json", "pytorch_model.bin"))
FLOAT_NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def local_folder(path: str, revision: str | None = None, weights: bool = True, code: bool = False) -> Path:
    """The local folder of a checkpoint: ``path`` itself, or a snapshot of the hub repository of that name at ``revision``.

    Without ``weights`` only configuration and tokenizer files are fetched. Raises CheckpointError for a folder or repository that cannot be had,
    ConfigError for a revision of a local folder.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"{path} is a local folder and has no revisions: remove the revision or give a hub id")
        return folder
    if folder.is_absolute() or path.startswith(("./", "../", "~")) or path.count("/") > 1:
        raise CheckpointError(f"{path}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        patterns = [*SMALL_FILES, *(["*.py"] if code else [])]
        found = Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
        if weights:
            # The folder of a snapshot is named after its commit: the weights are those of the same commit, whatever is pushed meanwhile.
            for wanted in weight_files(found):
                snapshot_download(path, revision=found.name, allow_patterns=wanted)
                if all((found / name).is_file() for name in wanted):
                    break
        return found
    except Exception as error:
        raise CheckpointError(f"{path}: no such folder here, and {reason(error)}") from error


def weight_files(folder: Path) -> list[list[str]]:
    """Sets of files that may hold the weights, the preferred set first, judged from the index files in ``folder``."""
    sets: list[list[str]] = []
    for index, single in LAYOUTS:
        if (folder / index).is_file():
            sets.append(sorted(set(_weight_map(folder / index).values())))
        sets.append([single])
    return sets


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a readable weight index: {error}") from error


class TensorFiles:
    """The tensor files of one folder: safetensors, single or sharded, else pytorch_model.bin, single or sharded.

    ``names`` maps each tensor to its file. Raises CheckpointError when there is none, or when an index names a file that is absent.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        for index, single in LAYOUTS:
            if (self.folder / index).is_file():
                self.names = {name: self.folder / file for name, file in _weight_map(self.folder / index).items()}
                absent = sorted({path.name for path in self.names.values() if not path.is_file()})
                if absent:
                    raise CheckpointError(f"{self.folder}: {index} names files that are absent: {', '.join(absent)}")
                return
            if (self.folder / single).is_file():
                self.names = dict.fromkeys(self._names_in(self.folder / single), self.folder / single)
                return
        raise CheckpointError(f"{self.folder}: no weights (model.safetensors or pytorch_model.bin, single or with an index)")

    def _names_in(self, path: Path) -> list[str]:
        if path.suffix == ".safetensors":
            return list(_header(path))
        return list(self._pickle(path))

    @cached_property
    def _pickles(self) -> dict[Path, dict[str, Tensor]]:
        return {}

    def _pickle(self, path: Path) -> dict[str, Tensor]:
        if path not in self._pickles:
            try:
                self._pickles[path] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception:
                try:  # files of the old, unzipped format cannot be mapped
                    self._pickles[path] = torch.load(path, map_location="cpu", weights_only=True)
                except Exception as error:
                    raise CheckpointError(f"{path}: not a readable tensor file: {' '.join(str(error).split())[:200]}") from error
        return self._pickles[path]

    @cached_property
    def _headers(self) -> dict[str, dict[str, Any]]:
        merged: dict[str, dict[str, Any]] = {}
        for path in sorted({p for p in self.names.values() if p.suffix == ".safetensors"}):
            merged.update(_header(path))
        return merged

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone where the format has one."""
        if name in self._headers:
            return tuple(self._headers[name]["shape"])
        return tuple(self._pickle(self.names[name])[name].shape)

    def first_float_dtype(self) -> torch.dtype | None:
        """dtype of the first floating tensor, or None."""
        for entry in self._headers.values():
            if entry["dtype"] in FLOAT_NAMES:
                return FLOAT_NAMES[entry["dtype"]]
        bins = {path for path in self.names.values() if path.suffix != ".safetensors"}
        return next((t.dtype for path in sorted(bins) for t in self._pickle(path).values() if t.is_floating_point()), None)

    def visit(self, names: Iterable[str], use: Callable[[str, Tensor], None]) -> None:
        """Call ``use(name, tensor)`` for each name, in file order; the tensor is mapped CPU memory and must be copied to be kept."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.names[name], []).append(name)
        for path, wanted in sorted(by_file.items()):
            if path.suffix != ".safetensors":
                for name in wanted:
                    use(name, self._pickle(path)[name])
                continue
            absent = [name for name in wanted if name not in self._headers]
            if absent:
                raise CheckpointError(f"{path}: the index promises {absent[0]}, the file does not hold it")
            with _open(path) as file:
                for name in sorted(wanted, key=lambda name: self._headers[name]["data_offsets"][0]):
                    use(name, file.get_tensor(name))

    def copy_into(self, views: Mapping[str, Tensor]) -> None:
        """Copy each named tensor into its view (one device, any dtype; shapes must be equal)."""
        if not views:
            return
        upload = Upload(next(iter(views.values())).device)
        self.visit(views, lambda name, tensor: upload(views[name], tensor))
        upload.wait()


class Upload:
    """Copies from mapped files to a device: through two pinned buffers on CUDA, so that reading one part and sending another overlap."""

    def __init__(self, device: torch.device, chunk_bytes: int = 1 << 27, staged: bool | None = None) -> None:
        """``staged``: copy by way of buffers (null: on CUDA only; a CPU target is written directly)."""
        self.device, self.turn = device, 0
        self.buffers: list[Tensor] = []
        self.sent: list[torch.cuda.Event] = []
        if device.type == "cuda" if staged is None else staged:
            self.buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        if device.type == "cuda":
            self.sent = [torch.cuda.Event() for _ in self.buffers]

    def __call__(self, view: Tensor, tensor: Tensor) -> None:
        """Copy ``tensor`` (CPU) into ``view`` (contiguous, on the device, same shape, any dtype)."""
        if not self.buffers:
            view.copy_(tensor)
            return
        source, target = tensor.contiguous().view(-1), view.view(-1)
        step = self.buffers[0].numel() // tensor.element_size()
        for start in range(0, source.numel(), step):
            part = source[start : start + step]
            staging = self.buffers[self.turn][: part.numel() * part.element_size()].view(part.dtype)
            if self.sent:
                self.sent[self.turn].synchronize()  # the buffer's last content has left
            staging.copy_(part)
            target[start : start + step].copy_(staging, non_blocking=True)
            if self.sent:
                self.sent[self.turn].record(torch.cuda.current_stream(self.device))
            self.turn = 1 - self.turn

    def wait(self) -> None:
        """Return once everything has arrived."""
        for event in self.sent:
            event.synchronize()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {' '.join(str(error).split())[:200]}") from error


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: name -> {dtype, shape}, in file order."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(100_000_000, path.stat().st_size - 8):
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def read_tensors(
    path: str | Path,
    names: Iterable[str] | None = None,
    prefix: str | tuple[str, ...] = "",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Tensors of a checkpoint folder: those of ``names``, or all whose name starts with ``prefix``; floating ones converted to ``dtype``.

    Integer and boolean tensors keep their type. Raises CheckpointError for a name the files do not hold.
    """
    files = TensorFiles(path)
    wanted = [name for name in files.names if name.startswith(prefix)] if names is None else list(names)
    absent = sorted(name for name in wanted if name not in files.names)
    if absent:
        raise CheckpointError(f"{path}: missing tensors {', '.join(absent)}")
    found: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        found[name] = tensor.to(device=device, dtype=kind, copy=True)

    files.visit(wanted, keep)
    return found
