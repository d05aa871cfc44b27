"""Steps of a model without a scheduler: plans made by hand, and what a decode step takes."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import numpy as np
import torch

from scheduler.output import AdmittedSequence, StepPlan, int32
from scheduler.sampling_params import SamplingParams
from workers.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
QUEUED_STEPS = 3
"""A stream holds about a thousand launches, and a step without a graph is three hundred."""
HELD_UP_CYCLES = 300_000_000
"""Of a device for 0.15 s or more, in which the queued steps are launched."""


def admit(
    num_seqs: int,
    length: int,
    block_size: int,
    room: int,
    epoch: int,
    *,
    params: SamplingParams = GREEDY,
    num_computed: int = 1,
) -> StepPlan:
    """The first step: every sequence computes the last `num_computed` tokens of `length`, the others being cached."""
    per_seq = -(-(length + room) // block_size)
    return StepPlan(
        engine_epoch=epoch,
        step=0,
        admitted=tuple(
            AdmittedSequence(
                slot=i,
                seq_id=i,
                seed=i,
                num_prompt_tokens=length,
                num_cached_tokens=length - num_computed,
                token_ids=np.random.default_rng(i).integers(3, 1000, length).astype(np.int32),
                block_table=np.arange(i * per_seq, (i + 1) * per_seq, dtype=np.int32),
                sampling_params=params,
            )
            for i in range(num_seqs)
        ),
        prefill_slots=np.arange(num_seqs, dtype=np.int32),
        prefill_starts=np.full(num_seqs, length - num_computed, dtype=np.int32),
        prefill_num_tokens=np.full(num_seqs, num_computed, dtype=np.int32),
    )


def decode_plan(step: int, num_seqs: int, epoch: int) -> StepPlan:
    return StepPlan(
        engine_epoch=epoch,
        step=step,
        decode_slots=np.arange(num_seqs, dtype=np.int32),
        decode_tokens=int32([-1] * num_seqs),
    )


def run_steps(
    runner: ModelRunner, num_seqs: int, length: int, num_steps: int, epoch: int
) -> tuple[list[list[int]], float]:
    """Tokens of every step, and seconds from one to the next (the median); one step ahead, as an engine does."""
    first = admit(num_seqs, length, runner.kv.block_size, num_steps + 1 + 2 * QUEUED_STEPS, epoch)
    tokens = [runner.collect(runner.launch(first)).tokens.tolist()]
    pending, times = [runner.launch(decode_plan(1, num_seqs, epoch))], []
    for step in range(2, num_steps + 1):
        pending.append(runner.launch(decode_plan(step, num_seqs, epoch)))
        tokens.append(runner.collect(pending.pop(0)).tokens.tolist())
        times.append(time.perf_counter())
    tokens.append(runner.collect(pending.pop()).tokens.tolist())
    return tokens, statistics.median(after - before for before, after in pairwise(times))


def device_seconds(runner: ModelRunner, num_seqs: int, next_step: int, epoch: int) -> float:
    """What a decode step takes the device: some are launched while it is held up, so that none waits for the host.

    Twice, because allocating pinned memory may wait: the second time there is enough.
    """
    for first in (next_step, next_step + QUEUED_STEPS):
        torch.cuda.synchronize()
        torch.cuda._sleep(HELD_UP_CYCLES)
        marks, pending = [_mark()], []
        for step in range(first, first + QUEUED_STEPS):
            pending.append(runner.launch(decode_plan(step, num_seqs, epoch)))
            marks.append(_mark())
        for launched in pending:
            runner.collect(launched)
    marks[-1].synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
