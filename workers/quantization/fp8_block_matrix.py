"""FP8 weights with scales in blocks times FP8 activations, by an own Triton kernel.

A scale is kept for every row and group of columns rather than for every block: rows of several modules, and a rank's
cut through a block, then need no special case, for 4 bytes in `block[1]`. Needs sm_89 or newer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.quantization import QuantizationSpec
from workers.quantization.fp8_matrix import FP8, quantize_tokens
from workers.quantization.kept import KeptPlace, QuantizedMatrix
from workers.quantization.slices import Fp8Slice, Int4Slice


class Fp8BlockMatrix(QuantizedMatrix):
    def __init__(self, spec: QuantizationSpec, place: KeptPlace) -> None:
        super().__init__(spec, place)
        assert spec.block is not None
        self.group = spec.block[1]
        num_groups = -(-place.num_columns // self.group)
        self.values = torch.empty(place.num_rows, place.num_columns, dtype=FP8, device=place.device)
        self.scales = torch.empty(num_groups, place.num_rows, dtype=torch.float32, device=place.device)

    def load(self, parts: Sequence[Fp8Slice | Int4Slice]) -> None:
        start = 0
        for part in parts:
            assert isinstance(part, Fp8Slice) and part.scales.shape[1] == len(self.scales), "groups are not whole"
            stop = start + len(part.values)
            self.values[start:stop] = part.values.to(self.values.device)
            self.scales[:, start:stop] = part.scales.t()
            start = stop

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from workers.kernels.triton.fp8_product import fp8_product
        from workers.kernels.triton.tuning import device_of

        return fp8_product(x, self.values, self.scales, bias, group=self.group, device=device_of(x.device))

    @staticmethod
    def reference(x: Tensor, weight: Fp8Slice | Int4Slice) -> Tensor:
        group = int((weight.groups == 0).sum())
        quantized = [values.float() * scale for values, scale in map(quantize_tokens, x.split(group, dim=1))]
        return torch.cat(quantized, dim=1) @ weight.dequantize().t()
