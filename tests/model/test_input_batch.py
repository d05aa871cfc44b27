"""The persistent batch: differences in, rows out, and no plan that does not follow."""

from __future__ import annotations

import pytest
import torch

from scheduler.output import int32
from tests.support.step_plans import admitted, plan
from workers.input_batch import InputBatch
from workers.plan_check import PlanError


def make_batch(*, num_slots=4, block_size=4, max_model_len=20, num_blocks=10, **options):
    return InputBatch(
        num_slots=num_slots,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=50,
        device=torch.device("cpu"),
        **options,
    )


def run(batch, step_plan, sampled=7):
    """Apply and advance, as if every row that samples had sampled `sampled`."""
    batch.apply(step_plan)
    rows = batch.rows_of(step_plan)
    seq_ids = batch.table.seq_ids[rows.sampling_slots]
    tokens = torch.full((len(rows.sampling),), sampled)
    batch.advance(rows, tokens)
    batch.note_sampled(rows, seq_ids, tokens.numpy().astype("int32"))
    return rows


def test_prefill_and_decode_rows_in_one_step():
    batch = make_batch()
    run(batch, plan(0, admit=[admitted(2, [11, 12, 13], [5])], prefill=[(2, 0, 3)]))
    rows = run(
        batch,
        plan(
            1,
            admit=[admitted(0, list(range(20, 27)), [8, 3])],
            prefill=[(0, 0, 6)],
            decode=[(2, -1)],
        ),
    )
    assert rows.slots.tolist() == [0, 2]
    assert rows.token_ids.tolist() == [20, 21, 22, 23, 24, 25, 7]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 5, 3]
    meta = rows.attention
    assert meta.slot_mapping.tolist() == [32, 33, 34, 35, 12, 13, 23]
    assert meta.cu_seqlens_q.tolist() == [0, 6, 7]
    assert meta.seq_lens.tolist() == [6, 4]
    assert meta.block_tables[0].tolist() == [8, 3]
    assert meta.block_tables[1, 0] == 5
    assert (meta.num_prefill_seqs, meta.num_prefill_tokens, meta.num_decodes) == (1, 6, 1)
    assert (meta.max_seqlen_q, meta.max_seqlen_k) == (6, 6)
    assert rows.sampling_slots.tolist() == [2]  # slot 0 lacks its last token
    assert rows.sampled_positions.tolist() == [4]


def test_a_decode_row_continues_from_the_token_given_or_the_one_sampled():
    batch = make_batch()
    run(batch, plan(0, admit=[admitted(0, [1], [0]), admitted(1, [2], [1])], prefill=[(0, 0, 1), (1, 0, 1)]))
    rows = run(batch, plan(1, decode=[(0, -1), (1, 7)]), sampled=9)
    assert rows.token_ids.tolist() == [7, 7]
    assert run(batch, plan(2, decode=[(1, 9)])).token_ids.tolist() == [9]
    assert run(batch, plan(3, decode=[(0, 9)])).token_ids.tolist() == [9]


def test_blocks_are_appended_in_order_to_several_slots():
    batch = make_batch()
    admits = [admitted(slot, [1] * 14, [slot]) for slot in (0, 1)]
    run(batch, plan(0, admit=admits, prefill=[(0, 0, 4), (1, 0, 4)]))
    run(batch, plan(1, grown=[(1, 7), (0, 4), (1, 8), (1, 9)], prefill=[(0, 4, 4), (1, 4, 10)]))
    assert batch.table.block_table[1, :4].tolist() == [1, 7, 8, 9]
    assert batch.table.block_table[0, :2].tolist() == [0, 4]
    assert batch.table.num_seq_blocks[:2].tolist() == [2, 4]


