"""A streaming client of /v1/completions that notes when each chunk came.

Owns HTTP, the event stream and the check that an answer holds exactly the tokens asked for. Works with every server
that speaks the OpenAI API; what a server does not understand is left out (`Dialect`). Knows no workloads and no
statistics.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from benchmarks.workloads import CompletionRequest

READ_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server wants to be asked.

    `prompt_text`: for a server that takes no token ids; its count of prompt tokens is then not checked.
    """

    model: str
    omitted: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)
    prompt_text: Callable[[tuple[int, ...]], str] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self, request: CompletionRequest) -> bytes:
        content: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt_text(request.prompt) if self.prompt_text else list(request.prompt),
            "max_tokens": request.num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode({k: v for k, v in content.items() if k not in self.omitted} | self.extra)


@dataclass(slots=True)
class Answer:
    """What came back. Times are `time.perf_counter()`; `due` is when it should have been sent, `sent` when it was."""

    request: CompletionRequest
    due: float
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)  # of chunks with a choice
    num_prompt_tokens: int | None = None  # as the server counts; None: it does not say
    num_completion_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.chunk_times) if self.num_completion_tokens is None else self.num_completion_tokens

    @property
    def ttft(self) -> float:
        """From when it was due: a client that fell behind does not flatter the server."""
        return self.chunk_times[0] - self.due

    @property
    def latency(self) -> float:
        return self.chunk_times[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        count = self.num_output_tokens - 1
        return (self.chunk_times[-1] - self.chunk_times[0]) / count if count > 0 else None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class CompletionClient:
    """One session with one server. A connection serves one request: not every server keeps it open after a stream."""

    def __init__(self, url: str, dialect: Dialect, *, timeout_s: float) -> None:
        self._url = url.rstrip("/") + "/v1/completions"
        self._dialect = dialect
        self._timeout_s = timeout_s
        self._decoder = msgspec.json.Decoder(_Chunk)

    async def __aenter__(self) -> CompletionClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={"Content-Type": "application/json"} | self._dialect.headers,
            read_bufsize=READ_SIZE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(self, request: CompletionRequest, due: float | None = None) -> Answer:
        """Never raises because of the server: what went wrong is the answer's `error`."""
        body = self._dialect.body(request)
        now = time.perf_counter()
        answer = Answer(request, due=now if due is None else due, sent=now)
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return answer
                async for event in _events(response.content):
                    self._take(answer, event)
        except (aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
            answer.error = repr(error)[:300]
            return answer
        answer.error = answer.error or complaint(answer, counts_prompt=self._dialect.prompt_text is None)
        return answer

    def _take(self, answer: Answer, event: bytes) -> None:
        chunk = self._decoder.decode(event)
        if chunk.error is not None:
            answer.error = str(chunk.error)[:300]
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            answer.num_prompt_tokens = chunk.usage.prompt_tokens
            answer.num_completion_tokens = chunk.usage.completion_tokens
            answer.num_cached_tokens = details.cached_tokens if details else answer.num_cached_tokens
        if chunk.choices:
            choice = chunk.choices[0]
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            # Some servers say why they finished in a chunk of its own, after the last token's.
            if choice.text or not choice.finish_reason or len(answer.chunk_times) < answer.request.num_output_tokens:
                answer.chunk_times.append(time.perf_counter())


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event of a server-sent event stream, one line each, until [DONE]."""
    rest = b""
    async for data in stream.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                return
            yield event


def complaint(answer: Answer, *, counts_prompt: bool = True) -> str | None:
    """What is wrong with an answer that came without an error."""
    request = answer.request
    if not answer.chunk_times:
        return "the stream ended without a token"
    if answer.num_output_tokens != request.num_output_tokens:
        how = "chunks" if answer.num_completion_tokens is None else "tokens"
        return f"asked for {request.num_output_tokens} tokens, got {answer.num_output_tokens} {how}"
    if counts_prompt and answer.num_prompt_tokens not in (None, len(request.prompt)):
        return f"sent {len(request.prompt)} prompt tokens, the server counted {answer.num_prompt_tokens}"
    if answer.finish_reason not in (None, "length"):
        return f"finished because of {answer.finish_reason!r}, not its length"
    return None
