"""Frames, handshakes and deadlines over real sockets."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import DeadlineExceeded, HandshakeRefused, MalformedFrame, PeerClosed
from cluster.frames import HEADER, FrameKind, FrameReader, Hello, check_hello, check_welcome, encode_frame
from cluster.reactor import Reactor
from cluster.transport import Address, Connection, Listener, QueuedConnection, connect

ALL = frozenset(FrameKind)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    left, right = socket.socketpair()
    yield Connection(left), right
    left.close()
    right.close()


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_frames_are_the_same_however_the_stream_is_cut(payloads: list[bytes], size: int) -> None:
    stream = b"".join(encode_frame(FrameKind.PLAN, payload) for payload in payloads)
    reader = FrameReader()
    found = [frame for at in range(0, len(stream), size) for frame in reader.feed(stream[at : at + size])]
    assert found == [(FrameKind.PLAN, payload) for payload in payloads]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MalformedFrame, match="kind 99"):
        FrameReader().feed(HEADER.pack(0, 99))


def test_a_kind_that_is_not_expected_here_is_refused() -> None:
    with pytest.raises(MalformedFrame, match="unexpected kind"):
        FrameReader(frozenset({FrameKind.HELLO})).feed(encode_frame(FrameKind.PLAN))


def test_a_length_beyond_its_kind_s_limit_is_refused_before_the_payload_comes() -> None:
    with pytest.raises(MalformedFrame, match="PONG announces 9 bytes; at most 8"):
        FrameReader().feed(HEADER.pack(9, FrameKind.PONG))


def test_a_payload_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(MalformedFrame, match="PING of 1 bytes"):
        encode_frame(FrameKind.PING, b"x")


def test_receiving_has_a_deadline(pair: tuple[Connection, socket.socket]) -> None:
    connection, other = pair
    other.sendall(encode_frame(FrameKind.PLAN, b"abc")[:-1])
    with pytest.raises(DeadlineExceeded):
        connection.recv_frame(0.05)


def test_sending_has_a_deadline(pair: tuple[Connection, socket.socket]) -> None:
    with pytest.raises(DeadlineExceeded):
        pair[0].send_frame(FrameKind.PLAN, bytes(8_000_000), timeout=0.05)


def test_a_closed_peer_is_seen_at_once(pair: tuple[Connection, socket.socket]) -> None:
    connection, other = pair
    other.close()
    started = time.monotonic()
    with pytest.raises(PeerClosed):
        connection.recv_frame(5.0)
    assert time.monotonic() - started < 0.1


def test_a_peer_that_does_not_read_never_blocks_a_queued_connection() -> None:
    left, right = socket.socketpair()
    connection = QueuedConnection(left, allowed=ALL, max_pending=4_000_000)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="does not read"):  # noqa: PT012
        for _ in range(10):
            connection.queue(encode_frame(FrameKind.PLAN, bytes(1_000_000)))
    assert time.monotonic() - started < 0.5
    left.close()
    right.close()


def test_what_waited_in_the_queue_arrives_whole_and_in_order() -> None:
    left, right = socket.socketpair()
    connection, reader = QueuedConnection(left, allowed=ALL, max_pending=10**8), Connection(right)
    reactor = Reactor()
    reactor.add(connection, lambda frames: None, lambda error: None)
    payloads = [bytes([number]) * 700_000 for number in range(5)]
    for payload in payloads:
        reactor.send(connection, encode_frame(FrameKind.PLAN, payload))
    assert connection.num_pending_bytes
    for payload in payloads:
        right.setblocking(False)
        frame = None
        while frame is None:
            reactor.run_once(0.01)
            try:
                frame = reader.recv_frame(0.001)
            except DeadlineExceeded:
                continue
        assert frame == (FrameKind.PLAN, payload)
    reactor.close()
    right.close()


def test_a_lost_connection_is_reported_once_and_never_from_inside_send() -> None:
    left, right = socket.socketpair()
    connection = QueuedConnection(left, allowed=ALL, max_pending=10**8)
    reactor, losses = Reactor(), []
    reactor.add(connection, lambda frames: None, losses.append)
    right.close()
    reactor.send(connection, encode_frame(FrameKind.PING))
    reactor.send(connection, encode_frame(FrameKind.PING))
    assert losses == []
    reactor.run_once(0.1)
    reactor.run_once(0.0)
    assert [type(error) for error in losses] == [PeerClosed]
    reactor.close()


@pytest.mark.parametrize("unix", [True, False])
def test_a_listener_is_reached_by_unix_name_and_by_tcp(unix: bool) -> None:
    listener = Listener("127.0.0.1")
    address = listener.address if unix else Address(listener.address.host, listener.address.port)
    with pytest.raises(DeadlineExceeded):
        connect(address, Hello(token="t", role="rank", name="r"), timeout=0.05)
    accepted = [peer for sock in listener.sockets if (peer := listener.accept(sock))]
    assert len(accepted) == 1
    assert (accepted[0].family == socket.AF_UNIX) is unix
    if not unix:
        assert accepted[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    accepted[0].close()
    listener.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.EAGAIN])
def test_a_peer_that_cannot_be_taken_in_is_nobody(number: int) -> None:
    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(number, os.strerror(number))

    listener = Listener()
    with Exhausted() as door:
        assert listener.accept(door) is None
    listener.close()


def test_a_unix_name_of_another_machine_falls_back_to_tcp() -> None:
    listener = Listener("127.0.0.1")
    address = Address("127.0.0.1", listener.address.port, "antiphon-that-is-not-here")
    with pytest.raises(DeadlineExceeded):
        connect(address, Hello(token="t", role="rank", name="r"), timeout=0.05)
    listener.close()


def test_nobody_listening_is_a_typed_error() -> None:
    listener = Listener("127.0.0.1")
    listener.close()
    with pytest.raises(PeerClosed):
        connect(listener.address, Hello(token="t", role="rank", name="r"), timeout=0.5)


def hello(**changes: object) -> bytes:
    return msgspec.msgpack.encode(Hello(**{"token": "right", "role": "rank", "name": "rank 3", **changes}))


def test_a_greeting_with_the_token_is_welcome() -> None:
    assert check_hello(hello(rank=3), "right").rank == 3


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (hello(token="wrong"), "wrong engine token"),
        (hello(version=99), "rank 3 speaks version 99"),
        (hello(role="king"), "unknown role"),
        (b"\xff\x00", "cannot be read"),
    ],
)
def test_any_other_greeting_is_refused_with_the_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(HandshakeRefused, match=reason):
        check_hello(payload, "right")


def test_the_refusal_reaches_the_one_who_connects() -> None:
    with pytest.raises(HandshakeRefused, match="not you"):
        check_welcome((FrameKind.REFUSED, b"not you"))
    with pytest.raises(HandshakeRefused, match="answered the greeting with PLAN"):
        check_welcome((FrameKind.PLAN, b""))
