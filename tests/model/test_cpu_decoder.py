"""The C++ decoder gives the PyTorch model's logits: every architecture, chunked and decoded, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.model_spec import ModelSpec
from configs.sharding import split_heads
from tests.support.cpu_kernels import loaded, variants_here
from tests.support.shared_ranks import thread_groups
from tests.support.thread_group import run_ranks
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE
from workers.attention.base import AttentionMetadata
from workers.attention.reference import ReferenceBackend
from workers.cpu_decoder import CpuDecoder
from workers.kernels.cpu.library import Format, PackedMatrix, Pool, check_memory
from workers.kv_cache import KVCache
from workers.models import CausalLM, build_model
from workers.parallel import ParallelError, ParallelGroup, SingleProcessGroup
from workers.shared_memory_group import SharedMemoryGroup
from workers.weights import load_weights

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SEQS, BLOCKS_PER_SEQ = 4, 20
BEST = variants_here()[:1]
# New tokens of each sequence, step by step: whole prompts, chunks of them, decodes, and all of these in one step.
STEPS = ([40, 0, 7, 1], [30, 50, 1, 1], [1, 1, 20, 1], [1, 1, 1, 1], [1, 40, 1, 1], [1, 1, 1, 1])


def load(directory: Path, group: ParallelGroup, dtype: torch.dtype = torch.float32) -> tuple[CausalLM, ModelSpec]:
    spec = ModelSpec.from_directory(directory)
    model = build_model(spec, group, ReferenceBackend(), dtype, "cpu")
    load_weights(model, spec)
    return model, spec


def decoder(directory: Path, group: ParallelGroup, variant: str, **options) -> CpuDecoder:
    model, spec = load(directory, group)
    options = {"num_threads": 2, "weight_format": "float32"} | options
    return CpuDecoder(model, spec, group, loaded(variant), **options)


def poisoned_cache(spec: ModelSpec, group: ParallelGroup, *, block_size: int = 16, dtype=torch.float32) -> KVCache:
    shard = split_heads(spec.num_heads, spec.num_kv_heads, group.size)[group.rank]
    cache = KVCache.allocate(
        num_layers=spec.num_layers,
        num_blocks=NUM_SEQS * BLOCKS_PER_SEQ,
        block_size=block_size,
        num_kv_heads=shard.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device="cpu",
    )
    for tensor in (*cache.k, *cache.v):
        tensor.view(torch.uint8).fill_(255)  # a NaN in every floating-point type, and in the scale of int8
    return cache


@torch.inference_mode()
def run_steps(model: CausalLM | CpuDecoder, cache: KVCache) -> Tensor:
    """Logits of every token of every step."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_SEQS, 150), generator=generator)
    done = [0] * NUM_SEQS
    logits = []
    for step in STEPS:
        seqs = sorted((s for s in range(NUM_SEQS) if step[s]), key=lambda s: step[s] == 1)
        ends = [done[s] + step[s] for s in seqs]
        meta = AttentionMetadata.from_lists(
            [step[s] for s in seqs],
            ends,
            [list(range(s * BLOCKS_PER_SEQ, (s + 1) * BLOCKS_PER_SEQ)) for s in seqs],
            block_size=cache.block_size,
            num_decodes=sum(step[s] == 1 for s in seqs),
        )
        positions = torch.cat([torch.arange(done[s], end) for s, end in zip(seqs, ends, strict=True)])
        meta = replace(meta, rope_lens=positions + 1)
        token_ids = torch.cat([tokens[s, done[s] : end] for s, end in zip(seqs, ends, strict=True)])
        logits.append(model.compute_logits(model(token_ids, positions, cache, meta)).clone())
        for s, end in zip(seqs, ends, strict=True):
            done[s] = end
    return torch.cat(logits)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Tensor]:
    known: dict[str, Tensor] = {}

    def get(name: str) -> Tensor:
        if name not in known:
            group = SingleProcessGroup()
            model, spec = load(tiny_checkpoint(name), group)
            known[name] = run_steps(model, poisoned_cache(spec, group))
        return known[name]

    return get


