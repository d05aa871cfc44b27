"""Attention of single queries over the paged cache: keys in parallel parts ("splits"), merged by their log-sum-exp.

Shape letters: S sequences, H query heads, G key heads, D head size, B blocks. Flash decoding (Dao et al. 2023) over
the work list of `workers.kernels.triton.splits`. The query heads that share a key head are the rows of one tile: keys
and values are read once for all of them.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.attention.base import AttentionMetadata, AttentionParams
from workers.kernels.triton.scores import score_factors, scores_of, take_in
from workers.kernels.triton.splits import Partials, SplitPlan, first_key, merge_parts, split_length
from workers.kernels.triton.tuning import PROGRAMS_PER_MULTIPROCESSOR, Device, decode_tile, next_power_of_2


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
    v_scale,
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
        first = first_key(seq_len, WINDOW, MIN_SPLIT)
        per_part = split_length(seq_len - first, MAX_SPLITS, MIN_SPLIT)
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
            score = scores_of(q_HD, k_ND, scale_log2, soft_cap, HAS_SOFT_CAP, PRECISION)
            seen = is_key
            if WINDOW > 0:
                seen = is_key & (key >= seq_len - WINDOW)
            score = tl.where(seen[None, :], score, float("-inf"))
            highest, total, acc_HD = take_in(score, v_ND, highest, total, acc_HD, True, PRECISION)

        is_empty = total == 0.0
        result = acc_HD * (v_scale / tl.where(is_empty, 1.0, total))[:, None]
        is_stored = is_row[:, None] & is_dim[None, :]
        at_head = head[:, None] * HEAD_DIM + dim[None, :]
        if seq_len - first <= per_part:
            tl.store(out + seq.to(tl.int64) * NUM_HEADS * HEAD_DIM + at_head, result, mask=is_stored)
        else:
            lse = tl.where(is_empty, float("-inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
            tl.store(partial_out + entry.to(tl.int64) * NUM_HEADS * HEAD_DIM + at_head, result, mask=is_stored)
            tl.store(partial_lse + entry * NUM_HEADS + head, lse, mask=is_row)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    out: Tensor,
    params: AttentionParams,
    *,
    plan: SplitPlan,
    partials: Partials,
    device: Device,
) -> None:
    """The decode rows of q [T, H, D] over the caches [B, block size, G, D] into those of out [T, H, D].

    Reads no place past a sequence's length.
    """
    q, out = q[meta.num_prefill_tokens :], out[meta.num_prefill_tokens :]
    seq_lens, block_tables = meta.seq_lens[meta.num_prefill_seqs :], meta.block_tables[meta.num_prefill_seqs :]
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    assert out.is_contiguous() and q.stride(2) == 1 and k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1 and partials.out.shape[0] >= plan.items.shape[0]
    tile = decode_tile(
        device.capability, group=num_heads // num_kv_heads, head_dim=head_dim, item_bytes=q.element_size()
    )
    assert plan.min_split // 4 % tile.keys == 0, "a tile must not cross from one part or block into another"
    most = num_seqs * plan.max_splits * num_kv_heads
    num_programs = min(most, PROGRAMS_PER_MULTIPROCESSOR * device.num_multiprocessors)
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
        *score_factors(params),
        params.v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1],
        WINDOW=plan.window,
        HAS_SOFT_CAP=params.soft_cap is not None,
        MAX_SPLITS=plan.max_splits,
        MIN_SPLIT=plan.min_split,
        BLOCK_H=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_parts(out, partials, plan, seq_lens)
