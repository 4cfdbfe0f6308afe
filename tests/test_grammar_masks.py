"""The masks of a step's nodes against matchers of their own, against a language written out, and with vocabularies that lack what must follow."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specgen.engine.grammar import GrammarMasks, packed
from specgen.errors import ConfigError
from specgen.grammar_text import KEY, library, rules_of
from specgen.types import Draft, Prompt, Request, SamplingParams
from tests import grammars
from tests.harness import tokenizer_of

CPU = torch.device("cpu")
TOKENS = ["a", "b", "c", "1", "2", "ab", "bc", "abc", "</s>", "d", "da"]
END = TOKENS.index("</s>")
NOTHING_LEFT = "has no token at output position 2: neither it, nor the vocabulary, nor the row's other masks allow one"


@cache
def small(filler: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of a dozen byte-level tokens and ``filler`` more that stand for nothing the grammars say."""
    tokens = {token: at for at, token in enumerate([*TOKENS, *(chr(0x100 + n) for n in range(filler))])}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[("a", "b"), ("b", "c"), ("a", "bc"), ("d", "a")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def masks_of(grammar: str, rows: int, nodes: int, tokenizer: Any = None) -> GrammarMasks:
    tokenizer = tokenizer or small()
    return GrammarMasks(rules_of(grammar, tokenizer), len(tokenizer), rows, nodes, CPU)


def request_of(output: list[int], **sampling: Any) -> Request:
    return Request(Prompt(0, 0, [1]), SamplingParams(**sampling), output_ids=list(output), stop_ids=(END,))


def ids_in(mask: torch.Tensor | np.ndarray, limit: int = len(TOKENS)) -> set[int]:
    words = np.asarray(mask)
    return {token for token in range(limit) if words[token // 32] >> (token % 32) & 1}


def draft_of(tokens: list[list[int]], parents: list[list[int]] | None) -> Draft:
    """A chain, or a tree whose node n + 1 hangs from ``parents[row][n]``."""
    if parents is None:
        return Draft(torch.tensor(tokens, dtype=torch.int32))
    nodes = len(tokens[0]) + 1
    first, sibling, depth = (torch.full((len(tokens), nodes), fill, dtype=torch.int32) for fill in (-1, -1, 0))
    for row, hung in enumerate(parents):
        for node in range(nodes - 1, 0, -1):
            sibling[row, node] = first[row, hung[node - 1]]
            first[row, hung[node - 1]] = node
        for node in range(1, nodes):
            depth[row, node] = depth[row, hung[node - 1]] + 1
    return Draft(torch.tensor(tokens, dtype=torch.int32), torch.tensor(parents), None, depth, first, sibling)


def path_to(node: int, tokens: list[int], parents: list[int] | None) -> list[int]:
    if parents is None:
        return tokens[:node]
    path: list[int] = []
    while node:
        path.insert(0, tokens[node - 1])
        node = parents[node - 1]
    return path


def expected(grammar: str, text: list[int]) -> set[int] | None:
    """The ids after ``text`` by a matcher of its own; None where the text is none of the grammar's or has ended."""
    rules = rules_of(grammar, small())
    matcher = rules.matcher()
    if END in text or (text and matcher.try_consume_tokens(text) < len(text)):
        return None
    mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
    found = ids_in(mask) - {END}
    return found | {END} if matcher.is_accepting() or matcher.is_error() else found


GRAMMARS = {
    "regex:(ab?c|a[12]{1,3}|d{2}a)": ["abc", "ac", "dda", *("a" + x for x in ["1", "2", "12", "111"])],
    'ebnf:start: "a" start "b" | "c"': ["c", "acb", "aacbb"],
    "regex:(abc)*": ["", "abc", "abcabc"],
}


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("shape", ["root", pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_every_reachable_node_has_the_mask_of_its_own_text(grammar: str, shape: str) -> None:
    """Filled again and again over other drafts: what is left of an earlier one is never seen at a node that can be reached, and is never empty."""
    rows, nodes, random_ = 5, 1 if shape == "root" else 7, random.Random(shape)
    masks = masks_of(grammar, rows, nodes)
    words = [small().encode(text, add_special_tokens=False) for text in GRAMMARS[grammar]]
    seen = 0
    for _ in range(15):
        outputs = [word[: random_.randrange(len(word) + 1)] for word in random_.choices(words, k=rows)]
        requests = [request_of(output) for output in outputs]
        assert [masks.follow(request) for request in requests] == [None] * rows
        likely = [*range(len(TOKENS)), *(token for word in words for token in word)]
        tokens = [random_.choices(likely, k=nodes - 1) for _ in range(rows)]
        parents = [[random_.randrange(node) for node in range(1, nodes)] for _ in range(rows)] if shape == "tree" else None
        found = masks.decode_masks(requests, nodes, None if shape == "root" else packed(draft_of(tokens, parents))).view(rows, nodes, -1)
        for row, output in enumerate(outputs):
            for node in range(nodes):
                path = path_to(node, tokens[row], None if parents is None else parents[row])
                right = expected(grammar, output + path)
                assert (found[row, node] != 0).any()
                if right is not None:
                    seen += 1
                    assert ids_in(found[row, node]) == right, (output, path)
        for request in requests:
            masks.release(request)
    assert seen >= 15 * rows * (1 if shape == "root" else 1.2)


# Two branches of two tokens that leave the library's lexer in one state: (grammar, text before, a branch that is drafted, the one that is taken).
BRANCHES = [
    ("json:{}", '{"a":["b', ('"]', " "), ('",', " ")),
    ("json:{}", '{"a":["b', ('",', " "), ('"]', " ")),
    ('ebnf:start: "[" item ("," ws item)* "]" ws "x"\nitem: "a"\nws: /\\s+/', "[a", ("]", " "), (",", " ")),
]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("grammar, before, drafted, taken", BRANCHES)
def test_a_branch_that_was_not_taken_leaves_nothing_behind(grammar: str, before: str, drafted: Any, taken: Any, shape: str) -> None:
    """The mask after the branch taken, and that of the next row to use the matcher, are those of a matcher that never saw the other branch."""
    tokenizer = grammars.tokenizer()
    (prefix, *branches) = (tokenizer.encode(text, add_special_tokens=False) for text in (before, *drafted, *taken))
    wrong, right = [token for ids in branches[:2] for token in ids], [token for ids in branches[2:] for token in ids]
    assert len(wrong) == len(right) == 2 and wrong[1] == right[1]

    def alone(text: list[int]) -> set[int]:
        matcher = rules_of(grammar, tokenizer).matcher()
        assert matcher.try_consume_tokens(text) == len(text)
        return ids_in(np.frombuffer(matcher.compute_bitmask(), np.int32), len(tokenizer)) - set(grammars.EOS)

    def seen(request: Request) -> set[int]:
        assert masks.follow(request) is None
        return ids_in(masks.decode_masks([request], 1, None)[0], len(tokenizer)) - set(grammars.EOS)

    masks = masks_of(grammar, 1, 5, tokenizer)
    for last in (right, wrong):  # the second row's matcher is a copy of what the first leaves
        request = Request(Prompt(0, 0, [1]), SamplingParams(), output_ids=list(prefix), stop_ids=grammars.EOS)
        assert seen(request) == alone(prefix)
        draft = draft_of([wrong], None) if shape == "chain" else draft_of([[*wrong, *right]], [[0, 1, 0, 3]])
        masks.decode_masks([request], 3 if shape == "chain" else 5, packed(draft))
        request.output_ids += last
        assert seen(request) == alone(prefix + last)
        masks.release(request)
    assert alone(prefix + right) != alone(prefix + wrong)


def test_masks_hold_what_continues_a_word_of_the_language_and_the_end_where_one_is_whole() -> None:
    language = {
        "abc",
        "ac",
        "dda",
        *("a" + x for x in map(str, [1, 2, 11, 12, 21, 22, *(int(f"{i}{j}{k}") for i in (1, 2) for j in (1, 2) for k in (1, 2))])),
    }
    grammar = "regex:(ab?c|a[12]{1,3}|d{2}a)"
    masks = masks_of(grammar, 1, 1)
    places, texts = [[]], set()
    while places:
        output = places.pop()
        text = "".join(TOKENS[token] for token in output)
        request = request_of(output)
        assert masks.follow(request) is None
        allowed = ids_in(masks.decode_masks([request], 1, None)[0])
        assert (END in allowed) == (text in language)
        for token in allowed - {END}:
            assert any(word.startswith(text + TOKENS[token]) for word in language)
            places.append([*output, token])
        texts.add(text)
        masks.release(request)
    assert language <= texts, "every word can be written"


# -- where nothing can follow -----------------------------------------------------------------------------------------------------------------


def test_a_draft_into_a_dead_end_spoils_neither_its_row_nor_the_others() -> None:
    """No token has a y or a z: after ``a1`` nothing can follow, which the library treats as an error for good. The row is not there yet."""
    grammar = "regex:(abc|a1[yz])2?"
    a, b, one = (TOKENS.index(token) for token in ("a", "b", "1"))
    for parents in (None, [[0, 1, 1], [0, 1, 1]]):
        masks = masks_of(grammar, 2, 4)
        requests = [request_of([]), request_of([])]
        for _ in range(3):
            tokens = [[a, one, b], [a, b, one]]
            found = masks.decode_masks(requests, 4, packed(draft_of(tokens, parents))).view(2, 4, -1)
            assert [masks.follow(request) for request in requests] == [None, None]
            assert ids_in(found[0, 0]) == ids_in(found[1, 0]) == expected(grammar, [])
            assert ids_in(found[0, 1]) == ids_in(found[1, 1]) == {b, one, TOKENS.index("bc")}
            assert ids_in(found[0, 2]) == {END}, "a dead end ends the row"
            assert ids_in(found[1, 2]) == {TOKENS.index("c")}
            if parents is not None:
                assert ids_in(found[0, 3]) == {TOKENS.index("c")}, "its sibling, visited after it"
        requests[0].output_ids = [a, b]
        assert masks.follow(requests[0]) is None
        assert ids_in(masks.decode_masks(requests[:1], 1, None)[0]) == {TOKENS.index("c")}


def test_a_row_in_a_dead_end_is_told_of_once_it_is_there() -> None:
    masks = masks_of("regex:(abc|a1[yz])2?", 1, 1)
    request = request_of([])
    assert ids_in(masks.decode_masks([request], 1, None)[0]) == expected("regex:(abc|a1[yz])2?", [])
    request.output_ids = [TOKENS.index("a"), TOKENS.index("1")]
    assert masks.follow(request) is None
    assert ids_in(masks.decode_masks([request], 1, None)[0]) == {END}
    request.output_ids.append(END)
    assert masks.follow(request) == (2, f"{KEY} {NOTHING_LEFT}")
    masks.release(request)
    assert masks._free == [], "a matcher in error serves nobody"


def test_an_id_that_no_mask_allows_is_found_out() -> None:
    masks = masks_of("regex:abc", 1, 1)
    for token in (TOKENS.index("d"), len(TOKENS) + 5, -1):
        request = request_of([TOKENS.index("ab"), token])
        wrong = masks.follow(request)
        assert wrong is not None and wrong[0] == 1


# -- other masks ------------------------------------------------------------------------------------------------------------------------------


def test_other_masks_that_leave_nothing_leave_the_end() -> None:
    masks = masks_of("regex:a[12]c", 3, 2)
    a, b, c, one, two = (TOKENS.index(token) for token in ("a", "b", "c", "1", "2"))
    requests = [request_of([a], banned_token_ids=(c,)), request_of([a], allowed_token_ids=(two, b, END)), request_of([a])]
    assert [masks.follow(request) for request in requests] == [None] * 3
    found = masks.decode_masks(requests, 2, packed(draft_of([[one], [one], [one]], None))).view(3, 2, -1)
    assert [ids_in(mask) for mask in found[:, 0]] == [{one, two}, {two}, {one, two}]
    assert ids_in(found[0, 1]) == {END} and ids_in(found[2, 1]) == {c}


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_min_tokens_counts_from_the_node(shape: str) -> None:
    masks = masks_of("regex:1{1,3}", 2, 4)
    one = TOKENS.index("1")
    requests = [request_of([one], min_tokens=3), request_of([one])]
    assert [masks.follow(request) for request in requests] == [None] * 2
    parents = [[0, 1, 0]] * 2 if shape == "tree" else None
    found = masks.decode_masks(requests, 4, packed(draft_of([[one, one, one]] * 2, parents))).view(2, 4, -1)
    assert [ids_in(mask) for mask in found[0, :3]] == [{one}, {one}, {END}]
    assert [ids_in(mask) for mask in found[1, :3]] == [{one, END}, {one, END}, {END}]
    if shape == "tree":
        assert ids_in(found[0, 3]) == {one} and ids_in(found[1, 3]) == {one, END}
    early = [request_of([one, one, one], min_tokens=9)]
    assert masks.follow(early[0]) is None
    assert ids_in(masks.decode_masks(early, 1, None)[0]) == {END}, "a text that cannot go on ends"


# -- tokenizers -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filler", [0, 19, 20, 21, 22, 53])
def test_the_end_token_stands_above_the_vocabulary_at_any_size(filler: int) -> None:
    tokenizer = small(filler)
    rules = rules_of("regex:ab", tokenizer)
    end = rules.vocabulary.end
    assert end >= len(tokenizer) and end % 32 != 31 and rules.vocabulary.words == end // 32 + 1
    masks = GrammarMasks(rules, len(tokenizer), 1, 1, CPU)
    request = request_of([TOKENS.index("ab")])
    assert masks.follow(request) is None
    (mask,) = masks.decode_masks([request], 1, None)
    assert ids_in(mask, 32 * rules.vocabulary.words) == {END}


def test_a_tokenizer_that_does_not_spell_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY} cannot read the tokens of this model's tokenizer as bytes: can't determine decoder type"):
        rules_of("regex:a", tokenizer_of("target"))
    with pytest.raises(ConfigError, match=rf"^{KEY} needs the model's tokenizer, and there is none"):
        rules_of("regex:a", None)
    with pytest.raises(ConfigError, match=rf"^{KEY} needs a tokenizer.json, which this model's object does not have"):
        rules_of("regex:a", object())


def test_a_special_token_that_the_tokenizer_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'the EBNF grammar cannot be used: line 1, column 8: unknown special token: "<\|nope\|>"'):
        rules_of("ebnf:start: <|nope|>", grammars.tokenizer())


def test_the_vocabulary_is_read_once_for_a_tokenizer() -> None:
    first = rules_of("regex:a", small()).vocabulary
    assert rules_of("regex:b", small()).vocabulary is first
    assert library().__name__ == "llguidance"
