"""Every architecture gives transformers' logits, on one rank and split over any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.model_spec import ModelSpec
from configs.sharding import split_heads
from tests.support.dense_attention import DenseAttention
from tests.support.thread_group import run_ranks
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE, make_tiny_model
from workers.attention.base import AttentionMetadata
from workers.kv_cache import KVCache
from workers.models import CausalLM, build_model
from workers.parallel import ParallelGroup, SingleProcessGroup
from workers.weights import load_weights

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
NUM_TOKENS = 150  # past every tiny model's window (24) and original rope length (64)


def random_tokens(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected_logits(name: str, token_ids: Tensor) -> Tensor:
    return make_tiny_model(name)(token_ids.unsqueeze(0)).logits[0]


class Runner:
    """One rank of a model with its cache; blocks of sequence s start at 10 * s."""

    def __init__(self, directory: Path, group: ParallelGroup, dtype: torch.dtype = torch.float32) -> None:
        self.spec = ModelSpec.from_directory(directory)
        self.model: CausalLM = build_model(self.spec, group, DenseAttention(), dtype, "cpu")
        load_weights(self.model, self.spec)
        shard = split_heads(self.spec.num_heads, self.spec.num_kv_heads, group.size)[group.rank]
        self.cache = KVCache.allocate(
            num_layers=self.spec.num_layers,
            num_blocks=40,
            block_size=BLOCK_SIZE,
            num_kv_heads=shard.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=dtype,
            device="cpu",
        )

    @torch.no_grad()
    def step(self, parts: list[tuple[int, int, Tensor]], rope_lens: list[int] | None = None) -> Tensor:
        """Logits of all tokens of (sequence, first position, tokens), packed into one step."""
        meta = AttentionMetadata.from_lists(
            [len(tokens) for _, _, tokens in parts],
            [start + len(tokens) for _, start, tokens in parts],
            [list(range(10 * s, 10 * s + 10)) for s, _, _ in parts],
            block_size=BLOCK_SIZE,
        )
        if rope_lens is not None:
            repeats = torch.tensor([len(tokens) for _, _, tokens in parts])
            meta = replace(meta, rope_lens=torch.tensor(rope_lens).repeat_interleave(repeats))
        token_ids = torch.cat([tokens for _, _, tokens in parts])
        positions = torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in parts])
        return self.model.compute_logits(self.model(token_ids, positions, self.cache, meta))


def assert_same_logits(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    assert (actual - expected).abs().max().item() < tolerance
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_those_of_transformers_for_any_number_of_ranks(
    name: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    token_ids = random_tokens(NUM_TOKENS)
    expected = expected_logits(name, token_ids)
    assert expected.std() > 0.3, "a reference that hardly varies proves nothing"
    directory = tiny_checkpoint(name)

    def logits(group: ParallelGroup) -> Tensor:
        return Runner(directory, group).step([(0, 0, token_ids)], rope_lens=[NUM_TOKENS])

    assert_same_logits(logits(SingleProcessGroup()), expected)
    for num_ranks in (2, 3, 5):
        for of_rank in run_ranks(num_ranks, logits):
            assert_same_logits(of_rank, expected)


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen3"])
def test_ranks_beyond_the_heads_hold_none_and_change_nothing(name: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    token_ids = random_tokens(20)
    directory = tiny_checkpoint(name)
    results = run_ranks(11, lambda group: Runner(directory, group).step([(0, 0, token_ids)]))
    assert_same_logits(results[0], expected_logits(name, token_ids))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_chunked_prefill_and_decode_of_packed_sequences_equal_one_whole_prefill(
    name: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    runner = Runner(tiny_checkpoint(name), SingleProcessGroup())
    first, second = random_tokens(90, seed=1), random_tokens(61, seed=2)
    first_prompt, second_prompt = 90, 58
    logits: dict[int, list[Tensor]] = {0: [], 1: []}
    plan = [
        [(0, 0, 40)],
        [(0, 40, 33), (1, 0, 50)],
        [(1, 50, 8), (0, 73, 17)],
        [(1, 58, 1)],
        [(1, 59, 1)],
        [(1, 60, 1)],
    ]
    for step in plan:
        parts = [(s, start, (first, second)[s][start : start + count]) for s, start, count in step]
        lens = [max((first_prompt, second_prompt)[s], start + count) for s, start, count in step]
        out = runner.step(parts, rope_lens=lens)
        for (s, _, _), rows in zip(parts, out.split([len(tokens) for _, _, tokens in parts]), strict=True):
            logits[s].append(rows)
    assert_same_logits(torch.cat(logits[0]), expected_logits(name, first))
    assert_same_logits(torch.cat(logits[1]), expected_logits(name, second))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_bfloat16_follows_transformers_in_bfloat16(name: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    token_ids = random_tokens(40)
    reference = make_tiny_model(name).to(torch.bfloat16)
    with torch.no_grad():
        expected = reference(token_ids.unsqueeze(0)).logits[0].float()
    actual = Runner(tiny_checkpoint(name), SingleProcessGroup(), torch.bfloat16).step([(0, 0, token_ids)])
    exact = expected_logits(name, token_ids)
    # Rounding is as large as transformers' own, not larger.
    assert (actual - exact).abs().mean() < 1.3 * (expected - exact).abs().mean()


def test_dynamic_rope_without_lengths_is_exact_within_the_original_length(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    token_ids = random_tokens(64)
    runner = Runner(tiny_checkpoint("llama-dynamic"), SingleProcessGroup())
    assert_same_logits(runner.step([(0, 0, token_ids)]), expected_logits("llama-dynamic", token_ids))
