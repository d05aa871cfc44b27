"""Token accounting of one sequence, and what of it travels."""

from __future__ import annotations

import copy
import pickle

import pytest

from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence, SequenceStatus
from tests.support.factories import make_sequence


def decoding(num_prompt_tokens: int, num_completion_tokens: int, block_size: int = 4) -> Sequence:
    seq = make_sequence(num_prompt_tokens, block_size=block_size)
    for i in range(num_completion_tokens):
        seq.append_token(100 + i)
    seq.block_table = list(range(10, 10 + seq.num_blocks))
    seq.num_cached_tokens, seq.num_scheduled_tokens, seq.is_prefill = seq.num_tokens - 1, 1, False
    seq.status = SequenceStatus.RUNNING
    return seq


def test_a_new_sequence_waits_for_its_prefill() -> None:
    seq = Sequence([5, 6, 7])
    assert seq.status is SequenceStatus.WAITING
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens) == (3, 3, 0)
    assert (seq.num_cached_tokens, seq.num_scheduled_tokens) == (0, 0)
    assert seq.is_prefill
    assert not seq.is_finished
    assert seq.block_table == []
    assert seq.last_token == 7
    assert seq.sampling_params == SamplingParams()


def test_the_statuses_are_three() -> None:
    assert [status.name for status in SequenceStatus] == ["WAITING", "RUNNING", "FINISHED"]


def test_the_prompt_is_copied_at_construction() -> None:
    prompt = [1, 2, 3]
    seq = Sequence(prompt)
    prompt.append(4)
    seq.append_token(5)
    assert seq.token_ids == [1, 2, 3, 5]
    assert prompt == [1, 2, 3, 4]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least one token"):
        Sequence([])


def test_every_sequence_has_its_own_id() -> None:
    assert Sequence([1]).seq_id != Sequence([1]).seq_id


def test_tokens_grow_and_the_prompt_does_not() -> None:
    seq = make_sequence(3)
    seq.append_token(9)
    assert (len(seq), seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens) == (4, 4, 3, 1)
    assert seq.last_token == 9
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([0, 1, 2], [9])
    assert (seq[0], seq[-1], seq[1:3]) == (0, 9, [1, 2])


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "in_last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1)]
)
def test_blocks_are_filled_one_after_the_other(num_tokens: int, num_blocks: int, in_last: int) -> None:
    seq = make_sequence(num_tokens, block_size=4)
    assert (seq.num_blocks, seq.last_block_num_tokens) == (num_blocks, in_last)
    assert [token for i in range(num_blocks) for token in seq.block(i)] == seq.token_ids
    assert len(seq.block(num_blocks - 1)) == in_last


@pytest.mark.parametrize("i", [-1, 2])
def test_a_block_that_does_not_exist_is_a_bug(i: int) -> None:
    with pytest.raises(AssertionError, match="of 2"):
        make_sequence(8, block_size=4).block(i)


def test_block_sizes_of_two_sequences_are_independent() -> None:
    small, large = make_sequence(10, block_size=2), make_sequence(10, block_size=256)
    assert (small.num_blocks, large.num_blocks) == (5, 1)


# --- what travels ---------------------------------------------------------------------------------------------------


def test_a_prefilling_sequence_travels_with_all_its_tokens() -> None:
    seq = make_sequence(9, temperature=0.5, max_tokens=7)
    seq.block_table, seq.num_cached_tokens, seq.num_scheduled_tokens = [3, 1, 4], 4, 5
    arrived = pickle.loads(pickle.dumps(seq))
    assert arrived.token_ids == seq.token_ids
    assert (arrived.num_cached_tokens, arrived.num_scheduled_tokens) == (4, 5)
    assert arrived.block_table == [3, 1, 4]
    assert arrived.is_prefill


def test_a_decoding_sequence_travels_with_its_last_token_only() -> None:
    arrived = pickle.loads(pickle.dumps(decoding(6, 3)))
    assert arrived.token_ids == []
    assert arrived.last_token == 102
    assert len(arrived) == arrived.num_tokens == 9
    assert (arrived.num_prompt_tokens, arrived.num_completion_tokens) == (6, 3)
    assert not arrived.is_prefill


def test_the_state_of_a_decoding_sequence_does_not_grow_with_its_tokens() -> None:
    short, long = decoding(8, 1, block_size=4096), decoding(4000, 1, block_size=4096)
    assert len(pickle.dumps(long)) - len(pickle.dumps(short)) < 8


@pytest.mark.parametrize("seq", [make_sequence(6), decoding(6, 1)], ids=["prefilling", "decoding"])
def test_parameters_ids_status_and_block_size_travel_too(seq: Sequence) -> None:
    arrived = pickle.loads(pickle.dumps(seq))
    for name in ("seq_id", "sampling_params", "block_size", "status", "num_blocks", "last_block_num_tokens"):
        assert getattr(arrived, name) == getattr(seq, name), name


def test_sampling_parameters_arrive_equal() -> None:
    params = SamplingParams(temperature=0.3, stop_token_ids=(1, 2), logit_bias={4: -1.0}, seed=9, n=2)
    assert pickle.loads(pickle.dumps(Sequence([1], params))).sampling_params == params


@pytest.mark.parametrize("num_completion_tokens", range(1, 10))
def test_the_decode_slot_can_be_told_on_arrival(num_completion_tokens: int) -> None:
    seq = decoding(6, num_completion_tokens)
    arrived = pickle.loads(pickle.dumps(seq))
    slot = arrived.block_table[-1] * arrived.block_size + arrived.last_block_num_tokens - 1
    position = seq.num_tokens - 1
    assert slot == seq.block_table[position // 4] * 4 + position % 4


def test_an_arrived_sequence_decodes_on() -> None:
    arrived = pickle.loads(pickle.dumps(decoding(6, 2)))
    arrived.append_token(77)
    assert (len(arrived), arrived.last_token, arrived.last_block_num_tokens) == (9, 77, 1)
    again = pickle.loads(pickle.dumps(arrived))
    assert (len(again), again.last_token) == (9, 77)


def test_a_deep_copy_is_a_transfer_as_well() -> None:
    seq = make_sequence(5)
    twin = copy.deepcopy(seq)
    twin.append_token(1)
    assert (len(seq), len(twin)) == (5, 6)
