"""Step plans from the scheduler's side: one in the making, lists turned into arrays at the end, and those under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.output import UNKNOWN_TOKEN, AdmittedSequence, Int32, StepPlan, int32
from scheduler.sequence import Sequence


@dataclass(slots=True)
class StepInFlight:
    """A plan that was sent: who samples in it, in the order of the rows, and whose prompt it scores, by slot."""

    step: int
    slots: Int32
    sampling: list[Sequence]
    scoring: dict[int, Sequence]


@dataclass(slots=True)
class PlanDraft:
    """Rows in the order in which they will be computed, and beside them whose they are.

    Nothing leaves its slot once rows are added: preemption comes first, so a draft never has to take a row back.
    """

    admitted: list[AdmittedSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    growth: list[tuple[Sequence, int]] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_starts: list[int] = field(default_factory=list)
    prefill_num_tokens: list[int] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)

    prefilled: list[Sequence] = field(default_factory=list)  # prefill rows that end their sequence's known tokens
    decoded: list[Sequence] = field(default_factory=list)
    scoring: dict[int, Sequence] = field(default_factory=dict)  # by slot: rows that score their prompt

    @property
    def has_rows(self) -> bool:
        return bool(self.decode_slots or self.prefill_slots)

    def admit(self, seq: Sequence, num_cached_tokens: int) -> None:
        self.admitted.append(
            AdmittedSequence(
                slot=seq.slot,
                seq_id=seq.seq_id,
                seed=seq.seed,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_cached_tokens=num_cached_tokens,
                token_ids=int32(seq.token_ids),
                block_table=int32(seq.block_table),
                sampling_params=seq.sampling_params,
            )
        )

    def prefill(self, seq: Sequence, num_tokens: int) -> None:
        """Compute the next `num_tokens` of `seq`, and sample if they are its last."""
        self.prefill_slots.append(seq.slot)
        self.prefill_starts.append(seq.num_cached_tokens)
        self.prefill_num_tokens.append(num_tokens)
        if seq.prompt_scores is not None:
            self.scoring[seq.slot] = seq
        seq.num_scheduled_tokens = num_tokens
        seq.num_cached_tokens += num_tokens
        if seq.num_cached_tokens == seq.num_tokens:
            seq.is_prefill = False
            seq.num_pending_tokens = 1
            self.prefilled.append(seq)

    def decode(self, seq: Sequence) -> None:
        """Compute the last token of `seq`, known or pending, and sample."""
        self.decode_slots.append(seq.slot)
        self.decode_tokens.append(UNKNOWN_TOKEN if seq.num_pending_tokens else seq.last_token)
        self.decoded.append(seq)
        seq.num_scheduled_tokens = 1
        seq.num_cached_tokens += 1
        seq.num_pending_tokens += 1

    def build(self, engine_epoch: int, step: int, released_slots: list[int]) -> StepPlan:
        return StepPlan(
            engine_epoch=engine_epoch,
            step=step,
            released_slots=int32(released_slots),
            admitted=tuple(self.admitted),
            copied_from=int32([source for source, _ in self.copies]),
            copied_to=int32([target for _, target in self.copies]),
            grown_slots=int32([seq.slot for seq, _ in self.growth]),
            grown_blocks=int32([block_id for _, block_id in self.growth]),
            prefill_slots=int32(self.prefill_slots),
            prefill_starts=int32(self.prefill_starts),
            prefill_num_tokens=int32(self.prefill_num_tokens),
            decode_slots=int32(self.decode_slots),
            decode_tokens=int32(self.decode_tokens),
        )
