"""Offline figures of a trained family: held-out loss, acceptance of every drafter, repetition of the text.

Boundary: whole sequences under a plain forward; no engine and no KV pool. Knows nothing of training. Acceptance is computed for every root
position at once: under teacher forcing a drafter's step k sees the accepted tokens, which is exactly its situation whenever that step can matter.

mean acceptance length = 1 + accepted / steps, the bonus token included, over the rows together; at T > 0 target and drafter share the Gumbel noise of
each position (Daliri, Musco and Suresh 2025), so a draft is accepted when both pick the same token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from specgen.embedded.heads import DFlashHead, Eagle3Head, Head, TargetStates
from specgen.embedded.target import generate_ragged, pick, target_states

STEPS = 4


def repeated_fraction(tokens: list[int], n: int = 4) -> float:
    """Share of the n-grams of ``tokens`` that occurred earlier in it; 0 when there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def head_matches(head: Head, target: LlamaForCausalLM, tokens: Tensor, states: TargetStates, temperature: float, noise: Tensor | None) -> Tensor:
    """[B, L, STEPS] bool: whether step k of the chain rooted at index r proposes the token at r + 1 + k. False where there is no such token."""
    length = tokens.shape[1]
    outs = head.chain(target.model.embed_tokens(tokens[:, 1:]), _but_last(states), STEPS)
    match = torch.zeros(*tokens.shape, STEPS, dtype=torch.bool, device=tokens.device)
    for k, out in enumerate(outs):
        z = head.logits(out, target.lm_head.weight)[:, :-1].float()  # pair p predicts index p + 2
        g = None if noise is None else noise[:, 2:]
        if isinstance(head, Eagle3Head):
            ids = head.target_ids
            guess = ids[pick(z, temperature, None if g is None else g[..., ids])]
        else:
            guess = pick(z, temperature, g)
        same = guess == tokens[:, 2:]  # at pair p = r - 1 + k
        if length > k + 2:
            match[:, 1 : length - 1 - k, k] = same[:, k:]
    return match


