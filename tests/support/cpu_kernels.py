"""The kernels of the CPU library called one at a time on tensors, as the step calls them."""

from __future__ import annotations

import functools
from ctypes import byref

import torch
from torch import Tensor

from workers.attention.base import AttentionMetadata
from workers.kernels.cpu.build import KernelsUnavailable, find_compiler, supported_variants
from workers.kernels.cpu.library import (
    CAttentionCall,
    CpuKernels,
    PackedMatrix,
    Pool,
    Then,
    describe_cache,
    load_kernels,
)


def variants_here() -> list[str]:
    """Every instruction set that this machine can run; none where nothing can compile it."""
    try:
        find_compiler()
    except KernelsUnavailable:
        return []
    return [variant.name for variant in supported_variants()]


loaded = functools.cache(load_kernels)


def linear(
    kernels: CpuKernels, pool: Pool, matrix: PackedMatrix, x: Tensor, num_columns: int, then: Then, cap: float = 0.0
) -> Tensor:
    out = torch.full((len(x), num_columns), 1.0 if then is Then.ADD else torch.nan)
    kernels.linear(pool.handle, matrix.handle, x.data_ptr(), len(x), int(then), cap, out.data_ptr())
    return out


def rms_norm(kernels: CpuKernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.full_like(x, torch.nan)
    kernels.rms_norm(x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, out.data_ptr())
    return out


def store_kv(
    kernels: CpuKernels, pool: Pool, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    cache = describe_cache(k_cache, v_cache)
    kernels.store_kv(
        pool.handle, byref(cache), slots.data_ptr(), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0),
        num_tokens, num_kv_heads, head_dim,
    )  # fmt: skip


def attend(
    kernels: CpuKernels,
    pool: Pool,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    coarse: bool = False,
) -> Tensor:
    out = torch.full_like(q, torch.nan)
    call = CAttentionCall(
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        first_queries=meta.cu_seqlens_q.data_ptr(),
        seq_lens=meta.seq_lens.data_ptr(),
        block_tables=meta.block_tables.data_ptr(),
        block_table_stride=meta.block_tables.stride(0),
        num_seqs=meta.num_seqs,
        cache=describe_cache(k_cache, v_cache),
        q=q.data_ptr(),
        q_stride=q.stride(0),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        scale=scale,
        soft_cap=soft_cap or 0.0,
        coarse=coarse,
    )
    kernels.attend(pool.handle, byref(call), window or 0)
    return out


def read_back(kernels: CpuKernels, matrix: PackedMatrix, num_rows: int, num_columns: int) -> Tensor:
    out = torch.full((num_rows, num_columns), torch.nan)
    for row in range(num_rows):
        kernels.matrix_row(matrix.handle, row, out[row].data_ptr())
    return out
