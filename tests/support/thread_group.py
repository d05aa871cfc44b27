"""Ranks as threads of one process: a real ParallelGroup whose sums go through shared memory and a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from workers.parallel import ParallelGroup

T = TypeVar("T")
TIMEOUT_S = 60.0


class ThreadGroup(ParallelGroup):
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Tensor | None]) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._barrier = barrier
        self._board = board

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(dim=0))

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[dim] for part in parts] == list(sizes)
        return torch.cat(parts, dim=dim)

    def barrier(self) -> None:
        self._barrier.wait(TIMEOUT_S)

    def close(self) -> None:
        pass

    def abort(self) -> None:
        """Wake the other ranks with an error: this one has failed."""
        self._barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._board[self.rank] = x.clone()
        self.barrier()
        parts = [part for part in self._board if part is not None]
        self.barrier()  # nobody posts the next round before everyone has read this one
        return parts


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """`work(group)` on every rank at once; the results in rank order, or the first rank's error."""
    barrier, board = threading.Barrier(size), [None] * size

    def one(rank: int) -> T:
        group = ThreadGroup(rank, size, barrier, board)
        try:
            return work(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception(TIMEOUT_S)) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
