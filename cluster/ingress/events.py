"""The server-sent events of one answer: its chunks as they come, its usage if asked for, and its end.

Owns their bytes. What is in a chunk's choice is the endpoint's; sending them is `cluster.ingress.http`'s.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from cluster.errors import RequestError
from cluster.generation import Delta
from cluster.ingress.http import error_body
from cluster.ingress.job import Job

DONE = b"data: [DONE]\n\n"


class ChunkEncoder:
    """Events of one stream: the part that never changes is encoded once."""

    def __init__(self, head: dict[str, Any], *, includes_usage: bool) -> None:
        self.includes_usage = includes_usage
        self._head = b"data: " + json.dumps(head).encode()[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"
        self._encode = msgspec.json.Encoder().encode

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + self._encode(choice) + self._tail

    def usage(self, usage: dict[str, object]) -> bytes:
        return self._head + b'],"usage":' + self._encode(usage) + b"}\n\n"


async def answer_events(
    job: Job,
    encoder: ChunkEncoder,
    choice_of: Callable[[int, Delta], dict[str, Any]],
    opening: Sequence[dict[str, Any]] = (),
) -> AsyncGenerator[bytes, None]:
    """The whole stream: the choices of `opening`, one each, then those that `choice_of` makes of the job's deltas."""
    for choice in opening:
        yield encoder.chunk(choice)
    try:
        async for pairs in job.deltas():
            yield b"".join([encoder.chunk(choice_of(number, delta)) for number, delta in pairs])
    except RequestError as error:
        yield b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"
        return
    if encoder.includes_usage:
        yield encoder.usage(job.usage())
    yield DONE
