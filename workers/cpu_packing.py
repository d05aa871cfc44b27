"""Which format each weight matrix of a model is packed in for the C++ kernels, and how much memory that takes.

Knows no layers (`workers.packed_model`) and not what a packed matrix looks like inside.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workers.kernels.cpu.library import CpuKernels, Format, PackedMatrix, Pool

WeightFormat = Literal["float32", "bfloat16", "int8", "int4"]
"""float32: the weights' own precision, kept as bfloat16 where that loses nothing. bfloat16: 12 bits that stand for 16.
int8: one scale per output; int4: a scale and a minimum per output and 32 inputs, the output head in int8. In both
activations have 15 bits and one scale per token, but beside int4 in AMX's tiles they are bfloat16 numbers where there
are many; the embedding has the model's dtype."""


class WeightPacker:
    """Packs matrices in one format and counts what they take."""

    def __init__(self, kernels: CpuKernels, pool: Pool, weight_format: WeightFormat) -> None:
        self._kernels = kernels
        self._pool = pool
        self._weight_format = weight_format
        self.num_bytes: dict[str, int] = {}

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PackedMatrix:
        if self._weight_format in ("int8", "int4"):
            chosen = Format.INT4 if self._weight_format == "int4" else Format.INT8
            return self._make(weight, bias, chosen, gated=gated, exact=False)
        return self.pack_unquantised(weight, bias, gated=gated)

    def pack_head(self, weight: Tensor) -> PackedMatrix:
        """Its outputs are compared with one another, so it keeps more bits than the layers."""
        if self._weight_format == "int4":
            return self._make(weight, None, Format.INT8, gated=False, exact=False)
        return self.pack(weight)

    def pack_unquantised(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PackedMatrix:
        """In float32, weights that are bfloat16 numbers are kept as such: half the bytes, the same products."""
        # The first row alone tells most of those that are not.
        narrow = weight.dtype == torch.bfloat16 or (_is_bfloat16(weight[:1]) and _is_bfloat16(weight))
        exact = self._weight_format == "float32"
        chosen = Format.BFLOAT16 if narrow or self._weight_format == "bfloat16" else Format.FLOAT32
        return self._make(weight, bias, chosen, gated=gated, exact=exact)

    def _make(
        self,
        weight: Tensor,
        bias: Tensor | None,
        format: Format,  # noqa: A002
        *,
        gated: bool,
        exact: bool,
    ) -> PackedMatrix:
        packed = PackedMatrix(
            self._kernels, self._pool, weight, bias, format=format, gated=gated, exact=exact, coded=True
        )
        name = format.name.lower()
        self.num_bytes[name] = self.num_bytes.get(name, 0) + packed.num_bytes
        return packed


def _is_bfloat16(weight: Tensor) -> bool:
    return bool(torch.equal(weight, weight.to(torch.bfloat16).to(weight.dtype)))
