"""How sequences leave their slot before their end: preemption and abort. Blocks have 4 tokens."""

from __future__ import annotations

from tests.support.factories import Story, decodes, everything_is_free, growth

# --- preemption -----------------------------------------------------------------------------------------------------


def crowded(*priorities: int, **options: object) -> Story:
    """Sequences 0, 1, ... of 7, 6, ... tokens that fill 2 blocks each, in a cache that has no more."""
    story = Story(num_blocks=2 * len(priorities), policy="priority", **options)
    for i, priority in enumerate(priorities):
        story.add(i, 7 - i, first=100 * i, priority=priority, max_tokens=4)
    story.step()
    return story


def preempted(story: Story) -> list[object]:
    return story.scheduler.stats().preempted


def test_the_cheapest_victim_goes() -> None:
    story = crowded(0, 0, 0)
    story.step()
    plan = story.step()
    assert preempted(story) == [2]
    assert plan.released_slots.tolist() == [2]
    assert growth(plan) == [(0, 5)]
    assert [slot for slot, _ in decodes(plan)] == [0, 1]


def test_the_lowest_priority_goes_first_whatever_it_costs() -> None:
    story = crowded(5, 0, 0)
    story.step()
    story.step()
    assert preempted(story) == [0]


def test_a_victim_is_not_readmitted_in_the_step_that_preempts_it() -> None:
    story = crowded(0, 0, 0)
    story.step()
    assert story.step().admitted == ()
    assert story.scheduler.num_waiting == 1


def test_a_victim_is_not_readmitted_before_its_blocks_are_there() -> None:
    story = crowded(0, 0, 0)
    story.step()
    story.step()
    plan = story.step()
    while story.reason(0) is None:
        assert plan.admitted == ()
        plan = story.step()
    plan = story.step() if not plan.admitted else plan
    assert plan.admitted[0].num_prompt_tokens == 5
    story.run()
    assert story.scheduler.stats().num_preemptions == 1


def test_a_readmitted_victim_brings_its_generated_tokens_and_finds_its_own_blocks() -> None:
    story = Story(num_blocks=4)
    story.add("a", 8, max_tokens=6)
    story.add("b", 7, first=100, max_tokens=6)
    for i in range(12):
        if (plan := story.step(say=600 + i)).admitted and i:
            break
    [admitted] = plan.admitted
    assert admitted.num_prompt_tokens == 7
    assert admitted.token_ids.tolist() == [*range(100, 107), *story.tokens("b")[: len(admitted.token_ids) - 7]]
    story.run()
    assert [len(story.tokens(name)) for name in "ab"] == [6, 6]


def test_one_request_is_not_preempted_again_and_again() -> None:
    story = Story(num_blocks=12, max_preemptions=2, max_num_seqs=6)
    for i in range(6):
        story.add(i, 5, first=100 * i, max_tokens=30)
    counts: dict[object, int] = {}
    while story.scheduler.has_unfinished:
        story.step()
        for request_id in preempted(story):
            counts[request_id] = counts.get(request_id, 0) + 1
    assert sum(counts.values()) > 0
    assert max(counts.values()) <= 4
    assert 0 not in counts or counts[0] <= 2
    assert all(story.tokens(i) == [500] * 30 for i in range(6))


def test_when_all_were_preempted_too_often_the_latest_goes() -> None:
    story = crowded(0, 0, 0, max_preemptions=0)
    story.step()
    story.step()
    assert preempted(story) == [2]
    early = Story(num_blocks=4, max_preemptions=0)
    early.add("first and cheaper", 7, max_tokens=4)
    early.add("second", 8, first=100, max_tokens=4)
    early.step()
    early.step()
    assert preempted(early) == ["second"]


def test_the_preempted_are_told_once() -> None:
    story = crowded(0, 0, 0)
    story.step()
    story.step()
    assert preempted(story) == [2]
    assert preempted(story) == []


# --- abort ----------------------------------------------------------------------------------------------------------


def test_abort_while_waiting() -> None:
    story = Story(max_num_seqs=1)
    story.add("a", 3, max_tokens=1)
    story.add("b", 3, n=3)
    story.scheduler.abort("b")
    assert story.scheduler.num_waiting == 1
    story.run()
    assert everything_is_free(story)
    assert story.tokens("b") == []


def test_abort_in_mid_prompt_keeps_the_computed_part_hittable() -> None:
    story = Story(max_prefill_chunk=8)
    story.add("a", 20, n=2)
    story.step()
    story.scheduler.abort("a")
    assert everything_is_free(story)
    story.add("b", 20)
    plan = story.step()
    assert plan.released_slots.tolist() == [0]
    assert plan.admitted[0].num_cached_tokens == 8


def test_abort_of_forked_completions_while_decoding() -> None:
    story = Story()
    story.add("a", 6, n=3)
    for _ in range(3):
        story.step()
    story.scheduler.abort("a")
    assert everything_is_free(story)


def test_abort_of_one_completion_leaves_its_siblings() -> None:
    story = Story()
    story.add("a", 6, n=3, max_tokens=8)
    for _ in range(3):
        story.step()
    story.scheduler.abort("a", 1)
    assert story.scheduler.num_running == 2
    story.run()
    assert everything_is_free(story)


def test_abort_of_the_lead_before_its_prompt_is_computed_sets_its_siblings_free() -> None:
    story = Story()
    story.add("a", 6, n=3)
    story.scheduler.abort("a", 0)
    assert story.scheduler.num_waiting == 2
    story.run()
    assert everything_is_free(story)


def test_abort_between_plan_and_result() -> None:
    story = Story()
    story.add("a", 6)
    story.add("b", 6, first=50)
    plan = story.schedule()
    assert plan is not None
    story.scheduler.abort("a")
    assert [output.request_id for output in story.collect(plan)] == ["b"]
    assert story.schedule().released_slots.tolist() == [0]  # type: ignore[union-attr]


def test_abort_of_a_preempted_request() -> None:
    story = crowded(0, 0, 0)
    story.step()
    story.step()
    story.scheduler.abort(2)
    assert story.scheduler.num_waiting == 0
    story.run()
    assert everything_is_free(story)


def test_abort_twice_or_of_nobody_is_no_error() -> None:
    story = Story()
    story.add("a", 3)
    for _ in range(2):
        story.scheduler.abort("a")
    story.scheduler.abort("never seen")
    assert everything_is_free(story)


def test_an_aborted_id_may_be_used_again_at_once() -> None:
    story = Story()
    story.add("a", 6)
    plan = story.schedule()
    assert plan is not None
    story.scheduler.abort("a")
    story.add("a", 6, max_tokens=2)
    assert story.collect(plan) == []
    story.run()
    assert len(story.tokens("a")) == 2
