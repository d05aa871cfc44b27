"""Root mean square norm, alone or after adding to the residual stream: one pass over the row. T rows of N numbers."""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.triton.tuning import next_power_of_2


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With ADDS, the residual row becomes itself plus x, rounded to its type, and that is normed."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_real = at < SIZE
    value = tl.load(x + row * x_stride + at, mask=is_real, other=0.0).to(tl.float32)
    if ADDS:
        place = residual + row * residual_stride + at
        value += tl.load(place, mask=is_real, other=0.0).to(tl.float32)
        tl.store(place, value, mask=is_real)
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    gain = tl.load(weight + at, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, value * scale * gain, mask=is_real)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] -> normed x, contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out, eps)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, N] += x [T, N] in place; returns the normed sum."""
    assert x.dim() == residual.dim() == 2 and residual.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    num_rows, size = x.shape
    if not num_rows or not size:
        return
    assert x.stride(1) == 1 and weight.is_contiguous()
    block = next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        SIZE=size,
        ADDS=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
