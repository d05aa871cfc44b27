"""Tiny quantised checkpoints, packed by hand as each format's own packer does it, and the models they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import llama

GROUP = 32
INNER = 96  # three groups: two ranks cut one in the middle
IGNORED = "model.layers.1.mlp.down_proj"
FP8 = torch.float8_e4m3fn

Packed = tuple[dict[str, Tensor], Tensor]
"""A module's tensors by the end of their names, and the weight [O, I] that they stand for."""


@dataclass(frozen=True)
class Scheme:
    config: Mapping[str, Any]
    pack: Callable[[Tensor], Packed]
    ignores: tuple[str, ...] = ("lm_head",)
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """[O, I] numbers 0 to 15; scales (float16) and zero points [O, G]; the group of each column [I]."""

    values: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.values.float() - self.zeros.float()[:, self.groups]) * self.scales.float()[:, self.groups]


def quantize_to_grid(weight: Tensor, *, group: int | None, symmetric: bool, scattered: bool = False) -> Grid:
    """Round to nearest. Where zero points are free, those of the first row are 0, which formats often get wrong."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // (group or inputs)
    if scattered:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    num_groups = int(groups.max()) + 1
    scales = torch.empty(len(weight), num_groups, dtype=torch.float16)
    zeros = torch.full((len(weight), num_groups), 8, dtype=torch.int32)
    for g in range(num_groups):
        part = weight[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = part.abs().amax(1) / 7 if symmetric else (high - low) / 15
        if not symmetric:
            zeros[:, g] = (-low / scales[:, g].float()).round().clamp(0, 15)
    if not symmetric:
        zeros[0] = 0
    values = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15).to(torch.int32)
    return Grid(values, scales, zeros, groups)


def pack_words(values: Tensor, dim: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Eight neighbours along `dim` in one int32: nibble i holds neighbour order[i]. The last word is padded with 0."""
    values = values.movedim(dim, 0)
    words = torch.zeros(-(-len(values) // 8), *values.shape[1:], dtype=torch.int32)
    for word in range(len(words)):
        for nibble, neighbour in enumerate(order):
            if word * 8 + neighbour < len(values):
                words[word] |= values[word * 8 + neighbour].to(torch.int32) << (4 * nibble)
    return words.movedim(0, dim).contiguous()


def pack_awq(weight: Tensor, group: int | None = GROUP) -> Packed:
    """AutoAWQ, awq/modules/linear/gemm.py, `from_linear`: transposed, and its `order_map`."""
    grid, order = quantize_to_grid(weight, group=group, symmetric=False), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": pack_words(grid.values.t(), 1, order),
        "qzeros": pack_words(grid.zeros.t(), 1, order),
        "scales": grid.scales.t().contiguous(),
    }
    return tensors, grid.weight


def pack_gptq(
    weight: Tensor, *, symmetric: bool, group: int | None = GROUP, scattered: bool = False, v2: bool = False
) -> Packed:
    """AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `pack`.

    Zero points are less one, in all nibbles of a word at once (GPTQModel, utils/model.py,
    `convert_gptq_v2_to_v1_format_module`), but as they are in gptq_v2.
    """
    grid = quantize_to_grid(weight, group=group, symmetric=symmetric, scattered=scattered)
    tensors = {
        "qweight": pack_words(grid.values.t(), 0),
        "qzeros": pack_words(grid.zeros.t(), 1) - (0 if v2 else 0x11111111),
        "scales": grid.scales.t().contiguous(),
        "g_idx": grid.groups.to(torch.int32),
    }
    return tensors, grid.weight


def pack_compressed(weight: Tensor, *, symmetric: bool, group: int | None = GROUP, scattered: bool = False) -> Packed:
    """compressed-tensors, compressors/pack_quantized, `compress`: numbers of -8 to 7, stored plus 8."""
    grid = quantize_to_grid(weight, group=group, symmetric=symmetric, scattered=scattered)
    tensors = {
        "weight_packed": pack_words(grid.values, 1),
        "weight_scale": grid.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(grid.zeros, 0)
    if scattered:
        tensors["weight_g_idx"] = grid.groups.to(torch.int32)
    return tensors, grid.weight


def pack_fp8(weight: Tensor, block: tuple[int, int], scale_name: str, shape: tuple[int, ...] | None = None) -> Packed:
    """DeepSeek-V3, inference/kernel.py, `weight_dequant`: a block's float32 factor multiplies its float8 numbers.

    A block as large as the matrix is a factor per tensor, one of a row a factor per channel; `shape` is the factors'.
    """
    height, width = min(block[0], len(weight)), min(block[1], weight.shape[1])
    grid = (-(-len(weight) // height), -(-weight.shape[1] // width))
    scale = torch.empty(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            part = weight[row * height : (row + 1) * height, column * width : (column + 1) * width]
            scale[row, column] = part.abs().max() / 448
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[: len(weight), : weight.shape[1]]
    values = (weight / spread).to(FP8)
    stored = scale if shape is None else scale.reshape(shape)
    return {"weight": values, scale_name: stored.clone()}, values.float() * spread


def compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def int4(**changes: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    return compressed("pack-quantized", scheme | changes)


def float8(strategy: str, **changes: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return compressed("float-quantized", scheme | changes, activations)


WHOLE = (10**6, 10**6)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8_CONFIG | {"weight_block_size": [40, 24]}  # neither divides the matrices

SCHEMES = {
    "fp8-tensor": Scheme(FP8_CONFIG, lambda w: pack_fp8(w, WHOLE, "weight_scale", ())),
    "fp8-static": Scheme(
        FP8_CONFIG | {"activation_scheme": "static"},
        lambda w: pack_fp8(w, WHOLE, "weight_scale", (1,)),
        extra={"model.layers.0.mlp.down_proj.input_scale": torch.tensor(0.5)},
    ),
    "fp8-blocks": Scheme(BLOCKS, lambda w: pack_fp8(w, (40, 24), "weight_scale_inv"), ignores=("lm_head", IGNORED)),
    "awq": Scheme(AWQ | {"modules_to_not_convert": [IGNORED]}, pack_awq, ignores=("lm_head", IGNORED)),
    "awq-one-group": Scheme(AWQ | {"group_size": -1}, lambda w: pack_awq(w, None)),
    "gptq": Scheme(GPTQ, lambda w: pack_gptq(w, symmetric=True)),
    "gptq-zeros-head": Scheme(
        GPTQ | {"sym": False, "lm_head": True}, lambda w: pack_gptq(w, symmetric=False), ignores=()
    ),
    "gptq-v2": Scheme(
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, lambda w: pack_gptq(w, symmetric=False, v2=True)
    ),
    "gptq-scattered": Scheme(
        GPTQ | {"sym": False, "desc_act": True}, lambda w: pack_gptq(w, symmetric=False, scattered=True)
    ),
    "gptq-one-group": Scheme(
        GPTQ | {"group_size": -1},
        lambda w: pack_gptq(w, symmetric=True, group=None),
        extra={"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)},
    ),
    "ct-tensor": Scheme(
        float8("tensor") | {"format": "naive-quantized"}, lambda w: pack_fp8(w, WHOLE, "weight_scale", (1,))
    ),
    "ct-channel": Scheme(float8("channel"), lambda w: pack_fp8(w, (1, 10**6), "weight_scale")),
    "ct-blocks": Scheme(
        float8("block", block_structure=[32, 32]) | {"ignore": ["lm_head", "re:.*layers.1.mlp.down.*"]},
        lambda w: pack_fp8(w, (32, 32), "weight_scale"),
        ignores=("lm_head", IGNORED),
    ),
    "ct-int4": Scheme(int4(), lambda w: pack_compressed(w, symmetric=True)),
    "ct-int4-zeros-head": Scheme(int4(symmetric=False), lambda w: pack_compressed(w, symmetric=False), ignores=()),
    "ct-int4-channel": Scheme(
        int4(strategy="channel", group_size=None), lambda w: pack_compressed(w, symmetric=True, group=None)
    ),
    "ct-int4-scattered": Scheme(
        int4(symmetric=False, actorder="group"), lambda w: pack_compressed(w, symmetric=False, scattered=True)
    ),
}


@torch.no_grad()
def save_tiny_quantized(name: str, directory: Path) -> PreTrainedModel:
    """Write the checkpoint; returns transformers' model in float32 with the dequantised weights."""
    scheme, config = SCHEMES[name], llama(intermediate_size=INNER)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    tensors = dict(scheme.extra)
    quantized = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - set(scheme.ignores)
    for parameter_name, parameter in model.named_parameters():
        module = parameter_name.removesuffix(".weight")
        if module in quantized:
            packed, weight = scheme.pack(parameter)
            parameter.copy_(weight)
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in packed.items()}
        else:
            tensors[parameter_name] = parameter.detach().clone()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    stored = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": dict(scheme.config)}
    (directory / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    return model
