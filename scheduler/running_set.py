"""Who runs: the sequences that hold a slot, and the blocks they were promised.

Owns the workers' slots and the division into prefilling and decoding. Knows no policy: who gets in, who computes what
and who has to leave is decided in `scheduler.scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.sequence import Sequence, SequenceStatus


class RunningSet:
    """At most `num_slots` sequences. A decoding one lacks exactly one token's KV: that of its last token."""

    def __init__(self, num_slots: int) -> None:
        # Invariant: a running sequence is in exactly one of these, by its id, in the order of admission.
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        # Invariant: the sum over prefilling sequences of the blocks that their tokens still lack.
        self.num_reserved_blocks = 0
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._released_slots: list[int] = []

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefilling.values()
        yield from self.decoding.values()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def admit(self, seq: Sequence, step: int) -> None:
        """Give `seq` a slot, and reserve the blocks that it lacks, from `step` on."""
        seq.status = SequenceStatus.RUNNING
        seq.slot = self._free_slots.pop()
        seq.admitted_step = step
        self.prefilling[seq.seq_id] = seq
        self.num_reserved_blocks += seq.num_blocks - len(seq.block_table)

    def settle(self, seq: Sequence) -> None:
        """All known tokens of `seq` are scheduled: it decodes from the next step on."""
        del self.prefilling[seq.seq_id]
        self.decoding[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Take the slot from `seq`. A token that it has in flight will find it gone."""
        if self.prefilling.pop(seq.seq_id, None) is not None:
            self.num_reserved_blocks -= seq.num_blocks - len(seq.block_table)
        else:
            del self.decoding[seq.seq_id]
        self._free_slots.append(seq.slot)
        self._released_slots.append(seq.slot)
        seq.slot = -1
        seq.num_pending_tokens = 0

    def take_released_slots(self) -> list[int]:
        """Slots released since the last call."""
        released, self._released_slots = self._released_slots, []
        return released

    def check_integrity(self, num_steps_in_flight: int) -> None:
        slots = [seq.slot for seq in self]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "slots leaked or shared"
        owed = sum(seq.num_blocks - len(seq.block_table) for seq in self.prefilling.values())
        assert owed == self.num_reserved_blocks, f"{self.num_reserved_blocks} blocks reserved, {owed} owed"
        for seq in self:
            assert seq.status is SequenceStatus.RUNNING, seq
            assert 0 <= seq.num_cached_tokens <= len(seq.block_table) * seq.block_size, seq
            assert seq.num_pending_tokens <= num_steps_in_flight, seq
        for seq in self.prefilling.values():
            assert seq.is_prefill, seq
            assert seq.num_cached_tokens < seq.num_tokens, seq
        for seq in self.decoding.values():
            assert not seq.is_prefill, seq
            assert seq.num_cached_tokens == seq.num_tokens + seq.num_pending_tokens - 1, seq
