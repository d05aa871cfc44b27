"""The scheduler's end of the ingress streams: who asked for what, and one message per step to each of them.

Owns the open requests of every ingress connection and their end: answered, aborted with their connection, or failed
with a reason. Knows nothing of ranks; the scheduler knows a request by (connection number, the ingress's number).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from cluster.errors import ProtocolError, TransportError
from cluster.frames import Frame, FrameKind
from cluster.protocol import (
    Abort,
    Accepted,
    Failed,
    Generate,
    RefusalKind,
    Refused,
    Status,
    TokenBatch,
    decode_from_ingress,
    encode_message,
    pack_scores,
    unpack_tokens,
)
from cluster.reactor import Reactor
from cluster.transport import QueuedConnection
from scheduler.request import QueueFullError, Request, SequenceOutput
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

FROM_INGRESS = frozenset({FrameKind.MESSAGE})
MAX_PENDING_TO_INGRESS = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class IngressPeer:
    number: int
    name: str
    connection: QueuedConnection
    open_texts: dict[int, set[int]] = field(default_factory=dict)  # request -> which of its n have not ended

    def close(self, request_id: int, index: int | None) -> bool:
        """Text `index` or all of them are over; True if any was open."""
        texts = self.open_texts.get(request_id, set())
        ended = {index} & texts if index is not None else set(texts)
        texts -= ended
        if not texts:
            self.open_texts.pop(request_id, None)
        return bool(ended)


class Streams:
    """Intake and output of one engine. `refusal` says why no request is taken now; None: they are. `on_arrival` is told
    of each that was."""

    def __init__(
        self,
        scheduler: Scheduler,
        reactor: Reactor,
        *,
        refusal: Callable[[], str | None],
        on_arrival: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._reactor = reactor
        self._refusal = refusal
        self._on_arrival = on_arrival
        self._peers: dict[int, IngressPeer] = {}
        self._numbers = itertools.count(1)

    @property
    def num_open(self) -> int:
        return sum(len(peer.open_texts) for peer in self._peers.values())

    def join(self, name: str, connection: QueuedConnection, status: Status) -> None:
        peer = IngressPeer(next(self._numbers), name, connection)
        self._peers[peer.number] = peer
        connection.allow(FROM_INGRESS)
        connection.max_pending = MAX_PENDING_TO_INGRESS
        self._reactor.add(
            connection, lambda frames: self._on_frames(peer, frames), lambda error: self._on_lost(peer, error)
        )
        self._reactor.send(connection, encode_message(status))

    def publish(self, outputs: Iterable[SequenceOutput]) -> None:
        """Send the tokens of one step, one message to each ingress that has a part in it; more, for scores."""
        batches: dict[int, TokenBatch] = {}
        for output in outputs:
            number, request_id = cast(tuple[int, int], output.request_id)
            peer = self._peers.get(number)
            if peer is None or request_id not in peer.open_texts:
                continue  # aborted while the step was in flight
            batch = batches.get(number)
            if batch is None or (output.prompt_logprobs is not None and batch.prompt_logprobs):
                self._send(number, batch)  # each prompt's scores go alone: together they may exceed what a frame holds
                batch = batches[number] = TokenBatch([], [], [], {}, {}, {}, {})
            self._append(batch, peer, request_id, output)
        for number, batch in batches.items():
            self._send(number, batch)

    def _send(self, number: int, batch: TokenBatch | None) -> None:
        if batch is not None:
            self._reactor.send(self._peers[number].connection, encode_message(batch))

    def broadcast(self, status: Status) -> None:
        frame = encode_message(status)
        for peer in self._peers.values():
            self._reactor.send(peer.connection, frame)

    def fail_all(self, reason: str) -> None:
        """Answer every open request with `reason`; the scheduler forgets them."""
        for peer in self._peers.values():
            for request_id in peer.open_texts:
                self._scheduler.abort((peer.number, request_id))
                self._reactor.send(peer.connection, encode_message(Failed(request_id, reason)))
            peer.open_texts.clear()

    def _append(self, batch: TokenBatch, peer: IngressPeer, request_id: int, output: SequenceOutput) -> None:
        row = len(batch.tokens)
        batch.request_ids.append(request_id)
        batch.indices.append(output.index)
        batch.tokens.append(int(output.token_id))
        if output.num_cached_tokens:
            batch.cached[row] = output.num_cached_tokens
        if output.logprobs is not None:
            batch.logprobs[row] = pack_scores(output.logprobs)
        if output.prompt_logprobs is not None:
            batch.prompt_logprobs[row] = pack_scores(output.prompt_logprobs)
        if output.finish_reason is not None:
            batch.ends[row] = output.finish_reason
            peer.close(request_id, output.index)

    def _on_frames(self, peer: IngressPeer, frames: list[Frame]) -> None:
        for _, payload in frames:
            message = decode_from_ingress(payload)
            if isinstance(message, Abort):
                if peer.close(message.request_id, message.index):
                    self._scheduler.abort((peer.number, message.request_id), message.index)
            else:
                self._reactor.send(peer.connection, encode_message(self._take(peer, message)))

    def _take(self, peer: IngressPeer, message: Generate) -> Accepted | Refused:
        if message.request_id in peer.open_texts:
            raise ProtocolError(f"request {message.request_id} of {peer.name} is open already")
        reason = self._refusal()
        if reason is not None:
            return Refused(message.request_id, "unavailable", reason)
        kind: RefusalKind
        try:
            self._scheduler.add(self._request(peer, message))
        except QueueFullError as error:
            kind, reason = "overloaded", str(error)
        except ValueError as error:
            kind, reason = "invalid", str(error)
        else:
            peer.open_texts[message.request_id] = set(range(message.sampling.n))
            self._on_arrival()
            return Accepted(message.request_id)
        return Refused(message.request_id, kind, reason)

    def _request(self, peer: IngressPeer, message: Generate) -> Request:
        return Request(
            request_id=(peer.number, message.request_id),
            token_ids=unpack_tokens(message.token_ids),
            sampling_params=message.sampling,
            priority=message.priority,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            num_delivered_tokens=message.num_delivered,
        )

    def _on_lost(self, peer: IngressPeer, error: TransportError) -> None:
        log.info("%s left with %d requests open: %s", peer.name, len(peer.open_texts), error)
        del self._peers[peer.number]
        for request_id in peer.open_texts:
            self._scheduler.abort((peer.number, request_id))
