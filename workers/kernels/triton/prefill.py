"""Causal attention of many queries per sequence over the paged cache, in tiles of queries with their heads packed.

Shape letters: T query tokens, S sequences, H query heads, G key heads, D head size, B blocks. FlashAttention-2 (Dao
2023) over a block table. The query heads that share a key head lie side by side in a tile, so that a short chunk
fills it too. Nothing is read back from the device: the grid is an upper bound, and a program finds its sequence by
bisection.
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
from workers.kernels.triton.tuning import Device, next_power_of_2, prefill_tile


@triton.jit
def _find_sequence(cu_seqlens_q, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence that does not begin after `tile`; s begins at tile cu_seqlens_q[s] // BLOCK_Q + s."""
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle
        if begins <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_keys(
    q_MD,
    highest,
    total,
    acc_MD,
    k_cache,
    v_cache,
    table,
    kv_offset,
    position,
    begin,
    end,
    seq_len,
    cache_stride_block,
    cache_stride_token,
    scale_log2,
    soft_cap,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the keys from `begin`, a multiple of BLOCK_N, to `end` in; without MASKED every query sees all of them."""
    dim = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE).to(tl.int64)
            token = page * cache_stride_block + (key % PAGE) * cache_stride_token
        elif MASKED:
            pages = tl.load(table + key // PAGE, mask=key < seq_len, other=0).to(tl.int64)
            token = pages * cache_stride_block + (key % PAGE) * cache_stride_token
        else:
            pages = tl.load(table + key // PAGE).to(tl.int64)
            token = pages * cache_stride_block + (key % PAGE) * cache_stride_token
        at = token[:, None] + kv_offset + dim[None, :]
        if MASKED:
            is_loaded = (key < seq_len)[:, None] & (dim < HEAD_DIM)[None, :]
            k_ND = tl.load(k_cache + at, mask=is_loaded, other=0.0)
            v_ND = tl.load(v_cache + at, mask=is_loaded, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k_ND = tl.load(k_cache + at)
            v_ND = tl.load(v_cache + at)
        else:
            k_ND = tl.load(k_cache + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v_ND = tl.load(v_cache + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        k_ND = k_ND.to(q_MD.dtype)
        v_ND = v_ND.to(q_MD.dtype)
        score = scores_of(q_MD, k_ND, scale_log2, soft_cap, HAS_SOFT_CAP, PRECISION)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        highest, total, acc_MD = take_in(score, v_ND, highest, total, acc_MD, MASKED, PRECISION)
    return highest, total, acc_MD


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "seq_lens"],
)
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    cu_seqlens_q,
    seq_lens,
    out,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see most keys: they go first
    kv_head = tl.program_id(1)
    seq = _find_sequence(cu_seqlens_q, tile, num_seqs, BLOCK_Q)
    first_row = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - first_row
    first_query = (tile - (first_row // BLOCK_Q + seq)) * BLOCK_Q
    if first_query < num_queries:
        seq_len = tl.load(seq_lens + seq)
        row = tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        query = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = (query < num_queries) & (row < BLOCK_Q * GROUP)
        token = (first_row + query).to(tl.int64)
        is_stored = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        q_at = q + (token * q_stride_token + head * q_stride_head)[:, None] + dim[None, :]
        q_MD = tl.load(q_at, mask=is_stored, other=0.0)
        if PRECISION == "ieee":
            q_MD = q_MD.to(tl.float32)
        position = seq_len - num_queries + query
        first_position = seq_len - num_queries + first_query
        last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1

        # Keys below `whole_end` are seen by every query of the tile, those up to `end` by some.
        end = last_position + 1
        whole_end = (first_position + 1) // BLOCK_N * BLOCK_N
        begin = first_position * 0
        whole_begin = begin
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            whole_begin = tl.maximum(last_position - WINDOW + 1, 0)
            whole_begin = (whole_begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            whole_begin = tl.minimum(whole_begin, tl.maximum(whole_end, begin))
            whole_end = tl.maximum(whole_end, whole_begin)

        highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc_MD = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        table = block_tables + seq.to(tl.int64) * table_stride
        kv_offset = kv_head * cache_stride_head
        if WINDOW > 0:
            highest, total, acc_MD = _attend_keys(
                q_MD, highest, total, acc_MD, k_cache, v_cache, table, kv_offset, position, begin, whole_begin, seq_len,
                cache_stride_block, cache_stride_token, scale_log2, soft_cap,
                True, HEAD_DIM, PAGE, WINDOW, HAS_SOFT_CAP, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        # Masked like the others after a window's edge: a query may have seen nothing before its first whole tile.
        highest, total, acc_MD = _attend_keys(
            q_MD, highest, total, acc_MD, k_cache, v_cache, table, kv_offset, position, whole_begin, whole_end, seq_len,
            cache_stride_block, cache_stride_token, scale_log2, soft_cap,
            False, HEAD_DIM, PAGE, WINDOW, HAS_SOFT_CAP, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        highest, total, acc_MD = _attend_keys(
            q_MD, highest, total, acc_MD, k_cache, v_cache, table, kv_offset, position, whole_end, end, seq_len,
            cache_stride_block, cache_stride_token, scale_log2, soft_cap,
            True, HEAD_DIM, PAGE, WINDOW, HAS_SOFT_CAP, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        acc_MD = acc_MD * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        out_at = out + (token * NUM_HEADS * HEAD_DIM + head * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(out_at, acc_MD, mask=is_stored)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    out: Tensor,
    params: AttentionParams,
    *,
    device: Device,
) -> None:
    """The prefill rows of q [T, H, D] over the caches [B, block size, G, D] into those of out [T, H, D]."""
    num_tokens, num_seqs = meta.num_prefill_tokens, meta.num_prefill_seqs
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    assert out.is_contiguous() and q.stride(2) == 1 and k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    tile = prefill_tile(
        device.capability,
        packed_rows=meta.max_seqlen_q * group,
        head_dim=head_dim,
        item_bytes=q.element_size(),
        is_converted=k_cache.dtype != q.dtype,
    )
    rows = max(tile.rows, next_power_of_2(group))
    num_tiles = num_tokens // (rows // group) + num_seqs
    prefill_kernel[(num_tiles, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        meta.block_tables,
        meta.cu_seqlens_q,
        meta.seq_lens,
        out,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        meta.block_tables.stride(0),
        *score_factors(params),
        params.v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1],
        WINDOW=params.window or 0,
        HAS_SOFT_CAP=params.soft_cap is not None,
        BLOCK_M=rows,
        BLOCK_N=tile.keys,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
