"""Gated activations over the fused gate and up projections: [T, 2 I] -> [T, I]."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class GeluAndMul(nn.Module):
    """The tanh approximation of GELU."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)


GATED_ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": SiluAndMul, "gelu_tanh": GeluAndMul}
