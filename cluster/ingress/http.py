"""HTTP without meaning: reading bodies, error bodies, sending events, and clients that hang up.

Owns what every endpoint does alike. Knows no endpoint and no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from cluster.errors import InvalidRequest, Overloaded, RequestError

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_S = 1
MAX_MESSAGE = 2000  # characters of an error

_Answer = TypeVar("_Answer")


class HttpError(RequestError):
    """A request that is wrong as HTTP: key, size, path, method."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class ClientGone(Exception):  # noqa: N818
    """Nobody is there to read an answer."""


async def read_body(request: Request, limit: int) -> bytes:
    """Raises: HttpError 413, as soon as the body is known to be longer than `limit` bytes; ClientGone."""
    too_long = HttpError(413, f"the body is longer than {limit} bytes (ingress.max_body_mib); send a shorter prompt")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise too_long
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_long
        if not message.get("more_body"):
            return bytes(body)


def check_key(request: Request, api_key: str | None) -> None:
    """Raises: HttpError 401."""
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise HttpError(401, "wrong or missing API key; send it as 'Authorization: Bearer ...'", "authentication_error")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_body(error: RequestError) -> dict[str, Any]:
    parameter = error.parameter if isinstance(error, InvalidRequest) else None
    message = str(error)
    if len(message) > MAX_MESSAGE:  # it quotes what the client sent
        message, parameter = message[:MAX_MESSAGE] + "...", None
    return {"error": {"message": message, "type": error.kind, "param": parameter, "code": error.status}}


async def answer_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, Overloaded) or error.status == 503 else None
    return json_response(error_body(error), error.status, headers)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    found = HttpError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return json_response(error_body(found), error.status_code, dict(error.headers or {}))


async def answer_client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def answer_crash(_: Request, error: Exception) -> Response:
    """The HTTP edge: whatever else went wrong; the server logs it with its traceback."""
    return json_response(error_body(RequestError(f"internal error: {type(error).__name__}")), 500)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """The answer of `work`, which is cancelled if the client hangs up first.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watcher)


class EventStream(Response):
    """Server-sent events. `events` yields whole events as bytes; `on_close` runs however the stream ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watcher = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self._on_close()
            await _cancel(pump, watcher)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
