"""One entry of the prefix cache, as the cache and the sequences that it serves share it."""

from __future__ import annotations


class CachedBlock:
    """The contents of one full block: an immutable node of the prefix tree."""

    __slots__ = ("block_id", "key", "parent", "salt", "tokens")

    def __init__(self, block_id: int, key: bytes, parent: CachedBlock | None, tokens: bytes, salt: str) -> None:
        self.block_id = block_id
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
