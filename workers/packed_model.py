"""A model as the C++ decoder reads it: packed matrices, and structures that say where they lie and what they are for.

Owns all that those point to. Knows no cache, no step and no sum over ranks (`workers.cpu_decoder`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from configs.model_spec import ModelSpec
from workers.cpu_packing import WeightPacker
from workers.kernels.cpu.library import CDescription, CLayer, Format, Then
from workers.layers.attention import SelfAttention
from workers.layers.mlp import GatedMLP
from workers.layers.rotary import RotaryEmbedding, inverse_frequencies
from workers.models.decoder import CausalLM
from workers.parallel import ParallelGroup

ACTIVATIONS = {"silu": Then.SILU_TIMES_UP, "gelu_tanh": Then.GELU_TIMES_UP}


class PackedModel:
    """Takes over `model`: its parameters are emptied as they are packed."""

    def __init__(self, model: CausalLM, spec: ModelSpec, group: ParallelGroup, packer: WeightPacker) -> None:
        self._spec = spec
        self._is_alone = group.size == 1
        self._packer = packer
        self._embedding_bytes = 0
        self._keep: list[object] = []  # what C++ holds addresses of
        self.layers = (CLayer * spec.num_layers)()
        for packed, layer in zip(self.layers, model.model.layers, strict=True):
            self._pack_layer(packed, layer)
        for i, (window, rope) in enumerate(zip(spec.windows, model.model.rope_of_layer, strict=True)):
            self.layers[i].window = window or 0
            self.layers[i].rope = rope % len(model.model.ropes)
        self.ropes: list[RotaryEmbedding | None] = []  # dynamic ones, whose rotations C++ is given with each step
        self.description = self._describe(model)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of weights by the format they are kept in."""
        return dict(self._packer.num_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step with logits reads."""
        return sum(self._packer.num_bytes.values()) - self._embedding_bytes

    def _pack_layer(self, packed: CLayer, layer: nn.Module) -> None:
        attention, mlp = cast(SelfAttention, layer.self_attn), cast(GatedMLP, layer.mlp)
        packed.qkv = self._pack(attention.qkv_proj, bias=True)
        packed.output = self._pack(attention.o_proj, bias=self._is_alone)
        packed.gate_up = self._pack(mlp.gate_up_proj, bias=True, gated=True)
        packed.down = self._pack(mlp.down_proj, bias=self._is_alone)
        packed.attention_norm = self._vector(layer.input_layernorm.weight)
        if self._spec.post_norms:
            packed.attention_out_norm = self._vector(layer.post_attention_layernorm.weight)
            packed.mlp_norm = self._vector(layer.pre_feedforward_layernorm.weight)
            packed.mlp_out_norm = self._vector(layer.post_feedforward_layernorm.weight)
        else:
            packed.mlp_norm = self._vector(layer.post_attention_layernorm.weight)
        if attention.q_norm is not None and attention.k_norm is not None:
            packed.q_norm, packed.k_norm = self._vector(attention.q_norm.weight), self._vector(attention.k_norm.weight)
        if not self._is_alone:
            packed.output_bias = self._vector(attention.o_proj.bias)
            packed.down_bias = self._vector(mlp.down_proj.bias)

    def _pack(self, linear: Any, *, bias: bool, gated: bool = False) -> int:
        matrix = self._packer.pack(linear.weight, linear.bias if bias else None, gated=gated)
        self._keep.append(matrix)
        _empty(linear.weight)
        return matrix.handle

    def _vector(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        # Padded, because the kernels read whole vectors of some of them.
        padded = torch.zeros(-(-len(values) // 64) * 64)
        padded[: len(values)] = values.detach()
        self._keep.append(padded)
        return padded.data_ptr()

    def _pack_vocabulary(self, model: CausalLM) -> tuple[int, int]:
        """(embedding, head). A tied head serves as both, unless quantising it would cost the embedding precision."""
        tied = self._spec.tie_word_embeddings
        embedding_weight = model.model.embed_tokens.weight
        head = self._packer.pack_head(embedding_weight if tied else model.lm_head.weight)
        embedding = head
        if not tied or head.format is Format.INT8:
            embedding = self._packer.pack_unquantised(embedding_weight)
            self._embedding_bytes = embedding.num_bytes  # of which a step reads a few rows
        self._keep += [head, embedding]
        _empty(embedding_weight)
        if not tied:
            _empty(model.lm_head.weight)
        return embedding.handle, head.handle

    def _describe(self, model: CausalLM) -> CDescription:
        spec = self._spec
        embed_tokens = model.model.embed_tokens
        first: Any = model.model.layers[0]
        shard = first.self_attn.shard
        embedding, head = self._pack_vocabulary(model)
        description = CDescription(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            inner=len(first.mlp.down_proj.weight.pieces[0].columns),
            num_heads=shard.num_heads,
            num_kv_heads=shard.num_kv_heads,
            head_dim=spec.head_dim,
            first_token=embed_tokens.rows.start,
            num_tokens=len(embed_tokens.rows),
            activation=ACTIVATIONS[spec.activation],
            eps=spec.rms_norm_eps,
            attention_scale=spec.attention_scale,
            attention_soft_cap=spec.attention_soft_cap or 0.0,
            logit_soft_cap=spec.logit_soft_cap or 0.0,
            embedding_scale=1.0 if embed_tokens.scale is None else embed_tokens.scale,
            embedding=embedding,
            head=head,
            final_norm=self._vector(model.model.norm.weight),
        )
        self._describe_ropes(description)
        return description

    def _describe_ropes(self, description: CDescription) -> None:
        """Dynamic rope's frequencies differ from token to token: those rotations are made step by step."""
        spec = self._spec
        ropes = [spec.rope] if spec.local_rope is None else [spec.rope, spec.local_rope]
        description.num_ropes = len(ropes)
        for i, rope in enumerate(ropes):
            dynamic = rope.kind == "dynamic"
            made_here = RotaryEmbedding(rope, spec.head_dim, dtype=torch.float32, device=torch.device("cpu"))
            self.ropes.append(made_here if dynamic else None)
            description.rope_factors[i] = rope.attention_factor
            if not dynamic:
                description.rope_frequencies[i] = self._vector(inverse_frequencies(rope, spec.head_dim))


def _empty(parameter: nn.Parameter) -> None:
    parameter.data = torch.empty(0, dtype=parameter.dtype)
