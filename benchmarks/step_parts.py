"""Where the time of a decode step goes on a CPU: the kernels, the rest of the rank, the frames, the scheduler.

    python -m benchmarks.step_parts                                  # the demo's model, 1, 8, 32 and 64 sequences
    python -m benchmarks.step_parts --set model.quantization=int8 --num-seqs 8

Scheduler and rank run in this process one step ahead, and every plan and result goes through its frame, as it does
between two processes; what those add is a write and a read of a socket each. The step is cut where C++ is called and
where frames are made: means over many steps of wall time, so the machine should be quiet.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.offline import PRESET
from benchmarks.report import heading, markdown_table
from cluster.local import LocalEngine
from configs import EngineConfig
from configs.loader import ConfigError, load_config
from configs.model_spec import ModelSpec
from scheduler.codec import decode_plan, decode_result, encode_plan, encode_result
from scheduler.output import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from workers import compute
from workers.kernels.cpu import CpuKernels
from workers.parallel import SingleProcessGroup
from workers.prepare import prepare_model
from workers.worker import Worker, choose_num_threads

IN_KERNELS = ("decode", "decoder_forward", "decoder_logits", "sampler_sample")
WARM_UP_STEPS = 20


@dataclass(slots=True)
class Seconds:
    """Of all steps together."""

    kernels: float = 0.0
    rank: float = 0.0  # around the kernels: Python, numpy, torch
    frames: float = 0.0
    scheduler: float = 0.0  # schedule and postprocess

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


class TimedRank:
    """An executor of `LocalEngine`: one worker in this process, reached by frames."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self.seconds = Seconds()
        self.worker = Worker(config, spec, SingleProcessGroup(), num_threads=choose_num_threads(config, 1))
        with patch.object(compute, "load_kernels", partial(self._timed_kernels, compute.load_kernels)):
            self.worker.load_model()
        self.num_blocks = self.worker.measure_num_blocks()
        self.worker.allocate_cache(self.num_blocks)
        self._frames: deque[bytes] = deque()

    def submit(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        self._frames.append(encode_plan(plan))
        self.seconds.frames += time.perf_counter() - started

    def collect(self) -> StepResult:
        started = time.perf_counter()
        plan = decode_plan(self._frames.popleft())
        decoded, in_kernels = time.perf_counter(), self.seconds.kernels
        result = self.worker.execute(plan)
        executed = time.perf_counter()
        assert result is not None
        result = decode_result(encode_result(result))
        self.seconds.rank += executed - decoded - (self.seconds.kernels - in_kernels)
        self.seconds.frames += decoded - started + time.perf_counter() - executed
        return result

    def close(self) -> None:
        self.worker.close()

    def _timed_kernels(self, load_kernels: Callable[..., CpuKernels], *arguments: Any) -> CpuKernels:
        kernels = load_kernels(*arguments)
        for name in IN_KERNELS:
            setattr(kernels, name, self._timed(getattr(kernels, name)))
        return kernels

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds.kernels += time.perf_counter() - started

        return timed


def measure(config: EngineConfig, spec: ModelSpec, *, num_seqs: int, context: int, num_steps: int) -> Seconds:
    """Of `num_steps` steps of `num_seqs` sequences that decode, the first at about `context` tokens."""
    rank = TimedRank(config, spec)
    with LocalEngine(config, spec, rank) as engine:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * (num_steps + WARM_UP_STEPS))
        for number in range(num_seqs):
            prompt = [100 + number, *range(100, 99 + context)]
            engine.scheduler.add(Request(request_id=number, token_ids=prompt, sampling_params=params))
        while len(engine.step()) < num_seqs:  # prompts
            pass
        for _ in range(WARM_UP_STEPS):
            engine.step()
        rank.seconds = Seconds()
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        found = replace(rank.seconds)
        found.scheduler = time.perf_counter() - started - found.total
        return found


def configure(options: argparse.Namespace) -> EngineConfig:
    """The cache holds all sequences to the end, so that none is preempted."""
    longest, most = options.context + 2 * (options.num_steps + WARM_UP_STEPS) + 1, max(options.num_seqs)
    sizes = [f"model.max_model_len={longest}", f"scheduler.max_num_seqs={most}"]
    config = load_config(options.config, [*sizes, *options.overrides])
    blocks_each = -(-longest // config.cache.block_size) + 1
    return replace(config, cache=replace(config.cache, num_blocks=2 + most * blocks_each))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.step_parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--config", default=PRESET, help=f"YAML file or preset; default: {PRESET}")
    made.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.OPTION=VALUE")
    made.add_argument("--num-seqs", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 32, 64))
    made.add_argument("--context", type=int, default=300)
    made.add_argument("--num-steps", type=int, default=100)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        config = configure(options)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    spec = ModelSpec.from_directory(prepare_model(config.model.path, config.model.cache_dir))
    rows = []
    for num_seqs in options.num_seqs:
        found = measure(config, spec, num_seqs=num_seqs, context=options.context, num_steps=options.num_steps)
        parts = [getattr(found, field.name) for field in fields(found)]
        milliseconds = [1e3 * part / options.num_steps for part in parts]
        rows.append((num_seqs, sum(milliseconds), *milliseconds, f"{1 - found.kernels / found.total:.1%}"))
    print(heading(("torch",)))
    columns = ("sequences", "step, ms", *(field.name for field in fields(Seconds)), "outside the kernels")
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()
