"""Attention of single queries over the paged cache: keys in parallel parts ("splits"), merged by their log-sum-exp.

Shape letters: S sequences, H query heads, G key heads, D head size, B blocks. Flash decoding (Dao et al. 2023) with
three decisions of our own:

- Work is listed on the device once per step (`plan_splits`): one entry per part that exists. A fixed number of
  programs walks the list, so nothing is launched for parts that do not exist, long and short sequences balance, and a
  captured graph serves every length.
- How a sequence is cut follows from its length alone, so its result does not depend on the batch around it.
- The query heads that share a key head are the rows of one tile: keys and values are read once for all of them.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.triton.tuning import (
    LOG2_E,
    PROGRAMS_PER_MULTIPROCESSOR,
    Device,
    decode_tile,
    max_splits,
    next_power_of_2,
)

MIN_SPLIT = 256
"""Keys in one part at least: below that, merging costs more than it gains. A multiple of every tile's keys."""


@triton.jit
def _split_length(num_keys, MAX_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """Keys per part: a multiple of MIN_SPLIT / 4, so that tiles stay whole."""
    UNIT: tl.constexpr = MIN_SPLIT // 4
    even = (num_keys + MAX_SPLITS - 1) // MAX_SPLITS
    return tl.maximum((even + UNIT - 1) // UNIT * UNIT, MIN_SPLIT)


@triton.jit
def _first_key(seq_len, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """The first key of a sequence's first part: where its window begins, rounded down to whole tiles."""
    if WINDOW == 0:
        first = seq_len * 0
    else:
        UNIT: tl.constexpr = MIN_SPLIT // 4
        first = tl.maximum(seq_len - WINDOW, 0) // UNIT * UNIT
    return first


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["seq_lens"])
def plan_splits_kernel(
    seq_lens,
    first_items,
    items,
    num_seqs,
    WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """first_items [S + 1]: where each sequence's entries begin; items: sequence * MAX_SPLITS + part."""
    seq = tl.program_id(0)
    before = tl.zeros((), dtype=tl.int32)
    own = tl.zeros((), dtype=tl.int32)
    for start in range(0, seq + 1, BLOCK):
        index = start + tl.arange(0, BLOCK)
        length = tl.load(seq_lens + index, mask=index <= seq, other=0)
        num_keys = length - _first_key(length, WINDOW, MIN_SPLIT)
        per_part = _split_length(num_keys, MAX_SPLITS, MIN_SPLIT)
        parts = (num_keys + per_part - 1) // per_part
        before += tl.sum(tl.where(index < seq, parts, 0))
        own += tl.sum(tl.where(index == seq, parts, 0))
    tl.store(first_items + seq, before)
    part = tl.arange(0, BLOCK_SPLITS)
    tl.store(items + before + part, seq * MAX_SPLITS + part, mask=part < own)
    if seq == num_seqs - 1:
        tl.store(first_items + num_seqs, before + own)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "first_items", "items"],
)
def decode_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    first_items,
    items,
    out,
    partial_out,
    partial_lse,
    num_seqs,
    q_stride_token,
    q_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    table_stride,
    scale_log2,
    soft_cap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program takes every n-th (entry, key head) of the work list.

    A sequence of one part is written to `out` [S, H, D] at once; parts of others go to `partial_out` [entries, H, D]
    and `partial_lse` [entries, H] (base 2) for `merge_kernel`.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    num_units = tl.load(first_items + num_seqs) * NUM_KV_HEADS
    row = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_row = row < GROUP
    is_dim = dim < HEAD_DIM
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        entry = unit // NUM_KV_HEADS
        kv_head = unit % NUM_KV_HEADS
        item = tl.load(items + entry)
        seq = item // MAX_SPLITS
        part = item % MAX_SPLITS
        seq_len = tl.load(seq_lens + seq)
        first = _first_key(seq_len, WINDOW, MIN_SPLIT)
        per_part = _split_length(seq_len - first, MAX_SPLITS, MIN_SPLIT)
        begin = first + part * per_part
        end = tl.minimum(begin + per_part, seq_len)

        head = kv_head * GROUP + row
        q_at = q + seq.to(tl.int64) * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
        q_HD = tl.load(q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
        if PRECISION == "ieee":
            q_HD = q_HD.to(tl.float32)

        highest = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_H,), dtype=tl.float32)
        acc_HD = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
        table = block_tables + seq.to(tl.int64) * table_stride
        for start in range(begin, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            is_key = key < end
            if PAGE % BLOCK_N == 0:
                page = tl.load(table + start // PAGE).to(tl.int64)
                token = page * cache_stride_block + (key % PAGE) * cache_stride_token
            else:
                pages = tl.load(table + key // PAGE, mask=is_key, other=0).to(tl.int64)
                token = pages * cache_stride_block + (key % PAGE) * cache_stride_token
            at = token[:, None] + kv_head * cache_stride_head + dim[None, :]
            is_loaded = is_key[:, None] & is_dim[None, :]
            k_ND = tl.load(k_cache + at, mask=is_loaded, other=0.0)
            v_ND = tl.load(v_cache + at, mask=is_loaded, other=0.0)
            k_ND = k_ND.to(q_HD.dtype)
            v_ND = v_ND.to(q_HD.dtype)
            score = tl.dot(q_HD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
            if HAS_SOFT_CAP:  # scale_log2 is then scale / soft_cap, and soft_cap is in base 2
                score = soft_cap * (2.0 * tl.sigmoid(2.0 * score) - 1.0)
            seen = is_key
            if WINDOW > 0:
                seen = is_key & (key >= seq_len - WINDOW)
            score = tl.where(seen[None, :], score, float("-inf"))
            now_highest = tl.maximum(highest, tl.max(score, 1))
            shift = tl.where(now_highest == float("-inf"), 0.0, now_highest)
            weight = tl.exp2(score - shift[:, None])
            fade = tl.exp2(highest - shift)
            total = total * fade + tl.sum(weight, 1)
            acc_HD = acc_HD * fade[:, None]
            acc_HD = tl.dot(weight.to(v_ND.dtype), v_ND, acc_HD, input_precision=PRECISION)
            highest = now_highest

        is_empty = total == 0.0
        result = acc_HD / tl.where(is_empty, 1.0, total)[:, None]
        is_stored = is_row[:, None] & is_dim[None, :]
        at_head = head[:, None] * HEAD_DIM + dim[None, :]
        if seq_len - first <= per_part:
            tl.store(out + seq.to(tl.int64) * NUM_HEADS * HEAD_DIM + at_head, result, mask=is_stored)
        else:
            lse = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
            tl.store(partial_out + entry.to(tl.int64) * NUM_HEADS * HEAD_DIM + at_head, result, mask=is_stored)
            tl.store(partial_lse + entry * NUM_HEADS + head, lse, mask=is_row)


@triton.jit(do_not_specialize_on_alignment=["first_items", "seq_lens"])
def merge_kernel(
    out,
    partial_out,
    partial_lse,
    first_items,
    seq_lens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per sequence and head. A sequence of no part gets zeros, one of a single part is left alone."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_items + seq)
    num_parts = tl.load(first_items + seq + 1) - first
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    if num_parts != 1:
        highest = tl.full((), float("-inf"), dtype=tl.float32)
        total = tl.zeros((), dtype=tl.float32)
        acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for start in range(0, num_parts, CHUNK):
            part = start + tl.arange(0, CHUNK)
            is_part = part < num_parts
            entry = (first + part).to(tl.int64) * NUM_HEADS + head
            lse = tl.load(partial_lse + entry, mask=is_part, other=float("-inf"))
            at = entry[:, None] * HEAD_DIM + dim[None, :]
            values = tl.load(partial_out + at, mask=is_part[:, None] & is_dim[None, :], other=0.0)
            now_highest = tl.maximum(highest, tl.max(lse, 0))
            shift = tl.where(now_highest == float("-inf"), 0.0, now_highest)
            weight = tl.exp2(lse - shift)
            fade = tl.exp2(highest - shift)
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade + tl.sum(values * weight[:, None], 0)
            highest = now_highest
        result = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (seq.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim, result, mask=is_dim)


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """The work list of one step's decode rows under one window, on the device."""

    first_items: Tensor  # [S + 1] int32
    items: Tensor  # [S * max_splits] int32
    max_splits: int
    window: int


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Where parts wait to be merged; one pair serves all layers of a step, which run one after another."""

    out: Tensor  # [entries, H, D] float32
    lse: Tensor  # [entries, H] float32

    @classmethod
    def allocate(cls, num_entries: int, num_heads: int, head_dim: int, device: torch.device) -> Partials:
        shape = (num_entries, num_heads, head_dim)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )


def plan_splits(seq_lens: Tensor, *, num_kv_heads: int, window: int | None, device: Device) -> SplitPlan:
    """How the decode sequences of `seq_lens` [S] are cut; nothing is read back."""
    num_seqs = seq_lens.shape[0]
    splits = max_splits(device.num_multiprocessors, num_kv_heads)
    plan = SplitPlan(
        first_items=torch.empty(num_seqs + 1, dtype=torch.int32, device=seq_lens.device),
        items=torch.empty(num_seqs * splits, dtype=torch.int32, device=seq_lens.device),
        max_splits=splits,
        window=window or 0,
    )
    plan_splits_kernel[(num_seqs,)](
        seq_lens,
        plan.first_items,
        plan.items,
        num_seqs,
        WINDOW=plan.window,
        MAX_SPLITS=splits,
        MIN_SPLIT=MIN_SPLIT,
        BLOCK=min(1024, max(16, next_power_of_2(num_seqs))),
        BLOCK_SPLITS=next_power_of_2(splits),
        num_warps=4,
    )
    return plan


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    *,
    seq_lens: Tensor,
    block_tables: Tensor,
    plan: SplitPlan,
    partials: Partials,
    device: Device,
    scale: float,
    soft_cap: float | None,
) -> None:
    """q [S, H, D] over the caches [B, block size, G, D] into out [S, H, D]. Reads no place past a sequence's length."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    assert out.is_contiguous() and q.stride(2) == 1 and k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1 and partials.out.shape[0] >= plan.items.shape[0]
    tile = decode_tile(
        device.capability, group=num_heads // num_kv_heads, head_dim=head_dim, item_bytes=q.element_size()
    )
    assert MIN_SPLIT // 4 % tile.keys == 0, "a tile must not cross from one part or block into another"
    most = num_seqs * plan.max_splits * num_kv_heads
    num_programs = min(most, PROGRAMS_PER_MULTIPROCESSOR * device.num_multiprocessors)
    block_d = max(16, next_power_of_2(head_dim))
    decode_kernel[(num_programs,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        plan.first_items,
        plan.items,
        out,
        partials.out,
        partials.lse,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        scale / soft_cap if soft_cap else scale * LOG2_E,
        soft_cap * LOG2_E if soft_cap else 0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1],
        WINDOW=plan.window,
        HAS_SOFT_CAP=bool(soft_cap),
        MAX_SPLITS=plan.max_splits,
        MIN_SPLIT=MIN_SPLIT,
        BLOCK_H=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_kernel[(num_seqs, num_heads)](
        out,
        partials.out,
        partials.lse,
        plan.first_items,
        seq_lens,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        CHUNK=16,
        num_warps=4,
    )
