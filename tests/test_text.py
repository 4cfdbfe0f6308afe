"""Text from ids: characters split over tokens come out whole, and a stop string is found at the token that completes it, however runs are cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.engine.text import OutputText
from specgen.types import Prompt, Request, SamplingParams
from tests.harness import tokenizer_of


class Pieces:
    """A tokenizer whose ids name byte strings; ids below 0 are special.

    ``each``: a cut character becomes one U+FFFD a byte, as byte-fallback decoders make it, else one in all.
    """

    def __init__(self, pieces: list[bytes], each: bool = False) -> None:
        self.pieces, self.each = pieces, each

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces
        data = b"".join(self.pieces[i] for i in ids if i >= 0)
        if not self.each:
            text = data.decode("utf-8", errors="replace")
        else:
            text = ""
            while data:
                for size in range(1, 5):
                    try:
                        text, data = text + data[:size].decode("utf-8"), data[size:]
                        break
                    except UnicodeDecodeError:
                        continue
                else:
                    text, data = text + "\ufffd", data[1:]
        return text if skip_special_tokens else text + "#" * sum(i < 0 for i in ids)


BYTES = [bytes([i]) for i in range(256)]


def request_of(ids: list[int], **sampling: Any) -> Request:
    return Request(Prompt(index=0, id=0, token_ids=[1]), SamplingParams(**sampling), output_ids=ids)


def feed(text: OutputText, ids: list[int], runs: list[int], **sampling: Any) -> tuple[Request, tuple[int, str] | None]:
    """Hand over ``ids`` in runs, as steps commit them, until a stop string ends the row."""
    request, at = request_of([], **sampling), 0
    for n in runs:
        new = ids[at : at + n]
        at += n
        request.output_ids.extend(new)
        found = text.stop_at(request, len(new))
        if found is not None:
            del request.output_ids[found[0] :]
            request.stop_reason = found[1]
            return request, found
    return request, None


def by_hand(tokenizer: Pieces, ids: list[int], stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The first token at which the whole text holds a stop string, and the one that begins first (the longer of two that begin together)."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], True, False)
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            return n, min(found)[2]
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.text(st.sampled_from("ab \U0001f600é"), max_size=12),
    st.lists(st.text(st.sampled_from("ab \U0001f600é"), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 7), min_size=48, max_size=48),
    st.booleans(),
)
def test_a_stop_string_is_found_at_the_byte_that_completes_it_whatever_the_runs(text: str, stops: list[str], runs: list[int], each: bool) -> None:
    tokenizer, ids = Pieces(BYTES, each), list(text.encode())
    request, found = feed(OutputText(tokenizer), ids, runs, stop=tuple(stops))
    assert found == by_hand(tokenizer, ids, tuple(stops))
    if found is None:
        assert request.output_ids == ids and OutputText(tokenizer).final(request) == text
    else:
        shown = OutputText(tokenizer).final(request)
        assert not any(stop in shown for stop in stops)
        assert tokenizer.decode(ids[: found[0]], True, False) == shown + found[1]


WORDS = Pieces([b"one ", b"two ", b"thr", b"ee STOP he", b"re", b"STOP", b"ST", b"OP"])


@pytest.mark.parametrize("runs", [[6], [1] * 6, [2, 4], [3, 3], [5, 1]])
def test_a_stop_string_inside_one_token_ends_the_row_at_that_token(runs: list[int]) -> None:
    request, found = feed(OutputText(WORDS), [0, 1, 2, 3, 4, 0], runs, stop=("STOP",))
    assert found == (4, "STOP") and request.output_ids == [0, 1, 2, 3]
    assert OutputText(WORDS).final(request) == "one two three "


@pytest.mark.parametrize("runs", [[5], [1] * 5, [3, 2], [2, 3]])
def test_a_stop_string_across_a_token_border_ends_the_row_at_its_last_token(runs: list[int]) -> None:
    request, found = feed(OutputText(WORDS), [0, 6, 7, 1, 1], runs, stop=("STOP",))
    assert found == (3, "STOP") and request.output_ids == [0, 6, 7]
    assert OutputText(WORDS).final(request) == "one "


def test_include_stop_keeps_the_stop_string_and_nothing_after_it() -> None:
    request, _ = feed(OutputText(WORDS), [0, 3, 4], [3], stop=("STOP",), include_stop=True)
    assert request.output_ids == [0, 3] and OutputText(WORDS).final(request) == "one ee STOP"


def test_of_two_stop_strings_completed_by_one_token_the_one_that_begins_first_wins() -> None:
    assert feed(OutputText(WORDS), [3], [1], stop=("STOP", "ee"))[1] == (1, "ee")
    assert feed(OutputText(WORDS), [3], [1], stop=("STOP", "STOP h"))[1] == (1, "STOP h")
    assert feed(OutputText(WORDS), [3], [1], stop=("STOP h", "STOP"))[1] == (1, "STOP h")


@pytest.mark.parametrize("runs", [[6], [1] * 6, [2, 2, 2]])
def test_a_match_complete_before_min_tokens_is_passed_over(runs: list[int]) -> None:
    request, found = feed(OutputText(WORDS), [5, 0, 1, 0, 5, 1], runs, stop=("STOP",), min_tokens=3)
    assert found == (5, "STOP") and request.output_ids == [5, 0, 1, 0, 5]
    assert OutputText(WORDS).final(request) == "STOPone two one "


def test_a_match_completed_by_the_last_token_of_min_tokens_counts() -> None:
    assert feed(OutputText(WORDS), [0, 0, 5, 0], [4], stop=("STOP",), min_tokens=3)[1] == (3, "STOP")


def test_special_tokens_have_no_text_and_do_not_hide_a_stop_string() -> None:
    assert feed(OutputText(WORDS), [6, -1, -1, -1, 7], [4, 1], stop=("STOP",))[1] == (5, "STOP")
    assert OutputText(WORDS).decode([0, -1, 1]) == "one two "
    assert OutputText(WORDS, skip_special_tokens=False).decode([0, -1, 1]) == "one two #"


def test_a_cut_character_is_shown_as_the_replacement_character_and_its_ids_are_kept() -> None:
    smile = list("\U0001f600".encode())
    assert OutputText(Pieces(BYTES)).final(request_of(smile)) == "\U0001f600"
    assert OutputText(Pieces(BYTES)).final(request_of(smile[:3])) == "\ufffd"
    assert OutputText(Pieces(BYTES, each=True)).final(request_of(smile[:3])) == "\ufffd" * 3


def test_without_a_tokenizer_text_is_empty_and_nothing_stops() -> None:
    text = OutputText(None)
    assert text.decode([1, 2]) == "" and text.final(request_of([1, 2])) == ""
    assert text.stop_at(request_of([1, 2], stop=("a",)), 1) is None


def test_no_new_tokens_complete_nothing() -> None:
    assert OutputText(WORDS).stop_at(request_of([5], stop=("STOP",)), 0) is None


def test_a_real_tokenizers_spaces_are_its_own() -> None:
    text = OutputText(tokenizer_of("target"))
    assert text.decode([31, 32, 2]) == "w31 w32"
    request, found = feed(text, [31, 32, 33, 34], [1, 3], stop=("w32 w33",))
    assert found == (3, "w32 w33") and text.final(request) == "w31 "
