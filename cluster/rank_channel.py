"""The rank's end of the step channel: receive a plan, execute it, answer.

Owns the blocking loop on the rank's main thread and the pulse, a thread that sleeps but for one frame per
heartbeat while a step takes long, and by which a rank whose scheduler has gone during a step ends itself. Knows
neither torch nor what executing means.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cluster.errors import DeadlineExceeded, PeerClosed, ProtocolError, TransportError
from cluster.frames import STEP, FrameKind, Hello, encode_frame
from cluster.transport import Address, Connection, connect
from configs.schema import ClusterConfig
from scheduler.codec import decode_plan, encode_result
from scheduler.output import StepPlan, StepResult

ORPHANED_EXIT_CODE = 70
POLL_S = 0.0001
"""Between two looks at the device and the stream while a device is at work."""
_MAX_ERROR_BYTES = 32 * 1024

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Steps(Generic[P]):
    """How plans are executed: `launch` starts one, `collect` waits for it; rank 0 gets a result, the others None."""

    launch: Callable[[StepPlan], P]
    collect: Callable[[P], StepResult | None]
    is_done: Callable[[P], bool]  # `collect` would not wait
    most_in_hand: int = 2


def exit_process(reason: str) -> None:
    """End this process now: its main thread may be inside a collective that will never return."""
    print(f"rank exits: {reason}", file=sys.stderr, flush=True)
    os._exit(ORPHANED_EXIT_CODE)


class RankChannel:
    """`serve` runs until the scheduler says SHUTDOWN or is gone."""

    def __init__(
        self,
        connection: Connection,
        *,
        engine_epoch: int,
        heartbeat_s: float,
        silence_timeout_s: float,
        on_orphaned: Callable[[str], None] = exit_process,
    ) -> None:
        self.connection = connection
        self.engine_epoch = engine_epoch
        self.heartbeat_s = heartbeat_s
        self.silence_timeout_s = silence_timeout_s
        self.on_orphaned = on_orphaned
        self.last_step = -1  # answered
        self._in_hand: deque[tuple[int, Any]] = deque()  # step, what its launch returned; the oldest first
        self._send_lock = threading.Lock()
        self._step_started: float | None = None
        self._closed = threading.Event()

    @classmethod
    def connect(
        cls,
        address: Address,
        *,
        token: str,
        rank: int,
        name: str,
        engine_epoch: int,
        config: ClusterConfig,
        on_orphaned: Callable[[str], None] = exit_process,
    ) -> RankChannel:
        """Join the engine at `address`. `name` is what errors will call this rank, e.g. "rank 1 on 10.0.0.7, pid 88".

        Raises:
            HandshakeRefused, PeerClosed, DeadlineExceeded
        """
        hello = Hello(token=token, role="rank", name=name, rank=rank, engine_epoch=engine_epoch)
        connection, _ = connect(address, hello)
        return cls(
            connection,
            engine_epoch=engine_epoch,
            heartbeat_s=config.heartbeat_s,
            silence_timeout_s=config.step_timeout_s + 5 * config.heartbeat_s,
            on_orphaned=on_orphaned,
        )

    def serve(self, execute: Callable[[StepPlan], StepResult | None]) -> None:
        """Answer plans with `execute`: rank 0 returns the result, the others None. Returns after SHUTDOWN.

        Raises:
            PeerClosed, DeadlineExceeded: the scheduler is gone, or silent for longer than it ever is.
            Exception: whatever `execute` raised, after the scheduler was told.
        """
        self._serve(Steps(launch=execute, collect=lambda result: result, is_done=lambda _: True, most_in_hand=1))

    def serve_ahead(self, steps: Steps[Any]) -> None:
        """The same with a device that works by itself: a plan is launched while it is at the one before.

        Raises: as `serve` does.
        """
        self._serve(steps)

    def _serve(self, steps: Steps[Any]) -> None:
        pulse = threading.Thread(target=self._pulse, name="antiphon-pulse", daemon=True)
        pulse.start()
        try:
            while self._answer_next(steps):
                pass
        finally:
            self._closed.set()
            self.connection.close()
            pulse.join(timeout=self.heartbeat_s + 1.0)

    def _answer_next(self, steps: Steps[Any]) -> bool:
        if self._oldest_is_due(steps):
            self._send(self._collect(steps))
            return True
        try:
            kind, payload = self.connection.recv_frame(self.silence_timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"the scheduler was silent for {self.silence_timeout_s:g} s; it hangs, or its node is cut off"
            ) from error
        if kind is FrameKind.PLAN:
            self._launch(payload, steps)
        elif kind is FrameKind.PING:
            self._send(encode_frame(FrameKind.PONG, STEP.pack(self.last_step)))
        elif kind is FrameKind.SHUTDOWN:
            return False
        else:
            raise ProtocolError(f"the scheduler sent {kind.name} to a rank")
        return True

    def _oldest_is_due(self, steps: Steps[Any]) -> bool:
        """Wait until the oldest step in hand is done (True) or a frame has come, which goes first (False)."""
        if not self._in_hand:
            return False
        if len(self._in_hand) == steps.most_in_hand:
            return True
        while not self.connection.has_arrived():
            if steps.is_done(self._in_hand[0][1]):
                return True
            time.sleep(POLL_S)
        return False

    def _launch(self, payload: bytes, steps: Steps[Any]) -> None:
        if not self._in_hand:
            self._step_started = time.monotonic()
        try:
            plan = decode_plan(payload)
            self._check_epoch(plan)
            self._in_hand.append((plan.step, steps.launch(plan)))
        except Exception as error:
            self._step_started = None
            self._report(error)
            raise

    def _collect(self, steps: Steps[Any]) -> bytes:
        step, launched = self._in_hand.popleft()
        try:
            result = steps.collect(launched)
        except Exception as error:
            self._report(error)
            raise
        finally:
            self._step_started = time.monotonic() if self._in_hand else None
        self.last_step = step
        if result is None:
            return encode_frame(FrameKind.DONE, STEP.pack(step))
        return encode_frame(FrameKind.RESULT, encode_result(result))

    def _check_epoch(self, plan: StepPlan) -> None:
        """A connection is of one epoch. Whether the plan is the next one of it, whoever executes it sees."""
        if plan.engine_epoch != self.engine_epoch:
            raise ProtocolError(f"plan of epoch {plan.engine_epoch}, this rank is of epoch {self.engine_epoch}")

    def _report(self, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        text = f"{type(error).__name__}: {error}\n{trace}".encode()[:_MAX_ERROR_BYTES]
        with contextlib.suppress(TransportError):
            self._send(encode_frame(FrameKind.ERROR, text))

    def _send(self, frame: bytes) -> None:
        with self._send_lock:
            self.connection.send(frame, self.silence_timeout_s)

    def _pulse(self) -> None:
        """While a step takes longer than a heartbeat: say that we live, and see whether the scheduler does."""
        while not self._closed.wait(self.heartbeat_s):
            started = self._step_started
            if started is None or time.monotonic() - started < self.heartbeat_s:
                continue
            try:
                if self._scheduler_hung_up():
                    raise PeerClosed("the scheduler closed the stream during a step")
                self._send(encode_frame(FrameKind.PONG, STEP.pack(self.last_step)))
            except (PeerClosed, DeadlineExceeded) as error:
                if not self._closed.is_set():
                    self.on_orphaned(f"lost its scheduler after step {self.last_step}: {error}")
                return

    def _scheduler_hung_up(self) -> bool:
        """Half-closed streams count: a scheduler never stops sending and goes on reading."""
        poll = select.poll()
        hung_up = getattr(select, "POLLRDHUP", select.POLLHUP) | select.POLLHUP | select.POLLERR
        poll.register(self.connection.sock, hung_up)
        return bool(poll.poll(0))
