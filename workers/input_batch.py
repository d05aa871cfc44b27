"""The persistent batch: the sequences in this rank's slots, and the tensors of one step made from them.

A plan changes the slots (`workers.slot_table`) by differences (`apply`), a step reads its rows out of them (`rows_of`,
all rows at once, no loop over tokens) and moves them forward (`advance`). The token that a step samples need not be
known here when the next step is built: it stays on the device, in `last_tokens`. Knows no model and no logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.output import UNKNOWN_TOKEN, Int32, StepPlan
from workers.attention import AttentionMetadata
from workers.plan_check import check_admitted, check_decode, check_growth, check_prefill, check_room, check_slots
from workers.slot_table import SlotTable
from workers.upload import upload


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
    def only_decodes(self) -> bool:
        return len(self.sampling) == len(self.slots) == self.attention.num_decodes

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
    """The slots of one rank; see `SlotTable` for what the sizes mean."""

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
        self.table = SlotTable(
            num_slots=num_slots,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
        )
        self.device = device
        self.dynamic_rope = dynamic_rope
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._last_rows: StepRows | None = None  # of the step before, while its slots hold the same sequences
        self._device_block_table = torch.from_numpy(self.table.block_table).to(device)  # on CPU the very same memory

    # --- a plan's differences -----------------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Release, admit and append blocks.

        Raises:
            PlanError: the plan contradicts what this rank holds.
        """
        if len(plan.released_slots) or plan.admitted:
            self._last_rows = None
        check_slots(self.table, plan.released_slots, "released")
        self.table.release(plan.released_slots)
        for sequence in plan.admitted:
            check_admitted(self.table, sequence)
            self.table.admit(sequence)
            self.append_blocks(np.full(len(sequence.block_table), sequence.slot, np.int32), sequence.block_table)
        self.append_blocks(plan.grown_slots, plan.grown_blocks)

    def clear(self) -> None:
        """Forget every sequence."""
        self._last_rows = None
        self.table.release(np.arange(self.table.num_slots, dtype=np.int32))

    def append_blocks(self, slots: Int32, blocks: Int32) -> None:
        """Raises PlanError: the rank has no such slots or blocks."""
        if not len(slots):
            return
        check_growth(self.table, slots, blocks)
        written = self.table.append_blocks(slots, blocks)
        if self.device.type != "cpu":
            rows, columns, values = upload(written, self.device)
            self._device_block_table[rows, columns] = values

    # --- one step's rows ----------------------------------------------------------------------------------------

    def rows_of(self, plan: StepPlan) -> StepRows:
        """The rows that `plan` computes.

        Raises:
            PlanError: a row does not follow from what this rank holds.
        """
        last = self._last_rows
        if last is not None and self._goes_on(last, plan):
            return self._next_rows(last)
        return self._gather_rows(plan)

    def _goes_on(self, last: StepRows, plan: StepPlan) -> bool:
        """Whether every row of the step before decodes one more token, and no other does: most steps are like that."""
        return (
            last.only_decodes
            and not len(plan.prefill_slots)
            and not self.dynamic_rope
            and np.array_equal(plan.decode_slots, last.slots)
            and bool((plan.decode_tokens == UNKNOWN_TOKEN).all())
        )

    def _next_rows(self, last: StepRows) -> StepRows:
        """The rows of the step before, a token further on: a fraction of what it takes to gather them."""
        table = self.table
        seq_lens = last.seq_lens + np.int32(1)
        check_room(table, last.slots, seq_lens)
        positions = last.seq_lens.astype(np.int64)
        places = table.places_of(last.slots, positions)
        lens_there, positions_there, places_there = upload((seq_lens, positions, places), self.device)
        max_seqlen = int(seq_lens.max(initial=0))
        return replace(
            last,
            seq_lens=seq_lens,
            token_ids=self.last_tokens[last.sampling_slots_on_device],
            positions=positions_there,
            attention=replace(
                last.attention,
                seq_lens=lens_there,
                slot_mapping=places_there,
                block_tables=self._block_tables(last.slots, last.sampling_slots_on_device, max_seqlen),
                max_seqlen_k=max_seqlen,
            ),
        )

    def _gather_rows(self, plan: StepPlan) -> StepRows:
        table = self.table
        num_prefill, num_decode = len(plan.prefill_slots), len(plan.decode_slots)
        slots = np.concatenate([plan.prefill_slots, plan.decode_slots])
        check_slots(table, slots, "scheduled", in_use=True, unique=True)
        check_prefill(table, plan)
        check_decode(table, plan)
        table.num_computed[plan.prefill_slots] = plan.prefill_starts  # further on after a prefix hit in mid-prompt
        first_positions = table.num_computed[slots]
        query_lens = np.ones(num_prefill + num_decode, dtype=np.int32)
        query_lens[:num_prefill] = plan.prefill_num_tokens
        seq_lens = first_positions + query_lens
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        check_room(table, slots, seq_lens)
        sampling = np.flatnonzero(seq_lens == table.num_tokens[slots])

        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(first_positions - starts[:-1], query_lens)
        tokens = self._tokens(np.repeat(slots, query_lens), positions, plan.decode_tokens)
        slots_int64 = slots.astype(np.int64)
        there = _OnDevice(*upload((*tokens, starts, seq_lens, slots_int64, slots_int64[sampling]), self.device))
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
                block_size=table.block_size,
                rope_lens=there.rope_lens if self.dynamic_rope else None,
            ),
        )

    def _tokens(
        self, owners: Int32, positions: NDArray[np.int64], decode_tokens: Int32
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each token of the step: its id, its position, its place in the KV cache, the length it is rotated for.

        That length is its prompt's, or its own once past the prompt; nobody asks for it without dynamic rope.
        """
        table = self.table
        token_ids = table.token_ids[owners, positions].astype(np.int64)
        token_ids[len(token_ids) - len(decode_tokens) :] = decode_tokens
        places = table.places_of(owners, positions)
        rope_lens = np.maximum(table.num_prompt[owners], positions + 1)[: len(owners) * self.dynamic_rope]
        return token_ids, positions, places, rope_lens

    def _with_own_tokens(self, there: _OnDevice, decode_tokens: Int32) -> Tensor:
        """The step's tokens, where those that the host does not know are the ones sampled here in the step before."""
        if (decode_tokens == UNKNOWN_TOKEN).any():
            given = there.token_ids[-len(decode_tokens) :]
            own = self.last_tokens[there.slots[-len(decode_tokens) :]]
            given.copy_(torch.where(given == UNKNOWN_TOKEN, own, given))
        return there.token_ids

    def _block_tables(self, slots: Int32, slots_on_device: Tensor, max_seqlen: int) -> Tensor:
        num_columns = -(-max_seqlen // self.table.block_size)
        if self.device.type == "cpu":
            return torch.from_numpy(self.table.block_table[slots, :num_columns])
        return self._device_block_table[slots_on_device, :num_columns]

    # --- after the step -----------------------------------------------------------------------------------------

    def advance(self, rows: StepRows, tokens: Tensor) -> None:
        """The rows are computed and `tokens`, one per sampling row, follow them; the device may still be at work."""
        self.table.num_computed[rows.slots] = rows.seq_lens
        self.table.num_tokens[rows.sampling_slots] += 1
        self.table.has_sampled[rows.sampling_slots] = True
        self.last_tokens[rows.sampling_slots_on_device] = tokens
        self._last_rows = rows

    def note_run(self, slots: Int32, sampled: list[Int32]) -> None:
        """`advance` and `note_sampled` at once for steps on a CPU that were made without rows of this batch.

        Each of `sampled` is a step's, with a token of each of `slots`.
        """
        if sampled:
            self._last_rows = None
            self.last_tokens.numpy()[slots] = sampled[-1]
            self.table.note_run(slots, np.stack(sampled, axis=1))

    def note_sampled(self, rows: StepRows, seq_ids: NDArray[np.int64], tokens: Int32) -> None:
        """The tokens that `seq_ids` sampled have reached the host."""
        self.table.note_sampled(rows.sampling_slots, rows.sampled_positions, seq_ids, tokens)

    def put(self, array: NDArray) -> Tensor:
        """The array on the device; the host does not wait for it to get there."""
        return upload((array,), self.device)[0]
