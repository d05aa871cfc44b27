"""Whole models on the Triton backend and the fused layer kernels, interpreted, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from configs.model_spec import ModelSpec
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model
from workers.attention import AttentionMetadata
from workers.attention.reference import ReferenceBackend
from workers.attention.triton_paged import TritonPagedBackend
from workers.kv_cache import KVCache
from workers.layers.ops import LayerOps, TritonOps
from workers.models import build_model
from workers.parallel import SingleProcessGroup
from workers.weights import load_weights

BLOCK_SIZE = 16
PROMPT_LENS = (30, 9)
TABLES = [[2, 0, 4], [1]]


def run(directory: Path, backend, ops):
    """Logits of a prefill of two prompts, then of a step that decodes one and prefills one token of the other."""
    spec = ModelSpec.from_directory(directory)
    model = build_model(spec, SingleProcessGroup(), backend, torch.float32, "cpu", ops)
    load_weights(model, spec)
    kv = KVCache.allocate(
        num_layers=spec.num_layers,
        num_blocks=5,
        block_size=BLOCK_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    rng = torch.Generator().manual_seed(0)
    logits = []
    for query_lens, seq_lens, num_decodes in ((PROMPT_LENS, PROMPT_LENS, 0), ((3, 1), (33, 10), 1)):
        meta = AttentionMetadata.from_lists(
            query_lens, seq_lens, TABLES, block_size=BLOCK_SIZE, num_decodes=num_decodes
        )
        positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)])
        token_ids = torch.randint(0, VOCAB_SIZE, (len(positions),), generator=rng)
        logits.append(model.compute_logits(model(token_ids, positions, kv, meta)))
    return torch.cat(logits)


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "smollm2"])
@torch.inference_mode()
def test_the_logits_are_those_of_plain_pytorch(name, tmp_path):
    torch.set_num_threads(1)
    directory = save_tiny_model(name, tmp_path)
    expected = run(directory, ReferenceBackend(), LayerOps())
    found = run(directory, TritonPagedBackend(), TritonOps())
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
