"""Which replica a request goes to: the one that holds its prefix, unless it is much busier than the idlest.

Owns a bounded memory of which replica was given which prompt prefix. Pure policy: loads come in, an order comes out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import xxhash

from cluster.protocol import TOKEN_BYTES, pack_tokens

CHUNK_TOKENS = 64
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
MAX_CHUNKS_HASHED = 256
MAX_REMEMBERED = 65_536


class Router:
    """`order` says whom to ask, best first; `note` that a replica took the prompt."""

    def __init__(self, *, slack: int = 8) -> None:
        self.slack = slack  # how many more requests the holder of a prefix may have than the idlest replica
        self._holders: OrderedDict[bytes, int] = OrderedDict()

    def order(self, token_ids: Sequence[int], loads: Sequence[int | None], cache_salt: str = "") -> list[int]:
        """Replicas that are up (`loads` not None), best first.

        Raises: InvalidRequest, where a prefix that could be remembered holds numbers that are no token ids.
        """
        idlest_first = sorted((load, replica) for replica, load in enumerate(loads) if load is not None)
        order = [replica for _, replica in idlest_first]
        if len(order) < 2:
            return order
        holder = self._holder(token_ids, cache_salt)
        load = None if holder is None or holder >= len(loads) else loads[holder]
        if holder is not None and load is not None and load <= idlest_first[0][0] + self.slack:
            order.remove(holder)
            order.insert(0, holder)
        return order

    def note(self, token_ids: Sequence[int], replica: int, cache_salt: str = "") -> None:
        for key in _chunk_keys(token_ids, cache_salt):
            self._holders[key] = replica
            self._holders.move_to_end(key)
        while len(self._holders) > MAX_REMEMBERED:
            self._holders.popitem(last=False)

    def _holder(self, token_ids: Sequence[int], cache_salt: str) -> int | None:
        """Of the longest prefix that is remembered."""
        found = None
        for key in _chunk_keys(token_ids, cache_salt):
            if key not in self._holders:
                break
            found = self._holders[key]
        return found


def _chunk_keys(token_ids: Sequence[int], cache_salt: str) -> Iterator[bytes]:
    """One key for each whole chunk, chained, so that it stands for all tokens up to its end."""
    num_chunks = min(len(token_ids) // CHUNK_TOKENS, MAX_CHUNKS_HASHED)
    tokens = pack_tokens([*token_ids[: num_chunks * CHUNK_TOKENS]])
    key = cache_salt.encode()
    for chunk in range(num_chunks):
        key = xxhash.xxh3_128_digest(key + tokens[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
        yield key
