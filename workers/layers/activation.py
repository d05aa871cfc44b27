"""Gated activations over the fused gate and up projections, in PyTorch: [T, 2 I] -> [T, I]."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}
