"""Replays a production trace through the pure scheduler, with a cost model in place of a model and a virtual clock.

    python -m benchmarks.replay TRACE [--replicas 4 --router affinity] [--load-scale 2] [--json]

A step costs base + prefill tokens + decoding sequences + KV tokens that the decoding sequences read, each at its
price. The default prices are those of an 8-billion-parameter model in bfloat16 with 8 KV heads of 128 in 32 layers
(128 KiB of KV per token) on one 80 GB GPU of 3.35 TB/s: weights are read in 6.5 ms, prefill runs at 400 TFLOP/s, KV is
read at 2.6 TB/s, and 50 GB hold the KV of 400,000 tokens. The scheduler's own time is CPU time of its thread, measured
for real; it costs no virtual time: one step ahead it is hidden behind the step before.

Every request must end with all its tokens, none may be overtaken at admission, and all blocks must be free at the end.
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import sys
import time
from array import array
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from benchmarks.replay_trace import TracedRequest, best_hit_rate, read_trace
from benchmarks.report import environment, heading, markdown_table
from configs.schema import CacheConfig, SchedulerConfig
from scheduler.output import Int32, StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

AFFINITY_SLACK = 1.25
"""Prefix affinity may make a replica this much busier than the least busy one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Microseconds."""

    base: float = 6500.0
    prefill_token: float = 40.0
    decode_sequence: float = 10.0
    cached_token: float = 0.05

    def step_s(self, num_prefill_tokens: int, num_decodes: int, num_cached_tokens: int) -> float:
        work = self.prefill_token * num_prefill_tokens + self.decode_sequence * num_decodes
        return 1e-6 * (self.base + work + self.cached_token * num_cached_tokens)


@dataclass(slots=True)
class Progress:
    """One request on its way."""

    traced: TracedRequest
    admitted_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class Measures:
    """Everything that the table is made of. Latencies in virtual seconds, the scheduler's own time in real ones."""

    queueing: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("f"))
    scheduler_step: array[float] = field(default_factory=lambda: array("d"))
    add_request: array[float] = field(default_factory=lambda: array("d"))
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0


