"""What the scheduler decides, plan by plan: order, budget, stops, admission, refusals. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from scheduler.request import QueueFullError
from tests.support.factories import Story, decodes, everything_is_free, growth, prefills, tables

# --- one request ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_admitted_whole_and_computed() -> None:
    story = Story()
    story.add("a", 6, seed=3, max_tokens=9)
    plan = story.step()
    [admitted] = plan.admitted
    assert (admitted.slot, admitted.seed, admitted.num_prompt_tokens, admitted.num_cached_tokens) == (0, 3, 6, 0)
    assert admitted.token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert admitted.block_table.tolist() == [0, 1]
    assert admitted.sampling_params.max_tokens == 9
    assert (prefills(plan), decodes(plan)) == ([(0, 0, 6)], [])
    assert (plan.engine_epoch, plan.step) == (0, 0)


def test_while_decoding_only_the_last_token_is_sent_and_a_block_when_it_is_needed() -> None:
    story = Story()
    story.add("a", 6)
    plans = [story.step(say=100 + i) for i in range(5)]
    assert [decodes(plan) for plan in plans] == [[], [(0, 100)], [(0, 101)], [(0, 102)], [(0, 103)]]
    assert [growth(plan) for plan in plans] == [[], [], [], [(0, 2)], []]
    assert [plan.step for plan in plans] == [0, 1, 2, 3, 4]
    assert not any(plan.admitted for plan in plans[1:])


def test_there_is_nothing_to_do_without_requests() -> None:
    assert Story().schedule() is None


def test_a_finished_sequence_frees_its_slot_and_its_blocks() -> None:
    story = Story(num_blocks=8)
    story.add("a", 6, max_tokens=1)
    story.step()
    assert not story.scheduler.has_unfinished
    assert story.scheduler.blocks.num_free_blocks == 8
    story.add("b", 3, first=50)
    assert story.step().released_slots.tolist() == [0]


def test_outputs_say_how_much_of_the_prompt_was_cached() -> None:
    story = Story()
    for name in "ab":
        story.add(name, 11, max_tokens=1)
        story.run()
    assert [story.outputs[name, 0][0].num_cached_tokens for name in "ab"] == [0, 8]
    stats = story.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens, stats.num_finished) == (22, 8, 2)


# --- when to stop ---------------------------------------------------------------------------------------------------


def test_max_tokens_ends_a_sequence() -> None:
    story = Story()
    story.add("a", max_tokens=3)
    story.run()
    assert (story.tokens("a"), story.reason("a")) == ([500] * 3, "length")


def test_the_models_limit_ends_a_sequence_without_max_tokens() -> None:
    story = Story(max_model_len=12)
    story.add("a", 8, max_tokens=None)
    story.run()
    assert (len(story.tokens("a")), story.reason("a")) == (4, "length")


def test_the_cache_limit_ends_a_sequence_as_well() -> None:
    story = Story(num_blocks=3, max_model_len=64)
    story.add("a", 8, max_tokens=None)
    story.run()
    assert len(story.tokens("a")) == 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "stop"),
        ({"ignore_eos": True}, "length"),
        ({"ignore_eos": True, "stop_token_ids": (500,)}, "stop"),
        ({"stop_token_ids": (7,)}, "stop"),
    ],
)
def test_end_of_sequence_and_stop_tokens_stop(options: dict[str, object], reason: str) -> None:
    story = Story(eos_token_ids=(499, 500))
    story.add("a", max_tokens=3, **options)
    story.run()
    assert story.reason("a") == reason
    assert len(story.tokens("a")) == (1 if reason == "stop" else 3)


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 2), (3, 4), (5, 5)])
def test_min_tokens_come_before_the_stop(min_tokens: int, num_tokens: int) -> None:
    story = Story(eos_token_ids=(500,))
    story.add("a", max_tokens=5, min_tokens=min_tokens)
    story.run()
    assert len(story.tokens("a")) == num_tokens


# --- budget and order -----------------------------------------------------------------------------------------------


def test_long_prompts_are_computed_in_chunks() -> None:
    story = Story(max_prefill_chunk=8)
    story.add("a", 20)
    plans = [story.step() for _ in range(4)]
    assert [prefills(plan) for plan in plans] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)], []]
    assert tables(plans[0]) == {0: [0, 1]}
    assert [growth(plan) for plan in plans[1:3]] == [[(0, 2), (0, 3)], [(0, 4)]]
    assert len(story.tokens("a")) == 2


def test_chunks_of_prompts_fill_what_decodes_leave_of_the_budget() -> None:
    story = Story(max_num_batched_tokens=10, max_num_seqs=4)
    story.add("a", 5)
    story.add("b", 5, first=50)
    story.step()
    story.add("c", 20, first=100)
    plan = story.step()
    assert [slot for slot, _ in decodes(plan)] == [0, 1]
    assert prefills(plan) == [(2, 0, 8)]
    assert plan.num_scheduled_tokens == 10


def test_decodes_never_starve_behind_arrivals() -> None:
    story = Story(max_num_batched_tokens=8, max_num_seqs=8, num_blocks=100)
    story.add("old", 4, max_tokens=20)
    story.step()
    for i in range(19):
        story.add(i, 8, first=100 + 8 * i, max_tokens=1)
        plan = story.step()
        assert 0 in plan.decode_slots
        assert plan.num_scheduled_tokens <= 8
    assert story.reason("old") == "length"


def test_max_num_seqs_caps_what_runs() -> None:
    story = Story(max_num_seqs=2)
    for i in range(4):
        story.add(i, 3, first=10 * i, max_tokens=2)
    assert len(story.step().admitted) == 2
    assert (story.scheduler.num_running, story.scheduler.num_waiting) == (2, 2)
    assert story.step().admitted == ()
    assert [admitted.slot for admitted in story.step().admitted] == [1, 0]


def test_lower_priorities_are_admitted_first() -> None:
    story = Story(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -5)):
        story.add(name, 3, priority=priority, max_tokens=1)
    story.run()
    assert [request_id for request_id, _ in story.outputs] == ["c", "a", "b"]


def test_fair_tenants_take_turns() -> None:
    story = Story(max_num_seqs=1, policy="fair")
    for i in range(4):
        story.add(f"x{i}", 3, tenant="loud", max_tokens=1)
    for i in range(2):
        story.add(f"o{i}", 3, tenant="quiet", max_tokens=1)
    story.run()
    assert [request_id for request_id, _ in story.outputs] == ["x0", "o0", "x1", "o1", "x2", "x3"]


# --- admission ------------------------------------------------------------------------------------------------------


def test_admission_keeps_the_watermark_free_while_others_run() -> None:
    story = Story(num_blocks=10, watermark=0.2)
    story.add("a", 16)
    story.add("b", 16, first=100)
    story.add("c", 4, first=200)
    plan = story.schedule()
    assert plan is not None
    assert len(plan.admitted) == 2
    assert story.scheduler.blocks.num_free_blocks == 2
    assert story.scheduler.num_waiting == 1


def test_a_sequence_alone_may_take_the_watermark_too() -> None:
    story = Story(num_blocks=4, watermark=0.5)
    story.add("a", 15, max_tokens=1)
    assert len(story.step().admitted) == 1


def test_blocks_promised_to_a_prompt_in_chunks_are_not_promised_twice() -> None:
    story = Story(num_blocks=8, max_prefill_chunk=4)
    story.add("long", 24, max_tokens=1)
    story.add("b", 12, first=100, max_tokens=1)
    assert len(story.step().admitted) == 1
    story.run()
    assert story.scheduler.stats().num_preemptions == 0


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_request() -> None:
    story = Story(num_blocks=8)
    story.add("a", 20, max_tokens=3)
    story.step()
    story.add("large", 16, first=100, max_tokens=1)
    story.add("small", 2, first=200, max_tokens=1)
    assert story.step().admitted == ()
    assert story.scheduler.explain_waiting() == [
        "request 'large' (16 tokens) is first: 7 of 8 slots free, needs up to 4 blocks, 2 of 8 available, "
        "0 kept for growth",
        "request 'small' (2 tokens) waits behind it",
    ]
    story.run()


def test_nobody_waits_without_an_explanation() -> None:
    assert Story().scheduler.explain_waiting() == []


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": list(range(64))}, "has 64 tokens .* limit of 64 tokens; shorten it"),
        ({"num_tokens": 60, "max_tokens": 5}, "60 prompt tokens and max_tokens 5 exceed .* ask for at most 4 tokens"),
        ({"token_ids": [1, 1000]}, "token id 1000 in the prompt is out of range; legal ids are 0 to 999"),
        ({"token_ids": [1, -1]}, "token id -1 in the prompt"),
        ({"stop_token_ids": (1000,)}, "token id 1000 in the logit_bias or stop_token_ids"),
        ({"logit_bias": {-3: 1.0}}, "token id -3 in the logit_bias"),
        ({"num_tokens": 3, "num_delivered_tokens": 3}, "3 of 3 tokens cannot be delivered ones"),
        ({"num_tokens": 6, "num_delivered_tokens": 2, "max_tokens": 2}, "2 tokens were delivered and max_tokens is 2"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(options: dict[str, object], message: str) -> None:
    story = Story()
    with pytest.raises(ValueError, match=message):
        story.add("a", **options)
    assert everything_is_free(story)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty; give at least one token"):
        Story().add("a", 0)


def test_a_prompt_that_no_cache_holds_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"the 12 tokens that the KV cache holds \(3 blocks of 4; raise cache.num_blocks"
    ):
        Story(num_blocks=3).add("a", 12)


def test_the_longest_request_that_fits_is_served() -> None:
    story = Story(num_blocks=3)
    story.add("a", 11, max_tokens=1)
    story.run()
    assert story.reason("a") == "length"


def test_an_id_in_use_is_refused() -> None:
    story = Story()
    story.add("a", 3)
    with pytest.raises(ValueError, match="'a' is in use"):
        story.add("a", 3)


def test_a_full_queue_refuses_and_recovers() -> None:
    story = Story(max_num_waiting=2, max_num_seqs=1)
    story.add("a", 3, max_tokens=1)
    story.add("b", 3, max_tokens=1)
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        story.add("c", 3)
    story.step()
    story.add("c", 3)


def test_more_rows_than_one_step_holds_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="64 rows"):
        Story(max_num_seqs=64, max_num_batched_tokens=32)
