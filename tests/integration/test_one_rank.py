"""A deployment of one rank, used as its clients use it; the last test drains it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support.served import Served, processes_marked

ENDLESS = {"ignore_eos": True, "max_tokens": 480}


@pytest.fixture(scope="module")
def server(serve) -> Served:
    return serve("cache.num_blocks=96")  # 1,536 tokens: three endless requests fit, not four


def wait_until_idle(server: Served, timeout: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if all(replica["running"] == replica["waiting"] == 0 for replica in server.get("/health").body["replicas"]):
            return True
        time.sleep(0.02)
    return False


def test_a_completion_streams_the_text_it_also_gives_at_once(server):
    whole = server.complete("hello the world", max_tokens=24, ignore_eos=True)
    assert whole.status == 200
    assert whole.body["usage"]["completion_tokens"] == 24
    streamed = server.stream("hello the world", max_tokens=24, ignore_eos=True)
    assert streamed.text == whole.body["choices"][0]["text"]
    assert streamed.finish_reason == "length"
    assert streamed.is_done
    assert len(streamed.events) > 2


def test_a_conversation_goes_through_the_models_template(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200
    assert reply.body["choices"][0]["message"]["role"] == "assistant"


def test_requests_at_once_get_the_answers_they_get_alone(server):
    prompts = [f"prompt number {number} of the" for number in range(6)]
    alone = [server.complete(prompt, max_tokens=16, ignore_eos=True).body["choices"][0]["text"] for prompt in prompts]
    together = server.start_streams(prompts, max_tokens=16, ignore_eos=True).join(30)
    assert [result.text for result in together] == alone


def test_models_and_health_are_answered(server):
    assert server.get("/v1/models").body["data"][0]["id"] == "tiny-random"
    health = server.get("/health")
    assert health.status == 200
    assert health.body["status"] == "healthy"


def test_impossible_requests_are_refused_and_leave_the_engine_well(server):
    assert server.complete("x" * 2000, max_tokens=8).status == 400
    assert server.complete("", max_tokens=8).status == 400
    assert server.post("/v1/completions", {"prompt": [10**6], "max_tokens": 4}).status == 400
    assert server.post("/v1/completions", {"model": "other", "prompt": "x"}).status == 404
    assert server.get("/health").status == 200


def test_a_client_that_hangs_up_a_stream_frees_its_blocks(server):
    for _ in range(4):  # not all four would fit if one stayed
        connection, response = server.open_stream("the client leaves", **ENDLESS)
        assert response.readline().startswith(b"data: ")
        response.close()
        connection.close()
    assert wait_until_idle(server)


def test_a_client_that_hangs_up_while_it_waits_for_the_whole_answer_is_noticed_too(server):
    connection = server.connect()
    connection.request("POST", "/v1/completions", '{"prompt": "gone", "ignore_eos": true, "max_tokens": 480}')
    connection.close()
    assert wait_until_idle(server)


def test_neither_scheduler_nor_ingress_has_loaded_torch(server):
    (scheduler,) = server.pids_of("SchedulerActor")
    (ingress,) = server.pids_of("IngressActor")
    for pid in (server.process.pid, scheduler, ingress):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    (worker,) = server.pids_of("WorkerActor")
    assert "libtorch" in Path(f"/proc/{worker}/maps").read_text()


def test_a_private_cluster_has_no_process_that_nobody_talks_to(server):
    commands = processes_marked(server.mark).values()
    bystanders = ("dashboard/dashboard.py", "_private/monitor.py", "log_monitor.py", "ray::IDLE")
    assert [command for command in commands if any(name in command for name in bystanders)] == []


def test_ranks_run_at_the_priority_of_their_driver(server):
    (worker,) = server.pids_of("WorkerActor")
    assert Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[16] == str(os.nice(0))


def test_sigterm_lets_running_requests_finish_refuses_new_ones_and_leaves_nothing(server):
    streams = server.start_streams(["the last words", "and more of them"], **ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    refused = threading.Event()

    def knock() -> None:
        while not refused.is_set() and server.process.poll() is None:
            try:
                if server.complete("too late", max_tokens=1).status == 503:
                    refused.set()
            except OSError:
                return

    knocking = threading.Thread(target=knock)
    knocking.start()
    results = streams.join(30)
    assert server.wait(30) == 0, server.output
    knocking.join(10)
    assert [(result.finish_reason, result.is_done) for result in results] == [("length", True)] * 2
    assert refused.is_set()
    assert not server.error_lines
    assert server.wait_until_gone(5) == {}
