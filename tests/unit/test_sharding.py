"""How heads, rows and columns are dealt out to any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.sharding import HeadShard, imbalance, split_heads, split_range

COUNTS = st.integers(1, 40)


def lengths(size: int, num_ranks: int, unit: int = 1) -> list[int]:
    return [len(part) for part in split_range(size, num_ranks, unit)]


def test_a_range_is_cut_equally_where_ranks_divide_it() -> None:
    assert split_range(12, 3) == (range(0, 4), range(4, 8), range(8, 12))
    assert lengths(1000, 8, unit=16) == [125] * 8


def test_the_first_parts_are_larger_where_ranks_do_not_divide_it() -> None:
    assert lengths(11, 3) == [4, 4, 3]
    assert lengths(2, 4) == [1, 1, 0, 0]


def test_uneven_parts_are_multiples_of_the_unit_but_for_the_last() -> None:
    assert lengths(1536, 5, unit=16) == [320, 304, 304, 304, 304]
    assert lengths(100, 3, unit=16) == [48, 32, 20]
    assert lengths(20, 3, unit=16) == [16, 4, 0]


@given(st.integers(0, 5000), COUNTS, st.sampled_from([1, 8, 16]))
def test_parts_join_to_the_whole_range(size: int, num_ranks: int, unit: int) -> None:
    parts = split_range(size, num_ranks, unit)
    assert len(parts) == num_ranks
    assert [i for part in parts for i in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) < 2 * unit


def test_whole_kv_groups_go_to_ranks_that_do_not_divide_them() -> None:
    assert split_heads(9, 3, 2) == (HeadShard(0, 6, 0, 2), HeadShard(6, 3, 2, 1))


def test_kv_heads_are_replicated_where_there_are_more_ranks() -> None:
    assert split_heads(8, 2, 4) == (
        HeadShard(0, 2, 0, 1),
        HeadShard(2, 2, 0, 1),
        HeadShard(4, 2, 1, 1),
        HeadShard(6, 2, 1, 1),
    )
    assert [shard.num_heads for shard in split_heads(9, 3, 5)] == [2, 1, 2, 1, 3]


def test_a_rank_without_query_heads_holds_no_kv_head() -> None:
    shards = split_heads(4, 4, 6)
    assert [shard.num_heads for shard in shards] == [1, 0, 1, 0, 1, 1]
    assert [shard.num_kv_heads for shard in shards] == [1, 0, 1, 0, 1, 1]


@given(COUNTS, COUNTS, COUNTS)
def test_every_query_head_is_held_once_beside_its_own_kv_head(group: int, num_kv_heads: int, num_ranks: int) -> None:
    shards = split_heads(group * num_kv_heads, num_kv_heads, num_ranks)
    assert len(shards) == num_ranks
    assert [head for shard in shards for head in shard.heads] == list(range(group * num_kv_heads))
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert shard.num_kv_heads == 0 or shard.num_heads % shard.num_kv_heads == 0


def test_unequal_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="10 query heads do not form equal groups over 4 KV heads"):
        split_heads(10, 4, 2)


def test_imbalance_compares_the_busiest_rank_with_the_mean() -> None:
    assert imbalance(split_heads(32, 8, 8)) == 1.0
    assert imbalance(split_heads(9, 3, 2)) == pytest.approx(6 / 4.5)
    assert imbalance(split_heads(4, 1, 5)) == pytest.approx(1.25)
