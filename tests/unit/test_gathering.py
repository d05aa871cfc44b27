"""Requests that come together start together, and nobody else waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.frames import Hello
from cluster.gathering import QUIET_S, REMEMBERED_S, RETURN_S, Gathering
from cluster.protocol import Accepted, Generate, TokenBatch, decode_from_scheduler, encode_message, pack_tokens
from cluster.transport import Connection, connect
from scheduler.sampling_params import SamplingParams
from tests.support.fake_ranks import expected_tokens
from tests.support.small_engine import TOKEN, SmallEngine, make_config, running_engine

PROMPT = [5, 6, 7]
ARRIVAL = None


def gathering_after(*events: tuple[float, int | None]) -> Gathering:
    """What happened, in order: a step in which so many requests ended, or the arrival of one."""
    gathering = Gathering()
    for now, num_ends in events:
        if num_ends is None:
            gathering.note_arrival(now)
        else:
            gathering.note_ends(num_ends, now)
    return gathering


# --- how long -------------------------------------------------------------------------------------------------------


def test_a_lone_request_starts_at_once() -> None:
    assert gathering_after((5.0, ARRIVAL)).due(0, 5.0) <= 5.0


def test_a_lone_client_s_next_request_starts_at_once() -> None:
    assert gathering_after((0.0, ARRIVAL), (1.0, 1), (1.002, ARRIVAL)).due(0, 1.002) <= 1.002


def test_tokens_that_end_nothing_make_nobody_wait() -> None:
    assert gathering_after((1.0, 0), (1.001, ARRIVAL)).due(0, 1.001) <= 1.001


def test_the_first_to_come_back_waits_for_those_who_ended_with_it() -> None:
    two = gathering_after((1.0, 3), (1.001, ARRIVAL), (1.002, ARRIVAL))
    assert two.due(0, 1.002) == 1.002 + QUIET_S
    two.note_arrival(1.004)
    assert two.due(0, 1.004) <= 1.004, "all are here"


def test_nobody_waits_long_for_clients_that_stay_away() -> None:
    assert gathering_after((1.0, 2), (1.009, ARRIVAL)).due(0, 1.009) == 1.0 + RETURN_S
    assert gathering_after((1.0, 2), (1.05, ARRIVAL)).due(0, 1.05) <= 1.05


def test_who_came_before_the_others_ended_waits_until_they_can_be_back() -> None:
    early = gathering_after((1.0, 1), (1.004, ARRIVAL), (1.02, 2))
    assert early.due(0, 1.02) == 1.02 + RETURN_S


def test_successors_wait_for_streams_that_are_about_to_end() -> None:
    assert gathering_after((1.0, 1), (1.004, ARRIVAL)).due(2, 1.004) == math.inf


def test_as_many_newcomers_as_streams_are_about_to_end_wait_for_none_of_them() -> None:
    gathering = gathering_after((1.0, ARRIVAL), (1.0, ARRIVAL))
    assert gathering.due(2, 1.0) <= 1.0
    gathering.note_start()
    gathering.note_arrival(1.1)
    assert gathering.due(2, 1.1) == math.inf, "the newcomers of earlier steps are no more to wait for"


def test_ends_are_forgotten() -> None:
    old = gathering_after((1.0, 3), (1.0 + REMEMBERED_S, ARRIVAL))
    assert old.due(1, 1.0 + REMEMBERED_S) <= 1.0 + REMEMBERED_S, "it is a newcomer"


# --- the engine, with a clock that stands still: nobody comes too late ----------------------------------------------


class Streams:
    """A client that keeps requests open: it sends the next one as soon as one has ended, and one after another."""

    def __init__(self, engine: SmallEngine, **params: Any) -> None:
        self.connection: Connection
        self.connection, _ = connect(engine.address, Hello(token=TOKEN, role="ingress", name="test"))
        self._sampling = SamplingParams(**{"seed": 1, "max_tokens": 8, **params})
        self._num_asked = self._num_taken = self._num_texts = self._num_succeeded = 0

    @property
    def _num_ended(self) -> int:
        return self._num_texts // self._sampling.n

    def begin(self, num_requests: int) -> None:
        """Ask for all of them in one write, and wait until they are taken."""
        self.connection.send(b"".join(self._next() for _ in range(num_requests)), 1.0)
        self._receive_until(lambda: self._num_taken == self._num_asked)

    def go_on(self, num_requests: int) -> None:
        """Until so many have ended, and no other is open."""
        while self._num_ended < num_requests:
            self._receive_until(lambda: self._num_ended > self._num_succeeded)
            self._num_succeeded += 1
            if self._num_asked < num_requests:
                self.begin(1)
        self.connection.close()

    def _next(self) -> bytes:
        self._num_asked += 1
        return encode_message(Generate(self._num_asked, pack_tokens(PROMPT), self._sampling))

    def _receive_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            message = decode_from_scheduler(self.connection.recv_frame(5.0)[1])
            self._num_taken += isinstance(message, Accepted)
            self._num_texts += len(message.ends) if isinstance(message, TokenBatch) else 0


@pytest.fixture
def engine() -> Iterator[SmallEngine]:
    with running_engine(clock=lambda: 1.0) as engine:
        engine.ranks[0].model.blocked.set()
        yield engine


def rows_of_prompts(engine: SmallEngine) -> list[int]:
    return [num_rows for num_rows in engine.ranks[0].model.num_prefills if num_rows]


def test_streams_that_began_one_after_another_are_in_step_from_their_second_requests_on(engine: SmallEngine) -> None:
    streams = Streams(engine)
    streams.begin(1)
    streams.begin(7)
    engine.ranks[0].model.blocked.clear()
    streams.go_on(32)
    assert rows_of_prompts(engine) == [1, 7, 8, 8, 8]


def test_streams_that_end_by_a_token_while_a_step_is_ahead_stay_in_step(engine: SmallEngine) -> None:
    fourth = expected_tokens(PROMPT, 4)[-1]
    streams = Streams(engine, max_tokens=100, stop_token_ids=(fourth,))
    streams.begin(8)
    engine.ranks[0].model.blocked.clear()
    streams.go_on(32)
    assert rows_of_prompts(engine) == [8, 8, 8, 8]


def test_where_a_stream_goes_on_others_start_as_they_come(engine: SmallEngine) -> None:
    long, short = Streams(engine, max_tokens=50), Streams(engine)
    long.begin(1)
    short.begin(2)
    engine.ranks[0].model.blocked.clear()
    engine.ranks[0].model.seconds_per_step = 0.001
    short.go_on(8)
    long.go_on(1)
    assert sum(rows_of_prompts(engine)) == 9


def test_nobody_waits_for_others_where_there_is_no_room_for_more(engine: SmallEngine) -> None:
    streams = Streams(engine)
    streams.begin(16)
    engine.ranks[0].model.blocked.clear()
    streams.go_on(16)
    assert rows_of_prompts(engine) == [8, 8]


@pytest.mark.parametrize("one_step_ahead", [True, False])
def test_the_texts_of_a_request_do_not_wait_for_its_end(one_step_ahead: bool) -> None:
    with running_engine(make_config(one_step_ahead=one_step_ahead), clock=lambda: 1.0) as engine:
        streams = Streams(engine, n=3, max_tokens=1)
        streams.begin(1)
        streams.go_on(2)
        assert rows_of_prompts(engine) == [1, 2, 1, 2]
