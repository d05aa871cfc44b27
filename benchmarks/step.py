"""What one decode step costs the scheduler: bytes, encode and decode, `schedule` and `postprocess`.

    python -m benchmarks.step [--json]

All state is made through the public API: requests are added, their prompts computed by plans that nobody executes, and
answered with made-up tokens. Then decode steps run one step ahead and each part is timed: medians of CPU time, so that
what else runs on the machine does not count.
Prompts differ in their first token, so no two sequences share a block, and in their length, so that they need blocks in
different steps. Beside it the classic way: the same sequences as a pickled list, block tables and all, sent every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median

import numpy as np

from benchmarks.report import environment, heading, markdown_table
from configs.schema import CacheConfig, SchedulerConfig
from scheduler.codec import decode_plan, decode_result, encode_plan, encode_result
from scheduler.output import StepPlan, StepResult, int32
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

VOCAB_SIZE = 50_000
COLUMNS = (
    "sequences", "context", "block size", "blocks", "waiting", "bytes", "bytes per sequence",
    "encode + decode, ms", "schedule, ms", "postprocess, ms", "both, ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    num_seqs: int = 512
    context: int = 32 * 1024
    block_size: int = 256
    num_waiting: int = 0
    block_factor: int = 1  # the cache has this many times the blocks that the sequences need


@dataclass(frozen=True, slots=True)
class StepCost:
    """Blocks of the cache. Bytes of a plan's frame, the median one and the largest; medians of milliseconds."""

    num_blocks: int
    num_bytes: int
    max_num_bytes: int
    codec_ms: float
    result_codec_ms: float
    schedule_ms: float
    postprocess_ms: float

    @property
    def scheduler_ms(self) -> float:
        return self.schedule_ms + self.postprocess_ms


