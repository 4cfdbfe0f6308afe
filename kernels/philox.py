"""Philox4x32-10 and Gumbel noise as Triton functions, and the kernel that writes noise out. Definition: ``reference_sampling``.

Boundary: counters and keys to noise; knows nothing of logits. The integers equal the reference's bit for bit, g to 1e-5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options, pdl_wait
from .reference_sampling import TARGET

TILE = 1024


@triton.jit
def philox4(c0, c1, stream, k0, k1):
    """The four uint32 words of counters (c0, c1, stream, 0); c0 a block of uint32, c1 and the key uint32 scalars, stream an int."""
    c2 = (c0 * 0 + stream).to(tl.uint32)
    c3 = c0 * 0
    c1 = c0 * 0 + c1
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words_to_gumbel(words):
    """Standard Gumbel noise from uint32 words (``reference_sampling.gumbel_from_words``)."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u + u * u * 0.5 + u * u * u * (1.0 / 3.0)
    plain = -tl.log(1.0 - tl.minimum(u, 1.0 - 5.960464477539063e-08))
    return -tl.log(tl.where(u < 0.015625, series, plain))


@triton.jit
def row_noise(keys, t):
    """The key words and position at two pointers, as uint32 scalars."""
    k0 = tl.load(keys).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    position = tl.load(t).to(tl.uint32, bitcast=True)
    return k0, k1, position


@triton.jit
def words_of_tile(start, k0, k1, position, stream, BLOCK: tl.constexpr):
    """Words of tokens start .. start + BLOCK - 1; start is a multiple of 4, so a counter's four words are used once each."""
    c0 = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = philox4(c0, position, stream, k0, k1)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of_ids(token, k0, k1, position, stream):
    """Words of any tokens (a block of int32)."""
    w0, w1, w2, w3 = philox4((token >> 2).to(tl.uint32), position, stream, k0, k1)
    word = token & 3
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def _noise_kernel(keys, t, ids, out, width, stream, HAS_IDS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    k0, k1, position = row_noise(keys + row * 2, t + row)
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    if HAS_IDS:
        words = words_of_ids(tl.load(ids + column, mask=inside, other=0).to(tl.int32), k0, k1, position, stream)
    else:
        words = words_of_tile(start, k0, k1, position, stream, BLOCK)
    if WORDS:
        tl.store(out + row * width + column, words.to(tl.int64), mask=inside)
    else:
        tl.store(out + row * width + column, words_to_gumbel(words), mask=inside)


def _noise(keys: Tensor, t: Tensor, vocab: int | None, stream: int, ids: Tensor | None, words: bool) -> Tensor:
    assert vocab is not None or ids is not None, "vocab or ids"
    width = ids.shape[0] if ids is not None else int(vocab or 0)
    rows = keys.shape[0]
    out = torch.empty(rows, width, dtype=torch.int64 if words else torch.float32, device=keys.device)
    if rows and width:
        grid = (rows, triton.cdiv(width, TILE))
        flags = {"HAS_IDS": ids is not None, "WORDS": words, "BLOCK": TILE} | pdl_options(keys.device)
        _noise_kernel[grid](keys.contiguous(), t.contiguous(), ids, out, width, stream, **flags)
    return out


def noise_words(keys: Tensor, t: Tensor, vocab: int | None, stream: int = TARGET, ids: Tensor | None = None) -> Tensor:
    """Launcher of ``reference_sampling.noise_words``."""
    return _noise(keys, t, vocab, stream, ids, True)


def gumbel(keys: Tensor, t: Tensor, vocab: int | None, stream: int = TARGET, ids: Tensor | None = None) -> Tensor:
    """Launcher of ``reference_sampling.gumbel``."""
    return _noise(keys, t, vocab, stream, ids, False)
