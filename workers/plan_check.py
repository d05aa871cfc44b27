"""Whether a plan follows from what this rank holds.

A plan that does not is the sign of a lost or repeated message or of two schedulers: computing it anyway would answer
clients with another sequence's tokens. So a rank stops and says what it saw.
"""

from __future__ import annotations

import numpy as np

from scheduler.output import UNKNOWN_TOKEN, AdmittedSequence, Int32, StepPlan
from workers.slot_table import SlotTable


class PlanError(RuntimeError):
    """Scheduler and rank disagree; the workers must be reset."""


def check_slots(table: SlotTable, slots: Int32, what: str, *, in_use: bool = False, unique: bool = False) -> None:
    """Slots exist, hold a sequence (`in_use`), and none comes twice (`unique`)."""
    if not len(slots):
        return
    if int(slots.min()) < 0 or int(slots.max()) >= table.num_slots:
        raise PlanError(f"{what} slots {slots.min()} to {slots.max()}; this rank has {table.num_slots}")
    if in_use and (empty := slots[table.seq_ids[slots] < 0]).size:
        raise PlanError(f"{what} slot {empty[0]} holds no sequence")
    if unique and len(np.unique(slots)) != len(slots):
        raise PlanError(f"a slot is {what} twice in one step: {sorted(slots.tolist())}")


def check_admitted(table: SlotTable, sequence: AdmittedSequence) -> None:
    check_slots(table, np.array([sequence.slot], dtype=np.int32), "admitted")
    num_tokens = len(sequence.token_ids)
    name = f"sequence {sequence.seq_id} in slot {sequence.slot}"
    if sequence.seq_id < 0:
        raise PlanError(f"{name} has a negative id")
    if not 1 <= num_tokens <= table.max_model_len:
        raise PlanError(f"{name} has {num_tokens} tokens; this rank takes 1 to {table.max_model_len}")
    if not 1 <= sequence.num_prompt_tokens <= num_tokens:
        raise PlanError(f"{name} has {sequence.num_prompt_tokens} prompt tokens among {num_tokens}")
    if not 0 <= sequence.num_cached_tokens < num_tokens:
        raise PlanError(f"{name} has {sequence.num_cached_tokens} of {num_tokens} tokens cached; one must be computed")
    if int(sequence.token_ids.min()) < 0 or int(sequence.token_ids.max()) >= table.vocab_size:
        raise PlanError(f"{name} has token ids outside 0 to {table.vocab_size - 1}")


def check_blocks(table: SlotTable, blocks: Int32, what: str) -> None:
    """This rank has memory for all of them."""
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < table.num_blocks:
        raise PlanError(f"{what} blocks {blocks.min()} to {blocks.max()}; this rank holds {table.num_blocks} blocks")


def check_growth(table: SlotTable, slots: Int32, blocks: Int32) -> None:
    """Blocks go to slots in use, and make no sequence longer than the longest legal one."""
    check_slots(table, slots, "grown", in_use=True)
    check_blocks(table, blocks, "grown")
    num_seq_blocks = table.num_seq_blocks + np.bincount(slots, minlength=table.num_slots)
    if int(num_seq_blocks.max()) > table.max_seq_blocks:
        raise PlanError(f"a sequence has more than the {table.max_seq_blocks} blocks of a full one")


def check_prefill(table: SlotTable, plan: StepPlan) -> None:
    """Prefill rows go on where the slot stands or further on, within the tokens that the host knows."""
    slots, starts = plan.prefill_slots, plan.prefill_starts
    ends = starts + plan.prefill_num_tokens
    wrong = (starts < table.num_computed[slots]) | (ends <= starts) | (ends > table.num_tokens[slots])
    wrong |= table.has_sampled[slots]
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        slot = slots[i]
        raise PlanError(
            f"prefill of tokens {starts[i]} to {ends[i]} in slot {slot}, which has {table.num_computed[slot]} of "
            f"{table.num_tokens[slot]} computed{' and is decoding' if table.has_sampled[slot] else ''}"
        )


def check_decode(table: SlotTable, plan: StepPlan) -> None:
    """Decode rows lack exactly their last token, which is the one that this rank knows, sampled or was told."""
    slots, tokens = plan.decode_slots, plan.decode_tokens
    if not len(slots):
        return
    num_tokens = table.num_tokens[slots]
    if (behind := np.flatnonzero(table.num_computed[slots] != num_tokens - 1)).size:
        slot = slots[behind[0]]
        raise PlanError(
            f"decode of slot {slot}, which has {table.num_computed[slot]} of {table.num_tokens[slot]} tokens computed"
        )
    is_unknown = tokens == UNKNOWN_TOKEN
    if (is_unknown & ~table.has_sampled[slots]).any():
        raise PlanError("a decode row continues from a sampled token in a slot that has sampled none")
    if ((tokens < UNKNOWN_TOKEN) | (tokens >= table.vocab_size)).any():
        raise PlanError(f"decode tokens {tokens.min()} to {tokens.max()}; legal ids are 0 to {table.vocab_size - 1}")
    is_known = ~is_unknown & (table.num_known[slots] == num_tokens)
    own = table.token_ids[slots, num_tokens - 1]
    if (apart := np.flatnonzero(is_known & (own != tokens))).size:
        i = int(apart[0])
        raise PlanError(
            f"slot {slots[i]} is to continue from token {tokens[i]}, but this rank sampled {own[i]}: the ranks diverged"
        )


def check_room(table: SlotTable, slots: Int32, seq_lens: Int32) -> None:
    """Each slot's sequence is legal as it is after the step, and its blocks hold it."""
    if (full := slots[seq_lens > table.max_model_len]).size:
        raise PlanError(f"slot {full[0]} would go beyond the limit of {table.max_model_len} tokens")
    if (seq_lens > table.num_seq_blocks[slots] * table.block_size).any():
        raise PlanError("a scheduled token has no block to store its keys in")
