"""Paged sequences on a GPU, and how long device work takes: what `benchmarks.gpu_check` is made of."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.attention import AttentionBackend, AttentionMetadata, AttentionParams
from workers.attention.reference import ReferenceBackend
from workers.attention.triton_paged import SMALLEST_FP8_CAPABILITY
from workers.kv_format import encode

DEVICE = torch.device("cuda", 0)
NAN_BYTE = 255
"""Of a NaN in every floating-point type."""


def has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= SMALLEST_FP8_CAPABILITY


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """The queries of one step and the cache they read."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMetadata
    params: AttentionParams

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(self.q, self.k_cache, self.v_cache, self.meta, self.params)

    def error(self, backend: AttentionBackend) -> float:
        """Against PyTorch in float32 over the same cache; NaN where a place was read that nobody wrote."""
        expected = replace(self, q=self.q.float()).attend(ReferenceBackend())
        found = self.attend(backend).float()
        return float((found - expected).norm() / expected.norm())


def make_scene(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_decodes: int,
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    poison: bool = True,
) -> Scene:
    """Blocks lie scattered; with `poison`, whatever no sequence wrote is NaN. `cache_dtype`: if it is not `dtype`."""
    num_heads, num_kv_heads = heads
    counts = [math.ceil(n / block_size) for n in seq_lens]
    num_blocks = sum(counts) + 1
    order = random.Random(0).sample(range(num_blocks), num_blocks)
    tables, first = [], 0
    for count in counts:
        tables.append(order[first : first + count])
        first += count
    shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
    kept = cache_dtype or dtype
    scales = {"k_scale": 0.02, "v_scale": 0.03} if kept == torch.float8_e4m3fn else {}
    params = AttentionParams(scale=head_dim**-0.5, window=window, soft_cap=soft_cap, **scales)
    k_cache, v_cache = (
        encode(torch.randn(shape, device=DEVICE, dtype=dtype), kept, scale)
        for scale in (params.k_scale, params.v_scale)
    )
    if poison:
        for cache in (k_cache, v_cache):
            _poison(cache, tables, seq_lens, order[first:])
    meta = AttentionMetadata.from_lists(
        query_lens, seq_lens, tables, block_size=block_size, num_decodes=num_decodes, device=DEVICE
    )
    q = torch.randn(sum(query_lens), num_heads, head_dim, device=DEVICE, dtype=dtype)
    return Scene(q, k_cache, v_cache, meta, params)


def _poison(cache: Tensor, tables: Sequence[Sequence[int]], seq_lens: Sequence[int], unused: Sequence[int]) -> None:
    """NaN wherever no sequence wrote: past the ends of their last blocks, and in unused ones."""
    places, block_size = cache.view(torch.uint8), cache.shape[1]
    for table, length in zip(tables, seq_lens, strict=True):
        if length % block_size:
            places[table[-1], length % block_size :] = NAN_BYTE
    for block in unused:
        places[block] = NAN_BYTE


def seconds_of(run: Callable[[], object], *, repeats: int = 10, rounds: int = 5) -> float:
    """Median device time of one `run`, without the host's share: a graph of `repeats` of them is replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    return timed(graph.replay, rounds=rounds) / repeats


def timed(run: Callable[[], object], *, rounds: int = 5) -> float:
    """Median device time of `run`, launches included."""
    found: list[float] = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(found)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this card does at most, measured."""

    copy_bytes_per_s: float  # read plus written
    bf16_flops: float


def measure_ceilings() -> Ceilings:
    source = torch.randint(0, 100, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    copy = timed(lambda: target.copy_(source), rounds=10)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b)
    product = timed(lambda: torch.mm(a, b), rounds=10)
    return Ceilings(copy_bytes_per_s=2 * (2 << 30) / copy, bf16_flops=2 * 8192**3 / product)
