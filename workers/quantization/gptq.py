"""GPTQ, 4 bits (AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; GPTQModel writes the same).

A module holds, with I input and O output features and G groups of inputs: `qweight` int32 [I / 8, O] packed along the
inputs, `qzeros` int32 [G, O / 8] packed along the outputs, `scales` float16 [G, O], `g_idx` int32 [I], the group of
each input. The zero points are stored less one, except in `checkpoint_format` gptq_v2. With desc_act the groups of
neighbours differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.quantization import QuantizationSpec
from workers.quantization.slices import (
    Int4Slice,
    MatrixPart,
    TensorFiles,
    column_groups,
    group_span,
    read_nibbles,
    read_scales,
)

ONE_IN_EVERY_NIBBLE = 0x11111111
"""GPTQModel subtracts it from whole words, a zero point of 0 borrowing from its neighbour; so it is added to them."""


def is_gptq(files: TensorFiles, module: str) -> bool:
    return files.has(f"{module}.qweight")


def read_gptq(files: TensorFiles, spec: QuantizationSpec, part: MatrixPart) -> Int4Slice:
    """ValueError: a tensor of another type or shape than the format has."""
    outputs, inputs = part.shape
    size = spec.group_size or inputs
    num_groups = -(-inputs // size)
    groups_of = read_group_index(files, f"{part.module}.g_idx", spec, part, num_groups)
    # Scattered groups may all be touched by any columns; neighbours touch those of their own span.
    groups = range(num_groups) if spec.act_order else group_span(part.columns, size)
    name = part.module
    values = read_nibbles(
        files, f"{name}.qweight", (inputs, outputs), part.columns, part.rows, packed_dim=0, transposed=True
    )
    zeros = read_nibbles(
        files,
        f"{name}.qzeros",
        (num_groups, outputs),
        groups,
        part.rows,
        packed_dim=1,
        word_offset=spec.zero_offset * ONE_IN_EVERY_NIBBLE,
        transposed=True,
    )
    scales = read_scales(files, f"{name}.scales", (num_groups, outputs), groups, part.rows).t().contiguous()
    return Int4Slice(values, scales, zeros.float(), groups_of - groups.start)


def read_group_index(
    files: TensorFiles, name: str, spec: QuantizationSpec, part: MatrixPart, num_groups: int
) -> Tensor:
    """int64 [C]: the group of each column. Without `act_order` it must be what the group size says."""
    size = spec.group_size or part.shape[1]
    expected = column_groups(part.columns, size, 0)
    if not files.has(name):
        if spec.act_order:
            raise ValueError(f"{name} is missing, though the quantization_config says that groups are scattered")
        return expected
    whole = files.read_whole(name)
    if whole.shape != (part.shape[1],):
        raise ValueError(f"{name} has shape {list(whole.shape)}, its config.json calls for {[part.shape[1]]}")
    index = whole[part.columns.start : part.columns.stop].to(torch.int64)
    if not spec.act_order:
        if not torch.equal(index, expected):
            raise ValueError(f"{name} scatters groups, though the quantization_config says that it does not")
        return expected
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < num_groups:
        raise ValueError(f"{name} names groups outside 0 to {num_groups - 1}")
    return index
