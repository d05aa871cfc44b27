"""Two replicas behind one ingress; the last test kills the driver without a chance to clean up."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.served import Served


@pytest.fixture(scope="module")
def server(serve) -> Served:
    return serve("parallel.num_replicas=2")


def test_both_replicas_work_and_give_the_same_answers(server):
    """A replica tells its load about once a second, so one wave of quick answers may pass unseen."""
    busy = [False, False]
    give_up = time.monotonic() + 60
    while not all(busy) and time.monotonic() < give_up:
        streams = server.start_streams([f"prompt {number}" for number in range(4)] * 2, max_tokens=400, ignore_eos=True)
        while streams.are_running:
            for number, replica in enumerate(server.get("/health").body["replicas"]):
                busy[number] |= replica["running"] > 0
        results = streams.join(30)
        assert [result.text for result in results[:4]] == [result.text for result in results[4:]]
    assert busy == [True, True]
    assert len(server.pids_of("SchedulerActor")) == 2
    assert len(server.pids_of("WorkerActor")) == 2
    assert len(server.pids_of("IngressActor")) == 1


def test_killing_the_driver_leaves_no_process_behind(server):
    server.start_streams(["going on and on"], ignore_eos=True, max_tokens=400)
    os.kill(server.process.pid, signal.SIGKILL)
    server.wait(5)
    assert server.wait_until_gone(10, but_agents=True) == {}
