"""Gated activations over fused gate and up projections: [T, 2 N] -> [T, N], each element read once."""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gated_kernel(gate_up, out, gate_up_stride, SIZE: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < SIZE
    gate = tl.load(gate_up + row * gate_up_stride + at, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + SIZE + at, mask=is_real, other=0.0).to(tl.float32)
    if IS_SILU:
        gate = gate * tl.sigmoid(gate)
    else:  # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * SIZE + at, gate * up, mask=is_real)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up. GELU is the tanh approximation."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.dim() == 2 and gate_up.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(size, BLOCK))
        gated_kernel[grid](
            gate_up, out, gate_up.stride(0), SIZE=size, IS_SILU=activation == "silu", BLOCK=BLOCK, num_warps=4
        )
    return out
