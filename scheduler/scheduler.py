"""The scheduler: which tokens of which sequences the workers compute next.

Owns every sequence from arrival to its last token: waiting (`waiting_queue`), running (`running_set`), and in blocks
(`block_manager`). Who computes what in a step is decided in `step_composer`.
Knows no clock, no transport and no tensors: `schedule` gives the next plan, `postprocess` takes the answer, and both
are pure state transitions, so a test can drive a million of them.

There is no prefill phase and no decode phase. A sequence has tokens and computed tokens; a step computes some of
the difference, decoding sequences first. One step ahead, `schedule` runs before the last step's tokens are known:
such a token is *pending*, and the worker continues from the one it sampled itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import numpy as np

from configs.schema import CacheConfig, SchedulerConfig
from scheduler.block_manager import BlockManager
from scheduler.intake import Intake, Limits
from scheduler.output import StepPlan, StepResult, int32
from scheduler.plan_draft import PlanDraft, StepInFlight
from scheduler.prompt_scores import row
from scheduler.request import FinishReason, QueueFullError, Request, SequenceOutput
from scheduler.running_set import RunningSet
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.stats import SchedulerStats
from scheduler.step_composer import StepComposer
from scheduler.waiting_queue import WaitingQueue


class StepMismatchError(RuntimeError):
    """A result that answers no plan in flight: scheduler and workers have lost step. Reset the workers."""


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
        # Every decoding sequence gets its token in every step. `configs.build` refuses the rest in the user's words.
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
        self._sequences_of: dict[Hashable, list[Sequence]] = {}  # unfinished ones, by request
        self._running = RunningSet(config.max_num_seqs)
        self._stats = SchedulerStats(num_blocks=num_blocks)
        self._composer = StepComposer(
            config,
            blocks=self.blocks,
            queue=self._queue,
            running=self._running,
            stats=self._stats,
            watermark=cache.watermark,
        )

        self._engine_epoch = engine_epoch
        self._next_step = 0
        self._in_flight: deque[StepInFlight] = deque()

    # --- what a client does -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
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

    def abort(self, request_id: Hashable, index: int | None = None) -> None:
        """Drop a request, or completion `index` of it alone, whatever it is doing. Unknown or finished: no error."""
        for seq in list(self._sequences_of.get(request_id, ())):
            if index is None or seq.index == index:
                self._drop(seq)

    # --- what the engine loop does ------------------------------------------------------------------------------

    def schedule(self, *, admits: bool = True) -> StepPlan | None:
        """The next plan, or None if there is nothing to compute until a result, a request or a block arrives.

        Without `admits`, waiting requests go on to wait.
        """
        assert len(self._in_flight) < self.max_steps_in_flight, f"{len(self._in_flight)} steps are in flight"
        draft = self._composer.compose(self._next_step, admits=admits)
        if not draft.has_rows:
            return None
        plan = draft.build(self._engine_epoch, self._next_step, self._running.take_released_slots())
        self._note_in_flight(draft, plan)
        return plan

    def postprocess(self, result: StepResult) -> list[SequenceOutput]:
        """Take the answer to the oldest plan in flight; one output for each sampled token that still has a taker.

        Results of an earlier epoch are dropped. So are tokens of sequences that have left their slot since: aborted
        ones have no taker, and preempted ones will sample the same token again.

        Raises:
            StepMismatchError: the result answers no plan in flight.
        """
        if result.engine_epoch != self._engine_epoch:
            return []
        flight = self._in_flight[0] if self._in_flight else None
        if flight is None or flight.step != result.step or flight.slots.tobytes() != result.slots.tobytes():
            expected = "none" if flight is None else f"step {flight.step} for {len(flight.slots)} slots"
            raise StepMismatchError(f"result of step {result.step} for {len(result.slots)} slots; expected {expected}")
        self._in_flight.popleft()
        for chunk in result.prompt_logprobs:
            seq = flight.scoring.get(chunk.slot)
            if seq is not None and seq.prompt_scores is not None and self._still_holds_slot(seq, flight.step):
                seq.prompt_scores.add(chunk)
        score_rows = {slot: i for i, slot in enumerate(result.logprob_slots.tolist())}
        outputs = []
        for seq, token_id in zip(flight.sampling, result.tokens.tolist(), strict=True):
            if not self._still_holds_slot(seq, flight.step):
                continue
            slot = seq.slot
            output = self._accept_token(seq, token_id)
            if slot in score_rows and result.logprobs is not None:
                output.logprobs = row(result.logprobs, score_rows[slot])
            outputs.append(output)
        self._stats.num_sampled_tokens += len(outputs)
        return outputs

    def reset_workers(self, engine_epoch: int) -> None:
        """The workers and all KV were lost: every running sequence waits again, results in flight are void."""
        assert engine_epoch > self._engine_epoch, f"epoch {engine_epoch} does not follow {self._engine_epoch}"
        for seq in list(self._running):
            self._composer.return_to_queue(seq)
        self._running.take_released_slots()
        self.blocks.forget_contents()
        self._engine_epoch = engine_epoch
        self._next_step = 0
        self._in_flight.clear()

    # --- what an operator sees ----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_ending(self) -> int | None:
        """Requests that run, if all of them end with the next step at the latest; else None."""
        running = self._running
        decoding = running.decoding.values()
        if running.prefilling or any(s.num_tokens + s.num_pending_tokens + 1 < s.max_num_tokens for s in decoding):
            return None
        request_ids = {seq.request_id for seq in decoding}
        # A request whose other completions still wait goes on.
        num_unfinished = sum(len(self._sequences_of[request_id]) for request_id in request_ids)
        return len(request_ids) if num_unfinished == len(decoding) else None

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._sequences_of)

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
        needed, available = self.blocks.num_blocks_for(head.num_tokens), self._composer.num_available_blocks
        head_reason = (
            f"request {head.request_id!r} ({head.num_tokens} tokens) is first: {self._running.num_free_slots} of "
            f"{self.config.max_num_seqs} slots free, needs up to {needed} blocks, {available} of "
            f"{self.limits.num_blocks} available, {self._composer.num_watermark_blocks} kept for growth"
        )
        behind = (seq for seq in self._queue if seq is not head)
        return [
            head_reason,
            *(f"request {seq.request_id!r} ({seq.num_tokens} tokens) waits behind it" for seq in behind),
        ]

    def check_integrity(self) -> None:
        """Assert every invariant that spans more than one object. For tests, and for idle moments."""
        self._running.check_integrity(len(self._in_flight))
        self.blocks.check_integrity(self._running)
        waiting = list(self._queue)
        assert len(waiting) == len(self._queue), f"{len(waiting)} wait, {len(self._queue)} counted"
        held_back = [child for seq in (*self._running, *waiting) for child in seq.children]
        known = sum(len(sequences) for sequences in self._sequences_of.values())
        assert len(self._running) + len(waiting) + len(held_back) == known, "a sequence is lost"

    # --- what happens to one sequence ---------------------------------------------------------------------------

    def _note_in_flight(self, draft: PlanDraft, plan: StepPlan) -> None:
        sampling = draft.prefilled + draft.decoded
        slots = plan.decode_slots
        if draft.prefilled:
            slots = np.concatenate([int32([seq.slot for seq in draft.prefilled]), slots])
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
            self._release(seq)
            self._forget(seq)
            self._stats.num_finished += 1
        return output

    def _drop(self, seq: Sequence) -> None:
        """End `seq` from outside."""
        status, seq.status = seq.status, SequenceStatus.FINISHED
        if status is SequenceStatus.RUNNING:
            self._release(seq)
        elif seq.parent is not None and seq in seq.parent.children:
            seq.parent.children.remove(seq)
        else:
            self._queue.note_discarded()
        for child in seq.children:  # they waited for its prompt, and have to compute it themselves
            self._queue.push(child)
        seq.children = []
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.FINISHED
        siblings = self._sequences_of[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._sequences_of[seq.request_id]

    def _release(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.blocks.free(seq)

    def _still_holds_slot(self, seq: Sequence, step: int) -> bool:
        return seq.status is SequenceStatus.RUNNING and seq.admitted_step <= step
