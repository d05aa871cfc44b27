"""The persistent batch: what this rank knows of the sequence in each slot, and the tensors of one step made from it.

Owns tokens, lengths and block tables by slot. A plan changes them by differences (`apply`), a step reads its rows out
of them (`rows_of`, all rows at once, no loop over tokens) and moves them forward (`advance`). The token that a step
samples need not be known here when the next step is built: it stays on the device, in `last_tokens`.
Knows no model and no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.output import UNKNOWN_TOKEN, AdmittedSequence, Int32, StepPlan
from workers.attention import AttentionMetadata
from workers.plan_check import PlanError, check_admitted, check_decode, check_prefill, check_slots
from workers.upload import upload

NO_SEQUENCE = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of one step, prefill rows first: on the host what describes them, on the device what computes them."""

    slots: Int32  # [S]
    seq_lens: Int32  # [S], after this step
    starts: Int32  # [S + 1], first token of each row among the step's T tokens
    sampling: NDArray[np.intp]  # those of the S rows that sample, ascending
    sampling_slots_on_device: Tensor  # [R] int64
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionMetadata

    @property
    def sampling_slots(self) -> Int32:
        return self.slots[self.sampling]

    @property
    def sampled_positions(self) -> Int32:
        """The index that each sampled token will have in its sequence."""
        return self.seq_lens[self.sampling]


class _OnDevice(NamedTuple):
    """What a step's rows need on the device, sent there at once."""

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    rope_lens: Tensor
    starts: Tensor
    seq_lens: Tensor
    slots: Tensor
    sampling_slots: Tensor


