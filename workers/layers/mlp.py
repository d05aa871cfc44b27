"""The gated feed-forward block: one fused product up, one row-split product down."""

from __future__ import annotations

from torch import Tensor, nn

from configs.matrices import split_inner
from workers.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from workers.layers.parameter import BuildContext


class GatedMLP(nn.Module):
    """hidden [T, hidden] -> [T, hidden]."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        spec = context.spec
        inner, hidden = spec.intermediate_size, spec.hidden_size
        part = split_inner(spec, context.group.size)[context.group.rank]
        self.gate_up_proj = MergedColumnParallelLinear(
            context, hidden, part, inner, ("gate_proj", "up_proj"), bias=spec.mlp_bias
        )
        self.ops = context.ops
        self.activation = spec.activation
        self.down_proj = RowParallelLinear(context, part, inner, hidden, bias=spec.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.ops.gated(self.gate_up_proj(hidden), self.activation))
