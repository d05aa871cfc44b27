"""When new requests wait for others that are on their way, so that those that come together start together.

Clients that keep a number of streams busy send the next request as soon as they have read the last answer. Where their
answers end together, their next requests come within milliseconds of each other. If the first of them began alone, it
would be out of step with the rest for good, and from then on each would hold up the others with its prompt. Owns
who is expected and for how long. Knows no sockets and no scheduler; the time comes in as an argument.
"""

from __future__ import annotations

import math

RETURN_S = 0.010
"""The ranks stay idle no longer than this for the clients of requests that have ended together."""

QUIET_S = 0.003
"""Nor longer than this after the last one that came: those who come together come closer together."""

REMEMBERED_S = 0.1
"""A request that comes this soon after another one's end is taken for its successor."""


class Gathering:
    """Told of every end, arrival and start, it says when those who wait may start."""

    def __init__(self) -> None:
        self._ended: list[float] = []  # when each request ended that has no successor yet, oldest first
        self._num_new = 0  # of those who wait, how many succeed nobody
        self._last_end = self._last_arrival = -math.inf

    def note_ends(self, num_requests: int, now: float) -> None:
        if num_requests:
            self._ended.extend([now] * num_requests)
            self._last_end = now

    def note_arrival(self, now: float) -> None:
        self._forget(now)
        self._last_arrival = now
        if self._ended:
            self._ended.pop()  # the youngest: a client that has not come by then stays away
        else:
            self._num_new += 1

    def note_start(self) -> None:
        """Those who wait start, as far as there is room for them."""
        self._num_new = 0

    def due(self, num_ending: int, now: float) -> float:
        """When those who wait may start, where nobody runs but `num_ending` requests that are about to end.

        Infinity means after the next result, a time not after `now` at once: nobody else is expected, or as many have
        come already as are about to end, besides the successors.
        """
        self._forget(now)
        if num_ending > self._num_new:
            return math.inf
        if not self._ended:
            return now
        limit = self._last_end + RETURN_S
        return limit if self._last_arrival < self._last_end else min(limit, self._last_arrival + QUIET_S)

    def _forget(self, now: float) -> None:
        while self._ended and now >= self._ended[0] + REMEMBERED_S:
            del self._ended[0]
