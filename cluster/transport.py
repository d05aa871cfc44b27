"""Framed stream sockets between our processes: unix on the same machine, TCP with TCP_NODELAY across.

Owns addresses, listening, connecting with the token handshake, and two ways to use a connected socket:
`Connection` blocks with deadlines (a rank), `QueuedConnection` never blocks (the engine loop). No pickle, no
asyncio, no threads. Knows nothing of steps or requests.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from cluster.errors import DeadlineExceeded, PeerClosed, TransportError
from cluster.frames import Frame, FrameKind, FrameReader, Hello, Welcome, check_welcome, encode_frame

HANDSHAKE_TIMEOUT_S = 5.0
_READ_AT_ONCE = 64 * 1024
"""Bytes. Python takes as much memory for every read, however little comes. More than this the system hands out anew
each time, which costs several times as much as the read."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener can be reached: `host:port`, and by name on its own machine.

    `unix_name` is in Linux' abstract namespace, so no file is left behind; empty where there is none.
    """

    host: str
    port: int
    unix_name: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Connection:
    """A stream of frames that blocks, always with a deadline. One thread reads; writers take turns by themselves."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._received: deque[Frame] = deque()

    def send(self, frame: bytes, timeout: float) -> None:
        """Send the bytes of one or more whole frames.

        Raises:
            PeerClosed, DeadlineExceeded
        """
        with _typed_errors("send"):
            self._allow(timeout)
            self.sock.sendall(frame)

    def send_frame(self, kind: FrameKind, payload: bytes = b"", *, timeout: float) -> None:
        self.send(encode_frame(kind, payload), timeout)

    def recv_frame(self, timeout: float) -> Frame:
        """The next frame.

        Raises:
            PeerClosed, DeadlineExceeded, MalformedFrame
        """
        deadline, time_left = time.monotonic() + timeout, timeout
        while not self._received:
            with _typed_errors("receive"):
                self._allow(max(time_left, 1e-3))
                data = self.sock.recv(_READ_AT_ONCE)
            if not data:
                raise PeerClosed("the other side closed the stream")
            self._received.extend(self._reader.feed(data))
            time_left = deadline - time.monotonic()
            if time_left < 0 and not self._received:
                raise DeadlineExceeded(f"no whole frame within {timeout:g} s")
        return self._received.popleft()

    def has_arrived(self) -> bool:
        """Whether `recv_frame` has something to read already: a frame, a part of one, or the end of the stream."""
        if self._received:
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.sock.close()

    def _allow(self, timeout: float) -> None:
        if self.sock.gettimeout() != timeout:  # setting it is a call of the system
            self.sock.settimeout(timeout)


class QueuedConnection:
    """A stream of frames that never blocks: what the socket does not take at once waits in a queue, up to a limit."""

    def __init__(self, sock: socket.socket, *, allowed: frozenset[FrameKind], max_pending: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.max_pending = max_pending
        self.num_pending_bytes = 0
        self._reader = FrameReader(allowed)
        self._pending: deque[memoryview] = deque()

    def allow(self, allowed: frozenset[FrameKind]) -> None:
        """From now on only frames of these kinds are legal."""
        self._reader.allowed = allowed

    def queue(self, frame: bytes) -> None:
        """Send now what the socket takes; keep the rest for `flush`.

        Raises:
            PeerClosed: the peer is gone.
            DeadlineExceeded: it has not read for so long that more than `max_pending` bytes wait.
        """
        self._pending.append(memoryview(frame))
        self.num_pending_bytes += len(frame)
        if len(self._pending) == 1:
            self.flush()
        if self.num_pending_bytes > self.max_pending:
            raise DeadlineExceeded(f"the other side does not read; {self.num_pending_bytes} bytes wait for it")

    def flush(self) -> bool:
        """Send what waits; True when nothing is left.

        Raises:
            PeerClosed: the peer is gone.
        """
        with _typed_errors("send"):
            while self._pending:
                try:
                    num_sent = self.sock.send(self._pending[0])
                except (BlockingIOError, InterruptedError):
                    return False
                self.num_pending_bytes -= num_sent
                if num_sent == len(self._pending[0]):
                    self._pending.popleft()
                else:
                    self._pending[0] = self._pending[0][num_sent:]
        return True

    def read(self) -> list[Frame]:
        """The whole frames that have arrived; possibly none.

        Raises:
            PeerClosed, MalformedFrame
        """
        try:
            with _typed_errors("receive"):
                data = self.sock.recv(_READ_AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise PeerClosed("the other side closed the stream")
        return self._reader.feed(data)

    def close(self) -> None:
        self.sock.close()


class Listener:
    """Listens on `host` (port 0: any free one, bound and held) and under a unix name on this machine."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tcp = socket.create_server((host, port), family=family, backlog=256)
        self.sockets = [tcp]
        self.address = Address(host, tcp.getsockname()[1])
        if hasattr(socket, "AF_UNIX"):
            with contextlib.suppress(OSError):  # no abstract namespace here: TCP serves both
                unix_name = f"antiphon-{secrets.token_hex(8)}"
                unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                unix.bind("\0" + unix_name)
                unix.listen(256)
                self.sockets.append(unix)
                self.address = Address(host, self.address.port, unix_name)
        for sock in self.sockets:
            sock.setblocking(False)

    def accept(self, sock: socket.socket) -> socket.socket | None:
        """A new peer of one of `sockets`; None if there is none. Its greeting is still to come."""
        try:
            peer, _ = sock.accept()
        except OSError:  # it is gone already, or there is no descriptor left for it: the peers we have go on
            return None
        with contextlib.suppress(OSError):  # gone by now: the first read will tell
            _no_delay(peer)
        return peer

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def connect(address: Address, hello: Hello, *, timeout: float = HANDSHAKE_TIMEOUT_S) -> tuple[Connection, Welcome]:
    """A connection whose handshake is done, all within `timeout` seconds.

    Raises:
        HandshakeRefused: the listener does not want us, with its reason.
        PeerClosed, DeadlineExceeded, MalformedFrame
    """
    deadline = time.monotonic() + timeout
    connection = Connection(_connected_socket(address, timeout))
    try:
        connection.send_frame(FrameKind.HELLO, msgspec.msgpack.encode(hello), timeout=timeout)
        answer = connection.recv_frame(max(deadline - time.monotonic(), 1e-3))
        return connection, check_welcome(answer)
    except TransportError:
        connection.close()
        raise


def _connected_socket(address: Address, timeout: float) -> socket.socket:
    if address.unix_name:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.settimeout(timeout)
        try:
            unix.connect("\0" + address.unix_name)
            return unix
        except OSError:  # the listener is on another machine
            unix.close()
    with _typed_errors(f"connect to {address}"):
        sock = socket.create_connection((address.host, address.port), timeout=timeout)
    _no_delay(sock)
    return sock


def _no_delay(sock: socket.socket) -> None:
    if sock.family != getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _typed_errors:  # noqa: N801 - reads like a function, and is quicker than one that is made a context manager
    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, BlockingIOError | InterruptedError | TransportError):
            return
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{self._action}: no progress within the deadline") from error
        if isinstance(error, OSError):
            raise PeerClosed(f"{self._action}: {error}") from error
