"""What happens between a plan and its result: a step ahead, lost workers, scores, resumed requests."""

from __future__ import annotations

import numpy as np
import pytest

from configs.schema import CacheConfig, SchedulerConfig
from scheduler.output import UNKNOWN_TOKEN, PromptLogprobs, StepResult, TokenLogprobs, int32
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import StepMismatchError
from tests.support.factories import Story, decodes, everything_is_free, prefills
from tests.support.scheduler_drive import Drive

# --- one step ahead -------------------------------------------------------------------------------------------------


def test_one_step_ahead_the_worker_continues_from_the_token_it_sampled() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6)
    first, second = story.schedule(), story.schedule()
    assert first is not None
    assert second is not None
    assert decodes(second) == [(0, UNKNOWN_TOKEN)]
    story.collect(first, say=101)
    third = story.schedule()
    assert third is not None
    assert decodes(third) == [(0, UNKNOWN_TOKEN)]
    story.collect(second, say=102)
    story.collect(third, say=103)
    assert story.tokens("a") == [101, 102, 103]
    assert decodes(story.step()) == [(0, 103)]


def test_at_most_one_step_is_ahead() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6)
    story.schedule()
    story.schedule()
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        story.schedule()


def test_a_late_stop_drops_the_token_that_was_computed_ahead() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6, stop_token_ids=(9,))
    first, second = story.schedule(), story.schedule()
    assert first is not None
    assert second is not None
    [output] = story.collect(first, say=9)
    assert output.finish_reason == "stop"
    assert story.collect(second, say=1) == []
    assert everything_is_free(story)


def test_nothing_is_computed_ahead_of_the_last_token() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6, max_tokens=2)
    first, second = story.schedule(), story.schedule()
    assert first is not None
    assert second is not None
    story.collect(first)
    assert story.schedule() is None
    assert story.collect(second)[0].finish_reason == "length"


def test_a_slot_freed_by_a_late_stop_serves_the_next_and_gets_none_of_the_old_tokens() -> None:
    story = Story(one_step_ahead=True, max_num_seqs=1)
    story.add("a", 6, stop_token_ids=(9,))
    story.add("b", 6, first=50, max_tokens=1)
    first, second = story.schedule(), story.schedule()
    assert first is not None
    assert second is not None
    story.collect(first, say=9)
    third = story.schedule()
    assert third is not None
    assert (third.released_slots.tolist(), [admitted.slot for admitted in third.admitted]) == ([0], [0])
    assert story.collect(second, say=1) == []
    assert [output.token_id for output in story.collect(third, say=2)] == [2]


def test_a_token_in_flight_of_a_preempted_sequence_is_dropped_and_sampled_again() -> None:
    story = Story(one_step_ahead=True, num_blocks=4)
    story.add("a", 8, max_tokens=3)
    story.add("b", 7, first=100, max_tokens=3)
    first = story.schedule()
    second = story.schedule()
    assert first is not None
    assert second is not None
    assert second.released_slots.tolist() == [1]
    assert [output.request_id for output in story.collect(first)] == ["a"]
    story.collect(second)
    story.run()
    assert [len(story.tokens(name)) for name in "ab"] == [3, 3]


# --- requests that wait for others ----------------------------------------------------------------------------------


def test_without_admission_only_those_who_run_are_computed() -> None:
    story = Story()
    story.add("a", 6)
    story.step()
    story.add("b", 6, first=50)
    plan = story.scheduler.schedule(admits=False)
    assert plan is not None
    assert (decodes(plan), prefills(plan)) == ([(0, 500)], [])
    assert story.scheduler.num_waiting == 1


def test_without_admission_and_with_nobody_running_there_is_no_step() -> None:
    story = Story()
    story.add("a", 6)
    assert story.scheduler.schedule(admits=False) is None
    assert story.schedule() is not None


def test_requests_are_ending_when_the_next_step_is_their_last() -> None:
    story = Story()
    story.add("a", 6, max_tokens=2)
    story.add("b", 6, first=50, max_tokens=4)
    found = []
    while story.scheduler.has_unfinished:
        story.step()
        found.append(story.scheduler.num_ending)
    assert found == [None, None, 1, 0]


