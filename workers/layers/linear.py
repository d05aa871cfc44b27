"""Linear layers split over the ranks: by output rows without communication, by input columns with one all-reduce.

Fused projections are one matrix product whose rows come from several tensors of the checkpoint. Shape letters:
T tokens, I and O input and output features of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from configs.sharding import HeadShard
from workers.layers.parameter import BuildContext, Piece, ShardedParameter, sharded
from workers.quantization.kept import QuantizedMatrix


class ParallelLinear(nn.Module):
    """A matrix: `weight`, or `kept` in its place where a kernel computes with it quantised."""

    weight: ShardedParameter | None
    kept: QuantizedMatrix | None

    def __init__(self) -> None:
        super().__init__()
        self.register_module("kept", None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.kept is not None:
            return self.kept(x, bias)
        assert self.weight is not None
        return F.linear(x, self.weight, bias)


class ColumnParallelLinear(ParallelLinear):
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
        self.weight = sharded(context.matrix(start, in_features), weights)
        self.bias = sharded(context.empty(start), biases) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one width: x [T, I] -> [T, this rank's `part` of each, side by side]."""

    def __init__(
        self,
        context: BuildContext,
        in_features: int,
        part: range,
        out_features: int,
        modules: tuple[str, ...],
        *,
        bias: bool,
    ) -> None:
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


class RowParallelLinear(ParallelLinear):
    """x [T, I] -> [T, out_features], summed over the ranks; `columns` are the input features that this rank holds."""

    def __init__(
        self, context: BuildContext, columns: range, in_features: int, out_features: int, *, bias: bool
    ) -> None:
        super().__init__()
        self.group = context.group
        rows = range(out_features)
        piece = Piece(target=rows, rows=rows, columns=columns, full_shape=(out_features, in_features))
        self.weight = sharded(context.matrix(out_features, len(columns)), [piece])
        bias_piece = Piece(target=rows, rows=rows, columns=None, full_shape=(out_features,))
        self.bias = sharded(context.empty(out_features), [bias_piece]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.product(x, self.bias)
        out = self.group.all_reduce(self.product(x, None))
        return out if self.bias is None else out.add_(self.bias)


def features_of(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
