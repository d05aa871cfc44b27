"""Tensor-parallel arithmetic: which heads, rows and columns each of any number of ranks holds.

Pure: knows neither tensors nor processes. Every split is contiguous, in rank order, larger parts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Uneven splits of wide dimensions are cut at multiples of this, so that every part keeps fast matrix kernels."""


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads of one rank. Each of its KV heads serves `num_heads / num_kv_heads` of its query heads."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def kv_heads(self) -> range:
        return range(self.first_kv_head, self.first_kv_head + self.num_kv_heads)


def split_range(size: int, num_ranks: int, unit: int = 1) -> tuple[range, ...]:
    """`range(size)` cut into one part per rank.

    Where ranks divide `size` the parts are equal; else they are multiples of `unit` (the last non-empty one may be
    smaller) and differ by at most one unit. A part is empty when there are more ranks than units.
    """
    assert size >= 0 and num_ranks >= 1 and unit >= 1
    if size % num_ranks == 0:
        unit = 1
    num_units = -(-size // unit)
    per_rank, extra = divmod(num_units, num_ranks)
    parts, start = [], 0
    for rank in range(num_ranks):
        stop = min(size, start + unit * (per_rank + (rank < extra)))
        parts.append(range(start, stop))
        start = stop
    return tuple(parts)


def split_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShard, ...]:
    """The heads of each rank.

    With at most as many ranks as KV heads, whole KV groups (a KV head and its query heads) are dealt out. With more
    ranks, each KV head is held by several ranks that share its query heads; a rank for which no query
    head is left holds no KV head either.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not form equal groups over {num_kv_heads} KV heads")
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        return tuple(
            HeadShard(part.start * group, len(part) * group, part.start, len(part))
            for part in split_range(num_kv_heads, num_ranks)
        )
    shards: list[HeadShard] = []
    for kv_head, ranks in enumerate(split_range(num_ranks, num_kv_heads)):
        for part in split_range(group, len(ranks)):
            shards.append(HeadShard(kv_head * group + part.start, len(part), kv_head, min(1, len(part))))
    return tuple(shards)


def imbalance(shards: Sequence[HeadShard]) -> float:
    """The busiest rank's query heads over the mean: how much longer attention takes than under an even split (1.0)."""
    loads = [shard.num_heads for shard in shards]
    return max(loads) * len(loads) / sum(loads)