def test_the_texts_of_a_request_are_one_that_is_ending() -> None:
    story = Story()
    story.add("a", 6, max_tokens=3, n=2)
    story.step()
    story.step()
    assert (story.scheduler.num_running, story.scheduler.num_ending) == (2, None)
    story.step()
    assert (story.scheduler.num_running, story.scheduler.num_ending) == (1, 1)


def test_a_request_is_not_ending_while_another_of_its_texts_waits() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6, max_tokens=1, n=2)
    story.schedule()
    assert (story.scheduler.num_waiting, story.scheduler.num_ending) == (1, None)
    story.schedule()
    assert (story.scheduler.num_waiting, story.scheduler.num_ending) == (0, 1)


def test_steps_in_flight_bring_the_end_nearer() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6, max_tokens=3)
    story.schedule()
    assert story.scheduler.num_ending is None
    story.schedule()
    assert story.scheduler.num_ending == 1


def test_a_prompt_that_is_not_computed_to_its_end_is_not_ending() -> None:
    story = Story()
    story.add("a", 40, max_tokens=1)
    story.step()
    assert story.scheduler.num_ending is None
    story.step()
    assert story.scheduler.num_ending == 0


# --- lost workers ---------------------------------------------------------------------------------------------------


def test_after_a_reset_every_sequence_starts_again_with_all_its_tokens() -> None:
    story = Story()
    story.add("a", 6, max_tokens=5)
    story.add("b", 30, first=100, max_tokens=1)
    story.step(say=101)
    story.step(say=102)
    story.scheduler.reset_workers(1)
    story.scheduler.check_integrity()
    assert (story.scheduler.num_running, story.scheduler.blocks.num_free_blocks) == (0, 32)
    plan = story.step(say=103)
    assert (plan.engine_epoch, plan.step) == (1, 0)
    assert plan.released_slots.tolist() == []
    assert plan.admitted[0].token_ids.tolist() == [*range(6), 101, 102]
    assert [admitted.num_cached_tokens for admitted in plan.admitted] == [0] * len(plan.admitted)
    story.run()
    assert story.tokens("a") == [101, 102, 103, 500, 500]


def test_a_reset_is_no_preemption() -> None:
    story = Story(max_preemptions=0)
    story.add("a", 6, max_tokens=2)
    story.step()
    story.scheduler.reset_workers(1)
    story.run()
    assert story.scheduler.stats().num_preemptions == 0


def test_results_of_an_earlier_epoch_mean_nothing() -> None:
    story = Story(one_step_ahead=True)
    story.add("a", 6, max_tokens=2)
    old = [story.schedule(), story.schedule()]
    story.scheduler.reset_workers(4)
    new = story.schedule()
    assert new is not None
    assert [story.collect(plan, say=1) for plan in old if plan is not None] == [[], []]
    assert [output.token_id for output in story.collect(new, say=2)] == [2]


def test_lost_kv_is_never_hit() -> None:
    story = Story()
    story.add("a", 11, max_tokens=1)
    story.run()
    story.scheduler.reset_workers(1)
    story.add("b", 11)
    assert story.step().admitted[0].num_cached_tokens == 0


def test_an_epoch_only_goes_up() -> None:
    with pytest.raises(AssertionError, match="does not follow"):
        Story().scheduler.reset_workers(0)


@pytest.mark.parametrize(("step", "slots"), [(1, [0]), (0, [1]), (0, []), (0, [0, 1])])
def test_a_result_that_answers_no_plan_is_an_error(step: int, slots: list[int]) -> None:
    story = Story()
    story.add("a", 6)
    story.schedule()
    with pytest.raises(StepMismatchError, match=f"result of step {step} for {len(slots)} slots; expected step 0 for 1"):
        story.scheduler.postprocess(StepResult(0, step, int32(slots), int32([5] * len(slots))))


