"""Workers and the local executor: sizes, and what happens when a rank fails. Tokens are `test_parity`'s matter."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

from cluster.local import LocalEngine
from cluster.reporting import ReportedError, reporting
from configs import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from configs.model_spec import ModelSpec
from scheduler.sampling_params import SamplingParams
from tests.support.step_plans import admitted, plan
from tests.support.thread_executor import ThreadExecutor
from tests.support.tiny_models import save_tiny_model
from workers.kv_cache import UNLIMITED_BLOCKS, KVCache, bytes_per_block, num_blocks_in
from workers.kv_format import torch_dtype
from workers.local_executor import _ERROR, _LOST_PEER, LocalExecutor, RankFailedError, _severity
from workers.parallel import ParallelError, SingleProcessGroup
from workers.worker import Worker, choose_cache_dtype, choose_dtype, choose_num_threads

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9] * 17]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True),
]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec.from_directory(save_tiny_model("smollm2", tmp_path_factory.mktemp("smollm2")))


def make_config(spec, *, num_ranks=1, num_blocks=40, **changes):
    config = EngineConfig(
        model=ModelConfig(path=str(spec.directory)),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        cache=CacheConfig(block_size=16, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_prefill_chunk=16),
        worker=WorkerConfig(num_threads=1),
    )
    return dataclasses.replace(config, **changes)


def close_to(completions, others):
    """Same tokens; scores within rounding."""
    for completion, other in zip(completions, others, strict=True):
        assert completion.token_ids == other.token_ids
        assert len(completion.logprobs) == len(other.logprobs)
        for scores, other_scores in zip(completion.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(scores.logprobs, other_scores.logprobs, atol=1e-4, rtol=1e-4)
        assert (completion.prompt_logprobs is None) == (other.prompt_logprobs is None)


@pytest.fixture(scope="module")
def two_processes(spec):
    with LocalEngine(make_config(spec, num_ranks=2), spec) as engine:
        yield engine


def test_two_processes_compute_what_one_does(spec, two_processes):
    with LocalEngine(make_config(spec), spec) as engine:
        close_to(two_processes.generate(PROMPTS, PARAMS), engine.generate(PROMPTS, PARAMS))


def test_a_killed_rank_is_named_at_once_and_nothing_is_left(spec, two_processes):
    executor = two_processes.executor
    processes = list(executor._ranks._processes)
    os.kill(processes[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 \(process \d+\) died with exit code -9"):
        two_processes.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert time.monotonic() - started < 10
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank-")]


def test_a_rank_that_lost_its_peers_is_not_taken_for_the_cause():
    died, own_fault, lost_peers = None, _ERROR + b"ValueError: no ParallelError", _LOST_PEER + b"whatever it says"
    assert sorted([lost_peers, own_fault, died], key=_severity) == [died, own_fault, lost_peers]


def test_a_lost_peer_is_reported_as_a_consequence():
    def lose_a_peer():
        raise ParallelError("rank 0 of 2 lost a peer")

    def fail():
        raise RuntimeError("ParallelError")

    for body, is_consequence in ((lose_a_peer, True), (fail, False)):
        with pytest.raises(ReportedError) as caught:
            reporting(body)()
        assert caught.value.is_consequence is is_consequence


def test_a_rank_that_cannot_load_says_why(spec, tmp_path):
    (tmp_path / "config.json").write_text((spec.directory / "config.json").read_text())
    bare = dataclasses.replace(spec, directory=tmp_path)
    with pytest.raises(RankFailedError, match=r"rank [01]: ValueError: .*safetensors"):
        LocalExecutor(make_config(bare, num_ranks=2), bare)
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank-")]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 11])
def test_any_number_of_ranks_gives_the_same_tokens(spec, num_ranks):
    executor = ThreadExecutor(make_config(spec, num_ranks=num_ranks), spec)
    with (
        LocalEngine(make_config(spec), spec) as alone,
        LocalEngine(make_config(spec, num_ranks=num_ranks), spec, executor) as split,
    ):
        close_to(split.generate(PROMPTS, PARAMS), alone.generate(PROMPTS, PARAMS))


def test_only_rank_0_answers(spec):
    executor = ThreadExecutor(make_config(spec, num_ranks=2), spec)
    executor.submit(plan(0, admit=[admitted(0, [5, 6], [0])], prefill=[(0, 0, 2)]))
    results = [future.result(20) for future in executor._running[0]]
    assert results[0] is not None
    assert results[1] is None
    executor.close()


@pytest.fixture(scope="module", params=["auto", "pytorch"])
def eight_bit_config(spec, request):
    return make_config(
        spec,
        cache=CacheConfig(block_size=16, num_blocks=40, dtype="int8"),
        worker=WorkerConfig(num_threads=1, cpu_kernels=request.param),
    )


def test_the_cache_is_kept_in_the_configured_dtype(spec, eight_bit_config):
    worker = Worker(eight_bit_config, spec, SingleProcessGroup())
    worker.load_model()
    worker.allocate_cache(worker.measure_num_blocks())
    assert {tensor.dtype for tensor in (*worker.runner.kv.k, *worker.runner.kv.v)} == {torch.int8}
    assert worker.dtype is torch.float32


def test_eight_bit_blocks_are_shared_and_copied_as_any_others(spec, eight_bit_config):
    """Forks copy the block they share in part; the same prompt again finds its whole blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    prompt = list(range(3, 43))
    with LocalEngine(eight_bit_config, spec) as engine:
        (first,) = engine.generate([prompt], params)
        forks = engine.generate([list(reversed(prompt))], dataclasses.replace(params, n=3))
        again = engine.generate([prompt], params)
    assert [completion.num_cached_tokens for completion in (first, *again)] == [0, 32]
    close_to(again, [first])
    close_to(forks[1:], forks[:1] * 2)
    with LocalEngine(eight_bit_config, spec) as engine:
        close_to(forks[:1], engine.generate([list(reversed(prompt))], params))


