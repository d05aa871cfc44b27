"""The scheduler: which tokens of which sequences the workers compute next.

Owns every sequence from arrival to its last token, the workers' slots and, through the block manager, all KV blocks.
Knows no clock, no transport and no tensors: `schedule` gives the next plan, `postprocess` takes the answer, and both
are pure state transitions, so a test can drive a million of them.

There is no prefill phase and no decode phase. A sequence has tokens and computed tokens; a step computes some of
the difference, decoding sequences first. One step ahead, `schedule` runs before the last step's tokens are known:
such a token is *pending*, and the worker continues from the one it sampled itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from configs.schema import CacheConfig, SchedulerConfig
from scheduler.block_manager import BlockManager
from scheduler.intake import Intake, Limits
from scheduler.output import Int32, StepPlan, StepResult
from scheduler.plan_draft import PlanDraft
from scheduler.prompt_scores import row
from scheduler.request import FinishReason, QueueFullError, Request, SequenceOutput
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.stats import SchedulerStats
from scheduler.waiting_queue import WaitingQueue


class StepMismatchError(RuntimeError):
    """A result that answers no plan in flight: scheduler and workers have lost step. Reset the workers."""


@dataclass(slots=True)
class StepInFlight:
    """A plan that was sent: who samples in it, in the order of the rows, and whose prompt it scores, by slot."""

    step: int
    slots: Int32
    sampling: list[Sequence]
    scoring: dict[int, Sequence]


class Scheduler:
    """Continuous batching over `num_blocks` KV blocks and `config.max_num_seqs` slots.

    Every plan that `schedule` returns must be executed, in order, or the workers reset. At most `max_steps_in_flight`
    plans may await their result.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        cache_namespace: str = "",
        engine_epoch: int = 0,
    ) -> None:
        # Every decoding sequence gets its token in every step. `configs.loader` refuses the rest in the user's words.
        assert config.max_num_seqs <= config.max_num_batched_tokens, f"{config.max_num_seqs} rows in one step"
        self.config = config
        self.max_steps_in_flight = 2 if config.one_step_ahead else 1
        self.limits = Limits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            eos_token_ids=eos_token_ids,
        )
        self.blocks = BlockManager(
            num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching, namespace=cache_namespace
        )
        self._intake = Intake(self.limits)
        self._queue = WaitingQueue(config.policy)
        self._num_watermark_blocks = math.ceil(cache.watermark * num_blocks)

        self._sequences_of: dict[Hashable, list[Sequence]] = {}  # unfinished ones, by request
        # Invariant: a running sequence is in exactly one of these; decoding ones lack exactly one token's KV.
        self._prefilling: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}
        # Blocks that prefilling sequences were admitted for and have not taken yet.
        self._num_reserved_blocks = 0
        self._blocked: tuple[Sequence, int] | None = None  # head of the queue, and the blocks it found too few

        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []  # since the last plan
        self._engine_epoch = engine_epoch
        self._next_step = 0
        self._in_flight: deque[StepInFlight] = deque()
        self._stats = SchedulerStats(num_blocks=num_blocks)

    # --- what a client does -------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never be served, or its id is in use; the message has the numbers and the remedy.
            QueueFullError: too many wait already.
        """
        if request.request_id in self._sequences_of:
            raise ValueError(f"request id {request.request_id!r} is in use")
        max_num_tokens = self._intake.max_num_tokens(request)
        if len(self._queue) >= self.config.max_num_waiting:
            raise QueueFullError(
                f"{len(self._queue)} requests wait already (scheduler.max_num_waiting); try again later"
            )
        key = self._queue.arrival_key(
            priority=request.priority, tenant=request.tenant, num_tokens=max_num_tokens * request.sampling_params.n
        )
        sequences = self._intake.sequences_of(request, max_num_tokens, key)
        self._sequences_of[request.request_id] = sequences
        self._queue.push(sequences[0])

    def abort(self, request_id: Hashable) -> None:
        """Drop every sequence of a request, whatever it is doing. An unknown or finished id is no error."""
        for seq in self._sequences_of.pop(request_id, ()):
            is_held_back = seq.parent is not None and seq in seq.parent.children
            if seq.status is SequenceStatus.RUNNING:
                self._release(seq)
            seq.status, was_waiting = SequenceStatus.FINISHED, seq.status is SequenceStatus.WAITING
            if was_waiting and not is_held_back:
                self._queue.note_discarded()

    # --- what the engine loop does ------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute until a result, a request or a block arrives."""
        assert len(self._in_flight) < self.max_steps_in_flight, f"{len(self._in_flight)} steps are in flight"
        draft = PlanDraft()
        num_preemptions = self._stats.num_preemptions
        self._grow_decoding(draft)
        self._schedule_decoding(draft)
        budget = self.config.max_num_batched_tokens - len(draft.decoded)
        budget -= self._schedule_prefilling(draft, budget)
        if self._stats.num_preemptions == num_preemptions or not draft.has_rows:
            self._admit_waiting(draft, budget)
        if not draft.has_rows:
            return None
        self._settle_prefilled(draft.prefilled)
        plan = draft.build(self._engine_epoch, self._next_step, self._released_slots)
        self._released_slots = []
        self._note_in_flight(draft, plan)
        return plan

    def postprocess(self, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take the answer to the oldest plan in flight; one output for each sampled token that still has a taker.

        Results of an earlier epoch are dropped. So are tokens of sequences that have left their slot since: aborted
        ones have no taker, and preempted ones will sample the same token again.

        Raises:
            StepMismatchError: the result answers no plan in flight.
        """
        if result.engine_epoch != self._engine_epoch:
            return []
        flight = self._in_flight[0] if self._in_flight else None
        if flight is None or flight.step != result.step or not np.array_equal(flight.slots, result.slots):
            expected = "none" if flight is None else f"step {flight.step} for {len(flight.slots)} slots"
            raise StepMismatchError(f"result of step {result.step} for {len(result.slots)} slots; expected {expected}")
        self._in_flight.popleft()
        for chunk in result.prompt_logprobs:
            seq = flight.scoring.get(chunk.slot)
            if seq is not None and seq.prompt_scores is not None and self._still_holds_slot(seq, flight.step):
                seq.prompt_scores.add(chunk)
        score_rows = {int(slot): i for i, slot in enumerate(result.logprob_slots)}
        outputs = []
        for seq, token_id in zip(flight.sampling, result.tokens.tolist(), strict=True):
            if seq.admitted_step > flight.step or seq.status is not SequenceStatus.RUNNING:
                continue
            slot = seq.slot
            output = self._accept_token(seq, token_id)
            if result.logprobs is not None and slot in score_rows:
                output.logprobs = row(result.logprobs, score_rows[slot])
            outputs.append(output)
        self._stats.num_sampled_tokens += len(outputs)
        return outputs

    def reset_workers(self, engine_epoch: int) -> None:
        """The workers and all KV were lost: every running sequence waits again, results in flight are void."""
        assert engine_epoch > self._engine_epoch, f"epoch {engine_epoch} does not follow {self._engine_epoch}"
        for seq in list(self._running()):
            self._return_to_queue(seq)
        self.blocks.forget_contents()
        self._engine_epoch = engine_epoch
        self._next_step = 0
        self._in_flight.clear()
        self._released_slots = []
        self._blocked = None

    # --- what an operator sees ----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences_of)

    def stats(self) -> SchedulerStats:
        """A snapshot; it takes the list of newly preempted requests with it."""
        return self._stats.snapshot(
            num_running=self.num_running, num_waiting=self.num_waiting, num_free_blocks=self.blocks.num_free_blocks
        )

    def explain_waiting(self) -> list[str]:
        """Why each waiting request does not run, the first one in detail."""
        head = self._queue.peek()
        if head is None:
            return []
        needed, available = self.blocks.num_blocks_for(head.num_tokens), self._num_available_blocks
        head_reason = (
            f"request {head.request_id!r} ({head.num_tokens} tokens) is first: {len(self._free_slots)} of "
            f"{self.config.max_num_seqs} slots free, needs up to {needed} blocks, {available} of "
            f"{self.limits.num_blocks} available, {self._num_watermark_blocks} kept for growth"
        )
        behind = (seq for seq in self._queue if seq is not head)
        return [
            head_reason,
            *(f"request {seq.request_id!r} ({seq.num_tokens} tokens) waits behind it" for seq in behind),
        ]

    def check_integrity(self) -> None:
        """Assert every invariant that spans more than one object. For tests, and for idle moments."""
        running = list(self._running())
        slots = [seq.slot for seq in running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), "slots leaked or shared"
        reserved = sum(self.blocks.num_blocks_for(s.num_tokens) - len(s.block_table) for s in self._prefilling.values())
        assert reserved == self._num_reserved_blocks, f"{self._num_reserved_blocks} blocks reserved, {reserved} owed"
        for seq in running:
            assert seq.status is SequenceStatus.RUNNING, seq
            assert 0 <= seq.num_cached_tokens <= len(seq.block_table) * seq.block_size, seq
            assert seq.num_pending_tokens <= len(self._in_flight), seq
        for seq in self._prefilling.values():
            assert seq.is_prefill, seq
            assert seq.num_cached_tokens < seq.num_tokens, seq
        for seq in self._decoding.values():
            assert not seq.is_prefill, seq
            assert seq.num_cached_tokens == seq.num_tokens + seq.num_pending_tokens - 1, seq
        waiting = list(self._queue)
        assert len(waiting) == len(self._queue), f"{len(waiting)} wait, {len(self._queue)} counted"
        held_back = [child for seq in (*running, *waiting) for child in seq.children]
        known = sum(len(sequences) for sequences in self._sequences_of.values())
        assert len(running) + len(waiting) + len(held_back) == known, "a sequence is lost"
        self.blocks.check_integrity(running)

    # --- one step -----------------------------------------------------------------------------------------------

    def _grow_decoding(self, draft: PlanDraft) -> None:
        """Give a block to each decoding sequence whose next token needs one, preempting where none is left."""
        block_size = self.limits.block_size
        short = [
            seq
            for seq in self._decoding.values()
            if seq.num_cached_tokens == len(seq.block_table) * block_size
            and seq.num_tokens + seq.num_pending_tokens < seq.max_num_tokens
        ]
        short.sort(key=lambda seq: seq.queue_key)
        growth = []
        for seq in short:
            while seq.status is SequenceStatus.RUNNING and not self.blocks.num_free_blocks:
                self._preempt(self._choose_victim())
            if seq.status is SequenceStatus.RUNNING:
                self.blocks.record(seq)
                growth.append((seq, self.blocks.append_block(seq)))
        draft.growth = [(seq, block_id) for seq, block_id in growth if seq.status is SequenceStatus.RUNNING]

    def _schedule_decoding(self, draft: PlanDraft) -> None:
        for seq in self._decoding.values():
            # Otherwise its last token is in flight already.
            if seq.num_tokens + seq.num_pending_tokens < seq.max_num_tokens:
                draft.decode(seq)

    def _schedule_prefilling(self, draft: PlanDraft, budget: int) -> int:
        num_scheduled = 0
        for seq in self._prefilling.values():
            if num_scheduled == budget:
                break
            num_blocks = len(seq.block_table)
            num_scheduled += self._prefill_chunk(draft, seq, budget - num_scheduled)
            draft.growth.extend((seq, block_id) for block_id in seq.block_table[num_blocks:])
        return num_scheduled

    def _admit_waiting(self, draft: PlanDraft, budget: int) -> None:
        while budget > 0 and self._free_slots and (seq := self._queue.peek()) is not None:
            if not self._take_cached(draft, seq):
                break
            self._queue.pop()
            seq.status = SequenceStatus.RUNNING
            seq.slot = self._free_slots.pop()
            seq.admitted_step = self._next_step
            self._prefilling[seq.seq_id] = seq
            self._num_reserved_blocks += self.blocks.num_blocks_for(seq.num_tokens) - len(seq.block_table)
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
        available = self._num_available_blocks
        if self._blocked is not None and self._blocked[0] is seq and available <= self._blocked[1]:
            return False
        parent = seq.parent if seq.parent is not None and seq.parent.seq_id in self._decoding else None
        scores_prompt = seq.prompt_scores is not None
        hits = [] if parent or scores_prompt else self.blocks.match(seq)
        num_shared = (
            (seq.num_tokens - 1) // self.limits.block_size if parent else len(hits) - self.blocks.num_free_among(hits)
        )
        needed = self.blocks.num_blocks_for(seq.num_tokens) - num_shared
        if needed > available - (self._num_watermark_blocks if self.num_running else 0):
            self._blocked = (seq, available)
            return False
        self._blocked = None
        if parent:
            if copy := self.blocks.fork(parent, seq):
                draft.copies.append(copy)
        elif hits:
            self.blocks.take_hits(seq, hits)
        seq.parent = None
        return True

    def _prefill_chunk(self, draft: PlanDraft, seq: Sequence, budget: int) -> int:
        """Compute as much of `seq` as budget and free blocks allow; returns the number of tokens."""
        num_blocks = len(seq.block_table)
        num_free = self.blocks.num_free_blocks
        if seq.num_cached_tokens == num_blocks * self.limits.block_size:
            if num_free == 0:
                return 0
            # Another sequence may have computed this prefix since.
            hits = [] if seq.prompt_scores is not None else self.blocks.match(seq)
            if hits and self.blocks.num_free_among(hits) < num_free:
                self.blocks.take_hits(seq, hits)
        room = (len(seq.block_table) + self.blocks.num_free_blocks) * self.limits.block_size - seq.num_cached_tokens
        num_tokens = min(budget, self.config.max_prefill_chunk, seq.num_tokens - seq.num_cached_tokens, room)
        while len(seq.block_table) * self.limits.block_size < seq.num_cached_tokens + num_tokens:
            self.blocks.append_block(seq)
        self._num_reserved_blocks -= len(seq.block_table) - num_blocks
        draft.prefill(seq, num_tokens)
        self.blocks.record(seq)
        return num_tokens

    def _settle_prefilled(self, sequences: list[Sequence]) -> None:
        """These decode from the next step on, and their siblings may fork from then on."""
        for seq in sequences:
            del self._prefilling[seq.seq_id]
            self._decoding[seq.seq_id] = seq
            for child in seq.children:
                self._queue.push(child)
            seq.children = []

    def _note_in_flight(self, draft: PlanDraft, plan: StepPlan) -> None:
        sampling = draft.prefilled + draft.decoded
        prefilled = [seq.slot for seq in draft.prefilled]
        slots = np.concatenate([np.array(prefilled, np.int32), plan.decode_slots])
        self._in_flight.append(StepInFlight(plan.step, slots, sampling, draft.scoring))
        self._next_step += 1
        self._stats.num_steps += 1

    def _accept_token(self, seq: Sequence, token_id: int) -> SequenceOutput:
        seq.num_pending_tokens -= 1
        seq.append_token(token_id)
        reason: FinishReason | None = None
        if token_id in seq.stop_ids and seq.num_completion_tokens > seq.sampling_params.min_tokens:
            reason = "stop"
        elif seq.num_tokens == seq.max_num_tokens:
            reason = "length"
        output = SequenceOutput(seq.request_id, seq.index, token_id, reason, seq.num_cached_prompt_tokens)
        if seq.prompt_scores is not None:
            output.prompt_logprobs = seq.prompt_scores.whole()
            seq.prompt_scores = None
        if reason is not None:
            self._finish(seq)
        return output

    # --- leaving a slot -----------------------------------------------------------------------------------------

    def _finish(self, seq: Sequence) -> None:
        self._release(seq)
        seq.status = SequenceStatus.FINISHED
        siblings = self._sequences_of[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._sequences_of[seq.request_id]
        self._stats.num_finished += 1

    def _choose_victim(self) -> Sequence:
        """The running sequence to recompute later: of the lowest priority, not preempted too often, the cheapest."""

        def cost(seq: Sequence) -> tuple[float, ...]:
            is_protected = seq.num_preemptions >= self.config.max_preemptions
            latest_first = [-part for part in seq.queue_key]
            return (-seq.priority, is_protected, *(latest_first if is_protected else [seq.num_cached_tokens]))

        return min(self._running(), key=cost)

    def _preempt(self, seq: Sequence) -> None:
        self._return_to_queue(seq)
        seq.num_preemptions += 1
        self._stats.note_preemption(seq.request_id)

    def _return_to_queue(self, seq: Sequence) -> None:
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.is_prefill = True
        if seq.prompt_scores is not None:
            seq.prompt_scores.restart()
        self._queue.push(seq)

    def _release(self, seq: Sequence) -> None:
        """Take slot and blocks from a running sequence. A token that it has in flight will find it gone."""
        if self._prefilling.pop(seq.seq_id, None) is not None:
            self._num_reserved_blocks -= self.blocks.num_blocks_for(seq.num_tokens) - len(seq.block_table)
        else:
            del self._decoding[seq.seq_id]
        self._free_slots.append(seq.slot)
        self._released_slots.append(seq.slot)
        seq.slot = -1
        seq.num_pending_tokens = 0
        self.blocks.free(seq)

    def _running(self) -> Iterator[Sequence]:
        yield from self._prefilling.values()
        yield from self._decoding.values()

    def _still_holds_slot(self, seq: Sequence, step: int) -> bool:
        return seq.status is SequenceStatus.RUNNING and seq.admitted_step <= step

    @property
    def _num_available_blocks(self) -> int:
        return self.blocks.num_free_blocks - self._num_reserved_blocks
