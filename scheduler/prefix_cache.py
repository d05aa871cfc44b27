"""The prefix cache: which blocks hold the KV of which prompt prefix.

A full block is found by a 128-bit hash chained over its prefix, and a hit is confirmed by comparing its tokens, its
salt and its parent entry. By induction from the first block the match is exact: a hash collision can never serve
another prompt's KV. Knows nothing of reference counts or of who is running.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import xxhash

from scheduler.cached_block import CachedBlock
from scheduler.sequence import Sequence


class PrefixCache:
    """Entries by hash. `namespace` separates what shares no KV at all: models and adapters.

    `digest` may be as weak as a constant: collisions cost hits, never correctness.
    """

    def __init__(
        self, num_blocks: int, *, namespace: str = "", digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
    ) -> None:
        self._namespace = namespace
        self._digest = digest
        self._by_hash: dict[bytes, CachedBlock] = {}
        # Invariant: _by_block[b] is e  <=>  _by_hash[e.key] is e and e.block_id == b.
        self._by_block: list[CachedBlock | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._by_hash)

    def holds(self, block_id: int) -> bool:
        return self._by_block[block_id] is not None

    def match(self, seq: Sequence) -> list[CachedBlock]:
        """Entries that continue `seq.prefix_entries`, up to the first block that is not cached.

        The block of the last token is never matched: at least one token is always computed.
        """
        hits: list[CachedBlock] = []
        parent = seq.prefix_entries[-1] if seq.prefix_entries else None
        for i in range(len(seq.prefix_entries), (seq.num_tokens - 1) // seq.block_size):
            entry = self._by_hash.get(self._hash(seq, i))
            if entry is None or not _confirms(entry, parent, seq.cache_salt, _token_bytes(seq, i)):
                break
            hits.append(entry)
            parent = entry
        return hits

    def insert(self, seq: Sequence) -> None:
        """Record the next full block of `seq`, unless an equal block is recorded; append its entry to the sequence."""
        i = len(seq.prefix_entries)
        parent = seq.prefix_entries[-1] if i else None
        key, tokens = self._hash(seq, i), _token_bytes(seq, i)
        entry = self._by_hash.get(key)
        if entry is None or not _confirms(entry, parent, seq.cache_salt, tokens):
            if entry is not None:  # its parent was evicted, so nothing can reach it any more; or the hashes collide
                self.evict(entry.block_id)
            entry = CachedBlock(seq.block_table[i], key, parent, tokens, seq.cache_salt)
            self._by_hash[key] = self._by_block[entry.block_id] = entry
        seq.prefix_entries.append(entry)

    def evict(self, block_id: int) -> None:
        entry = self._by_block[block_id]
        if entry is not None:
            self._by_block[block_id] = None
            del self._by_hash[entry.key]

    def clear(self) -> None:
        self._by_hash.clear()
        self._by_block = [None] * len(self._by_block)

    def check_integrity(self) -> None:
        recorded = [entry for entry in self._by_block if entry is not None]
        assert len(recorded) == len(self._by_hash), f"{len(recorded)} blocks for {len(self._by_hash)} hashes"
        for block_id, entry in enumerate(self._by_block):
            if entry is not None:
                assert entry.block_id == block_id, f"block {block_id} is recorded as {entry.block_id}"
                assert self._by_hash[entry.key] is entry, f"block {block_id} is not found by its hash"

    def _hash(self, seq: Sequence, i: int) -> bytes:
        """Hash of the prefix that ends with block `i`; every block of a sequence is hashed once."""
        hashes = seq.block_hashes
        while len(hashes) <= i:
            previous = hashes[-1] if hashes else self._root(seq.cache_salt)
            hashes.append(self._digest(previous + _token_bytes(seq, len(hashes))))
        return hashes[i]

    def _root(self, salt: str) -> bytes:
        # A client's salt may be any string that JSON can carry, lone surrogates included.
        return f"{len(self._namespace)}:{self._namespace}{salt}".encode(errors="surrogatepass")


def _confirms(entry: CachedBlock, parent: CachedBlock | None, salt: str, tokens: bytes) -> bool:
    return entry.parent is parent and entry.salt == salt and entry.tokens == tokens


def _token_bytes(seq: Sequence, i: int) -> bytes:
    start = i * seq.block_size
    return array("i", seq.token_ids[start : start + seq.block_size]).tobytes()
