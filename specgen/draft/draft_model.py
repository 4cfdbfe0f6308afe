"""A smaller language model of the same vocabulary as the drafter.

Boundary: wraps a loaded ``Target`` as a head; the draft loop is ``autoregressive.py``. It reads tokens alone, so it sees prompt token 0, and its
KV runs one
token ahead of the target's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specgen.errors import CheckpointError
from specgen.kernels import ops
from specgen.models.attention import KvPool
from specgen.models.decoder import Tail
from specgen.models.target import Hidden, Target
from specgen.types import Layout


class DraftModelHead:
    """A draft model: states are its own final hidden states, nothing is fed back."""

    method = "draft_model"
    lead = 1
    feed_size = 0
    id_map: Tensor | None = None
    aux_layers: tuple[int, ...] = ()
    prenorm = False

    def __init__(self, model: Target, target_vocab: int) -> None:
        self.model = model
        # Ids beyond the draft's table (the target's is larger) read its last row: that costs acceptance, never text.
        self.last_id = model.vocab_size - 1 if model.vocab_size < target_vocab else None
        self.device, self.feed_dtype = model.device, model.dtype

    def features(self, hidden: Hidden) -> None:
        return None

    def start(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, feed: Tensor | None, layout: Layout, pool: KvPool, tail: Tail | None = None) -> tuple[Tensor, None]:
        if self.last_id is not None:
            ids = ids.clamp(max=self.last_id)
        states = self.model.forward(ids, layout, pool).last
        return states if tail is None else ops.take_rows(states, tail.index), None

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)

    def make_pool(self, num_pages: int, page_size: int) -> KvPool:
        return self.model.make_pool(num_pages, page_size)

    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token


def check_vocabulary(target_tokens: dict[str, int], draft_tokens: dict[str, int], draft_path: Any) -> None:
    """Refuse a draft model whose tokenizer gives an id another meaning than the target's: it would run, and accept nothing or worse.

    Both arguments map token text to id. Extra ids on either side are fine.
    """
    by_id = {index: token for token, index in target_tokens.items()}
    wrong = [index for token, index in sorted(draft_tokens.items(), key=lambda item: item[1]) if by_id.get(index, token) != token]
    if wrong:
        raise CheckpointError(
            f"{draft_path}: the draft model's vocabulary differs from the target's, first at id {wrong[0]} "
            f"({by_id[wrong[0]]!r} in the target): draft and target must share one tokenizer"
        )
