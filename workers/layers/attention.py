"""Self-attention of one layer: projections, head norms, rotation, and the backend over the paged cache.

The backend computes; this file decides which heads, which window and which scale.
"""

from __future__ import annotations

from torch import Tensor, nn

from configs.sharding import HeadShard, split_heads
from workers.attention.base import AttentionMetadata, AttentionParams
from workers.kv_cache import KVCache
from workers.layers.linear import QKVParallelLinear, RowParallelLinear, features_of
from workers.layers.norm import RMSNorm
from workers.layers.parameter import BuildContext
from workers.layers.rotary import Rotation


class Attention(nn.Module):
    """Stores k, v [T, G, head_dim] in layer `index` of the cache, then attends with q [T, H, head_dim] over it."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__()
        self.index = index
        self.backend = context.backend
        self.params = AttentionParams(
            scale=context.spec.attention_scale,
            window=context.spec.windows[index],
            soft_cap=context.spec.attention_soft_cap,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: KVCache, meta: AttentionMetadata) -> Tensor:
        if q.shape[1] == 0:  # this rank holds no head
            return q
        k_cache, v_cache = kv.k[self.index], kv.v[self.index]
        self.backend.store_kv(k, v, k_cache, v_cache, meta.slot_mapping, self.params)
        return self.backend.attend(q, k_cache, v_cache, meta, self.params)


class SelfAttention(nn.Module):
    """hidden [T, hidden] -> [T, hidden]."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__()
        spec = context.spec
        self.ops = context.ops
        self.eps = spec.rms_norm_eps
        self.head_dim = spec.head_dim
        self.shard: HeadShard = split_heads(spec.num_heads, spec.num_kv_heads, context.group.size)[context.group.rank]
        self.qkv_proj = QKVParallelLinear(context, self.shard, bias=spec.attention_bias)
        self.q_norm = RMSNorm(context, spec.head_dim) if spec.qk_norm else None
        self.k_norm = RMSNorm(context, spec.head_dim) if spec.qk_norm else None
        self.attention = Attention(context, index)
        self.o_proj = RowParallelLinear(
            context,
            features_of(self.shard.heads, spec.head_dim),
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.attention_output_bias,
        )

    def forward(self, hidden: Tensor, rotation: Rotation, kv: KVCache, meta: AttentionMetadata) -> Tensor:
        num_heads, num_kv_heads = self.shard.num_heads, self.shard.num_kv_heads
        qkv = self.qkv_proj(hidden).view(len(hidden), num_heads + 2 * num_kv_heads, self.head_dim)
        q, k, v = self.ops.rotate(
            qkv,
            num_heads,
            num_kv_heads,
            rotation,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )
        attended = self.attention(q, k, v, kv, meta)
        return self.o_proj(attended.reshape(len(hidden), num_heads * self.head_dim))
