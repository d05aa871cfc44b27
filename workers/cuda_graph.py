"""Decode steps as CUDA graphs: captured once for a few numbers of rows, replayed for any number up to the largest.

Owns the tensors that a captured step reads and writes, always at the same addresses. A step of fewer rows than its
graph is padded with rows that read and write the dummy block of the cache alone. Prefill steps are not captured.
Knows neither plans nor sampling; what captures is passed in, so tests run all of it on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from workers.attention import AttentionMetadata
from workers.kv_cache import KVCache

log = logging.getLogger(__name__)

LARGEST_GRAPH = 512
"""Rows; beyond, a step computes for so long that launching its kernels one by one is hidden."""

Replay = Callable[[], None]
Forward = Callable[[Tensor, Tensor, KVCache, AttentionMetadata], Tensor]
"""token_ids [S], positions [S], cache, metadata -> hidden [S, hidden]."""


class Capture(Protocol):
    """Turns a function of no arguments, which works on tensors that stay where they are, into its replay."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """Captures into one memory pool: graphs replay one after another, so they may share what they need in between."""

    _side: ClassVar[torch.cuda.Stream | None] = None
    """One for all: cuBLAS keeps a workspace of some 32 MiB for every stream that it has worked on."""

    def __init__(self) -> None:
        self._pool: tuple[int, int] | None = None

    def __call__(self, run: Callable[[], None]) -> Replay:
        side = CudaCapture._side = CudaCapture._side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles kernels and fills workspaces, which a capture must not do
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, NCCL's watchdog among them, may ask the device things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        replay: Replay = graph.replay
        return replay


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows to capture, ascending: fine steps where padding costs most, `max_num_seqs` itself last."""
    largest = min(max_num_seqs, LARGEST_GRAPH)
    sizes = {1, 2, 4, *range(8, min(largest, 256), 8), *range(256, largest, 16), largest}
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """The captured decode steps of one model over one cache. Calls must not overlap."""

    def __init__(
        self,
        forward: Forward,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        dynamic_rope: bool,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._kv = kv
        self._max_model_len = max_model_len
        self._capture = capture
        self.sizes = bucket_sizes(max_num_seqs)
        largest = self.sizes[-1]
        # Row i is a real sequence's while i < _num_filled, else the padding that it starts as.
        self._num_filled = 0
        self._dummy_slot = kv.dummy_block * kv.block_size
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((largest,), self._dummy_slot, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(largest, dtype=torch.int32, device=device)
        width = -(-max_model_len // kv.block_size)
        self._block_tables = torch.full((largest, width), kv.dummy_block, dtype=torch.int32, device=device)
        self._rope_lens = torch.ones(largest, dtype=torch.int64, device=device) if dynamic_rope else None
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._hidden = torch.zeros((largest, hidden_size), dtype=dtype, device=device)
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture(self, num_largest: int | None = None) -> None:
        """Capture every size, or the largest few, that is not yet; the smaller fit into the memory of the largest.

        All ranks must call it together.
        """
        assert self._num_filled == 0, "captured before the first step"
        started = time.monotonic()
        missing = [size for size in self.sizes[::-1][:num_largest] if size not in self._replays]
        for size in missing:
            self._replays[size] = self._capture(lambda size=size: self._run(size))  # type: ignore[misc]
        if num_largest is None:
            seconds = time.monotonic() - started
            log.info("captured %d decode graphs of up to %d rows in %.1f s", len(missing), self.sizes[-1], seconds)

    def serves(self, meta: AttentionMetadata) -> bool:
        """Whether a step consists of nothing but decode rows, and not of too many."""
        return meta.num_prefill_seqs == 0 and 0 < meta.num_decodes <= self.sizes[-1] and bool(self._replays)

    def run(self, token_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> Tensor:
        """token_ids [S], positions [S] -> hidden [S, hidden], there until the next call."""
        num_rows = meta.num_decodes
        size = next(size for size in self.sizes if size >= num_rows)
        self._fill(num_rows, token_ids, positions, meta)
        self._replays[size]()
        return self._hidden[:num_rows]

    def _fill(self, num_rows: int, token_ids: Tensor, positions: Tensor, meta: AttentionMetadata) -> None:
        """Put the step's rows in place, and padding where the last step had more. Columns past a length stay stale."""
        self._token_ids[:num_rows] = token_ids
        self._positions[:num_rows] = positions
        self._slot_mapping[:num_rows] = meta.slot_mapping
        self._seq_lens[:num_rows] = meta.seq_lens
        self._block_tables[:num_rows, : meta.block_tables.shape[1]] = meta.block_tables
        if self._rope_lens is not None and meta.rope_lens is not None:
            self._rope_lens[:num_rows] = meta.rope_lens
        if num_rows < self._num_filled:
            left = slice(num_rows, self._num_filled)
            self._token_ids[left] = 0
            self._positions[left] = 0
            self._slot_mapping[left] = self._dummy_slot
            self._seq_lens[left] = 1
            self._block_tables[left, 0] = self._kv.dummy_block
        self._num_filled = num_rows

    def _run(self, size: int) -> None:
        """What is captured: the model over the first `size` rows. Its metadata is new, so nothing planned is reused."""
        meta = AttentionMetadata(
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._slot_mapping[:size],
            max_seqlen_q=1,
            max_seqlen_k=self._max_model_len,
            num_prefill_seqs=0,
            num_prefill_tokens=0,
            num_decodes=size,
            block_size=self._kv.block_size,
            rope_lens=None if self._rope_lens is None else self._rope_lens[:size],
        )
        self._hidden[:size] = self._forward(self._token_ids[:size], self._positions[:size], self._kv, meta)
