"""From output ids to text: decoding, and stop strings found at the token that completes them.

Boundary: works on one request's ids with a tokenizer; knows nothing of steps, slots or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgen.types import Request


class OutputText:
    """Decodes outputs with a tokenizer (any object with ``decode(ids, skip_special_tokens=...)``); None for token-id jobs, whose text is empty."""

    def __init__(self, tokenizer: Any | None, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._special: dict[str, int] | None = None  # text of a special token -> its id, once it was asked for

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; a character split over tokens comes out whole, and an incomplete one at the end as U+FFFD."""
        if self.tokenizer is None or not ids:
            return ""
        return self.tokenizer.decode(list(ids), skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False)

    def special_stops(self, stops: Sequence[str]) -> dict[int, str]:
        """The ids of the stop strings that are special tokens, when special tokens are left out of the text and so never found in it."""
        if not stops or not self.skip_special_tokens:
            return {}
        if self._special is None:
            added = getattr(self.tokenizer, "added_tokens_decoder", {})
            self._special = {str(token.content): id for id, token in added.items() if token.special}
        return {self._special[stop]: stop for stop in stops if stop in self._special}

    def stop_at(self, request: Request, new_tokens: int) -> tuple[int, str] | None:
        """The least number of output tokens whose text completes a stop string, and that string, looking at the last ``new_tokens`` tokens.

        Of several strings completed by one token, the one that begins first wins, then the longer. A match that is complete before ``min_tokens``
        is passed over.
        """
        stops = request.sampling.stop
        if not stops or self.tokenizer is None or new_tokens == 0:
            return None
        ids = request.output_ids
        known = len(ids) - new_tokens
        if not self._possible(ids, known, stops):
            return None
        before = _settled(self.decode(ids[:known]))
        for n in range(known + 1, len(ids) + 1):
            text = self.decode(ids[:n])
            if n >= request.sampling.min_tokens:
                found = _first_match(text, stops, before)
                if found is not None:
                    return n, found[1]
            before = _settled(text)
        return None

    def _possible(self, ids: Sequence[int], known: int, stops: Sequence[str]) -> bool:
        """A cheap look at the tail: enough earlier tokens to hold the longest stop string, and the new ones."""
        need = max(map(len, stops))
        start = known
        # U+FFFD is a character cut by the slice's ends; it may be part of the stop string, so it does not count as text before it.
        while start > 0 and len(self.decode(ids[start:known]).replace("\ufffd", "")) <= need:
            start = max(0, start - need - 4)
        tail = self.decode(ids[start:])
        return any(stop in tail for stop in stops)

    def final(self, request: Request) -> str:
        """The row's text: all of it, or up to the stop string that ended it (after it with ``include_stop``)."""
        text = self.decode(request.output_ids)
        if isinstance(request.stop_reason, str):
            before = _settled(self.decode(request.output_ids[:-1]))
            found = _first_match(text, (request.stop_reason,), before)
            if found is not None:
                at = found[0]
                return text[: at + len(request.stop_reason)] if request.sampling.include_stop else text[:at]
        return text


def _settled(text: str) -> int:
    """How many characters of a text later tokens cannot change: all but the U+FFFD at its end, which stand for an unfinished character."""
    return len(text.rstrip("\ufffd"))


def _first_match(text: str, stops: Sequence[str], before: int) -> tuple[int, str] | None:
    """The earliest stop string whose end lies beyond character ``before``."""
    best: tuple[int, str] | None = None
    for stop in stops:
        at = text.find(stop, max(0, before - len(stop) + 1))
        if at >= 0 and (best is None or (at, -len(stop)) < (best[0], -len(best[1]))):
            best = (at, stop)
    return best
