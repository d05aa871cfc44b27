"""FP8 weights times FP8 activations through torch._scaled_mm, one factor per row of each.

The activations' factors are computed from what they hold, token by token. Needs sm_89 or newer; torch's CPU
implementation serves tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.quantization import QuantizationSpec
from workers.quantization.kept import KeptPlace, QuantizedMatrix
from workers.quantization.slices import Fp8Slice, Int4Slice

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 1e-12  # of a token that is all zeros


class Fp8Matrix(QuantizedMatrix):
    def __init__(self, spec: QuantizationSpec, place: KeptPlace) -> None:
        super().__init__(spec, place)
        self.values = torch.empty(place.num_rows, place.num_columns, dtype=FP8, device=place.device)
        self.scale = torch.empty(1, place.num_rows, dtype=torch.float32, device=place.device)

    def load(self, parts: Sequence[Fp8Slice | Int4Slice]) -> None:
        start = 0
        for part in parts:
            assert isinstance(part, Fp8Slice) and part.scales.shape[1] == 1, "blocks are not kept"
            stop = start + len(part.values)
            self.values[start:stop] = part.values.to(self.values.device)
            self.scale[0, start:stop] = part.scales[:, 0]
            start = stop

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values, scale = quantize_tokens(x)
        out = torch._scaled_mm(values, self.values.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def reference(x: Tensor, weight: Fp8Slice | Int4Slice) -> Tensor:
        values, scale = quantize_tokens(x)
        return (values.float() * scale) @ weight.dequantize().t()


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] -> (float8 [T, C], float32 [T, 1]); x is about their product."""
    scale = (x.abs().amax(dim=-1, keepdim=True).float() / FP8_MAX).clamp_(min=SMALLEST_SCALE)
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale
