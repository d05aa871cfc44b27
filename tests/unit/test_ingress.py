"""The HTTP door over a whole small engine: the OpenAI API, its errors, its streams, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import InvalidRequest
from cluster.ingress.completions import CompletionAnswer
from cluster.ingress.schemas import CompletionBody, parse_body
from cluster.text.tokenizer import Tokenizer
from configs.schema import IngressConfig
from tests.support.fake_ranks import NUM_TOKENS, expected_tokens
from tests.support.small_engine import SmallEngine, make_config, running_engine
from tests.support.small_server import running_server
from tests.support.tiny_text import write_tiny_tokenizer

TEMPLATED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "hello"}]
KEY = "key of the tests"


@dataclass
class Door:
    engine: SmallEngine
    http: httpx.Client
    tokenizer: Tokenizer

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """Every event of a stream, decoded; "[DONE]" as it is."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def text(self, prompt: str | list[int], num_tokens: int = 16) -> str:
        """What the fake ranks must have said."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self.tokenizer.decode(expected_tokens(ids, num_tokens))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def door(directory: Path) -> Iterator[Door]:
    config = IngressConfig(api_key=KEY, max_body_mib=0.05)
    with (
        running_engine() as engine,
        running_server([engine], directory, config) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=10.0) as client,
    ):
        yield Door(engine, client, Tokenizer(directory))


@pytest.fixture
def slow_door(directory: Path) -> Iterator[Door]:
    """An engine of its own, to be broken or kept busy."""
    with (
        running_engine(make_config(max_num_seqs=2, max_num_waiting=1), seconds_per_step=0.005) as engine,
        running_server([engine], directory, IngressConfig()) as server,
        httpx.Client(base_url=server.url, timeout=10.0) as client,
    ):
        yield Door(engine, client, Tokenizer(directory))


# -- completions -------------------------------------------------------------------------------------------------


def test_a_completion_is_the_text_of_the_engine_s_tokens(door: Door) -> None:
    answer = door.ok("/v1/completions", model="tiny", prompt="hello world", max_tokens=20)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["text"] == door.text("hello world", 20)
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    num_prompt = len(door.tokenizer.encode("hello world"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 20,
        "total_tokens": num_prompt + 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_without_max_tokens_a_completion_has_sixteen(door: Door) -> None:
    assert door.ok("/v1/completions", prompt="x")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["one", ["one"], [111, 110, 101], [[111, 110, 101]]])
def test_a_prompt_is_text_or_token_ids_one_or_many(door: Door, prompt: Any) -> None:
    assert door.ok("/v1/completions", prompt=prompt)["choices"][0]["text"] == door.text("one")


def test_several_prompts_and_several_texts_of_each_are_numbered_in_order(door: Door) -> None:
    answer = door.ok("/v1/completions", prompt=["one", "two"], n=2, temperature=0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [door.text("one")] * 2 + [door.text("two")] * 2
    assert answer["usage"]["completion_tokens"] == 64


def test_a_stream_joins_to_the_plain_answer_and_ends_with_usage_and_done(door: Door) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 30}
    *chunks, usage, done = door.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 60
    texts = ["", ""]
    reasons = [None, None]
    for chunk in chunks:
        assert chunk["usage"] is None
        assert chunk["object"] == "text_completion"
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [door.text("one", 30), door.text("two", 30)]
    assert reasons == ["length", "length"]


def test_a_stream_without_usage_has_no_word_of_it(door: Door) -> None:
    *chunks, _ = door.events("/v1/completions", prompt="one")
    assert all("usage" not in chunk for chunk in chunks)


def test_echo_puts_the_prompt_before_the_text(door: Door) -> None:
    assert door.ok("/v1/completions", prompt="one", echo=True)["choices"][0]["text"] == "one" + door.text("one")
    chunks = door.events("/v1/completions", prompt=[111, 110, 101], echo=True)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one" + door.text("one")


def test_echo_with_max_tokens_zero_is_the_prompt_alone(door: Door) -> None:
    answer = door.ok("/v1/completions", prompt="one", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "one"
    assert answer["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_a_completion_are_parallel_lists(door: Door) -> None:
    answer = door.ok("/v1/completions", prompt="one", max_tokens=3, logprobs=2)
    found = answer["choices"][0]["logprobs"]
    tokens = expected_tokens([111, 110, 101], 3)
    names = [chr(token) for token in tokens]
    assert found["tokens"] == names
    assert found["token_logprobs"] == [-0.5] * 3
    assert found["text_offset"] == [0, 1, 2]
    assert found["top_logprobs"][0] == {names[0]: -0.5, chr(tokens[0] + 1): -1.0, chr(tokens[0] + 2): -2.0}


def test_echo_with_log_probabilities_scores_the_prompt_too(door: Door) -> None:
    prompt = "a longer prompt than one chunk of prefill holds, twice over and more"
    for answer in (
        door.ok("/v1/completions", prompt=prompt, max_tokens=2, logprobs=1, echo=True)["choices"][0],
        door.events("/v1/completions", prompt=prompt, max_tokens=1, logprobs=1, echo=True)[0]["choices"][0],
        door.ok("/v1/completions", prompt=prompt, max_tokens=0, logprobs=1, echo=True)["choices"][0],
    ):
        scores = answer["logprobs"]
        assert "".join(scores["tokens"]) == answer["text"]
        assert answer["text"].startswith(prompt)
        assert scores["token_logprobs"] == [None] + [-0.5] * (len(scores["tokens"]) - 1)
        assert scores["text_offset"][1] == len(scores["tokens"][0])


def test_a_stop_string_is_never_shown_unless_asked_for(door: Door) -> None:
    whole = door.text("one", 40)
    stop = whole[10:12]
    cut = whole.index(stop)
    [choice] = door.ok("/v1/completions", prompt="one", max_tokens=40, stop=[stop, "never"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole[:cut], "stop", stop)
    chunks = door.events("/v1/completions", prompt="one", max_tokens=40, stop=stop, include_stop_str_in_output=True)[
        :-1
    ]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:cut] + stop


def test_a_stop_token_ends_the_text_and_is_hidden(door: Door) -> None:
    tokens = expected_tokens([111, 110, 101], 5)
    at = tokens.index(tokens[4])
    [choice] = door.ok("/v1/completions", prompt="one", stop_token_ids=[tokens[4]])["choices"]
    assert choice["text"] == door.tokenizer.decode(tokens[:at])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[4])


def test_cached_tokens_are_part_of_usage(door: Door) -> None:
    prompt = list(range(32, 80))
    cached = [
        door.ok("/v1/completions", prompt=prompt, cache_salt="mine")["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 32]


def test_what_the_texts_of_one_prompt_share_is_not_cached(door: Door) -> None:
    usage = door.ok("/v1/completions", prompt=list(range(30, 70)), cache_salt="nobody's", n=3)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (40, {"cached_tokens": 0})


def test_every_parameter_of_openai_and_ours_is_taken(door: Door) -> None:
    extensions = {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    more = {"stop_token_ids": [1], "priority": 3, "cache_salt": "s", "skip_special_tokens": False}
    standard = {"temperature": 1, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 1, "seed": -5}
    last = {"logit_bias": {"5": -10}, "user": "u", "best_of": 1, "suffix": None, "stream_options": None}
    door.ok("/v1/completions", prompt="one", **extensions, **more, **standard, **last)


# -- chat --------------------------------------------------------------------------------------------------------


def test_a_chat_goes_through_the_template_and_up_to_its_limit(door: Door) -> None:
    answer = door.ok("/v1/chat/completions", model="tiny", messages=MESSAGES, max_completion_tokens=12)
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": door.text(TEMPLATED, 12), "refusal": None}
    assert choice["finish_reason"] == "length"


def test_text_parts_of_a_message_are_joined(door: Door) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answer = door.ok("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=5)
    assert answer["choices"][0]["message"]["content"] == door.text(TEMPLATED, 5)


def test_a_streamed_chat_opens_with_the_role(door: Door) -> None:
    first, *chunks, done = door.events("/v1/chat/completions", messages=MESSAGES, max_tokens=12)
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == door.text(TEMPLATED, 12)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_of_a_chat_are_objects_with_bytes(door: Door) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    content = door.ok("/v1/chat/completions", **body)["choices"][0]["logprobs"]["content"]
    token = expected_tokens(door.tokenizer.encode(TEMPLATED), 1)[0]
    after = (token + 1) % NUM_TOKENS
    alternative = {"token": chr(after), "logprob": -1.0, "bytes": [after]}
    assert content[0] == {"token": chr(token), "logprob": -0.5, "bytes": [token], "top_logprobs": [alternative]}
    chunks = door.events("/v1/chat/completions", **body)[1:-1]
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == content


# -- information -------------------------------------------------------------------------------------------------


def test_the_model_is_listed_with_its_limit(door: Door) -> None:
    [model] = door.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 512)


def test_one_model_is_described_by_its_name_and_any_other_is_not_here(door: Door) -> None:
    listed = door.http.get("/v1/models").json()["data"]
    assert [door.http.get("/v1/models/tiny").json()] == listed
    assert door.http.get("/v1/models/some/other").status_code == 404
    assert door.http.get("/v1/models/tiny", headers={"Authorization": ""}).status_code == 401


def test_health_needs_no_key_and_says_what_there_is(door: Door) -> None:
    response = httpx.get(f"{door.http.base_url}/health")
    assert response.status_code == 200
    assert response.json()["status"] == "healthy"
    assert response.json()["replicas"][0]["ranks_alive"] == 1


# -- errors ------------------------------------------------------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {}, "missing parameter `prompt`"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt is an empty list"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt is a mixed list"),
        (COMPLETIONS, {"prompt": [1] * 600}, "600 tokens"),
        (COMPLETIONS, {"prompt": [1, 264]}, "token id 264 in the prompt is out of range; legal ids are 0 to 263"),
        (COMPLETIONS, {"prompt": [-1]}, "token id -1"),
        (COMPLETIONS, {"prompt": [2**40]}, "token ids must lie"),
        (COMPLETIONS, {"prompt": [-1], "echo": True}, "token id -1"),
        (COMPLETIONS, {"prompt": [2**40], "echo": True}, "token ids must lie"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 600}, "ask for at most 511 tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        (COMPLETIONS, {"prompt": "x", "priority": 2**70}, "too large"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature is -1"),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "Expected `float"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p is 0"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n is 0"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs is 21; give a value from 0 to 20"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "must name a token id"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 10**400}, "give a value from 1 to"),
        (COMPLETIONS, {"prompt": "x", "temperature": 10**400}, "out of range"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"--5": 1}}, "must name a token id"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "must name a token id"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias[5] is 101"),
        (COMPLETIONS, {"prompt": ["x"] * 1025}, "1025 prompts in one request; give at most 1024"),
        (COMPLETIONS, {"prompt": "x", "y" * 9000: 1}, "unknown parameter yyy"),
        (COMPLETIONS, {"prompt": "x" * 40_000}, "40,000 characters, more than the model's limit of 512 tokens"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, "none of them empty"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of must equal n"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        (COMPLETIONS, {"prompt": "x", "max_token": 5}, "unknown parameter max_token; did you mean max_tokens?"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "needs stream: true"),
        (CHAT, {"messages": []}, "messages is empty"),
        (CHAT, {"messages": [{"role": "user"}] * 600}, "600 messages are more than the model's limit of 512 tokens"),
        (CHAT, {"messages": [{"content": "x"}]}, r"messages[0] has no role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not supported"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools is not supported"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "only"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot hold"),
        (CHAT, {"messages": MESSAGES, "continue_final_message": True}, "last message of the assistant"),
    ],
)
def test_a_bad_request_is_answered_with_the_remedy(door: Door, path: str, body: dict[str, Any], message: str) -> None:
    response = door.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"]
    assert len(response.content) < 3000
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)


def test_any_name_may_stand_among_the_template_s_arguments(door: Door) -> None:
    arguments = {"self": 1, "tools": None, "text": 2, "": 3}
    answer = door.ok(CHAT, messages=MESSAGES, chat_template_kwargs=arguments, max_tokens=4)
    assert answer["choices"][0]["message"]["content"] == door.text(TEMPLATED, 4)


def test_a_bad_request_is_a_status_in_a_stream_too(door: Door) -> None:
    assert door.post(COMPLETIONS, prompt=[1] * 600, stream=True).status_code == 400


def test_a_field_s_name_of_megabytes_is_refused_at_once() -> None:
    body = b'{"' + b"max_tokens" * 800_000 + b'": 1}'
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="unknown parameter max_tokens"):
        parse_body(body, CompletionBody)
    assert time.process_time() - started < 0.3  # a second and more, where all of it is looked at


def test_others_have_their_turn_while_a_thousand_texts_are_tokenized() -> None:
    """The order in which texts are encoded and a neighbour of theirs runs, in the loop of one process."""
    events: list[str] = []

    class Watched:
        async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            events.append(text)
            return [1]

        async def submit(self, *_: Any) -> None:
            raise InvalidRequest("enough")

    async def neighbour() -> None:
        while len(events) < 20:
            events.append("neighbour")
            await asyncio.sleep(0)

    async def both() -> None:
        body = CompletionBody(prompt=["text"] * 10)
        await asyncio.gather(CompletionAnswer.start(Watched(), body, {}), neighbour(), return_exceptions=True)  # type: ignore[arg-type]

    asyncio.run(both())
    assert events[:8] == ["text", "neighbour"] * 4


def test_one_bad_prompt_of_several_leaves_nothing_running(door: Door) -> None:
    assert door.post(COMPLETIONS, prompt=[[1], [999]], max_tokens=400).status_code == 400
    assert wait_until(lambda: not door.engine.scheduler.has_unfinished)


@pytest.mark.parametrize(
    ("send", "status"),
    [
        (lambda http: http.post(COMPLETIONS, json={"prompt": "x", "model": "other"}), 404),
        (lambda http: http.get("/v2/nothing"), 404),
        (lambda http: http.get(COMPLETIONS), 405),
        (lambda http: http.post(COMPLETIONS, content=b"{"), 400),
        (lambda http: http.post(COMPLETIONS, content=b"\xff"), 400),
        (lambda http: http.post(COMPLETIONS, content=rb'{"prompt": "\ud800"}'), 400),
        (lambda http: http.post(COMPLETIONS, content=b"[" * 50_000), 400),
        (lambda http: http.post(COMPLETIONS, json={"prompt": "x" * 60_000}), 413),
        (lambda http: http.post(COMPLETIONS, content=iter([b"x" * 30_000] * 2)), 413),
        (lambda http: http.post(COMPLETIONS, json={"prompt": "x"}, headers={"Authorization": "Bearer no"}), 401),
        (lambda http: http.get("/v1/models", headers={"Authorization": ""}), 401),
    ],
)
def test_other_errors_have_their_status_and_openai_s_body(
    door: Door, send: Callable[[httpx.Client], httpx.Response], status: int
) -> None:
    response = send(door.http)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert response.json()["error"]["message"]


# -- trouble -----------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_and_says_when_to_come_again(slow_door: Door) -> None:
    slow_door.engine.ranks[0].model.blocked.set()
    response = slow_door.post(COMPLETIONS, prompt=["a", "b", "c", "d", "e", "f"], max_tokens=100)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_lost_rank_ends_the_stream_with_an_error_event(slow_door: Door) -> None:
    events = []
    with slow_door.http.stream(
        "POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 400, "stream": True}
    ) as response:
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                if len(events) == 3:
                    slow_door.engine.ranks[0].die()
    assert "[DONE]" not in events
    assert "rank 0 on node test, pid 1000 died" in json.loads(events[-1])["error"]["message"]
    health = slow_door.http.get("/health")
    assert health.status_code == 503
    assert "rank 0 on node test" in health.json()["problems"][0]
    refused = slow_door.post(COMPLETIONS, prompt="x")
    assert refused.status_code == 503
    assert "rank 0 on node test" in refused.json()["error"]["message"]


def test_a_lost_rank_is_a_500_where_nothing_was_sent_yet(slow_door: Door) -> None:
    slow_door.engine.ranks[0].model.broken = "device lost"
    response = slow_door.post(COMPLETIONS, prompt="x")
    assert response.status_code == 500
    assert "device lost" in response.json()["error"]["message"]


def test_a_draining_engine_is_503(slow_door: Door) -> None:
    assert slow_door.engine.loop.drain(1.0)
    assert wait_until(lambda: slow_door.http.get("/health").status_code == 503)
    response = slow_door.post(COMPLETIONS, prompt="x")
    assert response.status_code == 503
    assert "draining" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_aborts_its_request(slow_door: Door, stream: bool) -> None:
    url = slow_door.http.base_url
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((url.host, url.port), timeout=5.0) as sock:
        sock.sendall(head + body)
        if stream:
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert wait_until(lambda: slow_door.engine.scheduler.has_unfinished)
    assert wait_until(lambda: not slow_door.engine.scheduler.has_unfinished)
    assert slow_door.engine.scheduler.stats().num_sampled_tokens < 350


def wait_until(condition: Callable[[], bool], timeout: float = 3.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
