"""The scales of a KV cache in fp8 that a checkpoint brings: two numbers per layer, under one of several names.

compressed-tensors writes them beside a layer's projections (`self_attn.k_scale`), older files of its kind and AutoFP8
within these (`self_attn.k_proj.output_scale`, `self_attn.k_proj.k_scale`) or one for both (`self_attn.kv_scale`). What
a cache holds is a key divided by its scale. A layer without any has scales of 1.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from torch import nn

from workers.layers.attention import Attention
from workers.quantization.slices import TensorFiles

log = logging.getLogger(__name__)

K_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
V_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")


def load_kv_scales(model: nn.Module, files: TensorFiles) -> None:
    """Give every layer of `model` its own. ValueError: one that is no single positive number."""
    num_layers = num_scaled = 0
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            parent = name.rpartition(".")[0]
            k_scale, v_scale = _read(files, parent, K_NAMES), _read(files, parent, V_NAMES)
            module.params = replace(module.params, k_scale=k_scale or 1.0, v_scale=v_scale or 1.0)
            num_layers += 1
            num_scaled += k_scale is not None and v_scale is not None
    log.info("KV cache: fp8, with the checkpoint's scales in %d of %d layers", num_scaled, num_layers)


def _read(files: TensorFiles, parent: str, names: tuple[str, ...]) -> float | None:
    name = next((full for last in names if files.has(full := f"{parent}.{last}")), None)
    if name is None:
        return None
    values = files.read_whole(name)
    if values.numel() != 1:
        raise ValueError(
            f"{name} has shape {list(values.shape)}; a KV cache in fp8 is served with one scale per layer: "
            "leave cache.dtype out"
        )
    scale = float(values.float().item())
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name} is {scale}, which is no scale; leave cache.dtype out, or fetch the model again")
    return scale
