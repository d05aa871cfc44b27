"""Activations times a weight in fp8 whose scales are per row and group of columns, as in checkpoints with blocks.

Shape letters: T tokens, C columns (input features), R rows (output features), G groups of columns. Activations are
quantised by token and group to what they hold, as DeepSeek-V3's technical report (2024, section 3.3) has it; products
of fp8 numbers are summed within a group by the matrix units, and over groups in float32 with both scales.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.triton.tuning import Device, fp8_product_tile

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SMALLEST_SCALE = 1e-12  # of a group that is all zeros
GROUPS_PER_PROGRAM = 8


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_groups_kernel(
    x,
    values,
    scales,
    num_tokens,
    num_columns,
    x_stride,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """x [T, C] -> values fp8 [T, C], scales float32 [G, T]: one program per token and BLOCK_G groups."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_real = column < num_columns
    x_GC = tl.load(x + token * x_stride + column, mask=is_real, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x_GC), 1) / LARGEST, SMALLEST)
    quantized = tl.clamp(x_GC / scale[:, None], -LARGEST, LARGEST, tl.PropagateNan.ALL)
    tl.store(values + token * num_columns + column, quantized.to(tl.float8e4nv), mask=is_real)
    tl.store(scales + group.to(tl.int64) * num_tokens + token, scale, mask=group * GROUP < num_columns)


@triton.jit(do_not_specialize=["num_tokens"])
def fp8_product_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    num_tokens,
    num_rows,
    num_columns,
    HAS_BIAS: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_M: tl.constexpr,
):
    """x fp8 [T, C], x_scales [G, T], weight fp8 [R, C], weight_scales [G, R] -> out [T, R], BLOCK_M tokens by BLOCK_N.

    Tiles go in bands of TILES_M tiles of tokens: what a band reads of x stays near while the weight passes by once.
    """
    tile = tl.program_id(0)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    per_band = TILES_M * tl.cdiv(num_rows, BLOCK_N)
    first_m = tile // per_band * TILES_M
    height = tl.minimum(num_m - first_m, TILES_M)
    within = tile % per_band
    token = (first_m + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the edges the last token and row are read again, and not stored.
    token_read = tl.minimum(token, num_tokens - 1)
    row_read = tl.minimum(row, num_rows - 1)
    column = tl.arange(0, GROUP)
    x_at = x + token_read.to(tl.int64)[:, None] * num_columns + column[None, :]
    weight_at = weight + row_read.to(tl.int64)[:, None] * num_columns + column[None, :]
    x_scale_at = x_scales + token_read
    weight_scale_at = weight_scales + row_read
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(0, tl.cdiv(num_columns, GROUP)):
        if WHOLE_GROUPS:
            x_MC = tl.load(x_at)
            weight_NC = tl.load(weight_at)
        else:
            is_column = (group * GROUP + column < num_columns)[None, :]
            x_MC = tl.load(x_at, mask=is_column, other=0.0)
            weight_NC = tl.load(weight_at, mask=is_column, other=0.0)
        x_scale = tl.load(x_scale_at)
        weight_scale = tl.load(weight_scale_at)
        acc_MN += tl.dot(x_MC, tl.trans(weight_NC)) * (x_scale[:, None] * weight_scale[None, :])
        x_at += GROUP
        weight_at += GROUP
        x_scale_at += num_tokens
        weight_scale_at += num_rows
    if HAS_BIAS:
        acc_MN += tl.load(bias + row_read)[None, :].to(tl.float32)
    is_real = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * num_rows + row[None, :], acc_MN, mask=is_real)


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [T, C] -> (fp8 [T, C], float32 [G, T]) by groups of `group` neighbours in a row, a power of 2."""
    num_tokens, num_columns = x.shape
    assert x.stride(1) == 1
    num_groups = triton.cdiv(num_columns, group)
    values = torch.empty(num_tokens, num_columns, dtype=FP8, device=x.device)
    scales = torch.empty(num_groups, num_tokens, dtype=torch.float32, device=x.device)
    quantize_groups_kernel[(num_tokens, triton.cdiv(num_groups, GROUPS_PER_PROGRAM))](
        x,
        values,
        scales,
        num_tokens,
        num_columns,
        x.stride(0),
        GROUP=group,
        BLOCK_G=GROUPS_PER_PROGRAM,
        LARGEST=FP8_MAX,
        SMALLEST=SMALLEST_SCALE,
        num_warps=4,
    )
    return values, scales


def fp8_product(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, *, group: int, device: Device
) -> Tensor:
    """x [T, C] times weight [R, C], the g-th `group` columns of whose row r count weight_scales[g, r] times: [T, R]."""
    (num_tokens, num_columns), num_rows = x.shape, weight.shape[0]
    assert weight.is_contiguous() and weight_scales.is_contiguous() and weight_scales.shape[1] == num_rows
    values, scales = quantize_groups(x, group)
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    tile = fp8_product_tile(device.capability, num_tokens=num_tokens)
    fp8_product_kernel[(triton.cdiv(num_tokens, tile.rows) * triton.cdiv(num_rows, tile.keys),)](
        values,
        scales,
        weight,
        weight_scales,
        bias,
        out,
        num_tokens,
        num_rows,
        num_columns,
        HAS_BIAS=bias is not None,
        WHOLE_GROUPS=num_columns % group == 0,
        GROUP=group,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        TILES_M=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
