"""Ranks that share memory: as threads of this process, or as processes that do what they are told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from tests.support.cpu_kernels import loaded, variants_here
from workers.parallel import ParallelError
from workers.shared_memory_group import SharedMemoryGroup, meet

ANSWER_S = 60.0


def meet_as_threads(size: int, timeout: float = 20.0) -> list[SharedMemoryGroup | str]:
    store, kernels = dist.HashStore(), loaded(variants_here()[0])
    store.set_timeout(timedelta(seconds=ANSWER_S))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(store, rank, size, kernels, timeout), range(size)))


def thread_groups(size: int, timeout: float = 20.0) -> list[SharedMemoryGroup]:
    met = meet_as_threads(size, timeout)
    groups = [group for group in met if isinstance(group, SharedMemoryGroup)]
    assert len(groups) == size, met
    return groups


class RankProcess:
    """One rank in a process of its own: `call` returns at once, `answer` waits for what the function returned."""

    def __init__(self, context: Any, store: str, rank: int, size: int, timeout: float) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(theirs, store, rank, size, timeout), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, work: Callable[..., object], *args: object) -> None:
        """Have `work(group, *args)` done; a function of a module, because its name is what is sent."""
        self._pipe.send((work, args))

    def answer(self) -> Any:
        """What it returned, or the text of its ParallelError."""
        assert self._pipe.poll(ANSWER_S), "the rank does not answer"
        return self._pipe.recv()

    def has_answered(self, seconds: float) -> bool:
        return bool(self._pipe.poll(seconds))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()


@contextmanager
def rank_processes(size: int, timeout: float = 20.0) -> Iterator[list[RankProcess]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # once for all of them
    with tempfile.TemporaryDirectory() as folder:
        ranks = [RankProcess(context, f"{folder}/store", rank, size, timeout) for rank in range(size)]
        try:
            assert [rank.answer() for rank in ranks] == ["SharedMemoryGroup"] * size
            yield ranks
        finally:
            for rank in ranks:
                rank.end()


def _obey(pipe: Connection, file: str, rank: int, size: int, timeout: float) -> None:
    store = dist.FileStore(file, size)
    store.set_timeout(timedelta(seconds=ANSWER_S))
    group = meet(store, rank, size, loaded(variants_here()[0]), timeout)
    pipe.send(type(group).__name__)
    while True:
        work, args = pipe.recv()
        try:
            pipe.send(work(group, *args))
        except ParallelError as error:
            pipe.send(str(error))