def test_a_prefix_hit_in_mid_prompt_skips_ahead():
    batch = make_batch()
    run(batch, plan(0, admit=[admitted(0, list(range(1, 11)), [0])], prefill=[(0, 0, 4)]))
    rows = run(batch, plan(1, grown=[(0, 5), (0, 6)], prefill=[(0, 8, 2)]))
    assert rows.positions.tolist() == [8, 9]
    assert rows.attention.slot_mapping.tolist() == [24, 25]
    assert rows.sampling_slots.tolist() == [0]


def test_a_slot_may_change_hands_in_one_step():
    batch = make_batch()
    run(batch, plan(0, admit=[admitted(0, [1, 2], [0], seq_id=5)], prefill=[(0, 0, 2)]))
    rows = run(batch, plan(1, released=[0], admit=[admitted(0, [3, 4, 5], [1], seq_id=6)], prefill=[(0, 0, 3)]))
    assert rows.token_ids.tolist() == [3, 4, 5]
    assert batch.table.seq_ids[0] == 6


def test_a_token_that_arrives_late_does_not_touch_the_slots_next_owner():
    batch = make_batch()
    first = plan(0, admit=[admitted(0, [1, 2], [0], seq_id=5)], prefill=[(0, 0, 2)])
    batch.apply(first)
    rows = batch.rows_of(first)
    seq_ids = batch.table.seq_ids[rows.sampling_slots]
    batch.advance(rows, torch.tensor([7]))
    batch.apply(plan(1, released=[0], admit=[admitted(0, [3, 4, 6, 8], [1], seq_id=6)]))
    batch.note_sampled(rows, seq_ids, int32([7]))
    assert batch.table.token_ids[0, :4].tolist() == [3, 4, 6, 8]


def test_tokens_of_a_prompt_are_rotated_for_the_whole_prompt_under_dynamic_rope():
    batch = make_batch(dynamic_rope=True)
    sequence = admitted(0, [1, 2, 3, 4, 5], [0, 1], num_prompt_tokens=3)
    rows = run(batch, plan(0, admit=[sequence], prefill=[(0, 0, 5)]))
    assert rows.attention.rope_lens.tolist() == [3, 3, 3, 4, 5]


def decoding_batch(num_slots=3, blocks_per_slot=2):
    batch = make_batch(num_slots=num_slots)
    admits = [admitted(s, [s + 1] * (s + 1), [2 * s, 2 * s + 1][:blocks_per_slot]) for s in range(num_slots)]
    run(batch, plan(0, admit=admits, prefill=[(s, 0, s + 1) for s in range(num_slots)]), sampled=9)
    return batch


def facts(rows):
    meta = rows.attention
    tensors = (rows.token_ids, rows.positions, meta.seq_lens, meta.slot_mapping, meta.block_tables, meta.cu_seqlens_q)
    arrays = (rows.slots, rows.seq_lens, rows.starts, rows.sampling, rows.sampled_positions)
    numbers = (meta.max_seqlen_q, meta.max_seqlen_k, meta.num_prefill_seqs, meta.num_prefill_tokens, meta.num_decodes)
    return [x.tolist() for x in (*tensors, *arrays)], numbers


def test_rows_that_go_on_from_the_step_before_equal_those_gathered_anew():
    quick, gathered = decoding_batch(), decoding_batch()
    for step, sampled in enumerate([3, 5, 8, 2], start=1):  # across the end of a block
        go_on = plan(step, decode=[(0, -1), (1, -1), (2, -1)])
        gathered._last_rows = None
        assert facts(run(quick, go_on, sampled)) == facts(run(gathered, go_on, sampled))


def test_a_released_slot_ends_what_the_rows_could_go_on_from():
    batch = decoding_batch(num_slots=2)
    run(batch, plan(1, decode=[(0, -1), (1, -1)]))
    run(batch, plan(2, released=[0], admit=[admitted(0, [1, 2], [8], seq_id=9)], prefill=[(0, 0, 2)]))
    rows = run(batch, plan(3, decode=[(0, -1), (1, -1)]))
    assert rows.positions.tolist() == [2, 3]
    with pytest.raises(PlanError, match="holds no sequence"):
        run(batch, plan(4, released=[1], decode=[(0, -1), (1, -1)]))


