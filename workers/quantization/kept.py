"""Matrices that stay in the checkpoint's few bits in memory, because a kernel computes with them as they are.

They stand in a linear layer's place of its `weight`. Knows neither which formats there are nor who decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.quantization import QuantizationSpec
from workers.layers.parameter import Piece
from workers.quantization.slices import Fp8Slice, Int4Slice
from workers.quantization.source import DequantizingSource


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """Where a kept matrix stands: its size on this rank, and the modules of the checkpoint that its rows come from."""

    num_rows: int
    num_columns: int
    sources: tuple[tuple[str, Piece], ...]
    device: torch.device


class QuantizedMatrix(nn.Module, ABC):
    """x [T, num_columns] -> [T, num_rows] in x's dtype. Empty until `load`."""

    def __init__(self, spec: QuantizationSpec, place: KeptPlace) -> None:
        super().__init__()
        self.spec = spec
        self.place = place

    @abstractmethod
    def load(self, parts: Sequence[Fp8Slice | Int4Slice]) -> None:
        """Take over the rows of `parts`, in the order of `place.sources`."""

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    @staticmethod
    @abstractmethod
    def reference(x: Tensor, weight: Fp8Slice | Int4Slice) -> Tensor:
        """float32 [T, R]: what `forward` should give, by plain PyTorch."""


def load_kept(model: nn.Module, source: DequantizingSource) -> None:
    """Fill the kept matrices of `model`. ValueError: as the formats' readers raise."""
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            module.load([source.read_slice(name, piece) for name, piece in module.place.sources])