def assert_same_logits(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    assert not actual.isnan().any()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("variant", variants_here())
@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_architecture_has_the_logits_of_pytorch(name, variant, tiny_checkpoint, expected):
    group = SingleProcessGroup()
    for num_threads, block_size in ((1, 9), (2, 16)):
        model = decoder(tiny_checkpoint(name), group, variant, num_threads=num_threads)
        cache = poisoned_cache(ModelSpec.from_directory(tiny_checkpoint(name)), group, block_size=block_size)
        assert_same_logits(run_steps(model, cache), expected(name))


@pytest.mark.parametrize("variant", BEST)
@pytest.mark.parametrize("name", ["llama-biases", "smollm2", "gemma3", "qwen3"])
@pytest.mark.parametrize("num_ranks", [2, 3, 11])
def test_ranks_have_the_logits_of_one_process(name, variant, num_ranks, tiny_checkpoint, expected):
    """With 11 ranks some hold no head, and some nothing at all of the vocabulary."""

    def work(group: ParallelGroup) -> Tensor:
        model = decoder(tiny_checkpoint(name), group, variant, num_threads=1)
        return run_steps(model, poisoned_cache(ModelSpec.from_directory(tiny_checkpoint(name)), group))

    for of_rank in run_ranks(num_ranks, work):
        assert_same_logits(of_rank, expected(name), 2e-5)


@pytest.mark.parametrize("variant", variants_here())
def test_sixteen_bits_are_as_near_as_those_of_pytorch(variant, tiny_checkpoint, expected):
    group = SingleProcessGroup()
    for name in ("smollm2", "gemma3"):
        of_pytorch, spec = load(tiny_checkpoint(name), group, torch.bfloat16)
        theirs = run_steps(of_pytorch, poisoned_cache(spec, group, dtype=torch.bfloat16))
        ours = run_steps(
            decoder(tiny_checkpoint(name), group, variant, weight_format="bfloat16"),
            poisoned_cache(spec, group, dtype=torch.bfloat16),
        )
        assert (ours - expected(name)).abs().mean() < 1.1 * (theirs - expected(name)).abs().mean()


@pytest.mark.parametrize("variant", variants_here())
def test_eight_bits_stay_near(variant, tiny_checkpoint, expected):
    group = SingleProcessGroup()
    for name in ("smollm2", "gemma3"):
        model = decoder(tiny_checkpoint(name), group, variant, weight_format="int8")
        actual = run_steps(model, poisoned_cache(ModelSpec.from_directory(tiny_checkpoint(name)), group))
        error = (actual - expected(name)).pow(2).mean().sqrt() / expected(name).std()
        assert error < 0.045


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def hold_in_four_bits(model: CausalLM, variant: str) -> None:
    """What packing makes of its weights, so that packing loses nothing more."""
    kernels = loaded(variant)
    pool = Pool(kernels, 1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            matrix_format = Format.INT4 if ".layers." in name else Format.INT8
            matrix = PackedMatrix(kernels, pool, parameter, format=matrix_format)
            for row, values in enumerate(parameter.data):
                kernels.matrix_row(matrix.handle, row, values.data_ptr())


@pytest.mark.parametrize("variant", variants_here())
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "llama-biases"])
def test_four_bits_compute_what_the_weights_that_they_hold_say(name, variant, tiny_checkpoint):
    group = SingleProcessGroup()
    model, spec = load(tiny_checkpoint(name), group)
    hold_in_four_bits(model, variant)
    theirs = run_steps(model, poisoned_cache(spec, group))
    packed = CpuDecoder(model, spec, group, loaded(variant), num_threads=2, weight_format="int4")
    assert set(packed.packed_bytes) == {"int4", "int8", "float32"}
    ours = run_steps(packed, poisoned_cache(spec, group))
    rounded = variant == "amx"  # to bfloat16 numbers, where a step has many tokens
    assert relative_error(ours, theirs) < (2e-2 if rounded else 2e-3)


@pytest.mark.parametrize("variant", BEST)
@pytest.mark.parametrize("num_ranks", [2, 3, 11])
def test_ranks_in_four_bits_are_as_near_as_one_process(variant, num_ranks, tiny_checkpoint, expected):
    """A rank's columns may begin within what were groups, so other numbers are rounded together."""
    directory = tiny_checkpoint("smollm2")

    def work(group: ParallelGroup) -> Tensor:
        model = decoder(directory, group, variant, num_threads=1, weight_format="int4")
        return run_steps(model, poisoned_cache(ModelSpec.from_directory(directory), group))

    alone = relative_error(work(SingleProcessGroup()), expected("smollm2"))
    for of_rank in run_ranks(num_ranks, work):
        assert relative_error(of_rank, expected("smollm2")) < 1.3 * alone


@pytest.mark.parametrize("variant", variants_here())
def test_keys_and_values_in_eight_bits_are_read_as_pytorch_reads_them(variant, tiny_checkpoint, expected):
    group = SingleProcessGroup()
    for name in ("smollm2", "gemma3"):
        of_pytorch, spec = load(tiny_checkpoint(name), group)
        theirs = run_steps(of_pytorch, poisoned_cache(spec, group, dtype=torch.int8))
        ours = run_steps(decoder(tiny_checkpoint(name), group, variant), poisoned_cache(spec, group, dtype=torch.int8))
        assert 1e-4 < relative_error(theirs, expected(name)) < 0.02
        assert relative_error(ours, theirs) < 0.2 * relative_error(theirs, expected(name))


