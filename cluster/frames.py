"""The framing shared by every stream between our processes: u32 length | u8 kind | payload, little-endian.

Owns the kinds, the longest payload each may carry, and the greeting that opens a stream. Knows nothing of
sockets (`cluster.transport`), nor of what the payloads mean.
"""

from __future__ import annotations

import enum
import hmac
import struct

import msgspec

from cluster.errors import HandshakeRefused, MalformedFrame

VERSION = 1
HEADER = struct.Struct("<IB")

KIB, MIB = 1 << 10, 1 << 20


class FrameKind(enum.IntEnum):
    """What a payload is. A kind's number is never used again for another meaning."""

    HELLO = 1  # first frame of the connecting side: `Hello`
    WELCOME = 2  # the listener's answer: `Welcome`
    REFUSED = 3  # or its reason, in UTF-8, before it closes
    PLAN = 10  # scheduler -> every rank: `scheduler.codec` plan
    RESULT = 11  # rank 0 -> scheduler: `scheduler.codec` result
    DONE = 12  # rank > 0 -> scheduler: the step it has finished, `STEP`
    ERROR = 13  # rank -> scheduler: why it cannot go on, UTF-8
    SHUTDOWN = 14  # scheduler -> rank: leave in order
    PING = 20  # scheduler -> rank: a sign of life, please
    PONG = 21  # rank -> scheduler: the last step it has finished, `STEP`; unasked while a step takes long
    MESSAGE = 30  # ingress <-> scheduler: `cluster.protocol`


MAX_LENGTH = {
    FrameKind.HELLO: 4 * KIB,
    FrameKind.WELCOME: 4 * KIB,
    FrameKind.REFUSED: 4 * KIB,
    FrameKind.PLAN: 256 * MIB,
    FrameKind.RESULT: 256 * MIB,
    FrameKind.DONE: 8,
    FrameKind.ERROR: 64 * KIB,
    FrameKind.SHUTDOWN: 0,
    FrameKind.PING: 0,
    FrameKind.PONG: 8,
    FrameKind.MESSAGE: 64 * MIB,
}

_KINDS = {int(kind): (kind, MAX_LENGTH[kind]) for kind in FrameKind}

STEP = struct.Struct("<q")
"""A step number; -1 before the first."""

Frame = tuple[FrameKind, bytes]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """How a process presents itself. `name` is for people: "rank 3 on node-7, pid 412"."""

    token: str
    role: str  # "rank" or "ingress"
    name: str
    rank: int = -1
    engine_epoch: int = 0
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    engine_epoch: int
    version: int = VERSION


def encode_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """The bytes of one frame, made once however many peers they go to."""
    if len(payload) > MAX_LENGTH[kind]:
        raise MalformedFrame(f"{kind.name} of {len(payload)} bytes; at most {MAX_LENGTH[kind]} fit")
    return HEADER.pack(len(payload), kind) + payload


class FrameReader:
    """Cuts a byte stream into frames. It refuses a bad header before it keeps a byte of the payload."""

    def __init__(self, allowed: frozenset[FrameKind] = frozenset(FrameKind)) -> None:
        self.allowed = allowed
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            MalformedFrame: unknown or unexpected kind, or a length beyond the kind's limit.
        """
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            length, number = HEADER.unpack_from(buffer, start)
            kind = self._checked_kind(number, length)
            end = start + HEADER.size + length
            if end > len(buffer):
                break
            frames.append((kind, bytes(memoryview(buffer)[start + HEADER.size : end])))
            start = end
        if start:
            del buffer[:start]
        return frames

    def _checked_kind(self, number: int, length: int) -> FrameKind:
        kind, limit = _KINDS.get(number, (None, 0))
        if kind is None or kind not in self.allowed:
            raise MalformedFrame(f"frame of unexpected kind {number}")
        if length > limit:
            raise MalformedFrame(f"{kind.name} announces {length} bytes; at most {limit} are legal")
        return kind


def check_hello(payload: bytes, token: str) -> Hello:
    """The greeting in `payload`, if it knows the token and speaks our version.

    Raises:
        HandshakeRefused: it does not. The token is compared in constant time and never repeated.
    """
    try:
        hello = msgspec.msgpack.decode(payload, type=Hello)
    except msgspec.MsgspecError as error:
        raise HandshakeRefused("the greeting cannot be read; is the other process the same version?") from error
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        raise HandshakeRefused("wrong engine token; the process belongs to another deployment")
    if hello.version != VERSION:
        raise HandshakeRefused(f"{hello.name} speaks version {hello.version}, this process {VERSION}; run one version")
    if hello.role not in ("rank", "ingress"):
        raise HandshakeRefused(f"unknown role {hello.role!r}")
    return hello


def check_welcome(frame: Frame) -> Welcome:
    """The listener's answer.

    Raises:
        HandshakeRefused: it was a refusal, or no answer of ours.
    """
    kind, payload = frame
    if kind is FrameKind.REFUSED:
        raise HandshakeRefused(payload.decode(errors="replace"))
    try:
        if kind is FrameKind.WELCOME:
            return msgspec.msgpack.decode(payload, type=Welcome)
    except msgspec.MsgspecError as error:
        raise HandshakeRefused("the listener's answer cannot be read") from error
    raise HandshakeRefused(f"the listener answered the greeting with {kind.name}")
