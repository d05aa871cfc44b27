"""Strangers at the engine's door: accepted connections that have not presented themselves yet.

Owns the handshake without blocking: the deadline for the greeting, the number of strangers at a time, the welcome and
the refusal. Knows nothing of what ranks and ingresses do afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

import msgspec

from cluster.errors import HandshakeRefused, TransportError
from cluster.frames import Frame, FrameKind, Hello, Welcome, check_hello, encode_frame
from cluster.reactor import Reactor
from cluster.transport import HANDSHAKE_TIMEOUT_S, QueuedConnection

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
_MAX_PENDING = 64 * 1024
_GREETING = frozenset({FrameKind.HELLO})

Admit = Callable[[Hello, QueuedConnection, bytes], None]


class Greeter:
    """`admit(hello, connection, welcome)` takes a connection over and sends the welcome, or raises HandshakeRefused."""

    def __init__(
        self, reactor: Reactor, *, token: str, engine_epoch: int, clock: Callable[[], float], admit: Admit
    ) -> None:
        self._reactor = reactor
        self._token = token
        self._welcome = encode_frame(FrameKind.WELCOME, msgspec.msgpack.encode(Welcome(engine_epoch)))
        self._clock = clock
        self._admit = admit
        self._deadlines: dict[QueuedConnection, float] = {}

    def on_peer(self, sock: socket.socket) -> None:
        """A new connection, whoever it is. Whoever has been silent for longest makes room: our own greet at once."""
        if len(self._deadlines) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._deadlines)), "too many others wait to be greeted")
        connection = QueuedConnection(sock, allowed=_GREETING, max_pending=_MAX_PENDING)
        self._deadlines[connection] = self._clock() + HANDSHAKE_TIMEOUT_S
        self._reactor.add(
            connection, lambda frames: self._on_frames(connection, frames), lambda _: self._forget(connection)
        )

    def check(self, now: float) -> None:
        """Dismiss those who have been silent for too long."""
        for connection, deadline in list(self._deadlines.items()):
            if now >= deadline:
                self._dismiss(connection, f"no greeting within {HANDSHAKE_TIMEOUT_S:g} s")

    def _on_frames(self, connection: QueuedConnection, frames: list[Frame]) -> None:
        try:
            if len(frames) > 1:
                raise HandshakeRefused("frames before the welcome")
            hello = check_hello(frames[0][1], self._token)
            self._admit(hello, connection, self._welcome)
        except HandshakeRefused as error:
            self._dismiss(connection, str(error))
        else:
            self._forget(connection)
            log.info("%s joined", hello.name)

    def _dismiss(self, connection: QueuedConnection, reason: str) -> None:
        log.warning("refused a connection: %s", reason)
        self._forget(connection)
        with contextlib.suppress(TransportError):
            connection.queue(encode_frame(FrameKind.REFUSED, reason.encode()))
        self._reactor.remove(connection)

    def _forget(self, connection: QueuedConnection) -> None:
        self._deadlines.pop(connection, None)
