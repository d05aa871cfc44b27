"""Parameters that say of which slices of the checkpoint they are made.

Layers declare the pieces, so that the loader (`workers.weights`) needs to know no model. Knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from configs.model_spec import ModelSpec
from workers.attention.base import AttentionBackend
from workers.layers.ops import LayerOps
from workers.parallel import ParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What every layer of a model is built with."""

    spec: ModelSpec
    group: ParallelGroup
    backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    ops: LayerOps
    defer_matrices: bool = False  # linear layers get no memory yet: `workers.quantization.placement` decides

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def matrix(self, num_rows: int, num_columns: int) -> Tensor:
        """The weight of a linear layer."""
        device = torch.device("meta") if self.defer_matrices else self.device
        return torch.empty(num_rows, num_columns, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows `target` of a parameter are `rows` (and `columns`) of one tensor of the checkpoint.

    `module` names the checkpoint's module where it differs from the parameter's own ("q_proj" in "qkv_proj").
    """

    target: range
    rows: range
    columns: range | None  # of a matrix; None: the tensor has one dimension
    full_shape: tuple[int, ...]
    module: str | None = None
    offset: float = 0.0  # added to what the checkpoint holds
    init: Literal["uniform", "zeros", "ones"] = "uniform"  # what load_format random draws

    def tensor_name(self, parameter_name: str) -> str:
        if self.module is None:
            return parameter_name
        *parents, _, kind = parameter_name.split(".")
        return ".".join([*parents, self.module, kind])


class ShardedParameter(nn.Parameter):
    """A parameter that carries its pieces."""

    pieces: tuple[Piece, ...]


def sharded(data: Tensor, pieces: Sequence[Piece]) -> ShardedParameter:
    parameter = ShardedParameter(data, requires_grad=False)
    parameter.pieces = tuple(pieces)
    return parameter
