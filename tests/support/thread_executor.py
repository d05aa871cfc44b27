"""Ranks as threads of this process behind the interface of `LocalExecutor`: real workers, no start-up time."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from configs import EngineConfig
from configs.model_spec import ModelSpec
from scheduler.codec import decode_plan, decode_result, encode_plan, encode_result
from scheduler.output import StepPlan, StepResult
from tests.support.thread_group import TIMEOUT_S, ThreadGroup, run_ranks
from workers.worker import Worker


class ThreadExecutor:
    """`allocate` makes new caches over the same weights, so that many configurations share one loaded model."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        size = config.parallel.tensor_parallel_size

        def make(group: ThreadGroup) -> Worker:
            worker = Worker(config, spec, group)
            worker.load_model()
            return worker

        self.workers = run_ranks(size, make)
        self._pools = [ThreadPoolExecutor(1) for _ in range(size)]
        self._running: deque[list[Future[StepResult | None]]] = deque()
        self.num_blocks = 0
        self.allocate(config)

    def allocate(self, config: EngineConfig) -> None:
        for worker in self.workers:
            worker.config = config
        self.num_blocks = min(worker.measure_num_blocks() for worker in self.workers)
        for worker in self.workers:
            worker.allocate_cache(self.num_blocks)

    def submit(self, plan: StepPlan) -> None:
        frame = encode_plan(plan)
        self._running.append(
            [pool.submit(_execute, worker, frame) for pool, worker in zip(self._pools, self.workers, strict=True)]
        )

    def collect(self) -> StepResult:
        results = [future.result(TIMEOUT_S) for future in self._running.popleft()]
        assert results[0] is not None
        return decode_result(encode_result(results[0]))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


def _execute(worker: Worker, frame: bytes) -> StepResult | None:
    try:
        return worker.execute(decode_plan(frame))
    except threading.BrokenBarrierError:
        raise
    except BaseException:
        if isinstance(worker.group, ThreadGroup):
            worker.group.abort()
        raise
