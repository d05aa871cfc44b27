"""One step of one rank: a plan in, the sampled tokens out.

Owns the order of things within a step and the order of steps. Knows neither how the plan came here nor which
other ranks there are: the model's layers speak to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.output import Int32, PromptLogprobs, StepPlan, StepResult, int32
from workers.attention import AttentionMetadata
from workers.cuda_graph import DecodeGraphs
from workers.decode_run import DecodeRun
from workers.input_batch import InputBatch, StepRows
from workers.kv_cache import KVCache
from workers.logprobs import Scores, copy_to_host, score
from workers.plan_check import PlanError, check_blocks
from workers.sampler import ChooseTokens, SamplingRows, choose_with_torch, sample
from workers.sampling_state import NOT_ASKED, SamplingState

PROMPT_ROWS_PER_CALL = 256
"""Prompt log-probabilities need the logits of every prompt token: so many rows of the vocabulary exist at once."""


class Model(Protocol):
    """What the runner needs of a model; see `workers.models.decoder.CausalLM`."""

    def __call__(self, token_ids: Tensor, positions: Tensor, kv: KVCache, meta: AttentionMetadata) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(slots=True, eq=False)
class PendingStep:
    """A step that was handed to the device. `ModelRunner.collect` waits for it."""

    plan: StepPlan
    rows: StepRows
    seq_ids: NDArray[np.int64]  # of the rows that sample, as they were at the time
    tokens: Tensor  # [R] int64; on CUDA a pinned copy that is there once `done` is, as are the scores
    done: torch.cuda.Event | None  # None: on a CPU
    logprob_slots: Int32
    logprobs: Scores | None
    prompt_logprobs: list[tuple[int, int, Scores]]  # slot, start, scores

    def is_done(self) -> bool:
        """Whether `collect` would return at once."""
        return self.done is None or self.done.query()


BeginRun = Callable[[StepRows, SamplingRows], DecodeRun]
"""A run that goes on from a step of nothing but decode rows."""


class ModelRunner:
    """Executes the plans of one engine epoch strictly in order.

    `launch` and `collect` are apart so that a device may be given step n + 1 while the host still waits for the tokens
    of step n; they are collected in the order of their launch. `launch` never waits for the device. Only a rank that
    `answers` keeps log-probabilities. Steps of nothing but decode rows are replayed from `graphs` on a GPU, and are
    left to the runs that `begin_run` makes on a CPU, where there are any.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        batch: InputBatch,
        sampling: SamplingState,
        *,
        answers: bool = True,
        graphs: DecodeGraphs | None = None,
        begin_run: BeginRun | None = None,
        choose_tokens: ChooseTokens = choose_with_torch,
    ) -> None:
        self.model = model
        self.kv = kv
        self.batch = batch
        self.sampling = sampling
        self.answers = answers
        self.graphs = graphs
        self.begin_run = begin_run
        self.choose_tokens = choose_tokens
        self._engine_epoch = -1
        self._next_step = 0
        self._run: DecodeRun | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Raises:
            PlanError: the plan is stale, out of order, or contradicts what this rank holds.
        """
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> PendingStep | StepResult:
        """Apply the plan and start its computation; on CPU it is done on return."""
        self._check_order(plan)
        if self._run is not None:
            if self._run.goes_on(plan):
                return self._run.step(plan)
            self._run.end()
            self._run = None
        pending = self._launch(plan)
        return self.collect(pending) if pending.done is None else pending

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> PendingStep:
        for slot in plan.released_slots.tolist():
            self.sampling.release(slot)
        self.batch.apply(plan)
        for sequence in plan.admitted:
            self.sampling.admit(sequence)
        if len(plan.copied_from):
            self.kv.copy_blocks(self._block_ids(plan.copied_from), self._block_ids(plan.copied_to))
        rows = self.batch.rows_of(plan)
        hidden = self._forward(rows)
        prompt_logprobs = self._score_prompts(plan, rows, hidden)
        tokens, logprob_slots, logprobs = self._sample(rows, hidden)
        self.batch.advance(rows, tokens)
        if self.begin_run is not None and rows.only_decodes and len(rows.slots):
            asked = self.sampling.lasting_rows(rows.slots, rows.seq_lens)
            self._run = None if asked is None else self.begin_run(rows, asked)
        return PendingStep(
            plan=plan,
            rows=rows,
            seq_ids=self.batch.table.seq_ids[rows.sampling_slots],
            tokens=copy_to_host(tokens) if tokens.is_cuda else tokens,
            logprob_slots=logprob_slots,
            logprobs=None if logprobs is None else logprobs.copied_to_host(),
            prompt_logprobs=[(slot, start, scores.copied_to_host()) for slot, start, scores in prompt_logprobs],
            done=_mark() if tokens.is_cuda else None,  # after all copies
        )

    def collect(self, pending: PendingStep | StepResult) -> StepResult:
        """Wait for a launched step."""
        if isinstance(pending, StepResult):
            return pending
        if pending.done is not None:
            pending.done.synchronize()
        tokens = pending.tokens.numpy().astype(np.int32)
        self.batch.note_sampled(pending.rows, pending.seq_ids, tokens)
        return StepResult(
            engine_epoch=pending.plan.engine_epoch,
            step=pending.plan.step,
            slots=pending.rows.sampling_slots,
            tokens=tokens,
            logprob_slots=pending.logprob_slots,
            logprobs=None if pending.logprobs is None else pending.logprobs.to_host(),
            prompt_logprobs=tuple(
                PromptLogprobs(slot, start, scores.to_host()) for slot, start, scores in pending.prompt_logprobs
            ),
        )

    def _forward(self, rows: StepRows) -> Tensor:
        """hidden [T, hidden]; from a graph it stays there until the next step."""
        if self.graphs is not None and self.graphs.serves(rows.attention):
            return self.graphs.run(rows.token_ids, rows.positions, rows.attention)
        return self.model(rows.token_ids, rows.positions, self.kv, rows.attention)

    def _check_order(self, plan: StepPlan) -> None:
        if plan.engine_epoch < self._engine_epoch:
            raise PlanError(f"stale plan of epoch {plan.engine_epoch}; this rank is in epoch {self._engine_epoch}")
        if plan.engine_epoch > self._engine_epoch:
            for slot in range(self.batch.table.num_slots):
                self.sampling.release(slot)
            self.batch.clear()
            self._run = None
            self._engine_epoch, self._next_step = plan.engine_epoch, 0
        if plan.step != self._next_step:
            raise PlanError(f"plan of step {plan.step} in epoch {plan.engine_epoch}; step {self._next_step} is due")
        self._next_step += 1

    def _sample(self, rows: StepRows, hidden: Tensor) -> tuple[Tensor, Int32, Scores | None]:
        """Tokens of the rows that sample, and the scores of those that asked."""
        slots = rows.sampling_slots
        if not len(slots):
            return torch.empty(0, dtype=torch.int64, device=self.batch.device), int32(), None
        if len(slots) != len(hidden):
            last = rows.starts[1:][rows.sampling].astype(np.int64) - 1
            hidden = hidden[self.batch.put(last)]
        logits = self.model.compute_logits(hidden)
        num_logprobs = self.sampling.num_logprobs[slots]
        asking = np.flatnonzero(num_logprobs != NOT_ASKED) if self.answers else np.empty(0, dtype=np.intp)
        asking_rows = self.batch.put(asking) if len(asking) else None
        raw = None if asking_rows is None else logits[asking_rows]  # the sampler changes logits in place
        asked = self.sampling.rows(slots, rows.sampled_positions)
        tokens = sample(logits, asked, self.sampling.counts, self.choose_tokens)
        self.sampling.count_sampled(asked, tokens)
        scores = None if raw is None else score(raw, tokens[asking_rows], int(num_logprobs.max()))
        return tokens, slots[asking], scores

    def _score_prompts(self, plan: StepPlan, rows: StepRows, hidden: Tensor) -> list[tuple[int, int, Scores]]:
        """The scores of prompt tokens that follow a token of this step, for each prefill row that asked."""
        if not len(plan.prefill_slots):
            return []
        num_top = self.sampling.num_prompt_logprobs[plan.prefill_slots]
        found = []
        for i in np.flatnonzero(num_top != NOT_ASKED).tolist():
            slot, start = int(plan.prefill_slots[i]), int(plan.prefill_starts[i])
            end = min(start + int(plan.prefill_num_tokens[i]), int(self.batch.table.num_prompt[slot]) - 1)
            parts = []
            for first in range(start, end, PROMPT_ROWS_PER_CALL):
                stop = min(first + PROMPT_ROWS_PER_CALL, end)
                offset = int(rows.starts[i]) - start
                logits = self.model.compute_logits(hidden[first + offset : stop + offset])  # on every rank
                if self.answers:
                    following = self.batch.table.token_ids[slot, first + 1 : stop + 1].astype(np.int64)
                    parts.append(score(logits, self.batch.put(following), int(num_top[i])))
            if parts:
                found.append((slot, start + 1, Scores.concatenate(parts)))
        return found

    def _block_ids(self, blocks: Int32) -> Tensor:
        check_blocks(self.batch.table, blocks, "copied")
        return self.batch.put(blocks.astype(np.int64))


def _mark() -> torch.cuda.Event:
    """An event that comes to pass when the device has done everything so far."""
    event = torch.cuda.Event()
    event.record()
    return event
