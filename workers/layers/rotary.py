"""Rotary position embedding: angles once per step, shared by all layers; then one rotation of q and k together.

Frequencies follow RoPE (arXiv 2104.09864) and its scalings: linear, dynamic (NTK-aware), llama3, YaRN
(arXiv 2309.00071). Angles are made in float32 whatever the model's dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from configs.rope_spec import RopeSpec

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [T, 1, head_dim / 2] each."""


class RotaryEmbedding:
    """positions [T] -> the step's rotation. Has no parameters and no limit on the position."""

    def __init__(self, spec: RopeSpec, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._exponents = _exponents(head_dim).to(device)
        self._inverse_frequencies = inverse_frequencies(spec, head_dim).to(device)

    def __call__(self, positions: Tensor, rope_lens: Tensor | None = None) -> Rotation:
        """`rope_lens` [T] matters to dynamic rope alone, whose frequencies follow the length of the sequence.

        Tokens of a prompt are rotated for the whole prompt's length, generated ones for their own position + 1. That
        makes a token's rotation the same however its prompt is cut into chunks. Without `rope_lens` every
        token counts as a generated one, which is the same thing for prompts within the original length.
        """
        frequencies = self._inverse_frequencies
        if self._spec.kind == "dynamic":
            frequencies = self._dynamic_frequencies(positions + 1 if rope_lens is None else rope_lens)
        angles = positions.unsqueeze(-1).to(torch.float32) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._spec.attention_factor != 1.0:
            cos, sin = cos * self._spec.attention_factor, sin * self._spec.attention_factor
        return cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1)

    def _dynamic_frequencies(self, rope_lens: Tensor) -> Tensor:
        """[T] -> [T, head_dim / 2]"""
        spec = self._spec
        stretch = spec.factor * rope_lens.to(torch.float32) / spec.original_max_len - (spec.factor - 1)
        dim = 2 * len(self._exponents)
        theta = spec.theta * stretch.clamp_(min=1.0) ** (dim / (dim - 2))
        return 1.0 / theta.unsqueeze(-1) ** self._exponents


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [T, heads, head_dim] -> the same, each head's halves (a, b) turned to (a cos - b sin, b cos + a sin)."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a)
    out_a.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b)
    out_b.addcmul_(a, sin)
    return out


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] radians per token, on the CPU. For dynamic rope, those within the original length."""
    base = 1.0 / spec.theta ** _exponents(head_dim)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3_frequencies(base, spec)
    if spec.kind == "yarn":
        return _yarn_frequencies(base, spec, head_dim)
    return base


def _exponents(head_dim: int) -> Tensor:
    """[head_dim / 2], on the CPU: so that they have the same bits for every device."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim


def _llama3_frequencies(base: Tensor, spec: RopeSpec) -> Tensor:
    """Short wavelengths are kept, long ones stretched, those between blended by turns within the original length."""
    turns = spec.original_max_len * base / (2 * math.pi)
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * base / spec.factor + blend * base


def _yarn_frequencies(base: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    """A linear ramp over the dimensions, from kept (many turns) to stretched (few)."""

    def dimension_of(num_turns: float) -> float:
        wavelength = spec.original_max_len / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((dimensions - low) / (high - low)).clamp(0, 1)
    return base / spec.factor * ramp + base * (1 - ramp)
