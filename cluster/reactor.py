"""A small reactor: one thread, many queued connections, no blocking but in `run_once`.

Owns the selector, write interest and the order of loss: a connection that fails is closed first, then reported once,
never from inside a call of `send`. Knows nothing of what the frames mean.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import TransportError
from cluster.frames import Frame
from cluster.transport import Listener, QueuedConnection

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

FramesHandler = Callable[[list[Frame]], None]
LossHandler = Callable[[TransportError], None]


@dataclass(slots=True, eq=False)
class _Entry:
    connection: QueuedConnection
    on_frames: FramesHandler
    on_lost: LossHandler
    interest: int = READ


class Reactor:
    """Handlers run on the thread that calls `run_once`; only `wake` may be called from another."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._entries: dict[QueuedConnection, _Entry] = {}
        self._lost: deque[tuple[QueuedConnection, TransportError]] = deque()
        self._waker, self._wakee = socket.socketpair()
        for sock in (self._waker, self._wakee):
            sock.setblocking(False)
        self._selector.register(self._wakee, READ, self._drain_wakes)

    def listen(self, listener: Listener, on_peer: Callable[[socket.socket], None]) -> None:
        for sock in listener.sockets:
            self._selector.register(sock, READ, lambda _, sock=sock: self._accept(listener, sock, on_peer))

    def add(self, connection: QueuedConnection, on_frames: FramesHandler, on_lost: LossHandler) -> None:
        """Watch `connection`. A second call for the same connection only changes its handlers."""
        known = self._entries.get(connection)
        if known is not None:
            known.on_frames, known.on_lost = on_frames, on_lost
            return
        entry = self._entries[connection] = _Entry(connection, on_frames, on_lost)
        self._selector.register(connection.sock, READ, lambda events: self._on_events(entry, events))

    def send(self, connection: QueuedConnection, frame: bytes) -> None:
        """Send or queue; a failure is reported to `on_lost` within the next `run_once`."""
        entry = self._entries.get(connection)
        if entry is None:
            return
        try:
            connection.queue(frame)
        except TransportError as error:
            self._lost.append((connection, error))
        else:
            self._set_interest(entry)

    def remove(self, connection: QueuedConnection) -> None:
        """Close `connection` and report nothing."""
        if self._entries.pop(connection, None) is not None:
            self._selector.unregister(connection.sock)
            connection.close()

    def run_once(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for something to happen, and handle it."""
        for key, events in self._selector.select(0.0 if self._lost else timeout):
            key.data(events)
        while self._lost:
            self._report(*self._lost.popleft())

    def wake(self) -> None:
        """Make a `run_once` in another thread return."""
        try:
            self._waker.send(b"\0")
        except (BlockingIOError, OSError):
            return  # awake already, or closed

    @property
    def num_pending_bytes(self) -> int:
        return sum(connection.num_pending_bytes for connection in self._entries)

    def close(self) -> None:
        for connection in list(self._entries):
            self.remove(connection)
        self._selector.close()
        self._waker.close()
        self._wakee.close()

    def _on_events(self, entry: _Entry, events: int) -> None:
        if entry.connection not in self._entries:
            return  # removed by another handler of the same round
        try:
            if events & WRITE:
                entry.connection.flush()
                self._set_interest(entry)
            frames = entry.connection.read() if events & READ else []
            if frames:
                entry.on_frames(frames)
        except TransportError as error:
            self._lost.append((entry.connection, error))

    def _set_interest(self, entry: _Entry) -> None:
        wanted = READ | WRITE if entry.connection.num_pending_bytes else READ
        if wanted != entry.interest:
            entry.interest = wanted
            self._selector.modify(entry.connection.sock, wanted, self._selector.get_key(entry.connection.sock).data)

    def _report(self, connection: QueuedConnection, error: TransportError) -> None:
        entry = self._entries.get(connection)
        if entry is not None:
            self.remove(connection)
            entry.on_lost(error)

    def _accept(self, listener: Listener, sock: socket.socket, on_peer: Callable[[socket.socket], None]) -> None:
        peer = listener.accept(sock)
        if peer is not None:
            on_peer(peer)

    def _drain_wakes(self, _: int) -> None:
        try:
            self._wakee.recv(4096)
        except BlockingIOError:
            return
