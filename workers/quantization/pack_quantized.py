"""compressed-tensors' `pack-quantized`, 4 bits (compressed_tensors/compressors/pack_quantized).

A module holds, with I input and O output features and G groups of inputs: `weight_packed` int32 [O, I / 8] packed along
the inputs, `weight_scale` [O, G], `weight_shape` (O, I); `weight_zero_point` int32 [O / 8, G] packed along the outputs
where the scheme is asymmetric; `weight_g_idx` int32 [I], the group of each input, where actorder is "group". Numbers
and zero points of -8 to 7 are stored plus 8.
"""

from __future__ import annotations

import torch

from configs.quantization import QuantizationSpec
from workers.quantization.gptq import read_group_index
from workers.quantization.slices import Int4Slice, MatrixPart, TensorFiles, group_span, read_nibbles, read_scales

ZERO = 8.0


def is_pack_quantized(files: TensorFiles, module: str) -> bool:
    return files.has(f"{module}.weight_packed")


def read_pack_quantized(files: TensorFiles, spec: QuantizationSpec, part: MatrixPart) -> Int4Slice:
    """ValueError: a tensor of another type or shape than the format has."""
    outputs, inputs = part.shape
    size = spec.group_size or inputs
    num_groups = -(-inputs // size)
    name = part.module
    if tuple(files.read_whole(f"{name}.weight_shape").tolist()) != part.shape:
        raise ValueError(f"{name}.weight_shape is not {list(part.shape)}, which its config.json calls for")
    groups_of = read_group_index(files, f"{name}.weight_g_idx", spec, part, num_groups)
    groups = range(num_groups) if spec.act_order else group_span(part.columns, size)
    values = read_nibbles(files, f"{name}.weight_packed", part.shape, part.rows, part.columns, packed_dim=1)
    scales = read_scales(files, f"{name}.weight_scale", (outputs, num_groups), part.rows, groups)
    zeros = torch.full_like(scales, ZERO)
    if not spec.symmetric:
        zeros = read_nibbles(
            files, f"{name}.weight_zero_point", (outputs, num_groups), part.rows, groups, packed_dim=0
        ).float()
    return Int4Slice(values, scales, zeros, groups_of - groups.start)