def test_a_result_twice_is_an_error() -> None:
    story = Story()
    story.add("a", 6)
    plan = story.step()
    with pytest.raises(StepMismatchError, match="expected none"):
        story.collect(plan)


# --- log-probabilities ----------------------------------------------------------------------------------------------


def scores(first: int, num_tokens: int) -> TokenLogprobs:
    """Scores of tokens that count up from `first`, each as likely as it is large."""
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    values = tokens.astype(np.float32)
    return TokenLogprobs(tokens, values, tokens, tokens.reshape(-1, 1), values.reshape(-1, 1))


def test_prompt_scores_are_gathered_over_chunks_and_come_with_the_first_token() -> None:
    story = Story(max_prefill_chunk=4)
    story.add("a", 10, prompt_logprobs=0)
    for start, num_tokens in ((1, 4), (5, 4), (9, 1)):
        plan = story.schedule()
        assert plan is not None
        outputs = story.collect(plan, prompt_logprobs=(PromptLogprobs(0, start, scores(start, num_tokens)),))
    assert outputs[0].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs.token_ids.tolist() == list(range(1, 10))
    story.step()
    assert story.outputs["a", 0][1].prompt_logprobs is None


def test_a_prompt_of_one_token_has_no_scores() -> None:
    story = Story()
    story.add("a", 1, prompt_logprobs=0)
    story.step()
    found = story.outputs["a", 0][0].prompt_logprobs
    assert found is not None
    assert len(found.token_ids) == 0


def test_a_prompt_to_be_scored_is_computed_whole_whatever_is_cached() -> None:
    story = Story()
    story.add("a", 11, max_tokens=1)
    story.run()
    story.add("b", 11, prompt_logprobs=0)
    assert prefills(story.step()) == [(0, 0, 11)]


def test_a_prompt_preempted_while_it_is_scored_is_scored_again_from_its_start() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_prefill_chunk=4, one_step_ahead=True)
    drive = Drive(config, CacheConfig(block_size=4, watermark=0.0), num_blocks=6, max_model_len=24)
    steady = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    scored = SamplingParams(max_tokens=2, ignore_eos=True, seed=2, prompt_logprobs=0)
    drive.add(Request(request_id="steady", token_ids=list(range(7)), sampling_params=steady))
    drive.add(Request(request_id="scored", token_ids=list(range(20, 36)), sampling_params=scored, priority=1))
    drive.drain()
    assert drive.events["preemptions"] > 0
    assert drive.events["scored prompts"] == 1


def test_each_token_gets_its_own_row_of_scores() -> None:
    story = Story()
    for i, name in enumerate("abc"):
        story.add(name, 3, first=10 * i, logprobs=None if name == "b" else 1)
    plan = story.schedule()
    assert plan is not None
    outputs = story.collect(plan, logprob_slots=int32([0, 2]), logprobs=scores(70, 2))
    assert [o.logprobs.token_ids.tolist() if o.logprobs else None for o in outputs] == [[70], None, [71]]


# --- resumed --------------------------------------------------------------------------------------------------------


def test_a_resumed_request_goes_on_where_it_was() -> None:
    story = Story()
    story.add("a", token_ids=[1, 2, 3, 40, 50], num_delivered_tokens=2, max_tokens=4)
    plan = story.step(say=60)
    assert plan.admitted[0].num_prompt_tokens == 3
    assert prefills(plan) == [(0, 0, 5)]
    story.run()
    assert (story.tokens("a"), story.reason("a")) == ([60, 500], "length")


def test_delivered_tokens_count_as_min_tokens_and_not_as_cached_prompt() -> None:
    story = Story(eos_token_ids=(500,))
    story.add("a", token_ids=[*range(9)], max_tokens=1, ignore_eos=True)
    story.run()
    story.add("b", token_ids=[*range(9)], num_delivered_tokens=6, min_tokens=6, max_tokens=9)
    story.run()
    assert (story.tokens("b"), story.reason("b")) == ([500], "stop")
    assert story.outputs["b", 0][0].num_cached_tokens == 3
