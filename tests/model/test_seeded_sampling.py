"""A seeded sequence has the same tokens whatever runs beside it and whatever happens to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.local import LocalEngine
from scheduler.sampling_params import SamplingParams
from tests.support.parity import Ranks, Setting, make_prompts
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 20
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.02),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    SamplingParams(logit_bias={5: 3.0, 7: -100.0}, min_tokens=10),
    SamplingParams(temperature=0.0, repetition_penalty=1.1),
    SamplingParams(temperature=0.0),
]
PROMPTS = make_prompts([3 + 2 * i for i in range(32)], VOCAB_SIZE, seed=4)
PARAMS = [
    replace(KINDS[i % len(KINDS)], seed=1000 + i // len(KINDS), max_tokens=NUM_TOKENS, ignore_eos=i % 3 > 0)
    for i in range(32)
]
SAMPLE = range(0, 32, 3)  # every kind, several lengths


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model("smollm2", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def ranks(checkpoint):
    ranks = Ranks(checkpoint, 1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alone(ranks):
    """Each sequence of the sample generated with nothing beside it."""
    engine = ranks.engine(Setting(prefix_cache=False, one_step_ahead=False))
    return {i: engine.generate([PROMPTS[i]], PARAMS[i])[0].token_ids for i in SAMPLE}


def sample_of(completions):
    return {i: completions[i].token_ids for i in SAMPLE}


def test_in_a_batch_of_32(ranks, alone):
    for one_step_ahead in (True, False):
        setting = Setting(num_blocks=200, max_num_seqs=32, prefill_chunk=16, one_step_ahead=one_step_ahead)
        assert sample_of(ranks.engine(setting).generate(PROMPTS, PARAMS)) == alone


def test_after_preemption(ranks, alone):
    engine = ranks.engine(Setting(num_blocks=16, max_num_seqs=32))
    assert sample_of(engine.generate(PROMPTS, PARAMS)) == alone
    assert engine.scheduler.stats().num_preemptions > 3


def test_after_a_prefix_hit(ranks, alone):
    engine = ranks.engine(Setting(num_blocks=400, max_num_seqs=32))
    engine.generate(PROMPTS, PARAMS)
    again = engine.generate(PROMPTS, PARAMS)
    assert sample_of(again) == alone
    assert sum(completion.num_cached_tokens > 0 for completion in again) > 16


def test_on_two_ranks(checkpoint, alone):
    ranks = Ranks(checkpoint, 2)
    assert sample_of(ranks.engine(Setting(num_blocks=200, max_num_seqs=32)).generate(PROMPTS, PARAMS)) == alone
    ranks.close()


class InterruptedEngine(LocalEngine):
    """Loses its workers, with steps in flight, after a few tokens."""

    is_lost = False

    def step(self):
        outputs = super().step()
        if not self.is_lost and self.scheduler.stats().num_sampled_tokens > 5:
            for _ in range(self.scheduler.num_steps_in_flight):
                self.executor.collect()  # computed, but nobody will hear of it
            self.scheduler.reset_workers(engine_epoch=1)
            self.is_lost = True
        return outputs


def test_after_the_workers_were_lost(ranks, alone):
    engine = ranks.engine(Setting(), InterruptedEngine)
    indices = list(SAMPLE)[:4]
    completions = engine.generate([PROMPTS[i] for i in indices], [PARAMS[i] for i in indices])
    assert engine.is_lost
    assert [completion.token_ids for completion in completions] == [alone[i] for i in indices]


def test_several_continuations_of_one_prompt_differ_and_repeat(ranks):
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    first = [c.token_ids for c in ranks.engine(Setting()).generate([PROMPTS[9]], params)]
    second = [c.token_ids for c in ranks.engine(Setting(one_step_ahead=False)).generate([PROMPTS[9]], params)]
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


def test_an_unseeded_sequence_takes_the_seed_it_was_given(ranks):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    completions = ranks.engine(Setting()).generate([PROMPTS[9]] * 2, params)
    assert completions[0].token_ids != completions[1].token_ids
