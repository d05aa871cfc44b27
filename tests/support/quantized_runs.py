"""Quantised tiny checkpoints, loaded on any number of ranks, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.model_spec import ModelSpec
from configs.sharding import split_heads
from tests.support.dense_attention import DenseAttention
from tests.support.tiny_quantized import save_tiny_quantized
from workers.attention.base import AttentionMetadata
from workers.kv_cache import KVCache
from workers.models import CausalLM, build_model
from workers.parallel import ParallelGroup
from workers.quantization.placement import Kernel
from workers.weights import load_weights

NUM_TOKENS = 40
TOKENS = torch.randint(0, 250, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
LAYER = "model.layers.0.mlp.down_proj"

Checkpoint = tuple[Path, Tensor]
"""A directory, and the logits that transformers computes with the weights it stands for."""


class Checkpoints:
    """One of each name, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._saved: dict[str, Checkpoint] = {}

    @torch.no_grad()
    def __call__(self, name: str) -> Checkpoint:
        if name not in self._saved:
            model = save_tiny_quantized(name, self._root / name)
            self._saved[name] = self._root / name, model(TOKENS.unsqueeze(0)).logits[0]
        return self._saved[name]


def load(
    directory: Path, group: ParallelGroup, dtype: torch.dtype = torch.float32, kernel: Kernel | None = None
) -> CausalLM:
    spec = ModelSpec.from_directory(directory)
    model = build_model(spec, group, DenseAttention(), dtype, "cpu", kernel=kernel)
    load_weights(model, spec)
    return model


@torch.no_grad()
def logits_of(model: CausalLM, spec: ModelSpec, group: ParallelGroup) -> Tensor:
    shard = split_heads(spec.num_heads, spec.num_kv_heads, group.size)[group.rank]
    cache = KVCache.allocate(
        num_layers=spec.num_layers,
        num_blocks=3,
        block_size=16,
        num_kv_heads=shard.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=next(model.parameters()).dtype,
        device="cpu",
    )
    meta = AttentionMetadata.from_lists([NUM_TOKENS], [NUM_TOKENS], [[0, 1, 2]], block_size=16)
    return model.compute_logits(model(TOKENS, torch.arange(NUM_TOKENS), cache, meta))


def logits(directory: Path, group: ParallelGroup, *args: Any) -> Tensor:
    return logits_of(load(directory, group, *args), ModelSpec.from_directory(directory), group)