class Replica:
    """A scheduler, and the slots of a worker as far as the cost model needs them."""

    def __init__(self, number: int, scheduler: Scheduler, costs: CostModel, measures: Measures) -> None:
        self.number = number
        self.scheduler = scheduler
        self.costs = costs
        self.measures = measures
        self.requests: list[Progress] = []  # by seq_id, which counts from 0 in order of arrival
        self.num_owed_tokens = 0
        self.worker_free_s = 0.0
        self.results: list[tuple[float, StepResult]] = []
        self._num_admitted = 0
        num_slots = scheduler.config.max_num_seqs
        self._num_known, self._num_computed, self._own_token, self._is_first_run = np.zeros((4, num_slots), np.int64)
        self._pending_schedule_s = 0.0

    def arrive(self, traced: TracedRequest, own_token: int) -> None:
        params = SamplingParams(max_tokens=traced.num_completion_tokens, ignore_eos=True, seed=own_token)
        request = Request(request_id=len(self.requests), token_ids=traced.token_ids(), sampling_params=params)
        started = time.thread_time()
        self.scheduler.add(request)
        self.measures.add_request.append(time.thread_time() - started)
        self.requests.append(Progress(traced))
        self.num_owed_tokens += traced.num_prompt_tokens + traced.num_completion_tokens

    def send_steps(self, now: float) -> None:
        while self.scheduler.num_steps_in_flight < self.scheduler.max_steps_in_flight:
            started = time.thread_time()
            plan = self.scheduler.schedule()
            self._pending_schedule_s += time.thread_time() - started
            if plan is None:
                return
            self._execute(plan, max(now, self.worker_free_s))

    def take_result(self) -> None:
        now, result = self.results.pop(0)
        started = time.thread_time()
        outputs = self.scheduler.postprocess(result)
        self.measures.scheduler_step.append(time.thread_time() - started + self._pending_schedule_s)
        self._pending_schedule_s = 0.0
        for output in outputs:
            progress = self.requests[output.request_id]  # type: ignore[call-overload]
            if progress.num_tokens == 0:
                self.measures.ttft.append(now - progress.traced.arrival_s)
                self.num_owed_tokens -= progress.traced.num_prompt_tokens
            else:
                self.measures.itl.append(now - progress.last_token_s)
            progress.last_token_s = now
            progress.num_tokens += 1
        self.num_owed_tokens -= len(outputs)

    def _execute(self, plan: StepPlan, start_s: float) -> None:
        for admitted in plan.admitted:
            self._admit(admitted.slot, admitted.seq_id, len(admitted.token_ids), admitted.num_cached_tokens, start_s)
        num_prefill_tokens = 0
        sampled = decoding = plan.decode_slots
        if len(plan.prefill_slots):
            num_prefill_tokens = int(plan.prefill_num_tokens.sum())
            sampled = np.concatenate([self._prefill(plan), decoding])
        self._num_computed[decoding] += 1
        self._num_known[decoding] += 1
        num_cached_tokens = int(self._num_computed[decoding].sum())
        self.worker_free_s = start_s + self.costs.step_s(num_prefill_tokens, len(decoding), num_cached_tokens)
        tokens = self._own_token[sampled].astype(np.int32)
        self.results.append((self.worker_free_s, StepResult(plan.engine_epoch, plan.step, sampled, tokens)))

    def _prefill(self, plan: StepPlan) -> Int32:
        """Compute the prefill rows; returns the slots whose prompt ends. A start ahead of the computed is a hit."""
        slots, starts = plan.prefill_slots, plan.prefill_starts
        hits = (starts - self._num_computed[slots]) * self._is_first_run[slots]
        self.measures.num_hit_tokens += int(hits.sum())
        self._num_computed[slots] = starts + plan.prefill_num_tokens
        return slots[self._num_computed[slots] == self._num_known[slots]]

    def _admit(self, slot: int, seq_id: int, num_known: int, num_cached: int, now: float) -> None:
        progress = self.requests[seq_id]
        self._num_known[slot], self._num_computed[slot] = num_known, num_cached
        self._own_token[slot] = self.scheduler.limits.vocab_size - 1 - seq_id
        self._is_first_run[slot] = progress.admitted_s is None
        if progress.admitted_s is None:
            assert seq_id == self._num_admitted, f"request {seq_id} overtook request {self._num_admitted}"
            self._num_admitted += 1
            progress.admitted_s = now
            self.measures.queueing.append(now - progress.traced.arrival_s)
            self.measures.num_hit_tokens += num_cached
            self.measures.num_prompt_tokens += progress.traced.num_prompt_tokens

    def check_end(self) -> None:
        for progress in self.requests:
            assert progress.num_tokens == progress.traced.num_completion_tokens, f"{progress} did not get its tokens"
        self.scheduler.check_integrity()
        blocks = self.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks, (
            f"{blocks.num_free_blocks} of {blocks.num_blocks} blocks free"
        )
        self.measures.num_preemptions += self.scheduler.stats().num_preemptions


class Router:
    """Least tokens owed; with affinity, the replica that last saw most of the prompt, unless it is too busy."""

    def __init__(self, replicas: list[Replica], *, affinity: bool) -> None:
        self._replicas = replicas
        self._affinity = affinity
        self._last_seen: dict[int, Replica] = {}

    def choose(self, request: TracedRequest) -> Replica:
        least = min(self._replicas, key=lambda r: r.num_owed_tokens)
        chosen = least
        if self._affinity:
            known = next((self._last_seen[b] for b in reversed(request.block_ids) if b in self._last_seen), least)
            if known.num_owed_tokens <= AFFINITY_SLACK * least.num_owed_tokens + request.num_prompt_tokens:
                chosen = known
            self._last_seen.update(dict.fromkeys(request.block_ids, chosen))
        return chosen


def replay(requests: list[TracedRequest], replicas: list[Replica], router: Router) -> float:
    """Run to the end; returns the virtual time of the last token."""
    events: list[tuple[float, int]] = []  # results to take, by replica
    num_arrived, now, told = 0, 0.0, time.perf_counter()
    while num_arrived < len(requests) or events:
        if num_arrived < len(requests) and (not events or requests[num_arrived].arrival_s <= events[0][0]):
            now = requests[num_arrived].arrival_s
            replica = router.choose(requests[num_arrived])
            replica.arrive(requests[num_arrived], own_token=num_arrived)
            num_arrived += 1
        else:
            now, number = heapq.heappop(events)
            replica = replicas[number]
            replica.take_result()
        num_results = len(replica.results)
        replica.send_steps(now)
        for end_s, _ in replica.results[num_results:]:
            heapq.heappush(events, (end_s, replica.number))
        if time.perf_counter() - told > 5:
            told = time.perf_counter()
            waiting = sum(r.scheduler.num_waiting for r in replicas)
            print(
                f"{num_arrived:,} of {len(requests):,} arrived, {waiting:,} wait, clock {now:,.0f} s", file=sys.stderr
            )
    return now


