"""Row state on the device: one entry a slot, written by the host when a request is admitted and by the step from then on.

Boundary: storage and its admission; what the values mean for a step is in ``step.py``. Slot 0 is scratch and always dead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specgen.engine.buffers import BufferRing
from specgen.types import Request, noise_key

MAX_STOP_IDS = 16
# Columns of the two admission matrices.
_INTS = ("alive", "length", "root", "output_len", "max_output", "noise_start", "top_k", "key0", "key1")
_FLOATS = ("temperature", "top_p", "min_p")


class DeviceRows:
    """Preallocated per-slot tensors.

    ints [R, 9 + 16] int32: alive, length L, root, output_len (output tokens so far, root included), max_output, noise_start (noise position of output
    token 0 of this turn), top_k, Philox key words, then stop ids (-1 unused). floats [R, 3] float32: temperature, top_p, min_p. Named views share
    them.
    """

    def __init__(self, max_slots: int, device: torch.device) -> None:
        width = len(_INTS) + MAX_STOP_IDS
        self.ints = torch.zeros(max_slots, width, dtype=torch.int32, device=device)
        self.floats = torch.zeros(max_slots, len(_FLOATS), dtype=torch.float32, device=device)
        self._int_ring = BufferRing(3, max_slots, width, dtype=torch.int32, device=device)
        self._float_ring = BufferRing(3, max_slots, len(_FLOATS), dtype=torch.float32, device=device)
        self._slot_ring = BufferRing(3, max_slots, dtype=torch.int64, device=device)

    def __getattr__(self, name: str) -> Tensor:
        if name in _INTS:
            return self.ints[:, _INTS.index(name)]
        if name in _FLOATS:
            return self.floats[:, _FLOATS.index(name)]
        if name == "stop_ids":
            return self.ints[:, len(_INTS) :]
        raise AttributeError(name)

    def admit(self, requests: list[Request], stop_ids: list[tuple[int, ...]]) -> None:
        """Write the rows of newly admitted requests, dead until their prefill ends. One copy and one scatter for all of them."""
        n = len(requests)
        ints, floats, slots = self._int_ring.take(), self._float_ring.take(), self._slot_ring.take()
        ints.np[:n] = 0
        ints.np[:n, len(_INTS) :] = -1
        for i, (request, stops) in enumerate(zip(requests, stop_ids, strict=True)):
            s = request.sampling
            key = np.array(noise_key(s.seed, request.prompt.key, request.sample), np.uint32).view(np.int32)
            ints.np[i, : len(_INTS)] = (0, 0, 0, 0, s.max_tokens, request.noise_offset, s.top_k, key[0], key[1])
            device_stops = stops[:MAX_STOP_IDS] if len(stops) <= MAX_STOP_IDS else ()
            ints.np[i, len(_INTS) : len(_INTS) + len(device_stops)] = device_stops
            floats.np[i] = (s.temperature, s.top_p, s.min_p)
            slots.np[i] = request.slot
        where = slots.copy_to_gpu(n)
        self.ints.index_copy_(0, where, ints.copy_to_gpu(n))
        self.floats.index_copy_(0, where, floats.copy_to_gpu(n))