class InputBatch:
    """`num_slots` rows of at most `max_model_len` tokens."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        device: torch.device,
        dynamic_rope: bool = False,
    ) -> None:
        self.dynamic_rope = dynamic_rope
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.device = device
        max_blocks = -(-max_model_len // block_size)

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
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._device_block_table = torch.from_numpy(self.block_table).to(device)  # on CPU the very same memory

    # --- a plan's differences -----------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Release, admit and append blocks.

        Raises:
            PlanError: the plan contradicts what this rank holds.
        """
        self._release(plan.released_slots)
        for sequence in plan.admitted:
            self._admit(sequence)
        if len(plan.grown_slots):
            self._append_blocks(plan.grown_slots, plan.grown_blocks)

    def clear(self) -> None:
        """Forget every sequence."""
        self._release(np.arange(self.num_slots, dtype=np.int32))

    def _release(self, slots: Int32) -> None:
        check_slots(self, slots, "released")
        self.seq_ids[slots] = NO_SEQUENCE
        for counts in (self.num_tokens, self.num_known, self.num_computed, self.num_seq_blocks):
            counts[slots] = 0

    def _admit(self, sequence: AdmittedSequence) -> None:
        check_admitted(self, sequence)
        slot, num_tokens = sequence.slot, len(sequence.token_ids)
        self.seq_ids[slot] = sequence.seq_id
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_tokens[slot] = self.num_known[slot] = num_tokens
        self.num_computed[slot] = sequence.num_cached_tokens
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.has_sampled[slot] = False
        self.num_seq_blocks[slot] = 0
        if len(sequence.block_table):
            slots = np.full(len(sequence.block_table), slot, dtype=np.int32)
            self._append_blocks(slots, sequence.block_table)

    def _append_blocks(self, slots: Int32, blocks: Int32) -> None:
        """Append to each slot's table, in order; a slot may come several times."""
        check_slots(self, slots, "grown", in_use=True)
        if int(blocks.min()) < 0 or int(blocks.max()) >= self.num_blocks:
            raise PlanError(f"block ids {blocks.min()} to {blocks.max()}; this rank holds {self.num_blocks} blocks")
        order = np.argsort(slots, kind="stable")
        slots, blocks = slots[order], blocks[order]
        is_first = np.ones(len(slots), dtype=np.bool_)
        is_first[1:] = slots[1:] != slots[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(np.append(firsts, len(slots)))
        columns = self.num_seq_blocks[slots] + np.arange(len(slots)) - np.repeat(firsts, counts)
        if int(columns.max()) >= self.block_table.shape[1]:
            raise PlanError(f"a sequence has more than the {self.block_table.shape[1]} blocks of a full one")
        self.block_table[slots, columns] = blocks
        self.num_seq_blocks[slots[firsts]] += counts.astype(np.int32)
        if self.device.type != "cpu":
            rows, places, values = upload((_int64(slots), _int64(columns), blocks), self.device)
            self._device_block_table[rows, places] = values

    # --- one step's rows ----------------------------------------------------------------------------------------

    def rows_of(self, plan: StepPlan) -> StepRows:
        """The rows that `plan` computes.

        Raises:
            PlanError: a row does not follow from what this rank holds.
        """
        num_prefill, num_decode = len(plan.prefill_slots), len(plan.decode_slots)
        slots = np.concatenate([plan.prefill_slots, plan.decode_slots])
        check_slots(self, slots, "scheduled", in_use=True, unique=True)
        check_prefill(self, plan)
        check_decode(self, plan)
        self.num_computed[plan.prefill_slots] = plan.prefill_starts  # further on after a prefix hit in mid-prompt
        first_positions = self.num_computed[slots]
        query_lens = np.ones(num_prefill + num_decode, dtype=np.int32)
        query_lens[:num_prefill] = plan.prefill_num_tokens
        seq_lens = first_positions + query_lens
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        if (seq_lens > self.num_seq_blocks[slots] * self.block_size).any():
            raise PlanError("a scheduled token has no block to store its keys in")

        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(first_positions - starts[:-1], query_lens)
        owners = np.repeat(slots, query_lens)
        places = self.block_table[owners, positions // self.block_size].astype(np.int64) * self.block_size
        places += positions % self.block_size
        known = self.token_ids[owners, positions].astype(np.int64)
        known[len(known) - num_decode :] = plan.decode_tokens
        sampling = np.flatnonzero(seq_lens == self.num_tokens[slots])
        # The length that each token is rotated for: its prompt's, or its own once past the prompt.
        rope_lens = np.maximum(self.num_prompt[owners], positions + 1)[: len(owners) * self.dynamic_rope]
        there = _OnDevice(
            *upload(
                (known, positions, places, rope_lens, starts, seq_lens, _int64(slots), _int64(slots[sampling])),
                self.device,
            )
        )
        return StepRows(
            slots=slots,
            seq_lens=seq_lens,
            starts=starts,
            sampling=sampling,
            sampling_slots_on_device=there.sampling_slots,
            token_ids=self._with_own_tokens(there, plan.decode_tokens),
            positions=there.positions,
            attention=AttentionMetadata(
                cu_seqlens_q=there.starts,
                seq_lens=there.seq_lens,
                block_tables=self._block_tables(slots, there.slots, int(seq_lens.max(initial=0))),
                slot_mapping=there.places,
                max_seqlen_q=int(query_lens.max(initial=0)),
                max_seqlen_k=int(seq_lens.max(initial=0)),
                num_prefill_seqs=num_prefill,
                num_prefill_tokens=int(starts[num_prefill]),
                num_decodes=num_decode,
                block_size=self.block_size,
                rope_lens=there.rope_lens if self.dynamic_rope else None,
            ),
        )

    def _with_own_tokens(self, there: _OnDevice, decode_tokens: Int32) -> Tensor:
        """The step's tokens, where those that the host does not know are the ones sampled here in the step before."""
        if (decode_tokens == UNKNOWN_TOKEN).any():
            given = there.token_ids[-len(decode_tokens) :]
            own = self.last_tokens[there.slots[-len(decode_tokens) :]]
            given.copy_(torch.where(given == UNKNOWN_TOKEN, own, given))
        return there.token_ids

    def _block_tables(self, slots: Int32, slots_on_device: Tensor, max_seqlen: int) -> Tensor:
        num_columns = -(-max_seqlen // self.block_size)
        if self.device.type == "cpu":
            return torch.from_numpy(self.block_table[slots, :num_columns])
        return self._device_block_table[slots_on_device, :num_columns]

    # --- after the step -----------------------------------------------------------------------------------------

    def advance(self, rows: StepRows, tokens: Tensor) -> None:
        """The rows are computed and `tokens`, one per sampling row, follow them; the device may still be at work."""
        self.num_computed[rows.slots] = rows.seq_lens
        slots = rows.sampling_slots
        self.num_tokens[slots] += 1
        self.has_sampled[slots] = True
        self.last_tokens[rows.sampling_slots_on_device] = tokens

    def note_sampled(self, rows: StepRows, seq_ids: NDArray[np.int64], tokens: Int32) -> None:
        """The sampled tokens have reached the host. Slots that changed hands since are left alone."""
        slots, positions = rows.sampling_slots, rows.sampled_positions
        same = (self.seq_ids[slots] == seq_ids) & (self.num_known[slots] == positions)
        slots, positions = slots[same], positions[same]
        self.token_ids[slots, positions] = tokens[same]
        self.num_known[slots] = positions + 1

    def put(self, array: NDArray) -> Tensor:
        """The array on the device; the host does not wait for it to get there."""
        return upload((array,), self.device)[0]


def _int64(array: Int32) -> NDArray[np.int64]:
    return array.astype(np.int64)
