"""Llama 2 and 3, SmolLM2, Mistral and Qwen2: biases, windows and rope kinds are the spec's flags."""

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


class LlamaLayer(nn.Module):
    """Norm before attention and before the MLP; the residual travels beside the hidden state."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__()
        hidden_size = context.spec.hidden_size
        self.input_layernorm = RMSNorm(context, hidden_size)
        self.self_attn = SelfAttention(context, index)
        self.post_attention_layernorm = RMSNorm(context, hidden_size)
        self.mlp = GatedMLP(context)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation, kv: KVCache, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add_and_norm(hidden, residual)
        hidden = self.self_attn(hidden, rotation, kv, meta)
        hidden, residual = self.post_attention_layernorm.add_and_norm(hidden, residual)
        return self.mlp(hidden), residual


class LlamaForCausalLM(CausalLM):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(context, LlamaLayer)
