"""Paged KV blocks: who holds which, which are free, which free one goes first.

Owns reference counts and the free list, and keeps the prefix cache equal to what the blocks hold. Does not know
why a sequence wants blocks. A free block keeps its contents, and stays hittable, until it is taken again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from scheduler.cached_block import CachedBlock
from scheduler.prefix_cache import PrefixCache
from scheduler.sequence import Sequence


class OutOfBlocksError(RuntimeError):
    """No block is free. The scheduler checks or preempts first, so it never sees this; a bug would."""


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens.

    Free blocks are taken least recently used first. A block that holds no cached prefix goes before any that does, and
    the tail of a freed sequence before its head, so that a cached prefix is always reachable from its first block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, namespace: str = ""
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache = PrefixCache(num_blocks, namespace=namespace)
        self._ref_counts = [0] * num_blocks
        # Invariant: b in _free  <=>  _ref_counts[b] == 0. Linked, so a hit is taken out of the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> list[CachedBlock]:
        """Cached blocks that continue the block table of `seq`; they are not taken yet."""
        return self.prefix_cache.match(seq) if self.enable_prefix_caching else []

    def num_free_among(self, hits: list[CachedBlock]) -> int:
        """How many of `hits` would leave the free list if they were taken."""
        return sum(self._ref_counts[entry.block_id] == 0 for entry in hits)

    def take_hits(self, seq: Sequence, hits: list[CachedBlock]) -> None:
        """Share the blocks of `hits`; their tokens count as cached."""
        for entry in hits:
            self._share(entry.block_id)
            seq.block_table.append(entry.block_id)
        seq.prefix_entries.extend(hits)
        seq.num_cached_tokens = len(seq.block_table) * self.block_size

    def append_block(self, seq: Sequence) -> int:
        """Give `seq` one more block, evicting what it held.

        Raises:
            OutOfBlocksError: none is free.
        """
        if not self._free:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are held")
        block_id, _ = self._free.popitem(last=False)
        self.prefix_cache.evict(block_id)
        self._ref_counts[block_id] = 1
        seq.block_table.append(block_id)
        return block_id

    def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
        """Let `child` share the computed prompt of `parent`, all but the last token, which it computes itself.

        Full blocks are shared. The block that the child is about to write is copied first, if it holds shared tokens.

        Returns:
            The block to copy from, and the block to copy to.
        """
        num_shared, num_copied_tokens = divmod(child.num_tokens - 1, self.block_size)
        for block_id in parent.block_table[:num_shared]:
            self._share(block_id)
            child.block_table.append(block_id)
        child.prefix_entries.extend(parent.prefix_entries[:num_shared])
        child.num_cached_tokens = child.num_tokens - 1
        own_block = self.append_block(child)
        return (parent.block_table[num_shared], own_block) if num_copied_tokens else None

    def record(self, seq: Sequence) -> None:
        """Make the full blocks of `seq` hittable whose tokens are known and whose KV is or will be computed."""
        if self.enable_prefix_caching:
            num_full = min(seq.num_cached_tokens, seq.num_tokens) // self.block_size
            for _ in range(num_full - len(seq.prefix_entries)):
                self.prefix_cache.insert(seq)

    def free(self, seq: Sequence) -> None:
        """Take every block from `seq`, tail first; what is cached stays hittable."""
        self.record(seq)
        for block_id in reversed(seq.block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if not self.prefix_cache.holds(block_id):
                    self._free.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.prefix_entries = []
        seq.num_cached_tokens = 0

    def forget_contents(self) -> None:
        """The workers lost their KV: no block can be hit any more. Held blocks stay held."""
        self.prefix_cache.clear()

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Assert that blocks are held exactly as often as the block tables of `holders` say, and free otherwise."""
        held = Counter(block_id for seq in holders for block_id in seq.block_table)
        for block_id, ref_count in enumerate(self._ref_counts):
            assert ref_count == held[block_id], f"block {block_id}: {ref_count} references, {held[block_id]} holders"
            assert (block_id in self._free) == (ref_count == 0), f"block {block_id}: {ref_count} references, free"
        self.prefix_cache.check_integrity()

    def _share(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1