def build_scheduler(case: Case, num_steps: int) -> Scheduler:
    """`num_seqs` sequences decode at about `context` tokens, `num_waiting` more find no blocks."""
    num_prompt_blocks = case.num_seqs * -(-case.context // case.block_size)
    num_growth_blocks = case.num_seqs * -(-(num_steps + 3) // case.block_size)
    num_blocks = num_prompt_blocks + num_growth_blocks + 1
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=2 * case.num_seqs,
            max_num_batched_tokens=case.num_seqs * case.context,
            max_prefill_chunk=case.context,
            max_num_waiting=case.num_seqs + case.num_waiting + 1,
        ),
        # The watermark keeps the room for growth from the waiting ones.
        CacheConfig(block_size=case.block_size, watermark=num_growth_blocks / num_blocks),
        num_blocks=num_blocks * case.block_factor,
        max_model_len=2 * case.context,
        vocab_size=VOCAB_SIZE,
    )
    tail = [7] * case.context
    params = SamplingParams(max_tokens=case.context // 2, ignore_eos=True)
    for i in range(case.num_seqs):
        length = case.context - i % case.block_size
        scheduler.add(Request(request_id=i, token_ids=[i, *tail[: length - 1]], sampling_params=params))
    while scheduler.num_waiting:
        run_step(scheduler)
    for i in range(case.num_waiting):
        scheduler.add(Request(request_id=-1 - i, token_ids=[VOCAB_SIZE - 1, *tail], sampling_params=params))
    assert scheduler.num_running == case.num_seqs
    return scheduler


def answer(plan: StepPlan, sampling: np.ndarray) -> StepResult:
    return StepResult(plan.engine_epoch, plan.step, sampling, np.full(len(sampling), 11, np.int32))


def run_step(scheduler: Scheduler) -> None:
    """A step of whole prompts, answered at once."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.postprocess(answer(plan, np.concatenate([plan.prefill_slots, plan.decode_slots])))


def measure(case: Case, num_steps: int) -> StepCost:
    scheduler = build_scheduler(case, num_steps)
    gc.collect()
    pending = scheduler.schedule()
    samples: list[tuple[float, ...]] = []
    for _ in range(num_steps):
        t0 = time.thread_time()
        plan = scheduler.schedule()
        t1 = time.thread_time()
        assert plan is not None
        assert pending is not None
        assert len(plan.decode_slots) == case.num_seqs
        frame = encode_plan(plan)
        decode_plan(frame)
        t2 = time.thread_time()
        result_frame = encode_result(answer(pending, pending.decode_slots))
        result = decode_result(result_frame)
        t3 = time.thread_time()
        scheduler.postprocess(result)
        t4 = time.thread_time()
        samples.append((len(frame), t2 - t1, t3 - t2, t1 - t0, t4 - t3))
        pending = plan
    assert scheduler.num_waiting == case.num_waiting
    num_bytes, *seconds = (median(column) for column in zip(*samples, strict=True))
    return StepCost(
        scheduler.limits.num_blocks,
        int(num_bytes),
        int(max(s[0] for s in samples)),
        *(1e3 * value for value in seconds),
    )


def classic(num_seqs: int, context: int, block_size: int, num_rounds: int) -> tuple[int, float, float]:
    """Bytes, and milliseconds to dump and to load, of the same sequences sent whole: a pickled list."""
    block_ids = count()
    sequences = []
    for _ in range(num_seqs):
        seq = Sequence([7] * context, block_size=block_size)
        seq.block_table = [next(block_ids) for _ in range(seq.num_blocks)]
        seq.num_cached_tokens, seq.is_prefill = context - 1, False
        sequences.append(seq)
    frame = pickle.dumps(sequences, pickle.HIGHEST_PROTOCOL)
    dump = timed(lambda: pickle.dumps(sequences, pickle.HIGHEST_PROTOCOL), num_rounds)
    return len(frame), dump, timed(lambda: pickle.loads(frame), num_rounds)


def timed(function: Callable[[], object], num_rounds: int) -> float:
    seconds = []
    for _ in range(num_rounds):
        started = time.thread_time()
        function()
        seconds.append(time.thread_time() - started)
    return 1e3 * median(seconds)


def cases() -> dict[str, list[Case]]:
    return {
        "running sequences": [Case(num_seqs=n, context=4096) for n in (64, 128, 256, 512, 1024, 2048)],
        "context": [Case(context=c) for c in (1024, 8 * 1024, 32 * 1024)],
        "waiting requests": [Case(context=1024, num_waiting=n) for n in (0, 1000, 10_000)],
        "blocks in the cache": [Case(context=1024, block_factor=f) for f in (1, 10, 100)],
        "block size": [Case(context=8 * 1024, block_size=b) for b in (16, 256)],
    }


def row(case: Case, cost: StepCost) -> tuple[object, ...]:
    shape = (case.num_seqs, case.context, case.block_size, cost.num_blocks, case.num_waiting)
    times = (cost.codec_ms, cost.schedule_ms, cost.postprocess_ms, cost.scheduler_ms)
    return (*shape, cost.num_bytes, cost.num_bytes / case.num_seqs, *times)


def print_headline(cost: StepCost, rivals: dict[int, tuple[int, float, float]]) -> None:
    num_result_bytes = len(encode_result(StepResult(0, 0, int32([0] * 512), int32([0] * 512))))
    rows: list[tuple[object, ...]] = [
        ("step frame, blocks of 256", cost.num_bytes, cost.codec_ms, cost.scheduler_ms),
        ("its result", num_result_bytes, cost.result_codec_ms, ""),
    ]
    for size, (num_bytes, dump, load) in rivals.items():
        rows.append((f"pickled sequences, blocks of {size}", num_bytes, dump + load, ""))
    print(f"512 sequences of 32k tokens; the largest frame has {cost.max_num_bytes:,} bytes\n")
    print(markdown_table(("way", "bytes", "encode + decode, ms", "scheduler, ms"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-steps", type=int, default=100, help="timed steps per case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    headline = Case()
    cost = measure(headline, options.num_steps)
    tables = {axis: [(case, measure(case, options.num_steps)) for case in along] for axis, along in cases().items()}
    rivals = {size: classic(headline.num_seqs, headline.context, size, num_rounds=5) for size in (256, 16)}
    if options.json:
        described = {axis: [asdict(case) | asdict(c) for case, c in along] for axis, along in tables.items()}
        headline_figures = asdict(headline) | asdict(cost)
        figures = {"environment": environment(), "headline": headline_figures, "scaling": described, "classic": rivals}
        print(json.dumps(figures, indent=2))
        return
    print(heading())
    print_headline(cost, rivals)
    for axis, along in tables.items():
        print(f"By {axis}:\n")
        print(markdown_table(COLUMNS, [row(case, cost) for case, cost in along]))


if __name__ == "__main__":
    main()
