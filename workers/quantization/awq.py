"""AWQ, 4 bits, `gemm` layout (AutoAWQ, awq/modules/linear/gemm.py).

A module holds, with I input and O output features and G groups of inputs: `qweight` int32 [I, O / 8] and `qzeros` int32
[G, O / 8], both packed along the outputs in an interleaved order, and `scales` float16 [G, O].
"""

from __future__ import annotations

from functools import partial

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

NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
"""The packer puts columns 0 2 4 6 1 3 5 7 into nibbles 0 to 7."""


def is_awq(files: TensorFiles, module: str) -> bool:
    return files.has(f"{module}.qweight")


def read_awq(files: TensorFiles, spec: QuantizationSpec, part: MatrixPart) -> Int4Slice:
    """ValueError: a tensor of another type or shape than the format has."""
    outputs, inputs = part.shape
    size = spec.group_size or inputs
    groups, num_groups = group_span(part.columns, size), -(-inputs // size)
    name = part.module
    read = partial(read_nibbles, files, packed_dim=1, order=NIBBLE_OF_COLUMN, transposed=True)
    values = read(f"{name}.qweight", (inputs, outputs), part.columns, part.rows)
    zeros = read(f"{name}.qzeros", (num_groups, outputs), groups, part.rows)
    scales = read_scales(files, f"{name}.scales", (num_groups, outputs), groups, part.rows).t().contiguous()
    return Int4Slice(values, scales, zeros.float(), column_groups(part.columns, size, groups.start))
