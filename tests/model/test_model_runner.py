"""One rank's steps, with a model whose next token is known in advance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler.output import StepPlan
from scheduler.sampling_params import SamplingParams
from tests.support.step_plans import GREEDY, admitted, plan
from workers.input_batch import InputBatch
from workers.kv_cache import KVCache
from workers.model_runner import ModelRunner
from workers.plan_check import PlanError
from workers.sampling_state import SamplingState

VOCAB = 64
BLOCK_SIZE = 4
NUM_BLOCKS = 16


def following(tokens):
    """What the model below finds likeliest after `tokens`."""
    return (sum(tokens) + len(tokens)) % VOCAB


class SummingModel:
    """Stores each token in the cache and predicts from the sum of all tokens that it finds there."""

    def __call__(self, token_ids, positions, kv, meta):
        flat = kv.k[0].view(-1)
        flat[meta.slot_mapping] = token_ids.to(torch.float32)
        rows = []
        for i, length in enumerate(meta.seq_lens.tolist()):
            places = [int(meta.block_tables[i, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]
            start, end = meta.cu_seqlens_q[i : i + 2].tolist()
            for seen in range(length - (end - start) + 1, length + 1):
                rows.append(following(flat[places[:seen]].to(torch.int64).tolist()))
        return torch.tensor(rows)[:, None]

    def compute_logits(self, hidden):
        distance = (torch.arange(VOCAB) - hidden) % VOCAB
        return -distance.to(torch.float32)


def make_runner(**options):
    device = torch.device("cpu")
    batch = InputBatch(
        num_slots=4,
        max_model_len=40,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB,
        device=device,
    )
    kv = KVCache.allocate(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=device,
    )
    return ModelRunner(SummingModel(), kv, batch, SamplingState(4, VOCAB, (0,), device), **options)


def continuation(tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[-count:]


def test_a_prompt_in_chunks_then_decoding():
    runner = make_runner()
    prompt = [3, 1, 4, 1, 5, 9]
    first = runner.execute(plan(0, admit=[admitted(1, prompt, [7])], prefill=[(1, 0, 4)]))
    assert (first.engine_epoch, first.step, len(first.tokens)) == (0, 0, 0)
    second = runner.execute(plan(1, grown=[(1, 2)], prefill=[(1, 4, 2)]))
    tokens = second.tokens.tolist()
    assert second.slots.tolist() == [1]
    for step in range(2, 4):
        tokens += runner.execute(plan(step, decode=[(1, tokens[-1])])).tokens.tolist()
    assert tokens == continuation(prompt, 3)


def test_one_step_ahead_the_next_plan_comes_before_the_token():
    runner = make_runner()
    prompt = [3, 1, 4]
    pending = [runner.launch(plan(0, admit=[admitted(0, prompt, [0, 1])], prefill=[(0, 0, 3)]))]
    tokens = []
    for step in range(1, 4):
        pending.append(runner.launch(plan(step, decode=[(0, -1)])))
        tokens += runner.collect(pending.pop(0)).tokens.tolist()
    tokens += runner.collect(pending.pop()).tokens.tolist()
    assert tokens == continuation(prompt, 4)


def test_rows_answer_in_the_order_of_the_plan():
    runner = make_runner()
    runner.execute(plan(0, admit=[admitted(3, [5, 6], [1])], prefill=[(3, 0, 2)]))
    result = runner.execute(
        plan(
            1,
            admit=[admitted(2, [1, 1], [2]), admitted(0, [2, 2, 2], [3])],
            prefill=[(2, 0, 2), (0, 0, 2)],
            decode=[(3, -1)],
        )
    )
    assert result.slots.tolist() == [2, 3]
    assert result.tokens.tolist() == [following([1, 1]), continuation([5, 6], 2)[1]]


def test_blocks_are_copied_before_anything_is_computed():
    runner = make_runner()
    prompt = [9, 8, 7]
    runner.execute(plan(0, admit=[admitted(0, prompt, [5])], prefill=[(0, 0, 3)]))
    fork = admitted(1, prompt, [6], num_cached_tokens=2)
    result = runner.execute(plan(1, admit=[fork], copies=[(5, 6)], prefill=[(1, 2, 1)], decode=[(0, -1)]))
    assert result.tokens.tolist() == [continuation(prompt, 1)[0], continuation(prompt, 2)[1]]
    with pytest.raises(PlanError, match="copied blocks"):
        runner.execute(plan(2, copies=[(5, 99)], decode=[(0, -1)]))


def test_cached_tokens_are_not_computed_again():
    runner = make_runner()
    prompt = list(range(10, 18))
    runner.execute(plan(0, admit=[admitted(0, prompt, [3, 4])], prefill=[(0, 0, 8)]))
    again = admitted(1, [*prompt, 30], [3, 4, 9], num_cached_tokens=8)
    result = runner.execute(plan(1, released=[0], admit=[again], prefill=[(1, 8, 1)]))
    assert result.tokens.tolist() == [following([*prompt, 30])]


def test_logprobs_come_only_for_those_who_asked():
    runner = make_runner()
    asking = SamplingParams(temperature=0.0, logprobs=2)
    result = runner.execute(
        plan(
            0,
            admit=[admitted(0, [4, 4], [0]), admitted(1, [6, 6], [1], params=asking)],
            prefill=[(0, 0, 2), (1, 0, 2)],
        )
    )
    assert result.logprob_slots.tolist() == [1]
    likeliest = following([6, 6])
    assert result.logprobs.token_ids.tolist() == [likeliest]
    assert result.logprobs.ranks.tolist() == [1]
    assert result.logprobs.top_ids.tolist() == [[likeliest, likeliest + 1]]
    expected = torch.log_softmax(-torch.arange(VOCAB, dtype=torch.float32), -1)[:2]
    np.testing.assert_allclose(result.logprobs.top_logprobs[0], expected, rtol=1e-5)


def test_logprobs_are_those_of_the_models_own_logits():
    runner = make_runner()
    params = SamplingParams(temperature=0.0, logprobs=1, logit_bias={50: 100.0})
    result = runner.execute(plan(0, admit=[admitted(0, [4, 4], [0], params=params)], prefill=[(0, 0, 2)]))
    assert result.tokens.tolist() == [50]
    assert result.logprobs.top_ids.tolist() == [[following([4, 4])]]
    assert result.logprobs.ranks.tolist() == [(50 - following([4, 4])) % VOCAB + 1]


def test_prompt_logprobs_score_every_token_but_the_first():
    runner = make_runner()
    prompt = [3, 1, 4, 1, 5, 9]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    first = runner.execute(plan(0, admit=[admitted(2, prompt, [0, 1], params=params)], prefill=[(2, 0, 4)]))
    second = runner.execute(plan(1, prefill=[(2, 4, 2)]))
    chunks = [*first.prompt_logprobs, *second.prompt_logprobs]
    assert [(chunk.slot, chunk.start) for chunk in chunks] == [(2, 1), (2, 5)]
    token_ids = [token for chunk in chunks for token in chunk.scores.token_ids.tolist()]
    likeliest = [row[0] for chunk in chunks for row in chunk.scores.top_ids.tolist()]
    ranks = [rank for chunk in chunks for rank in chunk.scores.ranks.tolist()]
    assert token_ids == prompt[1:]
    assert likeliest == [following(prompt[:n]) for n in range(1, 6)]
    assert ranks == [(prompt[n] - following(prompt[:n])) % VOCAB + 1 for n in range(1, 6)]


def test_generated_tokens_of_a_readmitted_sequence_are_no_prompt():
    runner = make_runner()
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    sequence = admitted(0, [3, 1, 4, 1, 5], [0, 1], num_prompt_tokens=3, params=params)
    result = runner.execute(plan(0, admit=[sequence], prefill=[(0, 0, 5)]))
    assert [chunk.scores.token_ids.tolist() for chunk in result.prompt_logprobs] == [[1, 4]]


def test_a_rank_that_does_not_answer_scores_nothing():
    runner = make_runner(answers=False)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)
    result = runner.execute(plan(0, admit=[admitted(0, [3, 1], [0], params=params)], prefill=[(0, 0, 2)]))
    assert result.logprobs is None
    assert result.prompt_logprobs == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(2, decode=[(0, -1)]), "plan of step 2 in epoch 0; step 1 is due"),
        (plan(0, decode=[(0, -1)]), "plan of step 0 in epoch 0; step 1 is due"),
        (plan(1, epoch=1), "plan of step 1 in epoch 1; step 0 is due"),
    ],
)
def test_plans_out_of_order_are_refused(wrong: StepPlan, message):
    runner = make_runner()
    runner.execute(plan(0, admit=[admitted(0, [3], [0], params=GREEDY)], prefill=[(0, 0, 1)]))
    with pytest.raises(PlanError, match=message):
        runner.execute(wrong)


def test_a_gap_is_noticed_against_the_plan_that_was_launched_last():
    runner = make_runner()
    runner.launch(plan(0, admit=[admitted(0, [3], [0], params=GREEDY)], prefill=[(0, 0, 1)]))
    with pytest.raises(PlanError, match="plan of step 2 in epoch 0; step 1 is due"):
        runner.launch(plan(2, decode=[(0, -1)]))


def test_a_new_epoch_starts_from_nothing():
    runner = make_runner()
    runner.execute(plan(0, epoch=3, admit=[admitted(0, [3], [0])], prefill=[(0, 0, 1)]))
    with pytest.raises(PlanError, match="slot 0 holds no sequence"):
        runner.execute(plan(0, epoch=4, decode=[(0, -1)]))
    with pytest.raises(PlanError, match="stale plan of epoch 3; this rank is in epoch 4"):
        runner.execute(plan(1, epoch=3, decode=[(0, -1)]))
