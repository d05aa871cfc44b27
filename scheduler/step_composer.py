"""The policy of one step: who computes how many tokens, who is admitted, who has to make room.

Decoding sequences first, one token each; then chunks of running prompts; then waiting ones, as far as tokens, slots and
blocks go. Knows nothing of results, of requests' ends or of plans in flight.
"""

from __future__ import annotations

import math

from configs.schema import SchedulerConfig
from scheduler.block_manager import BlockManager
from scheduler.plan_draft import PlanDraft
from scheduler.running_set import RunningSet
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.stats import SchedulerStats
from scheduler.waiting_queue import WaitingQueue


class StepComposer:
    """Moves sequences between the queue and the running set, and writes what it decides into a draft."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        blocks: BlockManager,
        queue: WaitingQueue,
        running: RunningSet,
        stats: SchedulerStats,
        watermark: float,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._queue = queue
        self._running = running
        self._stats = stats
        self.num_watermark_blocks = math.ceil(watermark * blocks.num_blocks)
        self._blocked: tuple[Sequence, int] | None = None  # head of the queue, and the blocks it found too few

    @property
    def num_available_blocks(self) -> int:
        """Free blocks that no admitted prompt has a claim on."""
        return self._blocks.num_free_blocks - self._running.num_reserved_blocks

    def compose(self, step: int, *, admits: bool = True) -> PlanDraft:
        draft = PlanDraft()
        num_preemptions = self._stats.num_preemptions
        self._grow_decoding(draft)
        self._schedule_decoding(draft)
        budget = self._config.max_num_batched_tokens - len(draft.decoded)
        budget -= self._schedule_prefilling(draft, budget)
        if admits and (self._stats.num_preemptions == num_preemptions or not draft.has_rows):
            self._admit_waiting(draft, budget, step)
        self._settle(draft.prefilled)
        return draft

    def return_to_queue(self, seq: Sequence) -> None:
        """Take slot and blocks from a running sequence; what it has computed will be computed again, or hit."""
        self._running.remove(seq)
        self._blocks.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.is_prefill = True
        if seq.prompt_scores is not None:
            seq.prompt_scores.restart()
        self._queue.push(seq)

    # --- decoding -----------------------------------------------------------------------------------------------

    def _grow_decoding(self, draft: PlanDraft) -> None:
        """Give a block to each decoding sequence whose next token needs one, preempting where none is left."""
        block_size = self._blocks.block_size
        short = [
            seq
            for seq in self._running.decoding.values()
            if seq.num_cached_tokens == len(seq.block_table) * block_size
            and seq.num_tokens + seq.num_pending_tokens < seq.max_num_tokens
        ]
        short.sort(key=lambda seq: seq.queue_key)
        growth = []
        for seq in short:
            while seq.status is SequenceStatus.RUNNING and not self._blocks.num_free_blocks:
                self._preempt(self._choose_victim())
            if seq.status is SequenceStatus.RUNNING:
                self._blocks.record(seq)
                growth.append((seq, self._blocks.append_block(seq)))
        draft.growth = [(seq, block_id) for seq, block_id in growth if seq.status is SequenceStatus.RUNNING]

    def _schedule_decoding(self, draft: PlanDraft) -> None:
        for seq in self._running.decoding.values():
            # Otherwise its last token is in flight already.
            if seq.num_tokens + seq.num_pending_tokens < seq.max_num_tokens:
                draft.decode(seq)

    def _choose_victim(self) -> Sequence:
        """The running sequence to recompute later: of the lowest priority, not preempted too often, the cheapest."""

        def cost(seq: Sequence) -> tuple[float, ...]:
            is_protected = seq.num_preemptions >= self._config.max_preemptions
            latest_first = [-part for part in seq.queue_key]
            return (-seq.priority, is_protected, *(latest_first if is_protected else [seq.num_cached_tokens]))

        return min(self._running, key=cost)

    def _preempt(self, seq: Sequence) -> None:
        self.return_to_queue(seq)
        seq.num_preemptions += 1
        self._stats.note_preemption(seq.request_id)

    # --- prefilling and admission -------------------------------------------------------------------------------

    def _schedule_prefilling(self, draft: PlanDraft, budget: int) -> int:
        num_scheduled = 0
        for seq in self._running.prefilling.values():
            if num_scheduled == budget:
                break
            num_blocks = len(seq.block_table)
            num_scheduled += self._prefill_chunk(draft, seq, budget - num_scheduled)
            draft.growth.extend((seq, block_id) for block_id in seq.block_table[num_blocks:])
        return num_scheduled

    def _admit_waiting(self, draft: PlanDraft, budget: int, step: int) -> None:
        while budget > 0 and self._running.num_free_slots and (seq := self._queue.peek()) is not None:
            if not self._take_cached(draft, seq):
                break
            self._queue.pop()
            self._running.admit(seq, step)
            num_cached_tokens = seq.num_cached_tokens
            if seq.num_cached_prompt_tokens < 0:
                self._note_first_admission(seq)
            budget -= self._prefill_chunk(draft, seq, budget)
            draft.admit(seq, num_cached_tokens)

    def _note_first_admission(self, seq: Sequence) -> None:
        seq.num_cached_prompt_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
        self._stats.num_prompt_tokens += seq.num_prompt_tokens
        self._stats.num_cached_prompt_tokens += seq.num_cached_prompt_tokens

    def _take_cached(self, draft: PlanDraft, seq: Sequence) -> bool:
        """If blocks suffice to admit `seq`, take those that hold its prefix already."""
        available = self.num_available_blocks
        if self._running and self._blocked is not None and self._blocked[0] is seq and available <= self._blocked[1]:
            return False
        parent = seq.parent if seq.parent is not None and seq.parent.seq_id in self._running.decoding else None
        scores_prompt = seq.prompt_scores is not None
        hits = [] if parent or scores_prompt else self._blocks.match(seq)
        num_shared = (
            (seq.num_tokens - 1) // self._blocks.block_size if parent else len(hits) - self._blocks.num_free_among(hits)
        )
        needed = self._blocks.num_blocks_for(seq.num_tokens) - num_shared
        if needed > available - (self.num_watermark_blocks if self._running else 0):
            self._blocked = (seq, available)
            return False
        self._blocked = None
        if parent:
            if copy := self._blocks.fork(parent, seq):
                draft.copies.append(copy)
        elif hits:
            self._blocks.take_hits(seq, hits)
        seq.parent = None
        return True

    def _prefill_chunk(self, draft: PlanDraft, seq: Sequence, budget: int) -> int:
        """Compute as much of `seq` as budget and free blocks allow; returns the number of tokens."""
        num_blocks = len(seq.block_table)
        num_free = self._blocks.num_free_blocks
        if seq.num_cached_tokens == num_blocks * self._blocks.block_size:
            if num_free == 0:
                return 0
            # Another sequence may have computed this prefix since.
            hits = [] if seq.prompt_scores is not None else self._blocks.match(seq)
            if hits and self._blocks.num_free_among(hits) < num_free:
                self._blocks.take_hits(seq, hits)
        room = (len(seq.block_table) + self._blocks.num_free_blocks) * self._blocks.block_size - seq.num_cached_tokens
        num_tokens = min(budget, self._config.max_prefill_chunk, seq.num_tokens - seq.num_cached_tokens, room)
        while len(seq.block_table) * self._blocks.block_size < seq.num_cached_tokens + num_tokens:
            self._blocks.append_block(seq)
        self._running.num_reserved_blocks -= len(seq.block_table) - num_blocks
        draft.prefill(seq, num_tokens)
        self._blocks.record(seq)
        return num_tokens

    def _settle(self, sequences: list[Sequence]) -> None:
        """These decode from the next step on, and their siblings may fork from then on."""
        for seq in sequences:
            self._running.settle(seq)
            for child in seq.children:
                self._queue.push(child)
            seq.children = []
