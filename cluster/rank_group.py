"""The scheduler's end of the step channels: all ranks of one replica.

Owns who has joined, what each rank last acknowledged, the deadline of the oldest step in flight, heartbeats to idle
ranks, and which of several failures was the first cause. Knows nothing of sequences or of ingresses.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import EngineFailed, HandshakeRefused, PeerClosed, ProtocolError, TransportError
from cluster.frames import STEP, Frame, FrameKind, Hello, encode_frame
from cluster.reactor import Reactor
from cluster.transport import QueuedConnection
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

FROM_RANK = frozenset({FrameKind.RESULT, FrameKind.DONE, FrameKind.ERROR, FrameKind.PONG})
MAX_PENDING_TO_RANK = 512 * 1024 * 1024
ERROR_GRACE_S = 0.15
"""A rank that reports an error may only be the neighbour of one that was killed; wait this long for its end of file."""

LONGEST_TURN_S = 5.0
"""The engine looks after its ranks at least once a second; a turn longer than this was a pause of its process."""

_PING = encode_frame(FrameKind.PING)
_SHUTDOWN = encode_frame(FrameKind.SHUTDOWN)


@dataclass(slots=True, eq=False)
class RankPeer:
    rank: int
    name: str
    connection: QueuedConnection
    last_heard: float
    last_step: int = -1
    last_pinged: float = -math.inf
    first_unanswered_ping: float | None = None
    has_reported: bool = False
    is_connected: bool = True

    @property
    def acknowledged(self) -> str:
        return "none" if self.last_step < 0 else str(self.last_step)


class RankGroup:
    """Results come out of `on_result`; the first cause of a failure comes out of `check` as `EngineFailed`."""

    def __init__(
        self,
        num_ranks: int,
        *,
        engine_epoch: int,
        config: ClusterConfig,
        reactor: Reactor,
        clock: Callable[[], float],
        on_result: Callable[[bytes], None],
    ) -> None:
        self.num_ranks = num_ranks
        self.engine_epoch = engine_epoch
        self.peers: dict[int, RankPeer] = {}
        self._config = config
        self._reactor = reactor
        self._clock = clock
        self._on_result = on_result
        self._in_flight: deque[tuple[int, float]] = deque()  # (step, when it became the oldest or was sent)
        self._failure: str | None = None
        self._failure_due = math.inf
        self._is_secondhand = True
        self._last_check = clock()

    @property
    def is_complete(self) -> bool:
        return len(self.peers) == self.num_ranks and self._failure is None

    @property
    def num_connected(self) -> int:
        return sum(peer.is_connected for peer in self.peers.values())

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank not in self.peers]

    @property
    def silence_timeout_s(self) -> float:
        """Silence after which a rank is taken for hung: an idle one answers a PING, one in a step pulses unasked."""
        return min(self._config.step_timeout_s, 10 * self._config.heartbeat_s)

    def join(self, hello: Hello, connection: QueuedConnection) -> None:
        """Raises: HandshakeRefused, where this rank is none of ours or is here already."""
        if hello.engine_epoch != self.engine_epoch:
            raise HandshakeRefused(f"{hello.name} is of epoch {hello.engine_epoch}, the engine of {self.engine_epoch}")
        if not 0 <= hello.rank < self.num_ranks:
            raise HandshakeRefused(f"{hello.name}: rank {hello.rank} of an engine with {self.num_ranks} ranks")
        if hello.rank in self.peers:
            raise HandshakeRefused(f"rank {hello.rank} is connected already as {self.peers[hello.rank].name}")
        peer = self.peers[hello.rank] = RankPeer(hello.rank, hello.name, connection, self._clock())
        connection.allow(FROM_RANK)
        connection.max_pending = MAX_PENDING_TO_RANK
        self._reactor.add(
            connection, lambda frames: self._on_frames(peer, frames), lambda error: self._on_lost(peer, error)
        )

    def send_plan(self, step: int, payload: bytes) -> None:
        """Send one step to every rank; the bytes are made once."""
        frame = encode_frame(FrameKind.PLAN, payload)
        self._in_flight.append((step, self._clock()))
        for peer in self.peers.values():
            self._reactor.send(peer.connection, frame)

    def shutdown(self) -> None:
        """Ask the ranks to leave in order."""
        for peer in self.peers.values():
            self._reactor.send(peer.connection, _SHUTDOWN)

    def close(self) -> None:
        """Close every connection, so that the surviving ranks see that the engine is over."""
        for peer in self.peers.values():
            self._reactor.remove(peer.connection)
        self.peers.clear()
        self._in_flight.clear()

    def check(self, now: float) -> float:
        """Send what heartbeats are due; the time at which to call again.

        Raises:
            EngineFailed: a rank is lost; the message names it, the reason and its last acknowledged step.
        """
        if self._failure is not None and now >= self._failure_due:
            raise EngineFailed(self._failure, is_secondhand=self._is_secondhand)
        self._forgive_pause(now)
        if self._in_flight:
            deadline = self._step_deadline()
            if now >= deadline:
                raise EngineFailed(self._explain_timeout(now))
            return min(deadline, self._failure_due)
        return min(self._ping_silent(now), self._failure_due)

    def _forgive_pause(self, now: float) -> None:
        """While this process itself was stopped it heard nobody; that is nobody's silence."""
        pause, self._last_check = now - self._last_check, now
        if pause < max(self.silence_timeout_s / 2, LONGEST_TURN_S):
            return
        self._in_flight = deque((step, since + pause) for step, since in self._in_flight)
        for peer in self.peers.values():
            peer.last_heard += pause
            if peer.first_unanswered_ping is not None:
                peer.first_unanswered_ping += pause

    def _step_deadline(self) -> float:
        """When the oldest step is late, or one of the ranks that are still in it has been silent for too long."""
        step, since = self._in_flight[0]
        heard = (max(peer.last_heard, since) for peer in self.peers.values() if peer.last_step < step)
        return min(since + self._config.step_timeout_s, min(heard, default=math.inf) + self.silence_timeout_s)

    def _ping_silent(self, now: float) -> float:
        heartbeat = self._config.heartbeat_s
        due = math.inf
        for peer in self.peers.values():
            asked = peer.first_unanswered_ping
            if asked is not None and now - asked >= self.silence_timeout_s:
                raise EngineFailed(
                    f"{peer.name} hung while idle: no sign of life for {now - peer.last_heard:.1f} s "
                    f"(last acknowledged step: {peer.acknowledged})"
                )
            if now - max(peer.last_heard, peer.last_pinged) >= heartbeat:
                peer.last_pinged = now
                peer.first_unanswered_ping = now if asked is None else asked
                self._reactor.send(peer.connection, _PING)
            due = min(due, max(peer.last_heard, peer.last_pinged) + heartbeat)
        return due

    def _on_frames(self, peer: RankPeer, frames: list[Frame]) -> None:
        peer.last_heard = self._clock()
        peer.first_unanswered_ping = None
        for kind, payload in frames:
            if kind is FrameKind.RESULT:
                self._finish_step(peer, payload)
            elif kind is FrameKind.ERROR:
                self._on_error(peer, payload.decode(errors="replace"))
            elif len(payload) != STEP.size:
                raise ProtocolError(f"{kind.name} of {len(payload)} bytes")
            else:
                peer.last_step = max(peer.last_step, STEP.unpack(payload)[0])

    def _finish_step(self, peer: RankPeer, payload: bytes) -> None:
        if peer.rank != 0:
            raise ProtocolError("only rank 0 sends results")
        if not self._in_flight:
            raise ProtocolError("a result, and no step is in flight")
        peer.last_step, _ = self._in_flight.popleft()
        if self._in_flight:  # the ranks begin the next one only now
            self._in_flight[0] = (self._in_flight[0][0], peer.last_heard)
        self._on_result(payload)

    def _on_error(self, peer: RankPeer, text: str) -> None:
        peer.has_reported = True
        log.error("%s reports after step %s: %s", peer.name, peer.acknowledged, text)
        if self._failure is None:
            self._failure = f"{peer.name} failed after step {peer.acknowledged}: {text.partition(chr(10))[0]}"
            self._failure_due = self._clock() + ERROR_GRACE_S

    def _on_lost(self, peer: RankPeer, error: TransportError) -> None:
        peer.is_connected = False
        if peer.has_reported or self._failure_due <= self._clock():
            return
        reason = "died" if isinstance(error, PeerClosed) else f"was lost ({error})"
        self._failure = f"{peer.name} {reason} (last acknowledged step: {peer.acknowledged})"
        self._is_secondhand = isinstance(error, PeerClosed)
        self._failure_due = self._clock()

    def _explain_timeout(self, now: float) -> str:
        """Name who is to blame for a step that was not answered: the silent ones, else all that are still in it."""
        step, since = self._in_flight[0]
        behind = [peer for peer in self.peers.values() if peer.last_step < step]
        silent = [peer for peer in behind if now - peer.last_heard > 3 * self._config.heartbeat_s]
        culprits = silent or behind or list(self.peers.values())
        state = "silent" if silent else "alive but still busy"
        details = "; ".join(
            f"{peer.name} is {state}, last acknowledged step: {peer.acknowledged}, "
            f"last heard {now - peer.last_heard:.1f} s ago"
            for peer in culprits
        )
        return f"step {step} was not answered within {now - since:.1f} s: {details}"