def test_rows_that_go_on_need_room_and_end_at_the_limit():
    batch = decoding_batch(num_slots=1, blocks_per_slot=1)
    for step in (1, 2, 3):
        run(batch, plan(step, decode=[(0, -1)]))
    with pytest.raises(PlanError, match="no block"):
        run(batch, plan(4, decode=[(0, -1)]))
    batch = make_batch(max_model_len=4)
    run(batch, plan(0, admit=[admitted(0, [1, 2], [0])], prefill=[(0, 0, 2)]))
    run(batch, plan(1, decode=[(0, -1)]))
    run(batch, plan(2, decode=[(0, -1)]))
    with pytest.raises(PlanError, match="limit of 4 tokens"):
        run(batch, plan(3, decode=[(0, -1)]))


SITUATION = plan(
    0,
    admit=[admitted(0, [1, 2, 3], [0]), admitted(1, list(range(1, 9)), [1, 2])],
    prefill=[(0, 0, 3), (1, 0, 4)],
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(1, decode=[(3, 5)]), "scheduled slot 3 holds no sequence"),
        (plan(1, decode=[(4, 5)]), "scheduled slots 4 to 4; this rank has 4"),
        (plan(1, decode=[(0, -1), (0, -1)]), "a slot is scheduled twice"),
        (plan(1, decode=[(1, 5)]), "slot 1, which has 4 of 8 tokens computed"),
        (plan(1, decode=[(0, 8)]), "continue from token 8, but this rank sampled 7: the ranks diverged"),
        (plan(1, decode=[(0, -2)]), "legal ids are 0 to 49"),
        (plan(1, decode=[(0, 50)]), "legal ids are 0 to 49"),
        (plan(1, prefill=[(1, 3, 2)]), "prefill of tokens 3 to 5 in slot 1, which has 4 of 8 computed"),
        (plan(1, prefill=[(1, 4, 5)]), "prefill of tokens 4 to 9 in slot 1"),
        (plan(1, prefill=[(1, 4, 0)]), "prefill of tokens 4 to 4"),
        (plan(1, prefill=[(0, 3, 1)]), "and is decoding"),
        (plan(1, grown=[(3, 1)]), "grown slot 3 holds no sequence"),
        (plan(1, grown=[(0, 10)]), "this rank holds 10 blocks"),
        (plan(1, grown=[(0, block) for block in range(5)]), "more than the 5 blocks of a full one"),
        (plan(1, released=[9]), "released slots 9 to 9"),
        (plan(1, admit=[admitted(7, [1], [0])]), "admitted slots 7 to 7"),
        (plan(1, admit=[admitted(2, [1] * 21, [0])]), "takes 1 to 20"),
        (plan(1, admit=[admitted(2, [], [0])]), "takes 1 to 20"),
        (plan(1, admit=[admitted(2, [60], [0])]), "token ids outside 0 to 49"),
        (plan(1, admit=[admitted(2, [1], [0], num_cached_tokens=1)]), "one must be computed"),
        (plan(1, admit=[admitted(2, [1] * 5, [3])], prefill=[(2, 0, 5)]), "no block to store its keys in"),
        (plan(1, admit=[admitted(2, [1], [3])], decode=[(2, -1)]), "in a slot that has sampled none"),
    ],
)
def test_a_plan_that_does_not_follow_is_refused(wrong, message):
    batch = make_batch()
    run(batch, SITUATION)
    with pytest.raises(PlanError, match=message):
        run(batch, wrong)


def test_decoding_stops_at_the_longest_sequence():
    batch = make_batch(max_model_len=4)
    run(batch, plan(0, admit=[admitted(0, [1, 2, 3], [0])], prefill=[(0, 0, 3)]))
    run(batch, plan(1, decode=[(0, -1)]))
    with pytest.raises(PlanError, match="beyond the limit of 4 tokens"):
        run(batch, plan(2, decode=[(0, -1)]))
