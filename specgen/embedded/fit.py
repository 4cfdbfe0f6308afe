"""Training loops: batches on the device, one optimiser loop under a time budget, and the loss of every model.

Boundary: corpora as id arrays in, trained modules and loss curves out. Knows nothing of files or of evaluation by acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from specgen.embedded.corpus import PAD
from specgen.embedded.heads import DFlashHead, Eagle3Head, Head
from specgen.embedded.target import target_states


@dataclass
class PackedRows:
    """Documents packed into rows of width T, each seeing itself alone. tokens, document (-1 = padding) and positions, [N, T] int32 on the CPU."""

    tokens: Tensor
    document: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack(rows: list[np.ndarray], width: int, seed: int) -> PackedRows:
    """Pack shuffled documents first-fit over 64 open rows; a document longer than ``width`` is cut into pieces."""
    pieces = [r[i : i + width] for r in rows for i in range(0, len(r), width) if len(r) - i > 1]
    closed: list[list[np.ndarray]] = []
    bins: list[list[np.ndarray]] = []
    used: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(pieces)):
        piece = pieces[index]
        slot = next((i for i, u in enumerate(used) if u + len(piece) <= width), None)
        if slot is None:
            if len(bins) == 64:
                fullest = int(np.argmax(used))
                closed.append(bins.pop(fullest))
                used.pop(fullest)
            bins.append([])
            used.append(0)
            slot = len(bins) - 1
        bins[slot].append(piece)
        used[slot] += len(piece)
    closed += bins
    tokens = np.full((len(closed), width), PAD, np.int32)
    document = np.full((len(closed), width), -1, np.int32)
    positions = np.zeros((len(closed), width), np.int32)
    for i, parts in enumerate(closed):
        at = 0
        for j, part in enumerate(parts):
            tokens[i, at : at + len(part)], document[i, at : at + len(part)] = part, j
            positions[i, at : at + len(part)] = np.arange(len(part))
            at += len(part)
    return PackedRows(torch.from_numpy(tokens), torch.from_numpy(document), torch.from_numpy(positions))


def document_mask(document: Tensor) -> Tensor:
    """[B, T] -> [B, 1, T, T] bool: causal, inside one document; padding sees padding, so that no row is empty."""
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal)[:, None]


def next_token_labels(tokens: Tensor, document: Tensor) -> Tensor:
    """[B, T] int64: the token expected after each position, -100 at the last of a document and in padding."""
    inside = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0)
    return F.pad(torch.where(inside, tokens[:, 1:].long(), -100), (0, 1), value=-100)


def language_loss(model: LlamaForCausalLM, tokens: Tensor, document: Tensor, positions: Tensor) -> Tensor:
    """Mean next-token cross entropy of packed rows."""
    hidden = model.model(
        input_ids=tokens.long(), attention_mask=document_mask(document), position_ids=positions.long(), use_cache=False
    ).last_hidden_state
    labels = next_token_labels(tokens, document)
    return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, rows: PackedRows, batch: int) -> float:
    """Mean next-token cross entropy over all tokens of ``rows``, in evaluation mode."""
    was_training, total, count = model.training, 0.0, 0
    model.eval()
    device = model.device
    for i in range(0, len(rows), batch):
        parts = [x[i : i + batch].to(device) for x in (rows.tokens, rows.document, rows.positions)]
        n = int((next_token_labels(parts[0], parts[1]) >= 0).sum())
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total += float(language_loss(model, *parts)) * n
        count += n
    model.train(was_training)
    return total / count


@contextmanager
def residual_dropout(model: LlamaForCausalLM, p: float) -> Any:
    """Dropout on the embeddings and on what each attention and MLP adds to the residual stream, while the model is in training mode."""

    def drop(module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return F.dropout(out, p, module.training)

    modules: list[nn.Module] = [model.model.embed_tokens]
    for layer in model.model.layers:
        modules += [layer.self_attn.o_proj, layer.mlp]
    handles = [m.register_forward_hook(drop) for m in modules] if p > 0 else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Fit:
    """One optimiser run: at most ``steps`` steps and about ``seconds`` seconds (the schedule is laid once the pace is known)."""

    name: str
    steps: int
    seconds: float
    lr: float
    weight_decay: float = 0.1
    warmup: int = 100
    checks: int = 12


@dataclass
class FitResult:
    """What a run did: ``curve`` holds [step, training loss, held-out loss or None]."""

    steps: int = 0
    seconds: float = 0.0
    ms_per_step: float = 0.0
    curve: list[list[Any]] = field(default_factory=list)
    best: float | None = None
    best_step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For the log."""
        return dict(self.__dict__)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, norms without."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def run_fit(module: nn.Module, loss: Callable[[int], Tensor], fit: Fit, device: torch.device, check: Callable[[], float] | None = None) -> FitResult:
    """Minimise ``loss(step)`` with AdamW, warm-up and cosine decay. With ``check`` (a held-out loss) the module ends with its best weights.

    Raises RuntimeError when the loss stops being finite.
    """
    cuda = device.type == "cuda"
    optimiser = torch.optim.AdamW(parameter_groups(module, fit.weight_decay), lr=fit.lr, betas=(0.9, 0.95), fused=cuda)
    result, total, best = FitResult(), fit.steps, None
    start = time.time()
    paced = start
    module.train()
    step = 0
    while step < total:
        rate = fit.lr * min(1.0, (step + 1) / min(fit.warmup, max(1, total // 5))) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            value = loss(step)
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step in (10, 40):
            if cuda:
                torch.cuda.synchronize()
            now = time.time()
            if step == 40:
                pace = (now - paced) / 30
                total = max(step, min(fit.steps, step + int((fit.seconds - (now - start)) / pace)))
                print(f"[{fit.name}] {1000 * pace:.1f} ms a step: {total} steps", flush=True)
            paced = now
        if step % max(1, total // fit.checks) == 0 or step == total:
            training = float(value.detach())
            if not math.isfinite(training):
                raise RuntimeError(f"{fit.name}: the loss is {training} at step {step}; lower the learning rate")
            held = check() if check is not None else None
            if held is not None and (result.best is None or held < result.best):
                result.best, result.best_step = held, step
                best = {k: v.detach().clone() for k, v in module.state_dict().items()}
            result.curve.append([step, round(training, 4), None if held is None else round(held, 4)])
            print(
                f"[{fit.name}] step {step}/{total} loss {training:.4f}"
                + (f" held-out {held:.4f}" if held is not None else "")
                + f" {time.time() - start:.0f}s",
                flush=True,
            )
    if best is not None:
        module.load_state_dict(best)
    module.eval()
    result.steps, result.seconds = step, round(time.time() - start, 1)
    result.ms_per_step = round(1000 * result.seconds / max(1, step), 2)
    return result


def train_target(model: LlamaForCausalLM, rows: PackedRows, held: PackedRows, batch: int, dropout: float, fit: Fit, seed: int) -> FitResult:
    """Train the target on packed rows, epoch after epoch in a new order; it ends with the weights of the best held-out loss."""
    device = model.device
    tokens, document, positions = (x.to(device) for x in (rows.tokens, rows.document, rows.positions))
    order = step_rows(len(rows), batch, fit.steps, seed).to(device)

    def loss(step: int) -> Tensor:
        chosen = order[step]
        return language_loss(model, tokens[chosen], document[chosen], positions[chosen])

    with residual_dropout(model, dropout):
        return run_fit(model, loss, fit, device, lambda: held_out_loss(model, held, batch))


def step_rows(rows: int, batch: int, steps: int, seed: int) -> Tensor:
    """[steps, batch] int64 row indices: whole shuffled epochs one after another."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / rows)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(epochs)])[: steps * batch].view(steps, batch)


class RowPool:
    """Sequences in buckets of a few widths, on the device. Draws batches of about ``budget`` tokens of one width, widths in proportion to their
    tokens."""

    def __init__(self, rows: list[np.ndarray], widths: tuple[int, ...], budget: int, device: torch.device, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.buckets: list[tuple[Tensor, Tensor]] = []
        self.batches: list[int] = []
        shares = []
        lower = 0
        for width in widths:
            last = width == widths[-1]
            chosen = [r[:width] for r in rows if lower < len(r) and (last or len(r) <= width) and len(r) > 4]
            lower = width
            if not chosen:
                continue
            tokens = np.full((len(chosen), width), PAD, np.int32)
            for i, r in enumerate(chosen):
                tokens[i, : len(r)] = r
            lengths = np.array([len(r) for r in chosen], np.int32)
            self.buckets.append((torch.from_numpy(tokens).to(device), torch.from_numpy(lengths).to(device)))
            self.batches.append(max(1, budget // width))
            shares.append(lengths.sum())
        self.shares = np.array(shares, float) / sum(shares)

    def draw(self) -> tuple[Tensor, Tensor]:
        """tokens [B, W] int64 (right-padded) and lengths [B] int64."""
        i = int(self.rng.choice(len(self.buckets), p=self.shares))
        tokens, lengths = self.buckets[i]
        chosen = torch.randint(tokens.shape[0], (self.batches[i],), device=tokens.device)
        return tokens[chosen].long(), lengths[chosen].long()


class Mixture:
    """Draws from the target's own text with probability ``share``, else from the corpus."""

    def __init__(self, own: RowPool, corpus: RowPool, share: float, seed: int) -> None:
        self.own, self.corpus, self.share, self.rng = own, corpus, share, np.random.default_rng(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """As ``RowPool.draw``."""
        return (self.own if self.rng.random() < self.share else self.corpus).draw()


def soft_cross_entropy(logits: Tensor, probabilities: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of -sum_v p log softmax(logits), over the last dimension in float32; weight has the leading shape."""
    z = logits.float()
    value = z.logsumexp(-1) - (probabilities * z).sum(-1)
    return (value * weight).sum() / weight.sum().clamp(min=1)


def distil_model(drafter: LlamaForCausalLM, target: LlamaForCausalLM, data: Mixture, fit: Fit) -> FitResult:
    """Train a draft model towards the target's distribution at every position."""

    def loss(_step: int) -> Tensor:
        tokens, lengths = data.draw()
        with torch.no_grad():
            probabilities = target(tokens, use_cache=False).logits.float().softmax(-1)
        weight = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None] - 1).float()
        return soft_cross_entropy(drafter(tokens, use_cache=False).logits, probabilities, weight)

    return run_fit(drafter, loss, fit, target.device)


def head_loss(head: Head, target: LlamaForCausalLM, tokens: Tensor, lengths: Tensor, steps: int = 4, decay: float = 0.8) -> Tensor:
    """Soft cross entropy of ``steps`` self-fed steps, step k weighted by decay^k; a pair counts when its own chain and its next token exist."""
    with torch.no_grad():
        states = target_states(target, tokens)
        wanted = states.logits[:, 1:].float()  # pair p predicts what follows x[p + 1]
        if isinstance(head, Eagle3Head):
            mass = wanted.softmax(-1)[..., head.target_ids].sum(-1)
            wanted = wanted[..., head.target_ids]
        else:
            mass = torch.ones_like(wanted[..., 0])
        probabilities = wanted.softmax(-1)
        states.logits, states.pre_norm, states.post_norm, states.aux = (
            x[:, :-1] for x in (states.logits, states.pre_norm, states.post_norm, states.aux)
        )
        embedded = target.model.embed_tokens(tokens[:, 1:])
    pair = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    total = torch.zeros((), device=tokens.device)
    for k, out in enumerate(head.chain(embedded, states, steps)):
        weight = ((pair >= k) & (pair + 2 < lengths[:, None])).float() * mass
        total = total + decay**k * soft_cross_entropy(head.logits(out, target.lm_head.weight), probabilities, weight)
    return total / sum(decay**k for k in range(steps))


def train_head(head: Head, target: LlamaForCausalLM, data: Mixture, fit: Fit) -> FitResult:
    """Train EAGLE, EAGLE-3 or MTP on drawn rows."""
    return run_fit(head, lambda _step: head_loss(head, target, *data.draw()), fit, target.device)


def block_loss(head: DFlashHead, target: LlamaForCausalLM, tokens: Tensor, lengths: Tensor, anchors: int = 24, decay: float = 0.8) -> Tensor:
    """Soft cross entropy of DFlash's slots at random anchors of each row, slot j weighted by decay^(j-1)."""
    with torch.no_grad():
        states = target_states(target, tokens)
        limit = (lengths - 2).clamp(min=2)
        at = 1 + (torch.rand(tokens.shape[0], anchors, device=tokens.device) * (limit[:, None] - 1)).long()
        slots = torch.arange(1, head.block_size, device=tokens.device)
        source = (at[..., None] + slots - 1).clamp(max=tokens.shape[1] - 1)  # the target's distribution for slot j stands at anchor + j - 1
        hidden = states.post_norm.gather(1, source.flatten(1)[..., None].expand(-1, -1, states.post_norm.shape[-1]))
        probabilities = target.lm_head(hidden).float().softmax(-1).unflatten(1, source.shape[1:])
    out = head(states.aux, at, tokens, target.model.embed_tokens.weight)[:, :, 1:]
    weight = (at[..., None] + slots < lengths[:, None, None]).float() * decay ** (slots - 1).float()
    return soft_cross_entropy(F.linear(out, target.lm_head.weight), probabilities, weight)


def train_block(head: DFlashHead, target: LlamaForCausalLM, data: Mixture, fit: Fit) -> FitResult:
    """Train DFlash on drawn rows."""
    return run_fit(head, lambda _step: block_loss(head, target, *data.draw()), fit, target.device)
