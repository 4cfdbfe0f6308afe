"""Oracles: what a run on the toys must give, computed apart from the engine, in plain Python and float64 numpy without any cache.

Boundary: reads the toys' files; never imports specgen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load_file

from tests.toys import EOS, HEAD_DIM, SUCCESSOR, head_table, toy_folder

# -- oracles: table models --------------------------------------------------------------------------------------------------------------------


def plain(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    head: np.ndarray | None = None,
    eos: Sequence[int] = (EOS,),
    min_tokens: int = 0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    max_length: int | None = None,
) -> tuple[list[int], str]:
    """Greedy decoding of a table model, one token at a time in float64: (output ids, finish reason).

    Repetition penalty over prompt and output, frequency and presence over the output alone.
    """
    table = (head_table(SUCCESSOR) if head is None else head).astype(np.float64)
    ids, output = list(prompt), []
    while len(output) < max_tokens:
        if max_length is not None and len(ids) >= max_length:
            return output, "context"
        z = table[:, ids[-1]].copy()
        for token in set(ids):
            z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
        for token in set(output):
            z[token] -= presence + frequency * output.count(token)
        if len(output) < min_tokens:
            z[list(eos)] = -np.inf
        output.append(int(z.argmax()))
        ids.append(output[-1])
        if output[-1] in eos:
            return output, "stop"
    return output, "length"


@dataclass
class Tally:
    """What ``specgen.types.Counts`` must hold, computed apart from the engine, and the accepted drafts of each step."""

    prefill_sampled: int = 1
    verify_steps: int = 0
    steps_without_draft: int = 0
    proposed: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    committed: int = 0
    trimmed: int = 0
    per_step: list[int] = field(default_factory=list)

    def counts(self) -> dict[str, Any]:
        """The fields of ``Counts``."""
        return {name: value for name, value in vars(self).items() if name != "per_step"}


def tally_chain(
    prompt: Sequence[int],
    output: Sequence[int],
    draft: Callable[[list[int]], int] | None,
    num_steps: int,
    endless: Sequence[int],
    max_length: int = 256,
) -> Tally:
    """Speculate by hand along a known text: chains of ``num_steps`` drafts, until ``output`` is complete.

    ``endless``: the text the target would write without any stop, which drafts past the end are judged by (it starts with ``output``).
    ``draft``: context -> next draft token; None for no drafts.
    """
    tally, done = Tally(), 1
    if len(output) == 1:
        return tally
    while done < len(output):
        context = [*prompt, *endless[:done]]
        room = max_length - len(context)
        depth = min(num_steps, room) if draft is not None else 0
        hits = 0
        while draft is not None and hits < depth and draft([*context, *endless[done : done + hits]]) == endless[done + hits]:
            hits += 1
        tally.per_step.append(hits)
        if depth:
            tally.verify_steps += 1
            for column in (tally.proposed, tally.reached, tally.accepted):
                column.extend([0] * (depth - len(column)))
            for d in range(depth):
                tally.proposed[d] += 1
                tally.reached[d] += d <= hits
                tally.accepted[d] += d < hits
        else:
            tally.steps_without_draft += 1
        tally.committed += hits + 1
        done += hits + 1
    tally.trimmed = done - len(output)
    return tally


def follow(successor: Sequence[int]) -> Callable[[list[int]], int]:
    """The draft function of a table model."""
    return lambda context: successor[context[-1]]


def endless_text(prompt: Sequence[int], tokens: int) -> list[int]:
    """What the table target writes when nothing stops it."""
    return plain(prompt, tokens, eos=())[0]


# -- oracles: full recomputation --------------------------------------------------------------------------------------------------------------


class Drafts(Protocol):
    """Anything that gives a drafter's logits after a committed context and a drafted path."""

    ids: np.ndarray | None  # target id of each draft id, or None

    def logits(self, context: Sequence[int], path: Sequence[int] = ()) -> np.ndarray: ...