def test_the_largest_step_can_be_profiled(spec):
    worker = Worker(make_config(spec), spec, SingleProcessGroup())
    worker.load_model()
    worker.profile_step()


def test_trying_the_kernels_touches_the_dummy_block_alone(spec):
    worker = Worker(make_config(spec, num_blocks=4), spec, SingleProcessGroup())
    worker.load_model()
    worker.allocate_cache(4)
    kv = worker.runner.kv
    worker.try_kernels(kv, worker.runner.choose_tokens)
    for cache in (*kv.k, *kv.v):
        assert not cache[: kv.num_blocks].any()
        assert cache[kv.dummy_block].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int8"])
def test_the_bytes_of_a_block_are_those_that_are_allocated(spec, dtype):
    shape = {"num_layers": spec.num_layers, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    block_bytes = bytes_per_block(block_size=16, dtype=torch_dtype(dtype), **shape)
    assert block_bytes == 16 * spec.kv_bytes_per_token(dtype)
    cache = KVCache.allocate(num_blocks=5, block_size=16, dtype=torch_dtype(dtype), device="cpu", **shape)
    assert sum(layer.nbytes for layer in (*cache.k, *cache.v)) == 6 * block_bytes


def test_blocks_follow_from_the_memory_given():
    block_bytes = 3000
    two_mib = CacheConfig(block_size=16, memory_gib=2 / 1024)
    assert num_blocks_in(two_mib, block_bytes=block_bytes) == 2**21 // block_bytes - 1
    assert num_blocks_in(CacheConfig(num_blocks=7), block_bytes=block_bytes) == 7
    assert num_blocks_in(CacheConfig(), block_bytes=2**20) == 1023  # 1 GiB
    assert num_blocks_in(CacheConfig(), block_bytes=2**20, available_bytes=2**22) == 3
    assert num_blocks_in(CacheConfig(), block_bytes=0) == UNLIMITED_BLOCKS


def test_too_little_memory_is_an_error_with_a_remedy():
    with pytest.raises(ValueError, match=r"give cache\.memory_gib or cache\.gpu_memory_utilization more"):
        num_blocks_in(CacheConfig(memory_gib=0.001), block_bytes=2**20)


def test_precision_and_threads_follow_the_configuration(spec):
    checkpoint = dataclasses.replace(spec, dtype="bfloat16")
    config = make_config(spec)
    assert choose_dtype(config, checkpoint, torch.device("cpu")) is torch.float32
    assert choose_dtype(config, checkpoint, torch.device("cuda")) is torch.bfloat16
    half = dataclasses.replace(config, model=ModelConfig(path="", dtype="float16"))
    assert choose_dtype(half, checkpoint, torch.device("cpu")) is torch.float16
    assert choose_cache_dtype(half, checkpoint, torch.device("cpu")) is torch.float16
    eight_bits = dataclasses.replace(config, cache=CacheConfig(dtype="int8"))
    assert choose_cache_dtype(eight_bits, checkpoint, torch.device("cpu")) is torch.int8
    with pytest.raises(ValueError, match="int8 is not served on a GPU"):
        choose_cache_dtype(eight_bits, checkpoint, torch.device("cuda"))
    assert choose_num_threads(config, 2) == 1
    own = dataclasses.replace(config, worker=WorkerConfig())
    assert choose_num_threads(own, 1) == len(os.sched_getaffinity(0))
    assert choose_num_threads(own, 10_000) == 1
