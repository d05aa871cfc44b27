"""FP8 weights: `fp8` (AutoFP8, Qwen3-FP8, DeepSeek) and compressed-tensors' `float-quantized`.

A module holds `weight`, float8_e4m3fn of the matrix's own shape, and a factor under one of two names:
`weight_scale_inv` in `fp8` checkpoints with blocks (DeepSeek-V3's inference/kernel.py and transformers'
FineGrainedFP8Config; despite the name it multiplies), `weight_scale` in the others (compressed-tensors, AutoFP8). One
factor is for the whole matrix, a column of them for its rows, a grid of them for its blocks, the last ones of which may
be cut off by the matrix's edge. `input_scale` is not needed: activations are scaled by what they hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.quantization import QuantizationSpec
from workers.quantization.slices import (
    Fp8Slice,
    MatrixPart,
    TensorFiles,
    column_groups,
    group_span,
    read_part,
    read_scales,
)

SCALE_NAMES = ("weight_scale_inv", "weight_scale")


def is_fp8(files: TensorFiles, module: str) -> bool:
    return any(files.has(f"{module}.{name}") for name in SCALE_NAMES)


def read_fp8(files: TensorFiles, spec: QuantizationSpec, part: MatrixPart) -> Fp8Slice:
    """ValueError: a tensor of another type or shape than the format has."""
    name = f"{part.module}.weight"
    values = read_part(files, name, part.shape, part.rows, part.columns)
    if values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} has the type {values.dtype}, the format calls for {torch.float8_e4m3fn}")
    scale_name = next(n for s in SCALE_NAMES if files.has(n := f"{part.module}.{s}"))
    if spec.block is None:
        scales = _read_row_scales(files, part, scale_name)
        return Fp8Slice(values, scales, torch.zeros(len(part.columns), dtype=torch.int64))
    first_group = group_span(part.columns, spec.block[1]).start
    scales = _read_block_scales(files, spec.block, part, scale_name)
    return Fp8Slice(values, scales, column_groups(part.columns, spec.block[1], first_group))


def _read_row_scales(files: TensorFiles, part: MatrixPart, name: str) -> Tensor:
    """[R, 1], whether the file holds one factor for all rows or one for each."""
    shape = files.shape(name)
    if shape in ((), (1,), (1, 1)):
        return files.read_whole(name).float().reshape(1, 1).expand(len(part.rows), 1)
    if shape == (part.shape[0],):
        return files.read_whole(name).float()[part.rows.start : part.rows.stop].unsqueeze(1)
    return read_scales(files, name, (part.shape[0], 1), part.rows, range(1))


def _read_block_scales(files: TensorFiles, block: tuple[int, int], part: MatrixPart, name: str) -> Tensor:
    """[R, G]: each row's factors, from the blocks that the part touches."""
    (height, width), (num_rows, num_columns) = block, part.shape
    grid = (-(-num_rows // height), -(-num_columns // width))
    block_rows, block_columns = group_span(part.rows, height), group_span(part.columns, width)
    scales = read_scales(files, name, grid, block_rows, block_columns)
    row_of = torch.arange(part.rows.start, part.rows.stop) // height - block_rows.start
    return scales[row_of]
