"""Rotary position embedding as a checkpoint's config.json describes it.

Owns the reading of both layouts (`rope_theta` + `rope_scaling`, and `rope_parameters`) and the defaults of each
kind. Knows no tensors: the frequencies are made in `workers.layers.rotary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions turn into angles. Fields after `original_max_len` belong to the kinds named beside them."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int = 0  # tokens the unscaled frequencies were trained for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    attention_factor: float = 1.0  # yarn: cosines and sines are multiplied by it

    @property
    def max_len(self) -> int:
        """Tokens this scaling stretches the model to, 0 where it does not say."""
        return int(self.factor * self.original_max_len) if self.kind in ("linear", "dynamic", "yarn") else 0


def read_rope(config: Mapping[str, Any], *, default_theta: float) -> RopeSpec:
    """The one rope of a model whose layers all share it."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError("rope_parameters per layer type are not supported for this architecture")
    theta = config.get("rope_theta") or default_theta
    return parse_rope({"rope_theta": theta, **parameters}, config)


def read_layered_rope(
    config: Mapping[str, Any], *, default_theta: float, default_local_theta: float
) -> tuple[RopeSpec, RopeSpec]:
    """(global, local): full-attention layers use the first, sliding-window layers the second."""
    parameters = config.get("rope_parameters") or {}
    globally = {"rope_theta": config.get("rope_theta") or default_theta}
    globally |= config.get("rope_scaling") or {}
    globally |= parameters.get("full_attention") or {}
    locally = {"rope_theta": config.get("rope_local_base_freq") or default_local_theta}
    locally |= parameters.get("sliding_attention") or {}
    return parse_rope(globally, config), parse_rope(locally, config)


def parse_rope(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> RopeSpec:
    """`parameters` is one flat rope dictionary; `config` supplies what it leaves out."""
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise ValueError(f"rope type {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {partial} is not supported: the whole head must be rotated")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        return RopeSpec(theta=theta)

    max_position = int(config["max_position_embeddings"])
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        original_max_len = int(original or max_position)
    else:
        original_max_len = max_position
    factor = parameters.get("factor")
    if factor is None and kind != "yarn":
        raise ValueError(f"rope type {kind!r} needs a `factor` in config.json")
    factor = float(factor or max_position / original_max_len)
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=original_max_len,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """The temperature of the YaRN paper (arXiv 2309.00071, eq. 22), or what the checkpoint says instead."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(mscale_all))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
