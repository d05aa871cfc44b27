"""Drawing tokens: the twin of `workers.sampler`'s temperature, top-k, top-p, min-p and Gumbel draw, in one launch.

One program per row, so a row's token does not depend on the batch. Thresholds are found without sorting: the smallest
kept logit is the smallest number for which few enough tokens (or little enough weight) lie strictly above it, and
floating-point numbers of one sign are ordered like their bits, so eight passes over a row fix 4 bits each. The
generator is Philox 4x32-10 on the same counters and key as `workers.rng`.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GUMBEL_BLOCK = 256
"""Tokens of one block of the two-stage draw; `workers.sampler.BLOCK`."""
TILE = 4096


@triton.jit
def _philox_word(seed, position, index):
    """Word `index` % 4 of block `index` // 4 of the stream of (seed, position); uint32."""
    word = index % 4
    c0 = (index // 4).to(tl.uint32)
    zero = c0 & 0
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        low = c0.to(tl.uint64) * 0xD2511F53
        high = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (high >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = high.to(tl.uint32)
        c2 = (low >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = low.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@triton.jit
def _gumbel(seed, position, index):
    """Standard Gumbel noise, float64."""
    uniform = (_philox_word(seed, position, index).to(tl.float64) + 0.5) / 4294967296.0
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scaled(logits, at, vocab_size, highest, temperature):
    """Log weights, 0 for the likeliest token; padding is minus infinity."""
    value = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
    return (value - highest) / temperature


@triton.jit
def _distance(log_weight):
    """Bits of -log_weight, which is 0 or more: larger for unlikelier tokens; int64."""
    return tl.abs(log_weight).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _farthest_kept(
    logits,
    vocab_size,
    highest,
    temperature,
    within,
    limit,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest distance d such that the tokens nearer than d number, or weigh, less than `limit`.

    Tokens farther than `within` do not count. Each pass compares the row with 16 candidates for the next 4 bits.
    """
    found = tl.zeros((), dtype=tl.int64)
    step = tl.arange(0, 16)
    for digit in range(8):
        shift = 28 - 4 * digit
        pivots = found + (step.to(tl.int64) << shift)
        mass = tl.zeros((16,), dtype=tl.float64)
        for start in range(0, vocab_size, TILE):
            at = start + tl.arange(0, TILE)
            log_weight = _scaled(logits, at, vocab_size, highest, temperature)
            distance = _distance(log_weight)
            counts = (distance <= within) & (at < vocab_size)
            share = tl.where(counts, tl.exp(log_weight) if BY_WEIGHT else 1.0, 0.0)
            nearer = distance[None, :] < pivots[:, None]
            mass += tl.sum(tl.where(nearer, share[None, :], 0.0), 1).to(tl.float64)
        # Pivot 0 has nothing nearer than the lower digits already allow, so at least one pivot passes.
        passes = mass < limit
        best = tl.max(tl.where(passes, step, 0), 0)
        found += best.to(tl.int64) << shift
    return found


@triton.jit(do_not_specialize=["has_rows", "has_top", "has_min_p"], do_not_specialize_on_alignment=["rows", "tokens"])
def draw_kernel(
    logits,
    rows,
    temperatures,
    seeds,
    positions,
    top_k,
    top_p,
    min_p,
    tokens,
    row_stride,
    vocab_size,
    has_rows,
    has_top,
    has_min_p,
    TILE: tl.constexpr,
    GUMBEL_BLOCK: tl.constexpr,
):
    """tokens[rows] become the draws from those rows of logits.

    One kernel whatever is asked for: a variant for each would be compiled when the first request asks for it.
    """
    index = tl.program_id(0).to(tl.int64)
    row = index
    if has_rows:
        row = tl.load(rows + index)
    logits += row * row_stride
    temperature = tl.maximum(tl.load(temperatures + index), 1e-6)
    seed = tl.load(seeds + index)
    position = tl.load(positions + index)

    best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(logits + at, mask=at < vocab_size, other=float("-inf")))
    highest = tl.max(best, 0)

    kept = tl.full((), 0x7F800000, dtype=tl.int64)  # the distance of a token that cannot come
    if has_top:
        k = tl.load(top_k + index)
        p = tl.load(top_p + index).to(tl.float64)
        if (k > 0) & (k < vocab_size):
            kept = tl.minimum(
                kept,
                _farthest_kept(logits, vocab_size, highest, temperature, kept, k.to(tl.float64), False, TILE),
            )
        if p < 1.0:
            total = tl.zeros((), dtype=tl.float64)
            for start in range(0, vocab_size, TILE):
                at = start + tl.arange(0, TILE)
                log_weight = _scaled(logits, at, vocab_size, highest, temperature)
                share = tl.where(_distance(log_weight) <= kept, tl.exp(log_weight), 0.0)
                total += tl.sum(share, 0).to(tl.float64)
            kept = tl.minimum(
                kept, _farthest_kept(logits, vocab_size, highest, temperature, kept, p * total, True, TILE)
            )
    floor = tl.full((), float("-inf"), dtype=tl.float32)
    if has_min_p:
        least = tl.load(min_p + index)
        floor = tl.where(least > 0.0, tl.log(tl.where(least > 0.0, least, 1.0)), float("-inf"))

    BLOCKS: tl.constexpr = TILE // GUMBEL_BLOCK
    block = tl.arange(0, BLOCKS)
    within = tl.arange(0, GUMBEL_BLOCK)
    best_score = tl.full((), float("-inf"), dtype=tl.float64)
    best_block = tl.zeros((), dtype=tl.int32)
    for start in range(0, vocab_size, TILE):
        at = start + block[:, None] * GUMBEL_BLOCK + within[None, :]
        log_weight = _scaled(logits, at, vocab_size, highest, temperature)
        is_kept = (_distance(log_weight) <= kept) & (log_weight >= floor) & (at < vocab_size)
        total = tl.sum(tl.where(is_kept, tl.exp(log_weight), 0.0), 1)
        number = start // GUMBEL_BLOCK + block
        score = tl.log(tl.where(total > 0.0, total, 1.0)).to(tl.float64)
        score += _gumbel(seed, position, GUMBEL_BLOCK + number)
        score = tl.where(total > 0.0, score, float("-inf"))
        here, where = tl.max(score, 0, return_indices=True)
        if here > best_score:
            best_score = here
            best_block = start // GUMBEL_BLOCK + where

    at = best_block * GUMBEL_BLOCK + within
    log_weight = _scaled(logits, at, vocab_size, highest, temperature)
    is_kept = (_distance(log_weight) <= kept) & (log_weight >= floor) & (at < vocab_size)
    score = tl.where(is_kept, log_weight.to(tl.float64) + _gumbel(seed, position, within), float("-inf"))
    tl.store(tokens + row, (best_block * GUMBEL_BLOCK + tl.argmax(score, 0)).to(tl.int64))


def draw_(
    tokens: Tensor,
    logits: Tensor,
    *,
    rows: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    """Draw for `rows` (int64; None: all) of logits [R, vocab], float32, into tokens [R], int64.

    The parameters have an entry per drawn row: temperature, top_p, min_p float32; seeds, positions, top_k int64.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    draw_kernel[(len(seeds),)](
        logits,
        tokens if rows is None else rows,
        temperature,
        seeds,
        positions,
        seeds if top_k is None else top_k,
        temperature if top_p is None else top_p,
        temperature if min_p is None else min_p,
        tokens,
        logits.stride(0),
        logits.shape[1],
        int(rows is not None),
        int(top_k is not None and top_p is not None),
        int(min_p is not None),
        TILE=TILE,
        GUMBEL_BLOCK=GUMBEL_BLOCK,
        num_warps=8,
    )
