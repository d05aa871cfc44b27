"""The asyncio end of one ingress stream: one scheduler, its state, and the requests open there.

Owns connecting, connecting again after a loss, and handing tokens to their `Generation`. A lost or silent scheduler
fails what was open there. Knows nothing of the other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from cluster.errors import (
    DeadlineExceeded,
    GenerationFailed,
    HandshakeRefused,
    InvalidRequest,
    MalformedFrame,
    RequestError,
    TransportError,
    Unavailable,
)
from cluster.frames import FrameKind, FrameReader, Hello, check_welcome, encode_frame
from cluster.generation import Generation
from cluster.protocol import (
    Abort,
    Accepted,
    Failed,
    Refused,
    Status,
    TokenBatch,
    decode_from_scheduler,
    encode_message,
    refusal_as_error,
    unpack_scores,
)
from cluster.transport import HANDSHAKE_TIMEOUT_S, Address

log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S = 15.0
"""A scheduler reports its state every second; one that has been silent for this long is stopped or cut off."""

RECONNECT_PERIOD_S = 0.5
_LOOKS = 10  # in that time
_MAX_UNSENT = 64 * 1024 * 1024
_GREETING = frozenset({FrameKind.WELCOME, FrameKind.REFUSED})
_TALK = frozenset({FrameKind.MESSAGE})


class ReplicaClient:
    """`run` keeps it connected until cancelled. `status` is None while there is no connection."""

    def __init__(self, address: Address, *, token: str, name: str, on_change: Callable[[], None]) -> None:
        self.address = address
        self.status: Status | None = None
        self.last_error = "not connected yet"
        self.open: dict[int, Generation] = {}
        self._hello = Hello(token=token, role="ingress", name=name)
        self._on_change = on_change
        self._stream: _Stream | None = None

    @property
    def load(self) -> int:
        """Requests there: as many as we opened, or more if others use it too."""
        reported = 0 if self.status is None else self.status.num_running + self.status.num_waiting
        return max(reported, len(self.open))

    def submit(self, generation: Generation) -> None:
        """Send the request; the answer comes through `generation`.

        Raises:
            Unavailable: not connected, or the scheduler does not read.
            InvalidRequest: the request cannot be written down.
        """
        if self._stream is None or self.status is None:
            raise Unavailable(f"no connection to the scheduler at {self.address}: {self.last_error}")
        if self._stream.num_unsent > _MAX_UNSENT:
            raise Unavailable(f"the scheduler at {self.address} does not read")
        try:
            frame = encode_message(generation.message())
        except (OverflowError, MalformedFrame) as error:
            raise InvalidRequest(f"a number or the prompt is too large: {error}") from error
        self._stream.send(frame)
        self.open[generation.request_id] = generation
        generation.on_enough = lambda index: self.abort(generation, index)

    def abort(self, generation: Generation, index: int | None = None) -> None:
        """Forget the request, here and there, or only text `index` of it. Finished ones are no error."""
        if generation.request_id not in self.open or self._stream is None:
            return
        self._stream.send(encode_message(Abort(generation.request_id, index)))
        if index is None or generation.is_finished:
            del self.open[generation.request_id]

    async def run(self) -> None:
        while True:
            try:
                await self._talk()
            except (TransportError, OSError, TimeoutError) as error:
                self._lose(str(error) or type(error).__name__)
            await asyncio.sleep(RECONNECT_PERIOD_S)

    async def _talk(self) -> None:
        """One connection, from its greeting to its end. Always ends with an exception."""
        stream = _Stream(self._on_message)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _open(self.address, stream)
                stream.send(encode_frame(FrameKind.HELLO, msgspec.msgpack.encode(self._hello)))
                await stream.welcomed.wait()
            self._stream = stream
            await self._watch(stream)
        finally:
            self._stream = None
            stream.close()
        if isinstance(stream.error, HandshakeRefused):
            log.error("%s: %s", self.address, stream.error)
        raise stream.error or TransportError("the scheduler closed the stream")

    async def _watch(self, stream: _Stream) -> None:
        num_silent_looks = 0  # not by the clock: while this process stands still, nobody else is to blame
        while not stream.closed.is_set():
            num_bytes = stream.num_received
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stream.closed.wait(), SILENCE_TIMEOUT_S / _LOOKS)
            num_silent_looks = num_silent_looks + 1 if stream.num_received == num_bytes else 0
            if not stream.closed.is_set() and num_silent_looks == _LOOKS:
                raise DeadlineExceeded(f"no sign of life for {SILENCE_TIMEOUT_S:g} s")

    def _lose(self, reason: str) -> None:
        self.last_error = reason
        if self.status is not None:
            log.warning("lost the scheduler at %s: %s", self.address, reason)
        self.status = None
        lost, self.open = self.open, {}
        for generation in lost.values():
            generation.fail(GenerationFailed(f"the scheduler at {self.address} was lost: {reason}"))
        self._on_change()

    def _on_message(self, payload: bytes) -> None:
        message = decode_from_scheduler(payload)
        if isinstance(message, TokenBatch):
            self._deliver(message)
        elif isinstance(message, Status):
            self.status = message
            self._on_change()
        elif isinstance(message, Accepted):
            if message.request_id in self.open:
                self.open[message.request_id].accepted.set()
        elif (generation := self.open.pop(message.request_id, None)) is not None:
            generation.fail(_as_error(message))

    def _deliver(self, batch: TokenBatch) -> None:
        ends, cached, logprobs = batch.ends, batch.cached, batch.logprobs
        for row, (request_id, index, token) in enumerate(
            zip(batch.request_ids, batch.indices, batch.tokens, strict=True)
        ):
            generation = self.open.get(request_id)
            if generation is None:
                continue  # aborted meanwhile
            if row in cached and index == 0:  # the prompt is computed once; the other texts found it there
                generation.num_cached_tokens = cached[row]
            if row in batch.prompt_logprobs:
                generation.prompt_logprobs = unpack_scores(batch.prompt_logprobs[row])
            scores = unpack_scores(logprobs[row]) if row in logprobs else None
            generation.push(index, token, ends.get(row), scores)
            if row in ends and generation.is_finished:
                self.open.pop(request_id, None)


class _Stream(asyncio.Protocol):
    """Frames over an asyncio transport; reads a greeting first, then messages."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.welcomed = asyncio.Event()
        self.closed = asyncio.Event()
        self.error: Exception | None = None
        self.num_received = 0
        self._on_message = on_message
        self._reader = FrameReader(_GREETING | _TALK)
        self._transport: asyncio.Transport | None = None

    @property
    def num_unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        self.num_received += len(data)
        try:
            for frame in self._reader.feed(data):
                if self.welcomed.is_set():
                    self._on_message(frame[1])
                else:
                    check_welcome(frame)
                    self._reader.allowed = _TALK
                    self.welcomed.set()
        except TransportError as error:
            self.error = error
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = self.error or exc
        self.welcomed.set()
        self.closed.set()


async def _open(address: Address, stream: _Stream) -> None:
    loop = asyncio.get_running_loop()
    if address.unix_name:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, "\0" + address.unix_name)
            await loop.create_unix_connection(lambda: stream, sock=sock)
            return
        except OSError:  # the scheduler is on another machine
            sock.close()
    await loop.create_connection(lambda: stream, address.host, address.port)


def _as_error(message: Refused | Failed) -> RequestError:
    return refusal_as_error(message) if isinstance(message, Refused) else GenerationFailed(message.reason)
