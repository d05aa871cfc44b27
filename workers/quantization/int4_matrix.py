"""4-bit weights times bfloat16 activations through torch's packed product (_weight_int4pack_mm).

The kernel takes a weight as (value - 8) * scale + zero, with scale and zero in bfloat16; a zero point z of the
checkpoint becomes zero = (8 - z) * scale. On CUDA it needs sm_80 or newer. The CPU has the same product under another
name and layout, which serves tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from configs.quantization import QuantizationSpec
from workers.quantization.kept import KeptPlace, QuantizedMatrix
from workers.quantization.slices import Fp8Slice, Int4Slice

MIDDLE = 8.0
CPU_TILES = 1  # the CPU's conversion takes the number of tiles and does not use it


class Int4Matrix(QuantizedMatrix):
    def __init__(self, spec: QuantizationSpec, place: KeptPlace) -> None:
        super().__init__(spec, place)
        group = spec.kernel_group(place.num_columns)
        assert group is not None, "a matrix that no kernel takes is not kept"
        self.group = group
        num_groups = place.num_columns // group
        shape = (num_groups, place.num_rows, 2)
        self.scales_and_zeros = torch.empty(shape, dtype=torch.bfloat16, device=place.device)
        self.values: Tensor | None = None  # in the kernel's layout

    def load(self, parts: Sequence[Fp8Slice | Int4Slice]) -> None:
        start, values = 0, []
        for part in parts:
            assert isinstance(part, Int4Slice)
            stop = start + len(part.values)
            repeats = self.scales_and_zeros.shape[0] // part.scales.shape[1]
            zeros = (MIDDLE - part.zeros) * part.scales
            both = torch.stack([part.scales, zeros], dim=-1).repeat_interleave(repeats, dim=1)
            self.scales_and_zeros[:, start:stop] = both.transpose(0, 1).to(self.scales_and_zeros)
            values.append(part.values)
            start = stop
        self.values = pack_int4(torch.cat(values).to(self.scales_and_zeros.device))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.values is not None, "load comes first"
        if x.device.type == "cpu":
            product = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            product = torch.ops.aten._weight_int4pack_mm
        out: Tensor = product(x.contiguous(), self.values, self.group, self.scales_and_zeros)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def reference(x: Tensor, weight: Fp8Slice | Int4Slice) -> Tensor:
        return x.float() @ weight.dequantize().t()


def pack_int4(values: Tensor) -> Tensor:
    """uint8 [R, C] of 0 to 15 -> the layout that the product of their device reads."""
    aten = torch.ops.aten
    if values.device.type == "cpu":
        return cast(Tensor, aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), CPU_TILES))
    tiles = next(tiles for tiles in (8, 4, 2) if values.shape[1] % (tiles * 16) == 0)
    pairs = (values[:, ::2] << 4) | values[:, 1::2]
    return cast(Tensor, aten._convert_weight_to_int4pack(pairs.contiguous(), tiles))