def model_matches(drafter: LlamaForCausalLM, tokens: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """As ``head_matches`` for a draft model: its proposal at an index depends on the tokens before it alone."""
    z = drafter(tokens, use_cache=False).logits[:, :-1].float()
    same = pick(z, temperature, None if noise is None else noise[:, 1:]) == tokens[:, 1:]
    return torch.stack([F.pad(same[:, k:], (0, k + 1)) for k in range(STEPS)], -1)


def block_matches(
    head: DFlashHead, target: LlamaForCausalLM, tokens: Tensor, states: TargetStates, temperature: float, noise: Tensor | None
) -> Tensor:
    """As ``head_matches`` for DFlash: every index is an anchor once, a few at a time."""
    rows, length = tokens.shape
    match = torch.zeros(rows, length, STEPS, dtype=torch.bool, device=tokens.device)
    depth = min(STEPS, head.block_size - 1)
    for start in range(1, length, 32):
        anchors = torch.arange(start, min(start + 32, length), device=tokens.device).expand(rows, -1)
        out = head(states.aux, anchors, tokens, target.model.embed_tokens.weight)[:, :, 1 : depth + 1]
        at = anchors[..., None] + torch.arange(1, depth + 1, device=tokens.device)
        inside = at.clamp(max=length - 1)
        flat = inside.flatten(1)
        g = None if noise is None else noise.gather(1, flat[..., None].expand(-1, -1, noise.shape[-1])).view(*at.shape, -1)
        guess = pick(target.lm_head(out).float(), temperature, g)
        match[:, start : start + anchors.shape[1], :depth] = (guess == tokens.gather(1, flat).view(at.shape)) & (at < length)
    return match


def lookup_matches(tokens: Tensor, starts: list[int], ends: list[int]) -> Tensor:
    """As ``head_matches`` for prompt lookup: the continuation of the latest earlier occurrence of the last 3, else 2, else 1 tokens."""
    match = [[[False] * STEPS for _ in range(tokens.shape[1])] for _ in range(tokens.shape[0])]
    for b, row in enumerate(tokens.tolist()):
        latest: dict[tuple[int, ...], int] = {}
        for r in range(ends[b]):
            if r >= starts[b]:  # the root is row[r]; earlier n-grams end before it
                for n in (3, 2, 1):
                    at = latest.get(tuple(row[r - n + 1 : r + 1]))
                    if at is not None:
                        for k in range(min(STEPS, r - at)):
                            match[b][r][k] = r + 1 + k < ends[b] and row[at + 1 + k] == row[r + 1 + k]
                        break
            for n in (1, 2, 3):
                if r + 1 >= n:
                    latest[tuple(row[r - n + 1 : r + 1])] = r
    return torch.tensor(match)


def walk(match: Tensor, starts: list[int], ends: list[int]) -> dict[str, Any]:
    """Decode every row along its matches: root = the first generated token, each step commits the accepted tokens and the bonus one."""
    rows = match.cpu().cumprod(-1).tolist()
    steps, accepted = 0, [0] * STEPS
    for b, row in enumerate(rows):
        root = starts[b]
        while root + STEPS + 1 <= ends[b] - 1:  # the whole window exists, so that the row's end does not count as a rejection
            steps += 1
            hits = sum(row[root])
            for d in range(hits):
                accepted[d] += 1
            root += hits + 1
    total = max(1, steps)
    return {"mean_length": round(1 + sum(accepted) / total, 4), "steps": steps, "rate_per_step": [round(a / total, 4) for a in accepted]}


@torch.no_grad()
def acceptance(
    target: LlamaForCausalLM, drafters: dict[str, nn.Module], prompts: list[list[int]], new_tokens: int, temperature: float, seed: int = 0
) -> dict[str, Any]:
    """Text figures and the acceptance of every drafter and of prompt lookup on ``prompts``, at one temperature, in float32."""
    device = target.device
    noise = None
    if temperature > 0:
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (len(prompts), max(map(len, prompts)) + new_tokens, target.config.vocab_size)
        noise = torch.empty(shape, device=device).exponential_(generator=generator).log_().neg_()
    tokens, end = generate_ragged(target, prompts, new_tokens, temperature, noise)
    starts, ends = [len(p) for p in prompts], end.tolist()
    texts = [row[s:e] for row, s, e in zip(tokens.tolist(), starts, ends, strict=True)]
    result: dict[str, Any] = {
        "rows": len(prompts),
        "mean_new_tokens": round(sum(map(len, texts)) / len(texts), 2),
        "repeated_4grams": round(sum(map(repeated_fraction, texts)) / len(texts), 4),
        "drafters": {"ngram": walk(lookup_matches(tokens, starts, ends), starts, ends)},
    }
    states = target_states(target, tokens)
    for name, drafter in drafters.items():
        if isinstance(drafter, Head):
            match = head_matches(drafter, target, tokens, states, temperature, noise)
        elif isinstance(drafter, DFlashHead):
            match = block_matches(drafter, target, tokens, states, temperature, noise)
        else:
            assert isinstance(drafter, LlamaForCausalLM)
            match = model_matches(drafter, tokens, temperature, noise)
        result["drafters"][name] = walk(match, starts, ends)
    return result


@torch.no_grad()
def samples(target: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]], new_tokens: int) -> list[str]:
    """Decoded greedy continuations, prompt included, for the log's reader."""
    tokens, ends = generate_ragged(target, prompts, new_tokens, 0.0, None)
    return [tokenizer.decode(row[:e], skip_special_tokens=False) for row, e in zip(tokens.tolist(), ends.tolist(), strict=True)]


def load_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of a prompts file (rows with ``prompt``, ``messages`` or ``turns``; of turns the first)."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line) if line.strip() else {}
        if "token_ids" in row:
            rows.append(list(row["token_ids"]))
        elif "prompt" in row:
            rows.append(tokenizer.encode(row["prompt"]).ids)
        elif "messages" in row or "turns" in row:
            messages = row.get("messages") or [{"role": "user", "content": row["turns"][0]}]
            text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
            rows.append(tokenizer.encode(text + "<|assistant|>").ids)
    return rows


def _but_last(states: TargetStates) -> TargetStates:
    return TargetStates(states.logits[:, :-1], states.pre_norm[:, :-1], states.post_norm[:, :-1], states.aux[:, :-1])
