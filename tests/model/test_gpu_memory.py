"""What is left for the KV cache on a GPU, with a device made for tests that keeps books as a real one does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel
from configs import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from configs.model_spec import ModelSpec
from tests.support.tiny_models import save_tiny_model
from workers.attention import AttentionMetadata
from workers.attention.triton_paged import TritonPagedBackend
from workers.cuda_graph import DecodeGraphs
from workers.gpu_memory import MOST_BYTES_PER_GRAPH, bytes_left, bytes_of_graphs
from workers.kernels.triton.tuning import INTERPRETER, max_splits
from workers.kv_cache import KVCache, bytes_per_block, num_blocks_in
from workers.local_executor import LocalExecutor
from workers.parallel import SingleProcessGroup
from workers.worker import Worker

MIB = 1 << 20
TOTAL = 10_000 * MIB
WEIGHTS, NEIGHBOUR = 3000 * MIB, 500 * MIB
POOL_PER_ROW, PER_GRAPH = 2 * MIB, 3 * MIB


class Device:
    """A device of 10,000 MiB with a neighbour on it, and this process's allocator."""

    def __init__(self):
        self.in_use, self.idle, self.most, self.outside = WEIGHTS, 0, 0, NEIGHBOUR

    def allocate(self, size):
        self.idle = max(0, self.idle - size)
        self.in_use += size
        self.most = max(self.most, self.held())

    def release(self, size):
        self.in_use -= size
        self.idle += size

    def free(self):
        return TOTAL - self.held() - self.outside

    def total(self):
        return TOTAL

    def held(self):
        return self.in_use + self.idle

    def most_held(self):
        return self.most

    def forget_most(self):
        self.most = self.held()

    def give_back(self):
        self.idle = 0


class CaptureOn:
    """The first capture fills the pool, which outlives no capture object; the driver keeps something for each."""

    def __init__(self, device, num_rows, taken_by_neighbour=0):
        self.device, self.pool, self.taken_by_neighbour = device, num_rows * POOL_PER_ROW, taken_by_neighbour
        self.num_captured = 0

    def __call__(self, run):
        if self.num_captured == 0:
            self.device.allocate(self.pool)
        self.device.outside += PER_GRAPH + self.taken_by_neighbour
        self.num_captured += 1
        self.device.allocate(7 * MIB)  # of the run before the capture
        self.device.release(7 * MIB)
        return lambda: None

    def __del__(self):
        self.device.release(self.pool)
        self.device.outside -= self.num_captured * PER_GRAPH


def graphs_on(device, max_num_seqs, **options):
    kv = KVCache.allocate(
        num_layers=1, num_blocks=0, block_size=16, num_kv_heads=1, head_dim=8, dtype=torch.float32, device="cpu"
    )
    return DecodeGraphs(
        lambda token_ids, positions, kv, meta: torch.zeros(len(token_ids), 8),
        kv,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        hidden_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        dynamic_rope=False,
        capture=CaptureOn(device, max_num_seqs, **options),
    )


def run_largest(device):
    """Leaves 100 MiB of buffers, after a peak of 900."""
    device.allocate(100 * MIB)
    device.allocate(800 * MIB)
    device.release(800 * MIB)


def test_what_the_largest_step_held_at_most_is_left_out_of_the_cache():
    device = Device()
    left = bytes_left(device, 0.9, run_largest=lambda: run_largest(device), make_graphs=None)
    assert left == 9000 * MIB - WEIGHTS - 900 * MIB
    assert device.held() == WEIGHTS + 100 * MIB


def test_no_more_is_promised_than_is_free_beside_a_neighbour():
    device = Device()
    device.outside = 4000 * MIB
    left = bytes_left(device, 0.9, run_largest=lambda: run_largest(device), make_graphs=None)
    assert left == 10_000 * MIB - 4000 * MIB - WEIGHTS - 900 * MIB


@pytest.mark.parametrize("max_num_seqs", [2, 6, 100, 256])
def test_the_graphs_are_counted_at_what_capturing_them_all_takes(max_num_seqs):
    device = Device()
    options = {"run_largest": lambda: run_largest(device)}
    without = bytes_left(device, 0.9, make_graphs=None, **options)
    device = Device()
    left = bytes_left(device, 0.9, make_graphs=lambda: graphs_on(device, max_num_seqs), **options)
    assert device.held() == WEIGHTS + 100 * MIB, "the trial is given back"
    free = device.free()
    graphs = graphs_on(device, max_num_seqs)
    graphs.capture()
    device.give_back()
    assert without - left == free - device.free() > 0


def test_what_a_neighbour_takes_meanwhile_is_not_multiplied_by_the_number_of_graphs():
    device = Device()
    graphs = graphs_on(device, 256, taken_by_neighbour=1000 * MIB)
    num_graphs = len(graphs.sizes)
    assert bytes_of_graphs(lambda: graphs, device) == 256 * POOL_PER_ROW + num_graphs * MOST_BYTES_PER_GRAPH


def test_one_graph_alone_is_counted_at_the_most_that_one_may_cost():
    device = Device()
    assert bytes_of_graphs(lambda: graphs_on(device, 1), device) == POOL_PER_ROW + MOST_BYTES_PER_GRAPH


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec.from_directory(save_tiny_model("smollm2", tmp_path_factory.mktemp("smollm2")))


def make_config(spec, **cache):
    return EngineConfig(
        model=ModelConfig(path=str(spec.directory)),
        cache=CacheConfig(block_size=16, **cache),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16, max_prefill_chunk=8),
        worker=WorkerConfig(num_threads=1, cpu_kernels="pytorch"),
    )


def test_the_partial_results_of_decoding_exist_before_memory_is_measured(spec, monkeypatch):
    backend = TritonPagedBackend()
    monkeypatch.setattr("workers.worker.choose_backend", lambda name, needs: backend)
    worker = Worker(make_config(spec, num_blocks=8), spec, SingleProcessGroup())
    worker.load_model()
    worker.profile_step()
    partials = backend._partials
    assert partials.out.shape[0] == 5 * max_splits(INTERPRETER.num_multiprocessors, spec.num_kv_heads)
    q = torch.zeros(5, spec.num_heads, spec.head_dim)
    cache = torch.zeros(2, 16, spec.num_kv_heads, spec.head_dim)
    meta = AttentionMetadata.from_lists([1] * 5, [1] * 5, [[0]] * 5, block_size=16, num_decodes=5)
    backend.attend(q, cache, cache, meta, next(m.params for m in worker._model.modules() if hasattr(m, "params")))
    assert backend._partials is partials


def test_the_rank_with_the_least_room_decides_for_all(spec):
    """Two ranks of a model of 3 key heads: the first holds 2 of them."""
    config = dataclasses.replace(
        make_config(spec, memory_gib=1 / 1024), parallel=ParallelConfig(tensor_parallel_size=2)
    )
    room = [
        num_blocks_in(
            config.cache,
            block_bytes=bytes_per_block(
                num_layers=spec.num_layers,
                block_size=16,
                num_kv_heads=num_kv_heads,
                head_dim=spec.head_dim,
                dtype=torch.float32,
            ),
        )
        for num_kv_heads in (2, 1)
    ]
    executor = LocalExecutor(config, spec)
    try:
        assert executor.num_blocks == min(room) < max(room)
    finally:
        executor.close()
