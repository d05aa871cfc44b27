"""What this rank knows, on the host, of the sequence in each slot: tokens, lengths, blocks.

A plan's differences change it. Knows no device and no step; `workers.plan_check` tells whether a change may be made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.output import AdmittedSequence, Int32

NO_SEQUENCE = -1


class SlotTable:
    """`num_slots` rows of at most `max_model_len` tokens, in blocks of `block_size` tokens."""

    def __init__(
        self, *, num_slots: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int
    ) -> None:
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_seq_blocks = -(-max_model_len // block_size)

        self.seq_ids = np.full(num_slots, NO_SEQUENCE, dtype=np.int64)
        self.token_ids = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        # Invariant of a slot in use: num_computed <= num_tokens and num_known <= num_tokens. A token past num_known
        # was sampled here and has not been read back from the device.
        self.num_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_known = np.zeros(num_slots, dtype=np.int32)
        self.num_computed = np.zeros(num_slots, dtype=np.int32)
        self.num_prompt = np.zeros(num_slots, dtype=np.int32)
        self.has_sampled = np.zeros(num_slots, dtype=np.bool_)  # its last token is one that this rank sampled
        self.num_seq_blocks = np.zeros(num_slots, dtype=np.int32)
        self.block_table = np.zeros((num_slots, self.max_seq_blocks), dtype=np.int32)

    def release(self, slots: Int32) -> None:
        self.seq_ids[slots] = NO_SEQUENCE
        for counts in (self.num_tokens, self.num_known, self.num_computed, self.num_seq_blocks):
            counts[slots] = 0

    def admit(self, sequence: AdmittedSequence) -> None:
        """All but its blocks; they are appended like any others."""
        slot, num_tokens = sequence.slot, len(sequence.token_ids)
        self.seq_ids[slot] = sequence.seq_id
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_tokens[slot] = self.num_known[slot] = num_tokens
        self.num_computed[slot] = sequence.num_cached_tokens
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.has_sampled[slot] = False
        self.num_seq_blocks[slot] = 0

    def append_blocks(self, slots: Int32, blocks: Int32) -> tuple[NDArray[np.int64], NDArray[np.int64], Int32]:
        """Append to each slot's row, in order; a slot may come several times.

        Returns:
            What was written into `block_table`: rows, columns, blocks.
        """
        order = np.argsort(slots, kind="stable")
        slots, blocks = slots[order], blocks[order]
        is_first = np.ones(len(slots), dtype=np.bool_)
        is_first[1:] = slots[1:] != slots[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(np.append(firsts, len(slots)))
        columns = self.num_seq_blocks[slots] + np.arange(len(slots)) - np.repeat(firsts, counts)
        self.block_table[slots, columns] = blocks
        self.num_seq_blocks[slots[firsts]] += counts.astype(np.int32)
        return slots.astype(np.int64), columns.astype(np.int64), blocks

    def places_of(self, slots: Int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens at `positions` of `slots`, one each, lie in the KV cache."""
        blocks = self.block_table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def note_sampled(self, slots: Int32, positions: Int32, seq_ids: NDArray[np.int64], tokens: Int32) -> None:
        """Tokens sampled at `positions` of `seq_ids` have reached the host. Slots that changed hands are left alone."""
        same = (self.seq_ids[slots] == seq_ids) & (self.num_known[slots] == positions)
        slots, positions = slots[same], positions[same]
        self.token_ids[slots, positions] = tokens[same]
        self.num_known[slots] = positions + 1

    def note_run(self, slots: Int32, tokens: Int32) -> None:
        """Each slot has computed all that it had, and sampled a row of `tokens` [S, N] one by one."""
        num_more = tokens.shape[1]
        positions = self.num_tokens[slots][:, None] + np.arange(num_more)
        self.token_ids[slots[:, None], positions] = tokens
        self.num_computed[slots] += num_more
        self.num_tokens[slots] += num_more
        self.num_known[slots] = self.num_tokens[slots]
