"""The rank's end of the step channel: what it refuses, and when it gives up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from cluster.errors import DeadlineExceeded, PeerClosed, ProtocolError
from cluster.frames import STEP, FrameKind
from cluster.rank_channel import RankChannel, Steps
from cluster.transport import Connection
from scheduler.codec import StepFormatError, decode_result, encode_plan
from scheduler.output import StepPlan, StepResult, int32


class Pair:
    """A channel that serves in a thread, and the scheduler's end of it."""

    def __init__(self, silence_timeout_s: float = 2.0) -> None:
        left, right = socket.socketpair()
        self.scheduler = Connection(right)
        self.error: BaseException | None = None
        self.channel = RankChannel(
            Connection(left), engine_epoch=2, heartbeat_s=0.05, silence_timeout_s=silence_timeout_s, on_orphaned=str
        )
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.channel.serve(lambda plan: StepResult(plan.engine_epoch, plan.step, int32(), int32()))
        except Exception as error:
            self.error = error

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        self.scheduler.send_frame(kind, payload, timeout=1.0)

    def plan(self, step: int, epoch: int = 2) -> None:
        self.send(FrameKind.PLAN, encode_plan(StepPlan(epoch, step)))

    def end(self) -> BaseException | None:
        self.thread.join(3.0)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.scheduler.close()
    pair.end()


def test_a_plan_is_answered_with_its_result_and_a_ping_with_the_last_step(pair: Pair) -> None:
    pair.send(FrameKind.PING)
    assert pair.scheduler.recv_frame(1.0) == (FrameKind.PONG, STEP.pack(-1))
    pair.plan(7)
    kind, payload = pair.scheduler.recv_frame(1.0)
    assert (kind, decode_result(payload).step) == (FrameKind.RESULT, 7)
    pair.send(FrameKind.PING)
    assert pair.scheduler.recv_frame(1.0) == (FrameKind.PONG, STEP.pack(7))


def test_shutdown_ends_the_service_in_order(pair: Pair) -> None:
    pair.send(FrameKind.SHUTDOWN)
    assert pair.end() is None


def test_another_epoch_is_reported_and_ends_the_service(pair: Pair) -> None:
    pair.plan(7)
    pair.scheduler.recv_frame(1.0)
    pair.plan(8, epoch=3)
    kind, payload = pair.scheduler.recv_frame(1.0)
    assert kind is FrameKind.ERROR
    assert "plan of epoch 3, this rank is of epoch 2" in payload.decode()
    assert isinstance(pair.end(), ProtocolError)


def test_bytes_that_are_no_plan_are_reported(pair: Pair) -> None:
    pair.send(FrameKind.PLAN, b"nonsense")
    assert pair.scheduler.recv_frame(1.0)[0] is FrameKind.ERROR
    assert isinstance(pair.end(), StepFormatError)


def test_a_scheduler_that_is_gone_ends_the_service_at_once(pair: Pair) -> None:
    pair.scheduler.close()
    assert isinstance(pair.end(), PeerClosed)


def test_a_scheduler_that_falls_silent_ends_the_service() -> None:
    pair = Pair(silence_timeout_s=0.1)
    assert isinstance(pair.end(), DeadlineExceeded)
    assert "the scheduler was silent for" in str(pair.error)
    pair.scheduler.close()


class Device:
    """Works at one step until it is told that it is done."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.done: set[int] = set()
        self.changed = threading.Condition()

    def steps(self) -> Steps[StepPlan]:
        return Steps(self.launch, self.collect, lambda plan: plan.step in self.done)

    def launch(self, plan: StepPlan) -> StepPlan:
        with self.changed:
            if self.launched and plan.step != self.launched[-1] + 1:
                raise LookupError("a step out of order")
            self.launched.append(plan.step)
            self.changed.notify_all()
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        with self.changed:
            assert self.changed.wait_for(lambda: plan.step in self.done, 2.0)
        return StepResult(plan.engine_epoch, plan.step, int32(), int32())

    def finish(self, step: int) -> None:
        with self.changed:
            self.done.add(step)
            self.changed.notify_all()

    def wait_for(self, launched: list[int]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.launched == launched, 2.0), self.launched


class AheadPair(Pair):
    """The same with a device that works by itself."""

    def __init__(self) -> None:
        self.device = Device()
        super().__init__()

    def _serve(self) -> None:
        try:
            self.channel.serve_ahead(self.device.steps())
        except Exception as error:
            self.error = error


@pytest.fixture
def ahead() -> Iterator[AheadPair]:
    pair = AheadPair()
    yield pair
    pair.scheduler.close()
    pair.end()


def answered_step(pair: Pair) -> int:
    kind, payload = pair.scheduler.recv_frame(2.0)
    assert kind is FrameKind.RESULT
    return decode_result(payload).step


def test_a_plan_is_launched_while_the_device_is_at_the_one_before(ahead: AheadPair) -> None:
    ahead.plan(0)
    ahead.plan(1)
    ahead.device.wait_for([0, 1])
    ahead.plan(2)
    ahead.device.finish(0)
    assert answered_step(ahead) == 0
    ahead.device.wait_for([0, 1, 2])
    for step in (1, 2):
        ahead.device.finish(step)
        assert answered_step(ahead) == step


def test_a_step_that_is_done_is_answered_though_no_plan_follows(ahead: AheadPair) -> None:
    ahead.plan(4)
    ahead.device.wait_for([4])
    ahead.device.finish(4)
    assert answered_step(ahead) == 4


def test_a_plan_that_the_device_refuses_ends_the_service_while_another_is_in_hand(ahead: AheadPair) -> None:
    ahead.plan(0)
    ahead.device.wait_for([0])
    ahead.plan(2)
    kind, payload = ahead.scheduler.recv_frame(2.0)
    assert kind is FrameKind.ERROR
    assert "LookupError: a step out of order" in payload.decode()
    assert isinstance(ahead.end(), LookupError)
