"""The ranks of one replica without Ray: in this process if there is one, in spawned processes if there are more.

For tests, benchmarks and debugging. The processes speak the same step frames as a cluster's ranks do, over pipes that
this process watches: a rank that dies is noticed by its pipe's end. Imports torch only when a rank is made.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from configs import EngineConfig
from configs.model_spec import ModelSpec
from scheduler.codec import decode_plan, decode_result, encode_plan, encode_result
from scheduler.output import StepPlan, StepResult

if TYPE_CHECKING:
    from workers.model_runner import PendingStep
    from workers.worker import Worker

_PLAN, _RESULT, _ALLOCATE, _NUM_BLOCKS, _PORT, _READY, _ERROR, _LOST_PEER, _STOP = (bytes([n]) for n in range(9))
_FAILURES = (_ERROR, _LOST_PEER)

EXIT_TIMEOUT_S = 5.0
ROOT_CAUSE_WAIT_S = 0.5
"""One rank's failure makes its peers fail: so long is waited for the others before the first cause is named."""


class RankFailedError(RuntimeError):
    """A rank stopped with an error, died or did not answer in time. The executor is closed."""


class LocalExecutor:
    """Runs plans on `config.parallel.tensor_parallel_size` ranks on this machine's CPU.

    A single rank runs on the GPU if `config.worker.device` is cuda. `execute` is `submit` and `collect`; one step
    ahead, submit the next plan before collecting the last.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._ranks: _Ranks | None = None
        self._pending: deque[PendingStep | StepResult] = deque()
        if config.parallel.tensor_parallel_size == 1:
            self._worker = _make_worker(config, spec)
            self.num_blocks = self._worker.measure_num_blocks()
            self._worker.allocate_cache(self.num_blocks)
        else:
            self._ranks = _Ranks(config, spec)
            self.num_blocks = self._ranks.num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step on all ranks.

        Raises:
            RankFailedError: a rank failed; the message names it and its reason.
        """
        self.submit(plan)
        return self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Hand the next plan to the ranks. A single rank on the CPU has computed it on return."""
        if self._ranks is not None:
            self._ranks.send(_PLAN + encode_plan(plan))
            return
        assert self._worker is not None, "the executor is closed"
        self._pending.append(self._worker.launch(plan))

    def collect(self) -> StepResult:
        """The result of the oldest plan that has not been collected."""
        if self._ranks is not None:
            timeout = self._config.cluster.step_timeout_s
            return decode_result(self._ranks.receive(_RESULT, ranks=[0], timeout=timeout)[0])
        assert self._worker is not None, "the executor is closed"
        result = self._worker.collect(self._pending.popleft())
        assert result is not None, "rank 0 answers"
        return result

    def close(self) -> None:
        """End every process. Safe to call twice."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ranks:
    """The spawned processes and the pipes to them."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        size = config.parallel.tensor_parallel_size
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank, args=(theirs, config, spec, rank, size), name=f"rank-{rank}", daemon=True
                )
                self._pipes.append(ours)
                process.start()
                self._processes.append(process)
                theirs.close()
            timeout = config.cluster.startup_timeout_s
            port = self.receive(_PORT, ranks=[0], timeout=timeout)[0]
            self.send(_PORT + port)
            found = self.receive(_NUM_BLOCKS, ranks=range(size), timeout=timeout)
            self.num_blocks = min(int(number) for number in found)
            self.send(_ALLOCATE + str(self.num_blocks).encode())
            self.receive(_READY, ranks=range(size), timeout=timeout)
        except BaseException:
            self.close()
            raise

    def send(self, frame: bytes) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(frame)
            except OSError:
                self._fail(rank, None)

    def receive(self, kind: bytes, *, ranks: Any, timeout: float) -> list[bytes]:
        """One frame of `kind` from each of `ranks`, in their order, while watching all of them."""
        deadline = time.monotonic() + timeout
        missing = dict.fromkeys(ranks, b"")
        found: dict[int, bytes] = {}
        while len(found) < len(missing):
            ready = wait(self._pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = min(set(missing) - set(found))
                self._give_up(f"rank {late} did not answer within {timeout:g} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                frame = self._read(rank)
                if frame is None or frame[:1] in _FAILURES:
                    self._fail(rank, frame)
                assert frame[:1] == kind, f"rank {rank} sent a frame of kind {frame[0]}, not {kind[0]}"
                found[rank] = frame[1:]
        return [found[rank] for rank in missing]

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(_STOP)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(EXIT_TIMEOUT_S)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def _read(self, rank: int) -> bytes | None:
        """A frame, or None if the rank is gone."""
        try:
            return self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            return None

    def _fail(self, rank: int, frame: bytes | None) -> NoReturn:
        """Rank `rank` failed first as far as we saw; see what the others say, then name the cause."""
        failures: dict[int, bytes | None] = {rank: frame}
        deadline = time.monotonic() + ROOT_CAUSE_WAIT_S
        while len(failures) < len(self._pipes):
            others = [pipe for other, pipe in enumerate(self._pipes) if other not in failures]
            ready = wait(others, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                other = self._pipes.index(pipe)  # type: ignore[arg-type]
                said = self._read(other)
                if said is None or said[:1] in _FAILURES:
                    failures[other] = said
        self._give_up(min((_severity(said), rank, self._describe(rank, said)) for rank, said in failures.items())[2])

    def _describe(self, rank: int, frame: bytes | None) -> str:
        if frame is not None:
            return f"rank {rank}: {frame[1:].decode(errors='replace')}"
        process = self._processes[rank]
        process.join(EXIT_TIMEOUT_S)
        return f"rank {rank} (process {process.pid}) died with exit code {process.exitcode}"

    def _give_up(self, reason: str) -> NoReturn:
        self.close()
        raise RankFailedError(reason)


def _severity(frame: bytes | None) -> int:
    """A rank that died is a cause, one that lost its peers a consequence."""
    if frame is None:
        return 0
    return 2 if frame[:1] == _LOST_PEER else 1


def _make_worker(config: EngineConfig, spec: ModelSpec) -> Worker:
    from workers.parallel import SingleProcessGroup
    from workers.worker import Worker, choose_num_threads

    device = "cuda" if config.worker.device == "cuda" else "cpu"
    worker = Worker(config, spec, SingleProcessGroup(device), num_threads=choose_num_threads(config, 1))
    worker.load_model()
    return worker


def _run_rank(pipe: Connection, config: EngineConfig, spec: ModelSpec, rank: int, size: int) -> None:
    """The body of one rank's process: until it is told to stop, or the other end is gone."""
    try:
        _serve_plans(pipe, config, spec, rank, size)
    except (EOFError, BrokenPipeError):
        pass  # the executor's process is gone
    except Exception as error:  # the edge of the process: the executor must hear of it
        trace = traceback.format_exc()
        kind = _LOST_PEER if isinstance(error, ConnectionError) else _ERROR
        with suppress(OSError):
            pipe.send_bytes(kind + f"{type(error).__name__}: {error}\n{trace}".encode())


def _serve_plans(pipe: Connection, config: EngineConfig, spec: ModelSpec, rank: int, size: int) -> None:
    from workers.joining import join_group
    from workers.parallel import bind_store
    from workers.worker import Worker, choose_num_threads

    store = None  # held until the end: the group meets there
    if rank == 0:
        store, own_port = bind_store("127.0.0.1")
        pipe.send_bytes(_PORT + str(own_port).encode())
    frame = pipe.recv_bytes()
    if frame == _STOP:
        return
    timeout = config.cluster.startup_timeout_s
    group = join_group(config, "127.0.0.1", int(frame[1:]), rank, size, device="cpu", timeout=timeout)
    worker = Worker(config, spec, group, num_threads=choose_num_threads(config, size))
    worker.load_model()
    pipe.send_bytes(_NUM_BLOCKS + str(worker.measure_num_blocks()).encode())
    while (frame := pipe.recv_bytes()) != _STOP:
        if frame[:1] == _ALLOCATE:
            worker.allocate_cache(int(frame[1:]))
            pipe.send_bytes(_READY)
            continue
        result = worker.execute(decode_plan(frame[1:]))
        if result is not None:
            pipe.send_bytes(_RESULT + encode_result(result))
    worker.close()
    del store
