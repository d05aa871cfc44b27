"""The sampler as a pure function: what each parameter does, and that company changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scheduler.output import AdmittedSequence, int32
from scheduler.sampling_params import SamplingParams
from workers.logprobs import score
from workers.sampler import _top_threshold, sample
from workers.sampling_state import SamplingState

EOS = 3


class Table:
    """Sequences admitted to slots; samples any of them together."""

    def __init__(self, vocab_size=1000, num_slots=64):
        self.state = SamplingState(num_slots, vocab_size, (EOS,), torch.device("cpu"))
        self.lengths = np.zeros(num_slots, dtype=np.int32)

    def admit(self, slot, params, *, prompt=(1, 2), output=(), seed=11):
        tokens = int32([*prompt, *output])
        self.lengths[slot] = len(tokens)
        self.state.admit(
            AdmittedSequence(
                slot=slot,
                seq_id=slot,
                seed=seed,
                num_prompt_tokens=len(prompt),
                num_cached_tokens=0,
                token_ids=tokens,
                block_table=int32(),
                sampling_params=params,
            )
        )

    def sample(self, slots, logits):
        slots = int32(slots)
        asked = self.state.rows(slots, self.lengths[slots])
        tokens = sample(logits.clone(), asked, self.state.counts)
        self.state.count_sampled(asked, tokens)
        self.lengths[slots] += 1
        return tokens.tolist()


def random_logits(num_rows, vocab_size=1000, seed=0, scale=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def draws(params, logits, count=4000):
    """Tokens drawn from one row of logits at many positions."""
    table = Table(len(logits))
    table.admit(0, params)
    return torch.tensor([table.sample([0], logits[None])[0] for _ in range(count)])


def frequencies(params, logits, count=4000):
    """The same, many rows at once, as shares of the vocabulary."""
    table = Table(len(logits), num_slots=count)
    for slot in range(count):
        table.admit(slot, params, seed=slot)
    tokens = torch.tensor(table.sample(range(count), logits.expand(count, -1)))
    return torch.bincount(tokens, minlength=len(logits)) / count


def test_greedy_takes_the_largest_logit():
    table = Table()
    logits = random_logits(3)
    for slot in range(3):
        table.admit(slot, SamplingParams(temperature=0.0))
    assert table.sample([0, 1, 2], logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [5, 256, 700])
def test_draws_follow_the_softmax(vocab_size):
    logits = random_logits(1, vocab_size, scale=1.5)[0]
    count = 20_000
    expected = torch.softmax(logits / 0.8, -1)
    observed = frequencies(SamplingParams(temperature=0.8), logits, count)
    often = expected * count >= 10
    chi_square = (count * (observed - expected)[often] ** 2 / expected[often]).sum().item()
    degrees = int(often.sum())
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_draws_at_consecutive_positions_are_independent():
    logits = torch.zeros(4)
    tokens = draws(SamplingParams(temperature=1.0), logits, 3000)
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert ((pairs - 187.4).abs() < 5 * math.sqrt(187.4)).all()


def test_top_k_keeps_the_k_likeliest():
    logits = random_logits(1)[0]
    allowed = set(logits.topk(5).indices.tolist())
    assert set(draws(SamplingParams(temperature=5.0, top_k=5), logits, 500).tolist()) == allowed


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    logits = torch.log(torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1]))
    observed = frequencies(SamplingParams(top_p=0.8), logits)
    assert set(observed.nonzero().flatten().tolist()) == {1, 2, 3}
    assert observed[1].item() == pytest.approx(0.4 / 0.85, abs=0.04)


def test_top_p_reaches_beyond_the_candidates_on_a_flat_distribution():
    logits = torch.zeros(5000)
    logits[:2500] += 1e-3 * torch.arange(2500, 0, -1) / 2500
    observed = frequencies(SamplingParams(top_p=0.4), logits, 2000).nonzero().flatten()
    assert len(observed) > 1024
    assert int(observed.max()) < 2010  # 40 % of the weight lies in about the first 2,000


def test_top_p_counts_only_what_top_k_left():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]))
    observed = frequencies(SamplingParams(top_k=2, top_p=0.6), logits)
    assert observed.nonzero().flatten().tolist() == [0]  # 0.5 of 0.8 reaches 0.6 alone


@pytest.mark.parametrize("vocab_size", [1000, 49152])
def test_the_thresholds_are_those_of_a_full_sort(vocab_size):
    logits = random_logits(6, vocab_size)
    scaled = logits - logits.amax(-1, keepdim=True)
    top_k = torch.tensor([0, 1, 40, 300, 0, 700])
    top_p = torch.tensor([0.9, 1.0, 0.5, 1.0, 0.05, 0.8])
    found = _top_threshold(scaled, top_k[:, None], top_p[:, None], int(top_k.max())).flatten()
    for row in range(6):
        ordered = scaled[row].sort(descending=True).values.double()
        ordered = ordered[: int(top_k[row]) or None]
        if top_p[row] < 1:
            shares = torch.softmax(ordered, -1)
            ordered = ordered[shares.cumsum(-1) - shares < top_p[row]]
        assert found[row].item() == pytest.approx(ordered[-1].item(), abs=1e-5)


def test_ties_with_the_kth_count_however_many_they_are():
    scaled = torch.full((1, 1000), -math.log(300))  # 999 of them weigh three times as much as the likeliest token
    scaled[0, 17] = 0.0
    found = _top_threshold(scaled, torch.tensor([[5]]), torch.tensor([[0.5]]), 5)
    assert found.item() == scaled[0, 0].item()


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]))
    observed = frequencies(SamplingParams(min_p=0.15), logits)
    assert observed.nonzero().flatten().tolist() == [0, 1, 2]


def test_a_tiny_temperature_is_as_good_as_greedy():
    logits = random_logits(1)[0]
    assert set(draws(SamplingParams(temperature=1e-30), logits, 5).tolist()) == {int(logits.argmax())}


def test_logit_bias_moves_a_token():
    table = Table()
    logits = random_logits(2)
    table.admit(0, SamplingParams(temperature=0.0, logit_bias={17: 100.0}))
    table.admit(1, SamplingParams(temperature=0.0))
    assert table.sample([1, 0], logits) == [int(logits[0].argmax()), 17]


def test_repetition_penalty_covers_prompt_and_output():
    logits = torch.tensor([[2.0, -1.0, 1.2, -3.0]])
    expected = {(): 0, (0,): 2, (0, 2): 0, (2,): 0}
    for seen, winner in expected.items():
        for split in range(len(seen) + 1):
            table = Table(4)
            params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
            table.admit(0, params, prompt=(3, *seen[:split]), output=seen[split:])
            assert table.sample([0], logits) == [winner], (seen, split)


def test_presence_and_frequency_penalties_count_the_output_alone():
    logits = torch.tensor([[1.0, 0.9, 0.0, -9.0]])
    cases = [
        (SamplingParams(temperature=0.0, presence_penalty=0.5), (0, 0), (), 0),
        (SamplingParams(temperature=0.0, presence_penalty=0.5), (0, 0), (0,), 1),
        (SamplingParams(temperature=0.0, frequency_penalty=0.06), (3,), (0,), 0),
        (SamplingParams(temperature=0.0, frequency_penalty=0.06), (3,), (0, 0), 1),
    ]
    for params, prompt, output, winner in cases:
        table = Table(4)
        table.admit(0, params, prompt=prompt, output=output)
        assert table.sample([0], logits) == [winner]


def test_sampled_tokens_count_at_once():
    table = Table(4)
    table.admit(0, SamplingParams(temperature=0.0, frequency_penalty=0.3), prompt=(3,))
    logits = torch.tensor([[1.0, 0.9, 0.8, -9.0]])
    assert [table.sample([0], logits)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_readmitted_sequence_has_its_counts_again():
    params = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    logits = torch.tensor([[1.0, 0.9, 0.8, -9.0]])
    table = Table(4)
    table.admit(0, params, prompt=(3,))
    first = table.sample([0], logits) + table.sample([0], logits)
    table.state.release(0)
    table.admit(5, params, prompt=(3,), output=first)
    assert table.sample([5], logits) == [2]


def test_nothing_stops_before_min_tokens():
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 7], logits[0, 5] = 3.0, 2.0, 1.0
    table = Table(10)
    table.admit(0, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,)))
    assert [table.sample([0], logits)[0] for _ in range(3)] == [5, 5, EOS]
    table.admit(1, SamplingParams(temperature=0.0, min_tokens=1, ignore_eos=True))
    assert table.sample([1], logits) == [EOS]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(min_p=0.05),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(logit_bias={4: 2.0, 9: -100.0}, min_tokens=3),
]


def test_a_row_is_drawn_alike_alone_and_in_any_company():
    logits = random_logits(32)
    table = Table()
    for slot in range(32):
        table.admit(slot, PARAMS[slot % len(PARAMS)], seed=slot // 8)
    together = table.sample(range(32), logits)
    for slot in range(32):
        alone = Table()
        alone.admit(0, PARAMS[slot % len(PARAMS)], seed=slot // 8)
        assert alone.sample([0], logits[slot : slot + 1]) == [together[slot]]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = Table()
    for row, slot in enumerate(order):
        shuffled.admit(row, PARAMS[slot % len(PARAMS)], seed=slot // 8)
    assert shuffled.sample(range(32), logits[order]) == [together[slot] for slot in order]


def test_noise_of_a_millionth_in_the_logits_changes_no_draw():
    # Two draws in a million would change; with an inverse CDF over the vocabulary dozens of these 4,096 do.
    logits = random_logits(64, 8192, scale=2.0)
    noisy = logits + 1e-6 * random_logits(64, 8192, seed=5, scale=1.0)
    table, other = Table(8192), Table(8192)
    for slot in range(64):
        table.admit(slot, SamplingParams(), seed=slot)
        other.admit(slot, SamplingParams(), seed=slot)
    changed = 0
    for _ in range(64):
        pair = table.sample(range(64), logits), other.sample(range(64), noisy)
        changed += sum(a != b for a, b in zip(*pair, strict=True))
    assert changed <= 1


def test_scores_are_those_of_a_full_log_softmax():
    logits = random_logits(6)
    tokens = logits.argsort(dim=-1, descending=True)[torch.arange(6), torch.tensor([0, 1, 2, 10, 100, 999])]
    scores = score(logits, tokens, 4).to_host()
    reference = torch.log_softmax(logits, -1)
    assert scores.ranks.tolist() == [1, 2, 3, 11, 101, 1000]
    np.testing.assert_allclose(scores.logprobs, reference[torch.arange(6), tokens].numpy(), rtol=1e-5, atol=1e-5)
    top = reference.topk(4, dim=-1)
    assert scores.top_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(scores.top_logprobs, top.values.numpy(), rtol=1e-5, atol=1e-5)
    assert score(logits, tokens, 0).to_host().top_ids.shape == (6, 0)
