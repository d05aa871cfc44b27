"""Who shares which blocks: cached prefixes, prompts in flight, forks. Blocks have 4 tokens, prompts count up."""

from __future__ import annotations

import pytest

from tests.support.factories import Story, copies, growth, prefills, tables

# --- the prefix cache -----------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_shared_block_by_block() -> None:
    story = Story()
    story.add("a", 11, max_tokens=1)
    story.run()
    story.add("b", 14, max_tokens=1)
    plan = story.step()
    assert tables(plan)[plan.admitted[0].slot] == [0, 1, 2, 3]
    assert plan.admitted[0].num_cached_tokens == 8
    assert prefills(plan) == [(0, 8, 6)]


def test_identical_prompts_in_one_step_share_their_work() -> None:
    story = Story()
    story.add("a", 11)
    story.add("b", 11)
    plan = story.step()
    assert tables(plan) == {0: [0, 1, 2], 1: [0, 1, 3]}
    assert prefills(plan) == [(0, 0, 11), (1, 8, 3)]


def test_identical_prompts_in_chunks_compute_every_chunk_once() -> None:
    story = Story(max_prefill_chunk=4)
    story.add("a", 17, max_tokens=1)
    story.add("b", 17, max_tokens=1)
    plans = [story.step() for _ in range(3)]
    assert [prefills(plan) for plan in plans] == [
        [(0, 0, 4), (1, 4, 4)],
        [(0, 8, 4), (1, 12, 4)],
        [(0, 16, 1), (1, 16, 1)],
    ]
    assert growth(plans[1]) == [(0, 1), (0, 2), (1, 2), (1, 3)]
    assert not story.scheduler.has_unfinished


def test_the_last_free_block_is_computed_into_and_not_spent_on_a_hit() -> None:
    story = Story(num_blocks=14, max_prefill_chunk=4)
    for i in range(5):
        story.add(i, 3, first=100 + 10 * i)
    story.add("long", 20)
    story.add("twin", 20)
    story.step()
    story.step()
    story.scheduler.abort("twin")
    plan = story.step()  # the five took every free block but the one that the twin computed
    assert growth(plan) == [(0, 9), (1, 10), (2, 11), (3, 12), (4, 13), (5, 8)]
    assert prefills(plan) == [(5, 12, 4)]
    story.run()


def test_different_salts_share_nothing() -> None:
    story = Story()
    story.add("a", 11, cache_salt="x")
    story.add("b", 11, cache_salt="y")
    assert tables(story.step()) == {0: [0, 1, 2], 1: [3, 4, 5]}


def test_without_prefix_caching_nothing_is_shared() -> None:
    story = Story(enable_prefix_caching=False)
    story.add("a", 11)
    story.add("b", 11)
    assert tables(story.step()) == {0: [0, 1, 2], 1: [3, 4, 5]}


def test_a_conversation_finds_its_last_answer() -> None:
    story = Story()
    story.add("a", 6, max_tokens=7)
    story.run()
    story.add("b", token_ids=[*range(6), *[500] * 7, 1, 2])
    assert story.step().admitted[0].num_cached_tokens == 12


# --- n > 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "lead", "child_tables", "expected_copies"),
    [
        (1, [0], [[1], [2]], []),
        (2, [0], [[1], [2]], [(0, 1), (0, 2)]),
        (3, [0], [[1], [2]], [(0, 1), (0, 2)]),
        (4, [0], [[2], [3]], [(0, 2), (0, 3)]),
        (5, [0, 1], [[0, 2], [0, 3]], []),
        (6, [0, 1], [[0, 2], [0, 3]], [(1, 2), (1, 3)]),
        (8, [0, 1], [[0, 3], [0, 4]], [(1, 3), (1, 4)]),
        (9, [0, 1, 2], [[0, 1, 3], [0, 1, 4]], []),
    ],
)
def test_completions_of_one_prompt_fork_where_it_ends(
    num_tokens: int, lead: list[int], child_tables: list[list[int]], expected_copies: list[tuple[int, int]]
) -> None:
    story = Story()
    story.add("a", num_tokens, n=3, seed=7)
    first, second = story.step(), story.step()
    assert tables(first) == {0: lead}
    assert tables(second) == {1: child_tables[0], 2: child_tables[1]}
    assert copies(second) == expected_copies
    assert prefills(second) == [(1, num_tokens - 1, 1), (2, num_tokens - 1, 1)]
    assert len({admitted.seed for plan in (first, second) for admitted in plan.admitted}) == 3


def test_each_completion_has_its_own_stream() -> None:
    story = Story()
    story.add("a", 6, n=3, max_tokens=4)
    story.run()
    assert [story.tokens("a", index) for index in range(3)] == [[500] * 4] * 3
    assert not story.scheduler.has_unfinished


def test_completions_start_without_their_lead_if_it_ended_at_once() -> None:
    story = Story()
    story.add("a", 6, n=2, max_tokens=1)
    story.step()
    plan = story.step()
    assert copies(plan) == []
    assert prefills(plan) == [(0, 4, 2)]
    assert not story.scheduler.has_unfinished


def test_the_texts_of_one_request_share_their_prompt_in_memory_until_they_differ() -> None:
    story = Story()
    story.add("a", 11, n=3, max_tokens=2)
    sequences = list(story.scheduler._sequences_of["a"])
    lead, *children = sequences
    assert all(child.token_ids is lead.token_ids for child in children)
    story.run()
    assert [seq.prompt_token_ids for seq in sequences] == [lead.prompt_token_ids] * 3
    assert [seq.num_completion_tokens for seq in sequences] == [len(seq.completion_token_ids) for seq in sequences]
    assert len({id(seq.token_ids) for seq in sequences}) == 3
