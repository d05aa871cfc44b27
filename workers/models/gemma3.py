"""Gemma 3 text: norms around attention and MLP, scaled embedding, local and global layers with their own rope."""

from __future__ import annotations

from torch import Tensor, nn

from workers.attention.base import AttentionMetadata
from workers.kv_cache import KVCache
from workers.layers.attention import SelfAttention
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.parameter import BuildContext
from workers.layers.rotary import Rotation
from workers.models.decoder import CausalLM


class Gemma3Layer(nn.Module):
    """The outputs of attention and MLP are normed before they join the residual stream."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__()
        hidden_size = context.spec.hidden_size
        self.input_layernorm = RMSNorm(context, hidden_size)
        self.self_attn = SelfAttention(context, index)
        self.post_attention_layernorm = RMSNorm(context, hidden_size)
        self.pre_feedforward_layernorm = RMSNorm(context, hidden_size)
        self.mlp = GatedMLP(context)
        self.post_feedforward_layernorm = RMSNorm(context, hidden_size)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation, kv: KVCache, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, rotation, kv, meta))
        hidden, residual = self.pre_feedforward_layernorm.add_and_norm(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma3ForCausalLM(CausalLM):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(context, Gemma3Layer)
