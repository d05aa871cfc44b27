"""Linear layers split over the ranks: by output rows without communication, by input columns with one all-reduce.

Fused projections are one matrix product whose rows come from several tensors of the checkpoint. Shape letters:
T tokens, I and O input and output features of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from configs.sharding import ALIGNMENT, HeadShard, split_range
from workers.layers.parameter import BuildContext, Piece, sharded


class ColumnParallelLinear(nn.Module):
    """x [T, I] -> [T, O]; this rank holds the rows `parts[name]` of each of the checkpoint's modules.

    `full_sizes` are those modules' whole numbers of rows.
    """

    def __init__(
        self,
        context: BuildContext,
        in_features: int,
        parts: Mapping[str | None, range],
        full_sizes: Mapping[str | None, int],
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        weights, biases, start = [], [], 0
        for module, rows in parts.items():
            target = range(start, start + len(rows))
            start = target.stop
            shape = (full_sizes[module], in_features)
            columns = range(in_features)
            weights.append(Piece(target=target, rows=rows, columns=columns, full_shape=shape, module=module))
            biases.append(Piece(target=target, rows=rows, columns=None, full_shape=shape[:1], module=module))
        self.weight = sharded(context.empty(start, in_features), weights)
        self.bias = sharded(context.empty(start), biases) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one width: x [T, I] -> [T, their parts side by side]."""

    def __init__(
        self, context: BuildContext, in_features: int, out_features: int, modules: tuple[str, ...], *, bias: bool
    ) -> None:
        part = split_range(out_features, context.group.size, ALIGNMENT)[context.group.rank]
        super().__init__(
            context, in_features, dict.fromkeys(modules, part), dict.fromkeys(modules, out_features), bias=bias
        )


class QKVParallelLinear(ColumnParallelLinear):
    """x [T, hidden] -> [T, (H + 2 G) * head_dim]: this rank's query heads, then its key heads, then its value heads."""

    def __init__(self, context: BuildContext, shard: HeadShard, *, bias: bool) -> None:
        spec = context.spec
        q, kv = features_of(shard.heads, spec.head_dim), features_of(shard.kv_heads, spec.head_dim)
        kv_size = spec.num_kv_heads * spec.head_dim
        super().__init__(
            context,
            spec.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            {"q_proj": spec.num_heads * spec.head_dim, "k_proj": kv_size, "v_proj": kv_size},
            bias=bias,
        )


class RowParallelLinear(nn.Module):
    """x [T, I] -> [T, out_features], summed over the ranks; `columns` are the input features that this rank holds."""

    def __init__(
        self, context: BuildContext, columns: range, in_features: int, out_features: int, *, bias: bool
    ) -> None:
        super().__init__()
        self.group = context.group
        rows = range(out_features)
        piece = Piece(target=rows, rows=rows, columns=columns, full_shape=(out_features, in_features))
        self.weight = sharded(context.empty(out_features, len(columns)), [piece])
        bias_piece = Piece(target=rows, rows=rows, columns=None, full_shape=(out_features,))
        self.bias = sharded(context.empty(out_features), [bias_piece]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.linear(x, self.weight, self.bias)
        out = self.group.all_reduce(F.linear(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)


def features_of(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