class Recompute:
    """A Llama of the toys' shape in float64 numpy: the whole prefix is computed anew for every token, so no cache can be wrong."""

    ids = None

    def __init__(self, name: str) -> None:
        self.w = _weights(name)
        self.layers = sum(key.startswith("model.layers.") and key.endswith("q_proj.weight") for key in self.w)

    def states(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """The residual stream [n, HIDDEN] before each layer and after the last."""
        found = [self.w["model.embed_tokens.weight"][list(tokens)]]
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            found.append(_run_layer(self.w, p, found[-1], _rms(found[-1], self.w[p + "input_layernorm.weight"])))
        return found

    def final(self, tokens: Sequence[int]) -> np.ndarray:
        """States after the final norm [n, HIDDEN]."""
        return _rms(self.states(tokens)[-1], self.w["model.norm.weight"])

    def logits(self, context: Sequence[int], path: Sequence[int] = ()) -> np.ndarray:
        """Logits [VOCAB] after the tokens."""
        return self.w["lm_head.weight"] @ self.final([*context, *path])[-1]


class RecomputeHead:
    """A head over a ``Recompute`` target, its pairs computed anew for every draft: ``eagle``, ``eagle3`` or ``mtp`` (MiMo's).

    Pair p joins token p + 1 with the target's state at p; the pair of a drafted token takes the head's own output before it.
    """

    def __init__(self, kind: str, target: str, head: str) -> None:
        self.kind, self.target, self.w = kind, Recompute(target), _weights(head)
        self.ids = np.arange(len(self.w["d2t"])) + self.w["d2t"].astype(int) if "d2t" in self.w else None

    def logits(self, context: Sequence[int], path: Sequence[int] = ()) -> np.ndarray:
        """Logits over the draft's own vocabulary for the token after ``path``."""
        features = self._features(context[:-1])
        for drafted in range(len(path) + 1):
            tokens = [*context[1:], *path[:drafted]]
            states, feed = self._forward(self.target.w["model.embed_tokens.weight"][tokens], features)
            features = np.concatenate([features, feed[-1:]])
        head = self.w["lm_head.weight"] if self.kind == "eagle3" else self.target.w["lm_head.weight"]
        return head @ states[-1]

    def _features(self, tokens: Sequence[int]) -> np.ndarray:
        if self.kind != "eagle3":
            return self.target.final(tokens)
        states, layers = self.target.states(tokens), self.target.layers
        return np.concatenate([states[2], states[layers // 2], states[layers - 3]], 1) @ self.w["fc.weight"].T

    def _forward(self, emb: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(states for the head, states to feed back), one row a pair."""
        w = self.w
        if self.kind == "eagle":
            x = np.concatenate([emb, features], 1) @ w["fc.weight"].T
            out = _run_layer(w, "layers.0.", x, x)
            return out, out
        if self.kind == "eagle3":
            x = np.concatenate([_rms(emb, w["midlayer.input_layernorm.weight"]), _rms(features, w["midlayer.hidden_norm.weight"])], 1)
            out = _run_layer(w, "midlayer.", features, x)
            return _rms(out, w["norm.weight"]), out
        p = "model.mtp_layers.0."
        x = (
            np.concatenate([_rms(features, w[p + "hidden_layernorm.weight"]), _rms(emb, w[p + "token_layernorm.weight"])], 1)
            @ w[p + "input_proj.weight"].T
        )
        out = _rms(_run_layer(w, p, x, _rms(x, w[p + "input_layernorm.weight"])), w[p + "final_layernorm.weight"])
        return out, out


class RecomputeModules:
    """MTP modules over a ``Recompute`` target, every state of every module computed anew for every draft.

    Module k at p joins token p + k + 1 with the state of module k - 1 at p (k = 0: the target's) and gives token p + k + 2. Drafts beyond the modules
    go on along the last one, which takes its own state one position before.
    """

    ids = None

    def __init__(self, target: str) -> None:
        self.target, self.w = Recompute(target), _weights(target)
        self.layers = sum(f"model.layers.{i}.self_attn.q_proj.weight" in self.w for i in range(32))
        self.kind = "mimo" if "model.mtp_layers.0.input_proj.weight" in self.w else "qwen" if "mtp.fc.weight" in self.w else "deepseek"
        if self.kind == "deepseek":  # the modules stand behind the model's own layers
            self.layers -= sum(f"model.layers.{i}.eh_proj.weight" in self.w for i in range(32))
        self.target.layers = self.layers
        prefixes = {"mimo": "model.mtp_layers.{}.", "qwen": "mtp.layers.{}.", "deepseek": "model.layers.{}."}[self.kind]
        first = self.layers if self.kind == "deepseek" else 0
        every = [prefixes.format(first + i) for i in range(8)]
        self.prefixes = [p for p in every if f"{p}self_attn.q_proj.weight" in self.w]

    def logits(self, context: Sequence[int], path: Sequence[int] = ()) -> np.ndarray:
        """Logits [VOCAB] for the token after ``path``."""
        tokens, count, last = [*context, *path], len(context) - 1, len(self.prefixes) - 1
        deepest = min(len(path), last)
        feed = self.target.states(context[:-1])[-1] if self.kind == "deepseek" else self.target.final(context[:-1])
        for k in range(deepest + 1):
            before = feed
            states, feed = self._forward(k, tokens[k + 1 : k + 1 + count], before)
        for beyond in range(len(path) - deepest):
            before = np.concatenate([before, feed[-1:]])
            states, feed = self._forward(last, tokens[last + 1 : last + 2 + count + beyond], before)
        own = f"{self.prefixes[deepest]}shared_head.head.weight"
        return self.w.get(own, self.w["lm_head.weight"]) @ states[-1]

    def _forward(self, k: int, tokens: Sequence[int], feed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(states for the head, states to pass on) of module k, one row a position."""
        w, p = self.w, self.prefixes[k]
        names = {
            "deepseek": (f"{p}enorm", f"{p}hnorm", f"{p}eh_proj", f"{p}shared_head.norm"),
            "mimo": (f"{p}token_layernorm", f"{p}hidden_layernorm", f"{p}input_proj", f"{p}final_layernorm"),
            "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        }[self.kind]
        token_norm, state_norm, proj, norm = (w[f"{name}.weight"] for name in names)
        table = w.get(f"{p}embed_tokens.weight", w["model.embed_tokens.weight"])
        halves = [_rms(table[list(tokens)], token_norm), _rms(feed, state_norm)]
        x = np.concatenate(halves[::-1] if self.kind == "mimo" else halves, 1) @ proj.T
        out = _run_layer(w, p, x, _rms(x, w[f"{p}input_layernorm.weight"]))
        normed = _rms(out, norm)
        return normed, out if self.kind == "deepseek" else normed


@cache
def _weights(name: str) -> dict[str, np.ndarray]:
    return {key: value.astype(np.float64) for key, value in load_file(toy_folder() / name / "model.safetensors").items()}


def _run_layer(w: dict[str, np.ndarray], p: str, residual: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One decoder layer over a whole sequence: attention reads ``x`` [n, .], the stream is ``residual`` [n, HIDDEN]."""
    n = len(x)
    q = _rotate((x @ w[p + "self_attn.q_proj.weight"].T).reshape(n, -1, HEAD_DIM))
    k = _rotate((x @ w[p + "self_attn.k_proj.weight"].T).reshape(n, 1, HEAD_DIM))[:, 0]
    v = x @ w[p + "self_attn.v_proj.weight"].T
    scores = np.einsum("qhd,kd->hqk", q, k) / HEAD_DIM**0.5 + np.triu(np.full((n, n), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,kd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)
    stream = residual + mixed @ w[p + "self_attn.o_proj.weight"].T
    h = _rms(stream, w[p + "post_attention_layernorm.weight"])
    gate = h @ w[p + "mlp.gate_proj.weight"].T
    return stream + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * weight


def _rotate(x: np.ndarray) -> np.ndarray:
    half = HEAD_DIM // 2
    angle = np.arange(x.shape[0])[:, None, None] * 10000.0 ** -(np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


Noise = Callable[[int], np.ndarray]


def tree_paths(
    draft: Drafts, context: Sequence[int], topk: int, num_steps: int, nodes: int, temperature: float = 0.0, noise: Noise | None = None
) -> set[tuple[int, ...]]:
    """The drafted token paths of one step, by EAGLE-2's rule: expand the ``topk`` best of each depth, then keep the ``nodes`` - 1 best of all.

    ``noise``: the target's Gumbel noise [VOCAB] at each depth (from 0), which drafts add to their own logits / temperature.
    """

    def children(path: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
        z = draft.logits(context, path)
        ids = np.arange(len(z)) if draft.ids is None else draft.ids
        if noise is not None:
            z = z / temperature + noise(len(path))[ids]
        logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
        return [((*path, int(ids[i])), float(logp[i])) for i in np.argsort(-logp, kind="stable")[:topk]]

    grown = children(())
    candidates, frontier = list(grown), grown
    for _ in range(num_steps - 1):
        grown = [(child, score + logp) for path, score in frontier for child, logp in children(path)]
        candidates += grown
        frontier = sorted(grown, key=lambda item: -item[1])[:topk]
    return {path for path, _ in sorted(candidates, key=lambda item: -item[1])[: nodes - 1]}


def tree_accepted(draft: Drafts, prompt: Sequence[int], output: Sequence[int], topk: int, num_steps: int, nodes: int) -> list[int]:
    """Accepted drafts of each step but the last, along the known greedy text."""
    steps, done = [], 1
    while done < len(output):
        paths = tree_paths(draft, [*prompt, *output[:done]], topk, num_steps, nodes)
        hits = 0
        while done + hits < len(output) and tuple(output[done : done + hits + 1]) in paths:
            hits += 1
        steps.append(hits)
        done += hits + 1
    return steps[:-1]
