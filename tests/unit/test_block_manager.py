"""Exact block ids: who gets which block, in which order free blocks go, and what forks share."""

from __future__ import annotations

import pytest

from scheduler.block_manager import BlockManager, OutOfBlocksError
from scheduler.sequence import Sequence
from tests.support.factories import make_sequence


def make_manager(num_blocks: int = 8, block_size: int = 4, **options: bool) -> BlockManager:
    return BlockManager(num_blocks, block_size, **options)


def compute(blocks: BlockManager, seq: Sequence, num_tokens: int | None = None) -> Sequence:
    """Take what is cached, compute the rest up to `num_tokens`, record it."""
    blocks.take_hits(seq, blocks.match(seq))
    num_tokens = seq.num_tokens if num_tokens is None else num_tokens
    while len(seq.block_table) < blocks.num_blocks_for(num_tokens):
        blocks.append_block(seq)
    seq.num_cached_tokens = num_tokens
    blocks.record(seq)
    return seq


def take_all(blocks: BlockManager) -> list[int]:
    """The order in which the free blocks go."""
    taker = make_sequence(1, first=900)
    return [blocks.append_block(taker) for _ in range(blocks.num_free_blocks)]


def test_fresh_blocks_go_in_order() -> None:
    assert take_all(make_manager(5)) == [0, 1, 2, 3, 4]


def test_without_a_free_block_there_is_an_error() -> None:
    blocks = make_manager(2)
    take_all(blocks)
    with pytest.raises(OutOfBlocksError, match="all 2 blocks are held"):
        blocks.append_block(make_sequence())


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_tokens_are_rounded_up(num_tokens: int, num_blocks: int) -> None:
    assert make_manager().num_blocks_for(num_tokens) == num_blocks


def test_a_freed_sequence_loses_its_tail_first_and_its_unfilled_block_before_all() -> None:
    blocks = make_manager(6)
    seq = compute(blocks, make_sequence(14))
    assert seq.block_table == [0, 1, 2, 3]
    blocks.free(seq)
    assert seq.block_table == []
    assert take_all(blocks) == [3, 4, 5, 2, 1, 0]


def test_least_recently_freed_sequences_go_first() -> None:
    blocks = make_manager(4)
    old, new = compute(blocks, make_sequence(8)), compute(blocks, make_sequence(8, first=50))
    blocks.free(new)
    blocks.free(old)
    assert take_all(blocks) == [3, 2, 1, 0]


def test_a_hit_takes_a_free_block_out_of_the_middle_and_brings_it_back_as_the_newest() -> None:
    blocks = make_manager(6)
    first, second = compute(blocks, make_sequence(8)), compute(blocks, make_sequence(8, first=50))
    blocks.free(first)
    blocks.free(second)
    again = compute(blocks, make_sequence(9))
    assert again.block_table == [0, 1, 4]
    blocks.free(again)
    assert take_all(blocks) == [4, 5, 3, 2, 1, 0]


def test_without_prefix_caching_nothing_is_hit_and_the_last_freed_goes_first() -> None:
    blocks = make_manager(4, enable_prefix_caching=False)
    seq = compute(blocks, make_sequence(9))
    blocks.free(seq)
    assert blocks.match(make_sequence(9)) == []
    assert take_all(blocks) == [0, 1, 2, 3]


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    blocks = make_manager(4)
    one, two = compute(blocks, make_sequence(9)), compute(blocks, make_sequence(9))
    assert (one.block_table, two.block_table) == ([0, 1, 2], [0, 1, 3])
    blocks.check_integrity([one, two])
    blocks.free(one)
    assert blocks.num_free_blocks == 1
    blocks.free(two)
    assert blocks.num_free_blocks == 4
    blocks.check_integrity([])


def test_only_free_hits_count_against_the_free_blocks() -> None:
    blocks = make_manager(8)
    held, gone = compute(blocks, make_sequence(5)), compute(blocks, make_sequence(9))
    blocks.free(gone)
    hits = blocks.match(make_sequence(9))
    assert [hit.block_id for hit in hits] == [0, 2]
    assert blocks.num_free_among(hits) == 1
    blocks.check_integrity([held])


def test_hits_count_as_computed() -> None:
    blocks = make_manager()
    compute(blocks, make_sequence(12))
    seq = make_sequence(11)
    blocks.take_hits(seq, blocks.match(seq))
    assert (seq.block_table, seq.num_cached_tokens) == ([0, 1], 8)


def test_only_blocks_that_are_full_and_computed_can_be_hit() -> None:
    blocks = make_manager()
    compute(blocks, make_sequence(16), num_tokens=7)
    assert [hit.block_id for hit in blocks.match(make_sequence(16))] == [0]


def test_generated_tokens_can_be_hit_as_well() -> None:
    blocks = make_manager()
    seq = compute(blocks, make_sequence(6))
    seq.append_token(6)
    seq.append_token(7)
    seq.num_cached_tokens = 8
    blocks.free(seq)
    assert [hit.block_id for hit in blocks.match(make_sequence(9))] == [0, 1]


def test_a_token_not_known_yet_is_not_recorded() -> None:
    blocks = make_manager()
    seq = compute(blocks, make_sequence(7))
    seq.num_cached_tokens, seq.num_pending_tokens = 8, 2
    blocks.free(seq)
    assert len(blocks.prefix_cache) == 1


@pytest.mark.parametrize(
    ("num_tokens", "shared", "copy"),
    [
        (1, [], None),
        (2, [], (0, 1)),
        (4, [], (0, 1)),
        (5, [0], None),
        (6, [0], (1, 2)),
        (8, [0], (1, 2)),
        (9, [0, 1], None),
    ],
)
def test_a_fork_shares_full_blocks_and_copies_what_it_will_write(
    num_tokens: int, shared: list[int], copy: tuple[int, int] | None
) -> None:
    blocks = make_manager()
    parent, child = compute(blocks, make_sequence(num_tokens)), make_sequence(num_tokens)
    num_parent_blocks = len(parent.block_table)
    assert blocks.fork(parent, child) == copy
    assert child.block_table == [*shared, num_parent_blocks]
    assert child.num_cached_tokens == num_tokens - 1
    blocks.check_integrity([parent, child])


def test_a_fork_of_a_parent_that_went_on_shares_the_prompt_only() -> None:
    blocks = make_manager()
    parent, child = compute(blocks, make_sequence(6)), make_sequence(6)
    for token in range(7):
        parent.append_token(token)
    compute(blocks, parent)
    assert parent.block_table == [0, 1, 2, 3]
    assert blocks.fork(parent, child) == (1, 4)
    assert child.block_table == [0, 4]


def test_lost_contents_are_never_hit() -> None:
    blocks = make_manager()
    held = compute(blocks, make_sequence(8))
    blocks.forget_contents()
    assert blocks.match(make_sequence(9)) == []
    blocks.check_integrity([held])


def test_the_books_show_a_leak() -> None:
    blocks = make_manager()
    compute(blocks, make_sequence(4))
    with pytest.raises(AssertionError, match="block 0: 1 references, 0 holders"):
        blocks.check_integrity([])
