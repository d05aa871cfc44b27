"""A deployment of one replica over two ranks; the last test kills one of them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.served import Served

ENDLESS = {"ignore_eos": True, "max_tokens": 480}


@pytest.fixture(scope="module")
def server(serve) -> Served:
    return serve("parallel.tensor_parallel_size=2")


def test_two_ranks_answer_and_say_so(server):
    reply = server.complete("hello the world", max_tokens=24, ignore_eos=True)
    assert reply.status == 200
    assert reply.body["usage"]["completion_tokens"] == 24
    (replica,) = server.get("/health").body["replicas"]
    assert replica["ranks_alive"] == replica["ranks"] == 2
    assert len(server.pids_of("WorkerActor")) == 2


def test_streams_at_once_get_the_answers_they_get_alone(server):
    prompts = [f"prompt number {number} of the" for number in range(4)]
    alone = [server.complete(prompt, max_tokens=16, ignore_eos=True).body["choices"][0]["text"] for prompt in prompts]
    together = server.start_streams(prompts, max_tokens=16, ignore_eos=True).join(30)
    assert [result.text for result in together] == alone


def test_the_start_was_told_in_phases_with_their_times(server):
    phases = ("connect", "model", "preflight", "placement", "actors", "rendezvous", "load", "profile", "serve")
    lines = server.output.splitlines()
    for phase in phases:
        assert any(line.startswith(f"{phase} ") and " s " in line for line in lines), phase
    assert "8 = 4+4 over the ranks, evenly" in server.output


def test_killing_a_rank_answers_every_stream_with_an_error_and_ends_the_deployment(server):
    streams = server.start_streams(["one", "two", "three"], **ENDLESS)
    victim = server.pids_of("WorkerActor")[1]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    results = streams.join(10)
    for result in results:
        assert result.ended_at - killed < 2.0
        assert result.error, result.events[-1:]
        assert "rank" in result.error
    assert server.wait(20) == 7, server.output
    (line,) = server.error_lines
    assert "rank" in line
    assert "killed" in line
    assert server.output.strip().endswith(line)
    assert server.wait_until_gone(5) == {}
