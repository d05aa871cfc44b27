"""The order of waiting sequences. Policy is a sort key; the queue knows nothing of blocks or budgets."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from scheduler.sequence import Sequence, SequenceStatus

Policy = Literal["fcfs", "priority", "fair"]


class WaitingQueue:
    """Waiting sequences, next one first.

    `fcfs` sorts by arrival, `priority` by priority and then arrival, `fair` by priority and then start-time fair
    queueing over tenants (Goyal, Vin, Cheng 1996): each tenant's requests are spaced by the tokens they may use, so a
    tenant that sends more does not get more. A preempted sequence keeps its key and so goes back to its place.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._num_discarded = 0
        self._num_arrivals = 0
        self._virtual_time = 0.0
        self._virtual_finish: dict[str, float] = {}
        self._latest_finish = 0.0
        self._max_tenants = 1024  # to remember before those that have caught up are forgotten

    def __len__(self) -> int:
        return len(self._heap) - self._num_discarded

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no particular order."""
        return (seq for _, _, seq in self._heap if seq.status is SequenceStatus.WAITING)

    def arrival_key(self, *, priority: int, tenant: str, num_tokens: int) -> tuple[float, ...]:
        """The sort key of a request that arrives now and may use `num_tokens` in all."""
        self._num_arrivals += 1
        if self._policy == "fcfs":
            return (self._num_arrivals,)
        if self._policy == "priority":
            return (priority, self._num_arrivals)
        start = max(self._virtual_time, self._virtual_finish.get(tenant, 0.0))
        self._virtual_finish[tenant] = start + num_tokens
        self._latest_finish = max(self._latest_finish, start + num_tokens)
        return (priority, start, self._num_arrivals)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.queue_key, seq.index, seq))

    def peek(self) -> Sequence | None:
        while self._heap:
            seq = self._heap[0][2]
            if seq.status is SequenceStatus.WAITING:
                return seq
            heapq.heappop(self._heap)
            self._num_discarded -= 1
        return None

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        if self._policy == "fair":
            self._advance_virtual_time(seq.queue_key[1])
        return seq

    def note_discarded(self) -> None:
        """A waiting sequence was finished from outside. It is dropped when it surfaces, or when most are such."""
        self._num_discarded += 1
        if self._num_discarded > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_discarded = 0

    def _advance_virtual_time(self, start: float) -> None:
        if not len(self):  # a busy period ends, and with it every debt
            self._virtual_time = self._latest_finish
            self._virtual_finish.clear()
            return
        self._virtual_time = max(self._virtual_time, start)
        if len(self._virtual_finish) > self._max_tenants:
            ahead = {tenant: at for tenant, at in self._virtual_finish.items() if at > self._virtual_time}
            self._virtual_finish = ahead
            self._max_tenants = max(1024, 2 * len(ahead))
