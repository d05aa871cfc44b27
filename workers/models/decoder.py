"""The frame of every decoder-only model: embedding, layers, final norm, output head.

A model is this frame plus its layer class. Tokens of all sequences are packed into one dimension [T].
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from workers.attention.base import AttentionMetadata
from workers.kv_cache import KVCache
from workers.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from workers.layers.norm import RMSNorm
from workers.layers.parameter import BuildContext
from workers.layers.rotary import RotaryEmbedding

LayerFactory = Callable[[BuildContext, int], nn.Module]
"""Makes layer i; called as layer(hidden, residual, rotation, kv, meta) -> (hidden, residual)."""


class Decoder(nn.Module):
    """What the checkpoint calls `model`."""

    def __init__(self, context: BuildContext, make_layer: LayerFactory) -> None:
        super().__init__()
        spec = context.spec
        self.embed_tokens = VocabParallelEmbedding(context)
        self.layers = nn.ModuleList(make_layer(context, index) for index in range(spec.num_layers))
        self.norm = RMSNorm(context, spec.hidden_size)
        ropes = [spec.rope] if spec.local_rope is None else [spec.rope, spec.local_rope]
        self.ropes = [RotaryEmbedding(r, spec.head_dim, dtype=context.dtype, device=context.device) for r in ropes]
        # The last rope is the local one, where there is one: layers with a window use it.
        self.rope_of_layer = [-1 if window is not None else 0 for window in spec.windows]

    def forward(self, token_ids: Tensor, positions: Tensor, kv: KVCache, meta: AttentionMetadata) -> Tensor:
        hidden, residual = self.embed_tokens(token_ids), None
        rotations = [rope(positions, meta.rope_lens) for rope in self.ropes]
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            hidden, residual = layer(hidden, residual, rotations[rope], kv, meta)
        return self.norm.add_and_norm(hidden, residual)[0]


class CausalLM(nn.Module):
    """token ids -> hidden states -> logits; the interface that the model runner uses."""

    def __init__(self, context: BuildContext, make_layer: LayerFactory) -> None:
        super().__init__()
        self.model = Decoder(context, make_layer)
        self.lm_head = ParallelLMHead(context, self.model.embed_tokens if context.spec.tie_word_embeddings else None)

    def forward(self, token_ids: Tensor, positions: Tensor, kv: KVCache, meta: AttentionMetadata) -> Tensor:
        """token_ids [T], positions [T] -> [T, hidden]; the step's K/V are in the cache afterwards."""
        return self.model(token_ids, positions, kv, meta)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocabulary], float32, whole on every rank. All ranks must call it."""
        return self.lm_head(hidden)