def build_replicas(
    options: argparse.Namespace, costs: CostModel, requests: list[TracedRequest], measures: Measures
) -> list[Replica]:
    longest = max(r.num_prompt_tokens + r.num_completion_tokens for r in requests)
    num_ids = 1 + max(max(r.block_ids) for r in requests)
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_chunk=options.max_prefill_chunk,
        one_step_ahead=not options.in_step,
        max_num_waiting=len(requests),
    )
    cache = CacheConfig(block_size=options.block_size, enable_prefix_caching=not options.no_prefix_caching)
    num_blocks = options.cache_tokens // options.block_size
    return [
        Replica(
            number,
            Scheduler(config, cache, num_blocks=num_blocks, max_model_len=longest, vocab_size=num_ids + len(requests)),
            costs,
            measures,
        )
        for number in range(options.replicas)
    ]


def summarise(
    options: argparse.Namespace, requests: list[TracedRequest], m: Measures, virtual_s: float
) -> dict[str, object]:
    def at(values: array[float], percentile: float, unit: float = 1.0) -> float:
        return float(np.percentile(np.frombuffer(values, values.typecode), percentile)) * unit if values else 0.0

    figures: dict[str, object] = {
        "requests": len(requests),
        "replicas": options.replicas,
        "virtual time, s": virtual_s,
        "prompt tokens": m.num_prompt_tokens,
        "output tokens per s, all replicas": (len(m.itl) + len(m.ttft)) / virtual_s,
        "prefix hit rate": m.num_hit_tokens / m.num_prompt_tokens,
        "best of an infinite cache": best_hit_rate(requests, options.block_size),
        "preemptions": m.num_preemptions,
        "steps": len(m.scheduler_step),
    }
    for name, values, unit, percentiles in (
        ("queueing, s", m.queueing, 1.0, (50, 90, 99, 100)),
        ("TTFT, s", m.ttft, 1.0, (50, 90, 99)),
        ("ITL, ms", m.itl, 1e3, (50, 90, 99)),
        ("scheduler per step, ms", m.scheduler_step, 1e3, (50, 99)),
        ("scheduler per arrival, ms", m.add_request, 1e3, (50, 99)),
    ):
        for percentile in percentiles:
            label = "max" if percentile == 100 else f"p{percentile}"
            figures[f"{name}, {label}"] = at(values, percentile, unit)
    return figures


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="Mooncake JSON lines or Azure CSV")
    parser.add_argument("--replicas", type=int, default=1, help="divide the load over this many replicas")
    parser.add_argument("--router", choices=("load", "affinity"), default="load")
    parser.add_argument("--load-scale", type=float, default=1.0, help="arrivals come this much faster")
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    parser.add_argument("--cache-tokens", type=int, default=400_000, help="KV tokens of one replica")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-prefill-chunk", type=int, default=2048)
    parser.add_argument("--in-step", action="store_true", help="wait for each result before the next step")
    parser.add_argument("--no-prefix-caching", action="store_true")
    for cost in fields(CostModel):
        parser.add_argument(
            f"--cost-{cost.name.replace('_', '-')}", type=float, default=cost.default, help="microseconds"
        )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    costs = CostModel(**{cost.name: getattr(options, f"cost_{cost.name}") for cost in fields(CostModel)})
    requests = [
        TracedRequest(r.arrival_s / options.load_scale, r.num_prompt_tokens, r.num_completion_tokens, r.block_ids)
        for r in read_trace(options.trace, options.num_requests)
    ]
    measures = Measures()
    replicas = build_replicas(options, costs, requests, measures)
    started, cpu_started = time.perf_counter(), time.process_time()
    virtual_s = replay(requests, replicas, Router(replicas, affinity=options.router == "affinity"))
    for replica in replicas:
        replica.check_end()
    figures = summarise(options, requests, measures, virtual_s)
    figures["replayed in, s"] = time.perf_counter() - started
    figures["of which CPU time, s"] = time.process_time() - cpu_started
    figures["peak memory, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.json:
        print(
            json.dumps(
                {"environment": environment(), "options": vars(options), "figures": figures}, default=str, indent=2
            )
        )
        return
    print(heading())
    print(markdown_table(("figure", "value"), figures.items()))


if __name__ == "__main__":
    main()
