"""The engine loop over real sockets, with fake ranks: what it does when all is well, and what when it is not."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cluster.errors import EngineFailed, HandshakeRefused, PeerClosed
from cluster.frames import FrameKind, Hello
from cluster.greeter import MAX_STRANGERS
from cluster.protocol import (
    Abort,
    Accepted,
    Failed,
    Generate,
    Refused,
    Status,
    TokenBatch,
    decode_from_scheduler,
    encode_message,
    pack_tokens,
)
from cluster.rank_group import RankGroup
from cluster.reactor import Reactor
from cluster.transport import Connection, QueuedConnection, connect
from configs.schema import ClusterConfig
from scheduler.sampling_params import SamplingParams
from tests.support.fake_ranks import FakeRank, expected_tokens
from tests.support.small_engine import TOKEN, ManualClock, SmallEngine, make_config, running_engine

PROMPT = [5, 6, 7, 8]
ROOT = Path(__file__).parents[2]


class Client:
    """An ingress that speaks the protocol by hand."""

    opened: ClassVar[list[Client]] = []

    def __init__(self, engine: SmallEngine) -> None:
        self.connection: Connection
        self.opened.append(self)
        self.connection, _ = connect(engine.address, Hello(token=TOKEN, role="ingress", name="test"))
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], str] = {}
        self.cached: dict[int, int] = {}
        self.last_status: Status | None = None

    def ask(self, request_id: int, prompt: list[int] = PROMPT, *, num_delivered: int = 0, **params: Any) -> None:
        sampling = SamplingParams(**{"seed": 1, "max_tokens": 8, **params})
        message = Generate(request_id, pack_tokens(prompt), sampling, num_delivered=num_delivered)
        self.connection.send(encode_message(message), 1.0)

    def abort(self, request_id: int) -> None:
        self.connection.send(encode_message(Abort(request_id)), 1.0)

    def next(self, kind: type[Any], timeout: float = 5.0) -> Any:
        """The next message of this kind; tokens that come before it are kept."""
        deadline = time.monotonic() + timeout
        while True:
            _, payload = self.connection.recv_frame(max(deadline - time.monotonic(), 1e-3))
            message = decode_from_scheduler(payload)
            if isinstance(message, TokenBatch):
                self._keep(message)
            elif isinstance(message, Status):
                self.last_status = message
            if isinstance(message, kind):
                return message

    def finish(self, *request_ids: int, n: int = 1) -> list[list[int]]:
        wanted = [(request_id, index) for request_id in request_ids for index in range(n)]
        while not all(key in self.ends for key in wanted):
            self.next(TokenBatch)
        return [self.tokens[key] for key in wanted]

    def wait_for_state(self, state: str) -> Status:
        while self.last_status is None or self.last_status.state != state:
            self.next(Status)
        return self.last_status

    def _keep(self, batch: TokenBatch) -> None:
        for row, key in enumerate(zip(batch.request_ids, batch.indices, strict=True)):
            assert key not in self.ends, "a token after the end"
            self.tokens.setdefault(key, []).append(batch.tokens[row])
            if row in batch.ends:
                self.ends[key] = batch.ends[row]
            if row in batch.cached:
                self.cached[key[0]] = batch.cached[row]


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while Client.opened:
        Client.opened.pop().connection.close()


@pytest.fixture
def engine() -> Iterator[SmallEngine]:
    with running_engine() as engine:
        yield engine


@contextlib.contextmanager
def engine_with_clock(clock: ManualClock, num_ranks: int = 1, **config: float) -> Iterator[SmallEngine]:
    with running_engine(
        make_config(**{"heartbeat_s": 0.05, **config}), num_ranks=num_ranks, clock=clock, rank_heartbeat_s=0.01
    ) as engine:
        yield engine


@pytest.mark.parametrize("one_step_ahead", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_many_requests_get_exactly_their_own_tokens(one_step_ahead: bool, num_ranks: int) -> None:
    with running_engine(make_config(one_step_ahead=one_step_ahead), num_ranks=num_ranks) as engine:
        client = Client(engine)
        prompts = [[number + 1] * (3 * number + 1) for number in range(20)]
        for number, prompt in enumerate(prompts):
            client.ask(number, prompt, max_tokens=number + 1)
        found = client.finish(*range(20))
        assert found == [expected_tokens(prompt, number + 1) for number, prompt in enumerate(prompts)]
        assert set(client.ends.values()) == {"length"}


def test_tokens_are_right_when_the_cache_is_so_small_that_requests_are_preempted() -> None:
    with running_engine(num_blocks=8, max_model_len=128) as engine:
        client = Client(engine)
        for number in range(6):
            client.ask(number, [number + 1] * 5, max_tokens=60)
        assert client.finish(*range(6)) == [expected_tokens([number + 1] * 5, 60) for number in range(6)]
        assert engine.scheduler.stats().num_preemptions > 0


def test_several_texts_of_one_prompt_end_one_by_one(engine: SmallEngine) -> None:
    client = Client(engine)
    client.ask(1, n=3)
    assert client.finish(1, n=3) == [expected_tokens(PROMPT, 8)] * 3


def test_each_prompt_s_scores_travel_in_a_message_of_their_own(engine: SmallEngine) -> None:
    client = Client(engine)
    for request_id in range(4):
        client.ask(request_id, prompt_logprobs=3)
    while len(client.ends) < 4:
        assert len(client.next(TokenBatch).prompt_logprobs) <= 1


def test_a_prompt_seen_before_says_how_much_of_it_was_cached(engine: SmallEngine) -> None:
    client = Client(engine)
    prompt = list(range(100, 148))
    for request_id in (1, 2):
        client.ask(request_id, prompt)
        client.finish(request_id)
    assert client.cached == {2: 32}


def test_a_request_is_continued_where_an_earlier_engine_stopped(engine: SmallEngine) -> None:
    client = Client(engine)
    whole = expected_tokens(PROMPT, 8)
    client.ask(1, PROMPT + whole[:5], num_delivered=5, max_tokens=8)
    assert client.finish(1) == [whole[5:]]


def test_a_request_is_taken_or_refused_with_the_numbers(engine: SmallEngine) -> None:
    client = Client(engine)
    client.ask(1)
    assert client.next(Accepted).request_id == 1
    client.ask(2, [1] * 600)
    refused = client.next(Refused)
    assert (refused.request_id, refused.kind) == (2, "invalid")
    assert "600" in refused.reason
    assert "512" in refused.reason
    client.ask(3, [1, 264])
    assert "264" in client.next(Refused).reason


def test_a_full_queue_is_said_to_be_full() -> None:
    with running_engine(make_config(max_num_waiting=1, max_num_seqs=1)) as engine:
        client = Client(engine)
        engine.ranks[0].model.blocked.set()
        for request_id in range(8):
            client.ask(request_id)
        assert client.next(Refused).kind == "overloaded"


def test_an_aborted_request_sends_nothing_more_and_frees_its_blocks(engine: SmallEngine) -> None:
    client = Client(engine)
    engine.ranks[0].model.seconds_per_step = 0.005
    client.ask(1, max_tokens=400)
    client.next(TokenBatch)
    client.abort(1)
    client.abort(99)
    client.ask(2)
    client.finish(2)
    assert (1, 0) not in client.ends
    assert wait_until(lambda: not engine.scheduler.has_unfinished)


def test_what_an_ingress_asked_for_is_aborted_when_it_goes(engine: SmallEngine) -> None:
    engine.ranks[0].model.seconds_per_step = 0.005
    client = Client(engine)
    client.ask(1, max_tokens=400)
    client.next(TokenBatch)
    client.connection.close()
    assert wait_until(lambda: not engine.scheduler.has_unfinished)


def test_an_ingress_that_talks_nonsense_loses_only_its_own_connection(engine: SmallEngine) -> None:
    good, bad = Client(engine), Client(engine)
    bad.connection.send_frame(FrameKind.MESSAGE, b"nonsense", timeout=1.0)
    with pytest.raises(PeerClosed):
        bad.next(Refused)
    good.ask(1)
    good.finish(1)


@pytest.mark.parametrize(
    "hello", [Hello("wrong", "ingress", "x"), Hello(TOKEN, "rank", "x", rank=0), Hello(TOKEN, "rank", "x", rank=7)]
)
def test_strangers_and_doubles_are_turned_away_with_the_reason(engine: SmallEngine, hello: Hello) -> None:
    with pytest.raises(HandshakeRefused, match=r"wrong engine token|connected already|an engine with 1 ranks"):
        connect(engine.address, hello)
    assert engine.loop.status().state == "healthy"


def test_noise_at_the_door_disturbs_nobody(engine: SmallEngine) -> None:
    noise = random.Random(1)
    strangers = [socket.create_connection((engine.address.host, engine.address.port)) for _ in range(20)]
    for stranger in strangers:
        stranger.sendall(noise.randbytes(noise.randrange(1, 200)))
    client = Client(engine)
    client.ask(1)
    assert client.finish(1) == [expected_tokens(PROMPT, 8)]
    for stranger in strangers:
        stranger.close()


def test_our_own_come_in_past_a_crowd_that_says_nothing(engine: SmallEngine) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4 * MAX_STRANGERS):
            stack.enter_context(socket.create_connection((engine.address.host, engine.address.port)))
        client = Client(engine)
        client.ask(1)
        assert client.finish(1) == [expected_tokens(PROMPT, 8)]


def test_the_engine_waits_for_every_rank_and_names_the_one_that_does_not_come() -> None:
    with running_engine(num_ranks=2, num_fakes=1) as engine:
        with pytest.raises(EngineFailed, match=r"rank 1 did not connect within 0\.1 s"):
            engine.loop.wait_until_healthy(0.1)
        client = Client(engine)
        client.ask(1)
        assert "starting" in client.next(Refused).reason


# -- when a rank is lost -----------------------------------------------------------------------------------------


def test_a_rank_that_dies_is_seen_at_once_and_named_to_every_stream() -> None:
    with running_engine(num_ranks=2, seconds_per_step=0.005) as engine:
        clients = [Client(engine), Client(engine)]
        for client in clients:
            client.ask(1, max_tokens=400)
            client.ask(2, max_tokens=400)
            client.next(TokenBatch)
        engine.ranks[1].die()
        died = time.monotonic()
        for client in clients:
            for failed in (client.next(Failed), client.next(Failed)):
                assert failed.reason.startswith("rank 1 on node test, pid 1001 died (last acknowledged step: ")
        assert time.monotonic() - died < 0.3
        status = clients[0].wait_for_state("failed")
        assert (status.num_ranks_alive, status.is_healthy) == (0, False)
        assert engine.loop.status().reason == failed.reason
        clients[0].ask(3)
        assert "rank 1 on node test" in clients[0].next(Refused).reason
        assert engine.ranks[0].has_ended(), "the survivor sees that the engine is over"


def test_a_killed_process_is_seen_within_milliseconds() -> None:
    with running_engine(num_ranks=1, num_fakes=0) as engine:
        arguments = [engine.address.host, str(engine.address.port), TOKEN, "0"]
        process = subprocess.Popen([sys.executable, "-m", "tests.support.fake_ranks", *arguments], cwd=ROOT)
        try:
            engine.loop.wait_until_healthy(20.0)
            client = Client(engine)
            client.ask(1, max_tokens=400)
            client.next(TokenBatch)
            process.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            assert "rank 0 in its own process died" in client.next(Failed).reason
            assert time.monotonic() - killed < 0.5
        finally:
            process.kill()
            process.wait(5.0)


def test_a_rank_that_fails_says_why_and_the_stream_repeats_it(engine: SmallEngine) -> None:
    client = Client(engine)
    client.ask(1)
    client.finish(1)
    engine.ranks[0].model.broken = "out of memory: 3 GiB wanted"
    client.ask(2)
    reason = client.next(Failed).reason
    assert "rank 0 on node test, pid 1000 failed after step" in reason
    assert reason.endswith("RuntimeError: out of memory: 3 GiB wanted"), "the traceback is for the log"


def test_a_killed_rank_is_blamed_and_not_the_neighbour_that_only_noticed_it() -> None:
    with running_engine(num_ranks=2) as engine:
        client = Client(engine)
        engine.ranks[0].model.broken = "connection closed by peer"
        engine.ranks[1].model.blocked.set()
        client.ask(1)
        client.next(Accepted)
        time.sleep(0.03)
        engine.ranks[1].die()
        assert client.next(Failed).reason.startswith("rank 1 on node test, pid 1001 died")


def test_a_hung_rank_is_named_with_its_last_acknowledged_step() -> None:
    clock = ManualClock()
    with engine_with_clock(clock, num_ranks=2, step_timeout_s=0.4) as engine:
        client = Client(engine)
        client.ask(1, max_tokens=4)
        client.finish(1)
        last = engine.ranks[0].channel.last_step
        assert wait_until(lambda: engine.ranks[1].channel.last_step == last)
        engine.ranks[0].model.blocked.set()  # waits in the collective, and pulses
        engine.ranks[1].fall_silent()
        client.ask(2)
        client.next(Accepted)
        engine.let_pass(clock, 0.45, heard=[0])
        reason = client.next(Failed).reason
        assert "was not answered within 0.4 s: rank 1 on node test, pid 1001 is silent" in reason
        assert f"last acknowledged step: {last}" in reason
        assert "rank 0" not in reason


def test_a_rank_that_is_stopped_in_a_step_is_seen_long_before_the_step_is_late() -> None:
    clock = ManualClock()
    with engine_with_clock(clock, num_ranks=2, step_timeout_s=60.0) as engine:
        client = Client(engine)
        engine.ranks[0].model.blocked.set()
        engine.ranks[1].fall_silent()
        client.ask(1)
        client.next(Accepted)
        engine.let_pass(clock, 0.55, heard=[0])
        assert "rank 1 on node test, pid 1001 is silent" in client.next(Failed).reason
        assert not engine.loop.is_reason_secondhand


def test_a_pause_of_our_own_process_is_nobody_s_silence() -> None:
    now, config = [0.0], ClusterConfig(step_timeout_s=60.0, heartbeat_s=1.0)
    reactor = Reactor()
    ours, theirs = socket.socketpair()
    ranks = RankGroup(
        1, engine_epoch=0, config=config, reactor=reactor, clock=lambda: now[0], on_result=lambda payload: None
    )
    connection = QueuedConnection(ours, allowed=frozenset(FrameKind), max_pending=1 << 20)
    ranks.join(Hello(TOKEN, "rank", "rank 0", rank=0), connection)
    ranks.send_plan(0, b"")

    def let_pass(*pauses: float) -> None:
        for pause in pauses:
            now[0] += pause
            ranks.check(now[0])

    let_pass(1.0, 1.0, 3600.0, 1.0, 1.0)  # the machine slept for an hour; the rank's pulse is on its way
    with pytest.raises(EngineFailed, match="rank 0 is silent"):
        let_pass(*[1.0] * 10)
    reactor.close()
    theirs.close()


def test_ranks_that_are_all_alive_and_too_slow_are_all_named() -> None:
    clock = ManualClock()
    with engine_with_clock(clock, step_timeout_s=0.4) as engine:
        client = Client(engine)
        engine.ranks[0].model.blocked.set()
        client.ask(1)
        client.next(Accepted)
        engine.let_pass(clock, 0.45, heard=[0])
        assert "rank 0 on node test, pid 1000 is alive but still busy" in client.next(Failed).reason


def test_an_idle_rank_is_asked_for_a_sign_of_life_and_gives_it() -> None:
    clock = ManualClock()
    with engine_with_clock(clock, step_timeout_s=0.25) as engine:
        engine.let_pass(clock, 0.5, heard=[0])
        assert engine.loop.status().state == "healthy"


def test_a_rank_that_waited_long_for_a_slow_neighbour_is_not_taken_for_hung() -> None:
    clock = ManualClock()
    with engine_with_clock(clock, num_ranks=2, heartbeat_s=0.02) as engine:
        client = Client(engine)
        engine.ranks[0].model.blocked.set()
        client.ask(1, max_tokens=1)
        client.next(Accepted)
        assert wait_until(lambda: engine.ranks[1].channel.last_step == 0)
        engine.let_pass(clock, 0.4, heard=[0])  # twice the silence that an idle rank is allowed
        engine.ranks[0].model.blocked.clear()
        assert client.finish(1) == [expected_tokens(PROMPT, 1)]
        engine.let_pass(clock, 0.1, heard=[0, 1])
        assert engine.loop.status().state == "healthy"


def test_an_idle_rank_that_gives_no_sign_of_life_is_named() -> None:
    clock = ManualClock()
    with engine_with_clock(clock, step_timeout_s=0.25) as engine:
        engine.ranks[0].fall_silent()
        engine.let_pass(clock, 0.4)
        assert engine.loop.status().state == "failed"
        assert "rank 0 on node test, pid 1000 hung while idle" in engine.loop.status().reason


def test_a_rank_whose_scheduler_goes_during_a_step_ends_by_itself() -> None:
    with running_engine(make_config(heartbeat_s=0.05)) as engine:
        client = Client(engine)
        engine.ranks[0].model.blocked.set()
        client.ask(1)
        client.next(Accepted)
        time.sleep(0.05)
        engine.loop.fail("the supervisor gave up")
        assert client.next(Failed).reason == "the supervisor gave up"
        assert wait_until(lambda: bool(engine.ranks[0].orphaned))


def test_ranks_leave_in_order_when_the_engine_stops() -> None:
    with running_engine(num_ranks=2) as engine:
        engine.loop.stop()
        assert all(rank.has_ended() and rank.error is None for rank in engine.ranks)
        assert engine.loop.status().state == "stopped"


# -- draining and stalls -----------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_refuses_what_comes(engine: SmallEngine) -> None:
    engine.ranks[0].model.seconds_per_step = 0.005
    client = Client(engine)
    client.ask(1, max_tokens=20)
    client.next(TokenBatch)
    assert engine.loop.drain(5.0) is True
    assert client.finish(1) == [expected_tokens(PROMPT, 20)]
    client.ask(2)
    refused = client.next(Refused)
    assert (refused.kind, "draining" in refused.reason) == ("unavailable", True)


def test_draining_has_a_deadline(engine: SmallEngine) -> None:
    engine.ranks[0].model.blocked.set()
    client = Client(engine)
    client.ask(1)
    client.next(Accepted)
    assert engine.loop.drain(0.1) is False
    assert "shutting down" in client.next(Failed).reason


def test_work_without_progress_is_explained_once_per_period(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    config = make_config(stall_timeout_s=0.1, max_num_seqs=1)
    with running_engine(config, clock=clock) as engine, caplog.at_level(logging.WARNING):
        client = Client(engine)
        engine.ranks[0].model.blocked.set()
        for request_id in (1, 2):
            client.ask(request_id)
            client.next(Accepted)
        engine.let_pass(clock, 0.34)
        lines = [record.message for record in caplog.records if "no progress" in record.message]
        assert lines[0].startswith("no progress for 0.1 s: 1 running, 1 waiting, ")
        assert "0 of 1 slots free" in lines[1]
        assert lines.count(lines[0]) == 3


def wait_until(condition: Any, timeout: float = 3.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_rank_of_another_epoch_is_turned_away(engine: SmallEngine) -> None:
    with pytest.raises(HandshakeRefused, match="is of epoch 3, the engine of 0"):
        connect(engine.address, Hello(TOKEN, "rank", "late rank", rank=0, engine_epoch=3))


def test_a_fake_rank_cannot_join_twice(engine: SmallEngine) -> None:
    with pytest.raises(HandshakeRefused, match="connected already as rank 0 on node test"):
        FakeRank(engine.address, token=TOKEN, rank=0, config=make_config().cluster)
