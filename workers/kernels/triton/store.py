"""Writing a step's keys and values to their places in the paged cache, in fp8 if it is kept in that.

Shape letters as in `workers.attention.base`.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.attention.base import AttentionParams
from workers.kernels.triton.tuning import next_power_of_2

FP8 = torch.float8_e4m3fn


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_stride,
    v_stride,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    k_factor,
    v_factor,
    IS_FP8: tl.constexpr,
    LARGEST: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token. A slot below 0 is nobody's: its token is dropped."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        is_real = at < NUM_KV_HEADS * HEAD_DIM
        place = slot // PAGE * cache_stride_block + slot % PAGE * cache_stride_token
        place += at // HEAD_DIM * cache_stride_head + at % HEAD_DIM
        key = tl.load(k + row * k_stride + at, mask=is_real)
        value = tl.load(v + row * v_stride + at, mask=is_real)
        if IS_FP8:  # held to its range: beyond, a conversion may give NaN; a NaN itself stays one, and shows
            key = tl.clamp(key.to(tl.float32) * k_factor, -LARGEST, LARGEST, tl.PropagateNan.ALL).to(tl.float8e4nv)
            value = tl.clamp(value.to(tl.float32) * v_factor, -LARGEST, LARGEST, tl.PropagateNan.ALL).to(tl.float8e4nv)
        tl.store(k_cache + place, key, mask=is_real)
        tl.store(v_cache + place, value, mask=is_real)


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, params: AttentionParams
) -> None:
    """k, v [T, G, D], each token's heads side by side, to slot_mapping [T] of the caches [B, block size, G, D]."""
    num_tokens, num_kv_heads, head_dim = k.shape
    for part in (k, v):
        assert part.stride(2) == 1 and (num_kv_heads == 1 or part.stride(1) == head_dim)
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        1.0 / params.k_scale,
        1.0 / params.v_scale,
        IS_FP8=k_cache.dtype == FP8,
        LARGEST=torch.finfo(FP8).max,
        PAGE=k_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=next_power_of_2(num_kv_heads * head_dim),
        num_warps=4,
    )
