"""Root mean square norm, with the residual stream passed along."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.layers.parameter import BuildContext, Piece, sharded


class RMSNorm(nn.Module):
    """x [..., size] -> normed x. Where the model multiplies by 1 + weight, the 1 is added once, at load.

    Such a weight is kept and applied in float32, as the checkpoints' own library does; others in the model's dtype.
    """

    def __init__(self, context: BuildContext, size: int) -> None:
        super().__init__()
        self.ops = context.ops
        self.eps = context.spec.rms_norm_eps
        plus_one = context.spec.norm_plus_one
        rows = range(size)
        piece = Piece(
            target=rows,
            rows=rows,
            columns=None,
            full_shape=(size,),
            offset=float(plus_one),
            init="zeros" if plus_one else "ones",
        )
        self.weight = sharded(context.empty(size, dtype=torch.float32 if plus_one else None), [piece])

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed sum, sum): the sum is the residual stream that the next norm adds to, `residual` changed in place."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps), residual
