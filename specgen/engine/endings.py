"""What ends a row: the finish code that the device found, and what only the host can see, stop strings, long stop lists and a grammar's end.

Boundary: one request's tokens and its ending; slots, pages and who runs are the scheduler's.
"""

from __future__ import annotations

from specgen.engine.accounting import FINISH_NAMES, fail, trim
from specgen.engine.grammar import GrammarMasks
from specgen.engine.rows import MAX_STOP_IDS
from specgen.engine.text import OutputText
from specgen.kernels.reference_step import NON_FINITE, STOP
from specgen.types import Request


class Endings:
    """The endings of one engine's rows."""

    def __init__(self, text: OutputText, grammar: GrammarMasks | None, eos_ids: tuple[int, ...]) -> None:
        self.text, self.grammar, self.eos_ids = text, grammar, eos_ids

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """The ids that end this row: the model's EOS ids unless ``ignore_eos``, its own, and stop strings that are special tokens. Put together
        once a request."""
        if request.stop_ids is None:
            eos = () if request.sampling.ignore_eos else self.eos_ids
            special = tuple(self.text.special_stops(request.sampling.stop))
            request.stop_ids = tuple(dict.fromkeys(eos + request.sampling.stop_token_ids + special))
        return request.stop_ids

    def on_host(self, request: Request) -> bool:
        """Whether the row has endings that the device does not know, so that the host looks at every token of it."""
        return bool(request.sampling.stop) or self.grammar is not None or len(self.stop_ids(request)) > MAX_STOP_IDS

    def apply(self, request: Request, new_tokens: int, finish: int) -> bool:
        """Apply what the host sees in the last ``new_tokens`` tokens, then the device's finish code; whether the row ended."""
        cut: tuple[int, str | int] | None = self.text.stop_at(request, new_tokens) if request.sampling.stop else None
        stop_ids = self.stop_ids(request)
        if len(stop_ids) > MAX_STOP_IDS:
            cut = self._long_stop_list(request, new_tokens, stop_ids, cut)
        if cut is not None:
            n, request.stop_reason = cut
            trim(request, n)
            request.finish_reason = "stop"
        elif finish == NON_FINITE:
            fail(request, "NonFiniteError", f"the target's logits at output position {len(request.output_ids)} are not finite")
        elif finish:
            request.finish_reason = FINISH_NAMES[finish]
            if finish == STOP:
                request.stop_reason = request.output_ids[-1]
        if self.grammar is not None and request.error is None and not isinstance(request.stop_reason, str):
            self._follow(self.grammar, request)
        if request.done and isinstance(request.stop_reason, int) and request.stop_reason not in request.sampling.stop_token_ids:
            request.stop_reason = self.text.special_stops(request.sampling.stop).get(request.stop_reason, request.stop_reason)
        return request.done

    @staticmethod
    def _follow(grammar: GrammarMasks, request: Request) -> None:
        """Check the new tokens against the grammar; a row that it cannot go on with ends as an error, with the tokens that count."""
        wrong = grammar.follow(request)
        if wrong is not None:
            trim(request, wrong[0])
            request.stop_reason = None
            fail(request, "GrammarError", wrong[1])

    def _long_stop_list(
        self, request: Request, new_tokens: int, stop_ids: tuple[int, ...], cut: tuple[int, str | int] | None
    ) -> tuple[int, str | int] | None:
        # Under a grammar an id that ends the row may come earlier: where no other id is left.
        least = request.sampling.min_tokens if self.grammar is None else 0
        first = max(len(request.output_ids) - new_tokens, least - 1, 0)
        for n in range(first, len(request.output_ids)):
            if request.output_ids[n] in stop_ids and (cut is None or n + 1 <= cut[0]):
                return n + 1, request.output_ids[n]
        return cut