@pytest.mark.parametrize("variant", BEST)
@pytest.mark.parametrize("num_ranks", [2, 3, 11])
def test_ranks_keep_the_same_eight_bits_as_one_process(variant, num_ranks, tiny_checkpoint, expected):
    """A scale belongs to one head, so it does not matter which other heads a rank holds."""
    directory = tiny_checkpoint("smollm2")

    def work(group: ParallelGroup) -> Tensor:
        model = decoder(directory, group, variant, num_threads=1)
        return run_steps(model, poisoned_cache(ModelSpec.from_directory(directory), group, dtype=torch.int8))

    alone = work(SingleProcessGroup())
    for of_rank in run_ranks(num_ranks, work):
        assert relative_error(of_rank, alone) < 0.2 * relative_error(alone, expected("smollm2"))


@pytest.mark.parametrize("variant", BEST)
def test_float32_weights_that_are_bfloat16_numbers_take_half_the_memory(variant, tiny_checkpoint, expected):
    group = SingleProcessGroup()
    model, spec = load(tiny_checkpoint("smollm2"), group)
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    theirs = run_steps(model, poisoned_cache(spec, group))
    packed = CpuDecoder(model, spec, group, loaded(variant), num_threads=1, weight_format="float32")
    assert list(packed.packed_bytes) == ["bfloat16"]
    assert_same_logits(run_steps(packed, poisoned_cache(spec, group)), theirs)
    assert max(parameter.numel() for parameter in model.parameters()) == spec.hidden_size, "only norms are left"


@pytest.mark.parametrize("variant", BEST)
def test_another_cache_starts_anew(variant, tiny_checkpoint, expected):
    group = SingleProcessGroup()
    model = decoder(tiny_checkpoint("smollm2"), group, variant)
    spec = ModelSpec.from_directory(tiny_checkpoint("smollm2"))
    for block_size in (16, 32):
        cache = poisoned_cache(spec, group, block_size=block_size)
        assert_same_logits(run_steps(model, cache), expected("smollm2"))


@pytest.mark.parametrize("variant", BEST)
def test_a_lost_peer_ends_the_step_with_its_error(variant, tiny_checkpoint):
    class Lonely(SingleProcessGroup):
        size = 2

        def __init__(self) -> None:
            super().__init__()
            self.size = 2

        def all_reduce(self, x: Tensor) -> Tensor:
            raise ParallelError("rank 0 lost a peer")

    group = Lonely()
    model = decoder(tiny_checkpoint("smollm2"), group, variant)
    cache = poisoned_cache(ModelSpec.from_directory(tiny_checkpoint("smollm2")), group)
    with pytest.raises(ParallelError, match="lost a peer"):
        run_steps(model, cache)


@pytest.mark.parametrize("variant", BEST)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_memory_sum_without_leaving_the_library(num_ranks, variant, tiny_checkpoint, expected):
    directory = tiny_checkpoint("llama-biases")

    def work(group: SharedMemoryGroup) -> Tensor:
        group.all_reduce = None  # the method, which Python would call
        model = decoder(directory, group, variant, num_threads=1)
        return run_steps(model, poisoned_cache(ModelSpec.from_directory(directory), group))

    groups = thread_groups(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(work, groups))
    for of_rank in results:
        assert_same_logits(of_rank, expected("llama-biases"), 2e-5)
        assert torch.equal(of_rank, results[0])
    for group in groups:
        group.close()


@pytest.mark.parametrize("variant", BEST)
def test_a_peer_that_left_the_shared_memory_ends_the_step_with_its_name(variant, tiny_checkpoint):
    group, other = thread_groups(2)
    model = decoder(tiny_checkpoint("smollm2"), group, variant)
    cache = poisoned_cache(ModelSpec.from_directory(tiny_checkpoint("smollm2")), group)
    other.close()
    with pytest.raises(ParallelError, match="rank 0 of 2 lost a peer during all_reduce: rank 1 has left the group"):
        run_steps(model, cache)


@pytest.mark.parametrize("variant", BEST)
def test_a_step_that_there_is_no_memory_for_is_an_error_and_the_next_one_is_served(variant, tiny_checkpoint, expected):
    model = decoder(tiny_checkpoint("smollm2"), SingleProcessGroup(), variant)
    cache = poisoned_cache(ModelSpec.from_directory(tiny_checkpoint("smollm2")), SingleProcessGroup())
    run_steps(model, cache)
    with pytest.raises(MemoryError):
        check_memory(model._kernels.decoder_reserve(model._decoder.handle, 1 << 40))
    assert_same_logits(run_steps(model, cache), expected("smollm2"), 2e-5)
