"""What layers compute besides matrix products and attention: norms, rotation, gated activations.

`LayerOps` is plain PyTorch on any device and defines what is correct; `TritonOps` does each in one pass over memory.
Chosen once, when a model is built. Knows no layers.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.available import triton_unavailable_reason
from workers.layers.activation import GATED_ACTIVATIONS
from workers.layers.rotary import Rotation, rotate

log = logging.getLogger(__name__)


class LayerOps:
    """PyTorch's operations."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., N] -> normed x. A weight of another type than x, float32, is applied in float32."""
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, N] += x [T, N] in place; returns the normed sum."""
        return self.rms_norm(residual.add_(x), weight, eps)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2 N] -> [T, N]: activation(gate) * up."""
        return GATED_ACTIVATIONS[activation](gate_up)

    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        rotation: Rotation,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, H + 2 G, D] -> q, k, v: queries and keys normed, where there are weights [D], and turned.

        May work in place.
        """
        if q_weight is not None and k_weight is not None and num_heads:
            q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            q, k = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)
            return rotate(q, rotation), rotate(k, rotation), v
        qk, v = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        q, k = rotate(qk, rotation).split([num_heads, num_kv_heads], dim=1)
        return q, k, v


class TritonOps(LayerOps):
    """Own kernels: one launch and one pass over memory each, all arithmetic in float32."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from workers.kernels.triton.norm import rms_norm

        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        from workers.kernels.triton.norm import add_rms_norm

        return add_rms_norm(x, residual, weight, eps)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        from workers.kernels.triton.activation import gated

        return gated(gate_up, activation)

    def rotate(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        rotation: Rotation,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from workers.kernels.triton.rotary import rotate_

        rotate_(qkv, num_heads, num_kv_heads, *rotation, q_weight=q_weight, k_weight=k_weight, eps=eps)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return q, k, v


def choose_ops(device: torch.device) -> LayerOps:
    """Own kernels on a GPU, where Triton is installed."""
    if device.type != "cuda":
        return LayerOps()
    reason = triton_unavailable_reason(device)
    if reason is not None:
        log.warning("layers compute with PyTorch's operations, several passes over memory each: triton: %s", reason)
        return LayerOps()
    return TritonOps()
