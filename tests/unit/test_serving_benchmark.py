"""The serving benchmark: its workloads, its client against a small server, and its figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks import serve
from benchmarks.completion_client import Answer, CompletionClient, Dialect, complaint
from benchmarks.serving_figures import Slo, percentile, summarize
from benchmarks.workloads import CompletionRequest, Shape, Workload, arrival_times, draw, make_workload

REQUEST = CompletionRequest((100, 101, 102), 3)


def answer(*chunk_times: float, num_tokens: int | None = None, due: float = 0.0) -> Answer:
    count = len(chunk_times) if num_tokens is None else num_tokens
    return Answer(CompletionRequest((1,), count), due, due, list(chunk_times), 1, count, 0, "length")


# Workloads


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W3S", "W4"])
def test_the_same_seed_gives_the_same_requests_and_another_seed_others(name: str) -> None:
    first = make_workload(name, vocab_size=1000, seed=1)
    assert first == make_workload(name, vocab_size=1000, seed=1)
    assert first.requests != make_workload(name, vocab_size=1000, seed=2).requests


def test_requests_of_the_shared_prefix_workload_share_exactly_that() -> None:
    workload = make_workload("W3", vocab_size=5000)
    everyone = (*workload.cold, *workload.requests)
    assert len(workload.cold) == 1
    assert len(workload.requests) == 32
    assert {len(request.prompt) for request in everyone} == {1056}
    assert len({request.prompt[:1024] for request in everyone}) == 1
    assert len({request.prompt[1024:] for request in everyone}) == 33


def test_lengths_stay_in_their_range_and_ids_in_the_vocabulary() -> None:
    workload = make_workload("W1", vocab_size=300)
    assert workload.num_streams == len(workload.requests) == 64
    assert all(100 <= len(request.prompt) <= 512 for request in workload.requests)
    assert all(64 <= request.num_output_tokens <= 256 for request in workload.requests)
    assert {token for request in workload.requests for token in request.prompt} <= set(range(100, 300))


def test_a_scaled_workload_is_smaller_but_never_empty() -> None:
    workload = make_workload("W2", vocab_size=1000, scale=0.01)
    assert [len(request.prompt) for request in workload.requests] == [3]
    assert workload.requests[0].num_output_tokens == 2
    assert workload.num_streams == 1


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'W9'; give one of W1, W2"):
        make_workload("W9", vocab_size=1000)


def test_poisson_arrivals_keep_their_rate_and_their_seed() -> None:
    times = arrival_times(4000, 5.0, seed=3)
    assert times == arrival_times(4000, 5.0, seed=3)
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(5.0, rel=0.1)


# Figures


def test_percentiles_lie_between_the_two_nearest_values() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5


def test_latencies_count_from_when_a_request_was_due() -> None:
    figures = summarize([answer(11.0, 11.1, 11.3, due=10.0)], wall_s=2.0)
    assert figures["ttft_p50_ms"] == pytest.approx(1000)
    assert figures["tpot_p50_ms"] == pytest.approx(150)
    assert figures["itl_p99_ms"] == pytest.approx(199)
    assert figures["output_tokens_per_s"] == 1.5
    assert figures["total_tokens_per_s"] == 2.0


def test_a_chunk_of_several_tokens_is_no_gain_in_time_per_token() -> None:
    figures = summarize([answer(1.0, 2.0, num_tokens=5)], wall_s=1.0)
    assert figures["tpot_p50_ms"] == pytest.approx(250)
    assert figures["tokens_per_chunk"] == 2.5


def test_only_requests_within_the_slo_are_good() -> None:
    quick, slow = answer(0.5, 0.6), answer(3.0, 3.1)
    figures = summarize([quick, slow], wall_s=4.0, slo=Slo.parse("ttft=1000, tpot=200"))
    assert figures["good_share"] == 0.5
    assert figures["good_output_tokens_per_s"] == 0.5


def test_failed_requests_add_nothing_but_their_number() -> None:
    failed = Answer(REQUEST, 0.0, error="HTTP 500")
    figures = summarize([answer(1.0, 1.5), failed], wall_s=1.0)
    assert (figures["num_requests"], figures["num_failed"], figures["output_tokens"]) == (2, 1, 2)


def test_an_slo_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="'itl' is no part"):
        Slo.parse("itl=5")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"num_completion_tokens": 2}, "asked for 3 tokens, got 2"),
        ({"num_prompt_tokens": 4}, "sent 3 prompt tokens, the server counted 4"),
        ({"finish_reason": "stop"}, "finished because of 'stop'"),
        ({"chunk_times": []}, "without a token"),
    ],
)
def test_an_answer_must_hold_exactly_what_was_asked_for(change: dict[str, Any], expected: str | None) -> None:
    found = Answer(REQUEST, 0.0, 0.0, [1.0, 2.0, 3.0], 3, 3, 0, "length")
    for name, value in change.items():
        setattr(found, name, value)
    said = complaint(found)
    assert (said is None) if expected is None else (said is not None and expected in said)


# The client


@dataclass
class StreamingServer:
    """Answers every POST with the events that `script` makes of its body; counts how many it answers at once."""

    script: Callable[[dict[str, Any]], Sequence[bytes]]
    url: str = ""
    num_open: int = 0
    most_open: int = 0
    answering: set[asyncio.Task[None]] = field(default_factory=set)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self.answer(reader, writer))
        self.answering.add(task)
        await task

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for data in self.script(body):
            await asyncio.sleep(0.001)
            writer.write(data)
        self.num_open -= 1  # nothing was awaited since the last event, so the client has not seen it
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def serving(script: Callable[[dict[str, Any]], Sequence[bytes]]) -> AsyncIterator[StreamingServer]:
    fake = StreamingServer(script)
    listener = await asyncio.start_server(fake.accept, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield fake
        await asyncio.wait_for(asyncio.gather(*fake.answering), timeout=5)


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def well_behaved(body: dict[str, Any]) -> list[bytes]:
    count, prompt = body["max_tokens"], len(body["prompt"])
    reasons = [None] * (count - 1) + ["length"]
    events = [event(choices=[{"text": "x", "finish_reason": reason}]) for reason in reasons]
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 1}}
    # Split where no event ends: a read from the network may.
    whole = b"".join([b": a comment\n\n", *events, event(choices=[], usage=usage), b"data: [DONE]\n\n"])
    return [whole[:50], whole[50:131], whole[131:]]


def ask(script: Callable[[dict[str, Any]], Sequence[bytes]], dialect: Dialect | None = None) -> Answer:
    async def one() -> Answer:
        async with serving(script) as fake, CompletionClient(fake.url, dialect or Dialect("m"), timeout_s=5) as client:
            return await client.complete(REQUEST)

    return asyncio.run(one())


def test_the_client_reads_a_stream_that_is_cut_anywhere() -> None:
    found = ask(well_behaved)
    assert found.error is None
    assert (len(found.chunk_times), found.num_output_tokens, found.num_cached_tokens) == (3, 3, 1)


def test_a_reason_in_a_chunk_of_its_own_is_no_token() -> None:
    def script(body: dict[str, Any]) -> list[bytes]:
        tokens = [event(choices=[{"text": "x", "finish_reason": None}])] * 3
        return [*tokens, event(choices=[{"text": "", "finish_reason": "length"}]), b"data: [DONE]\n\n"]

    found = ask(script)
    assert (found.error, len(found.chunk_times)) == (None, 3)


def test_an_error_within_the_stream_is_the_answers_error() -> None:
    found = ask(lambda body: [event(choices=[{"text": "x"}]), event(error={"message": "rank 1 died"})])
    assert "rank 1 died" in (found.error or "")


def test_a_server_that_is_not_there_fails_the_request_alone() -> None:
    async def one() -> Answer:
        async with CompletionClient("http://127.0.0.1:1", Dialect("m"), timeout_s=5) as client:
            return await client.complete(REQUEST)

    assert "Connect" in (asyncio.run(one()).error or "")


def test_a_dialect_leaves_fields_out_and_sends_texts() -> None:
    dialect = Dialect("m", frozenset({"ignore_eos"}), {"priority": 1}, prompt_text=lambda ids: f"{len(ids)} ids")
    body = json.loads(dialect.body(REQUEST))
    assert (body["prompt"], body["priority"]) == ("3 ids", 1)
    assert "ignore_eos" not in body


def run_workload(workload: Workload, **options: Any) -> tuple[dict[str, Any], StreamingServer]:
    async def work() -> tuple[dict[str, Any], StreamingServer]:
        async with serving(well_behaved) as fake:
            found = await serve.run(fake.url, Dialect("m"), [workload], vocab_size=1000, timeout_s=5, **options)
            return found[0], fake

    return asyncio.run(work())


def test_a_closed_loop_never_has_more_requests_open_than_streams() -> None:
    workload = draw("own", Shape(12, 3, (4, 4), (2, 5)), vocab_size=1000, seed=0)
    figures, fake = run_workload(workload)
    assert fake.most_open == 3
    assert figures["errors"] == []
    assert figures["output_tokens"] == sum(request.num_output_tokens for request in workload.requests)


def test_an_open_loop_sends_on_time_whether_or_not_the_server_is_done() -> None:
    workload = draw("own", Shape(20, 1, (4, 4), (2, 2)), vocab_size=1000, seed=0)
    figures, fake = run_workload(workload, rate=5000.0)
    assert fake.most_open > 1
    assert (figures["num_failed"], figures["rate"]) == (0, 5000.0)


def test_the_table_has_a_row_for_each_workload() -> None:
    figures, _ = run_workload(make_workload("W3S", vocab_size=1000, scale=0.2))
    assert "| W3S | 2 of 2 |" in serve.table([figures])
    assert "cold TTFT, ms" in serve.table([figures])
