"""What the sums over the ranks of one host cost: through shared memory and over gloo, alone and within decode steps.

    python -m benchmarks.all_reduce [--num-ranks 2] [--rounds 60] [--format bf16]

Every rank is a process with one thread of kernels, and both groups are held by the same processes. The model has
SmolLM2-135M's shape and random weights: 61 sums and one gathering of logits a step. All ways take turns, so that what
else the machine does falls on both; times are rank 0's. Beside them one process with all the threads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median

import torch
from torch import Tensor

from benchmarks.kernels_cpu import CASES, FORMATS, make_cache, smollm2_spec, step_of
from benchmarks.report import heading, markdown_table
from configs.model_spec import ModelSpec
from configs.sharding import split_heads
from workers.attention.reference import ReferenceBackend
from workers.cpu_decoder import CpuDecoder
from workers.kernels.cpu.library import CpuKernels, load_kernels
from workers.kv_cache import KVCache
from workers.models import build_model
from workers.parallel import ParallelGroup, SingleProcessGroup, bind_store, connect, meeting
from workers.shared_memory_group import SharedMemoryGroup, meet

TIMEOUT_S = 300.0
ROWS = (1, 8, 64, 512)
SUMS_IN_A_ROW = 20

Times = dict[str, dict[str, list[float]]]  # milliseconds, by case and by way


def make_decoder(
    spec: ModelSpec, group: ParallelGroup, kernels: CpuKernels, name: str, num_threads: int
) -> tuple[CpuDecoder, KVCache]:
    weight_format, kv_dtype = FORMATS[name]
    model = build_model(spec, group, ReferenceBackend(), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.fill_(1.0) if parameter.dim() == 1 else parameter.data.normal_(0.0, 0.04, generator=generator)
    decoder = CpuDecoder(model, spec, group, kernels, num_threads=num_threads, weight_format=weight_format)
    shard = split_heads(spec.num_heads, spec.num_kv_heads, group.size)[group.rank]
    return decoder, make_cache(replace(spec, num_kv_heads=shard.num_kv_heads), kv_dtype)


def take_turns(
    works: dict[str, Callable[[], object]], together: Callable[[], None], rounds: int
) -> dict[str, list[float]]:
    """`together` lets the ranks begin at once; it is not timed."""
    found: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(-2, rounds):
        names.append(names.pop(0))  # nobody is always the first
        for name in names:
            together()
            started = time.perf_counter()
            works[name]()
            if number >= 0:
                found[name].append(1e3 * (time.perf_counter() - started))
    return found


def time_sums(groups: dict[str, ParallelGroup], width: int, rounds: int) -> Times:
    def sums_of(group: ParallelGroup, x: Tensor) -> Callable[[], None]:
        def work() -> None:
            for _ in range(SUMS_IN_A_ROW):
                group.all_reduce(x)

        return work

    times: Times = {}
    for rows in ROWS:
        works = {name: sums_of(group, torch.zeros(rows, width)) for name, group in groups.items()}
        times[f"[{rows}, {width}]"] = take_turns(works, groups["gloo"].barrier, rounds)
    return times


def time_steps(decoders: dict[str, tuple[CpuDecoder, KVCache]], together: Callable[[], None], rounds: int) -> Times:
    cases = [case for case in CASES if case.name in ("decode, batch 1", "decode, batch 8", "prefill 512")]
    return {
        case.name: take_turns(
            {name: step_of(case, *way) for name, way in decoders.items()},
            together,
            rounds if case.num_queries == 1 else max(3, rounds // 10),
        )
        for case in cases
    }


@torch.inference_mode()
def run_rank(pipe: Connection, port: int, rank: int, size: int, name: str, rounds: int) -> None:
    torch.set_num_threads(1)
    kernels, spec = load_kernels(), smollm2_spec()
    gloo = connect("127.0.0.1", port, rank, size, "gloo", TIMEOUT_S)
    with meeting("127.0.0.1", port, rank, size, TIMEOUT_S) as store:
        shared = meet(store, rank, size, kernels, TIMEOUT_S)
    assert isinstance(shared, SharedMemoryGroup), shared
    groups = {"gloo": gloo, "shared memory": shared}
    sums = time_sums(groups, spec.hidden_size, rounds)
    decoders = {way: make_decoder(spec, group, kernels, name, 1) for way, group in groups.items()}
    steps = time_steps(decoders, gloo.barrier, rounds)
    if rank == 0:
        alone = {
            f"one process, {threads} thread{'s' * (threads > 1)}": make_decoder(
                spec, SingleProcessGroup(), kernels, name, threads
            )
            for threads in dict.fromkeys((1, size))
        }
        for case, found in time_steps(alone, lambda: None, rounds).items():
            steps[case].update(found)
        pipe.send((kernels.description, sums, steps))
    shared.barrier()


def table(times: Times, unit: str, factor: float) -> str:
    ways = list(next(iter(times.values())))
    rows = [
        (case, *(f"{factor * median(found[way]):,.1f} ({factor * min(found[way]):,.1f})" for way in ways))
        for case, found in times.items()
    ]
    return markdown_table((f"{unit}: median (quickest)", *ways), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.all_reduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60, help="timed steps per case and way")
    parser.add_argument("--format", choices=list(FORMATS), default="bf16", help="of the weights")
    options = parser.parse_args()

    store, port = bind_store("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=run_rank, args=(theirs, port, rank, options.num_ranks, options.format, options.rounds))
        for rank in range(options.num_ranks)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    description, sums, steps = ours.recv()
    for process in ranks:
        process.join()
    del store

    print(heading(("torch",)))
    print(f"{description}; {options.num_ranks} ranks of one thread, weights {options.format}\n")
    print("One sum of float32 rows:\n")
    print(table(sums, "us", 1e3 / SUMS_IN_A_ROW))
    print("A step, logits included:\n")
    print(table(steps, "ms", 1.0))


if __name__ == "__main__":
    main()
