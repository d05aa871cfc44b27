"""What choosing the tokens of one step costs on this CPU: the C++ kernels beside PyTorch.

    python -m benchmarks.sampling_cpu [--num-threads 2] [--seconds 0.3]

Logits fall with a token's rank as a trained model's do, so that a few dozen tokens hold 90 % of the weight; the
uncertain ones are spread like a bell, and there PyTorch sorts the vocabulary. Both ways are timed in turn, and the
quickest of many rounds counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels_cpu import quickest_in_turn
from benchmarks.report import heading, markdown_table
from workers.cpu_sampler import CpuSampler
from workers.kernels.cpu.library import Pool, load_kernels
from workers.sampler import ChooseTokens, DrawnRows, SamplingRows, choose_with_torch

VOCAB_SIZES = (49_152, 151_936)
BATCH_SIZES = (1, 8, 64)
WAYS = ("greedy", "temperature 0.8", "top-k 50", "top-p 0.9", "top-p 0.9, uncertain")


def peaked_logits(num_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    by_rank = -1.5 * torch.log(torch.arange(1, vocab_size + 1))
    return torch.stack([by_rank[torch.randperm(vocab_size, generator=generator)] for _ in range(num_rows)])


def uncertain_logits(num_rows: int, vocab_size: int) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


def asked_of(way: str, num_rows: int) -> SamplingRows:
    if way == "greedy":
        return SamplingRows(greedy=slice(None))
    top_k, top_p = (50 if "top-k" in way else 0), (0.9 if "top-p" in way else 1.0)
    has_top = top_k > 0 or top_p < 1
    drawn = DrawnRows(
        rows=slice(None),
        temperature=torch.full((num_rows,), 0.8),
        seeds=torch.arange(num_rows),
        positions=torch.arange(num_rows),
        min_p=None,
        top_k=torch.full((num_rows,), top_k) if has_top else None,
        top_p=torch.full((num_rows,), top_p) if has_top else None,
        max_top_k=top_k,
    )
    return SamplingRows(drawn=drawn)


def step_of(choose_tokens: ChooseTokens, logits: Tensor, asked: SamplingRows) -> Callable[[], object]:
    return partial(choose_tokens, torch.empty(len(logits), dtype=torch.int64), logits, asked)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sampling_cpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="per way and case")
    parser.add_argument("--kernels", default="auto", help="instruction set, for example avx2")
    options = parser.parse_args()

    torch.set_num_threads(options.num_threads)
    kernels = load_kernels(options.kernels)
    pool = Pool(kernels, options.num_threads)
    rows = []
    for vocab_size in VOCAB_SIZES:
        samplers = {"C++": CpuSampler(kernels, pool, vocab_size), "PyTorch": choose_with_torch}
        for num_rows in BATCH_SIZES:
            peaked, uncertain = peaked_logits(num_rows, vocab_size), uncertain_logits(num_rows, vocab_size)
            cells = []
            for way in WAYS:
                logits = uncertain if "uncertain" in way else peaked
                steps = {name: step_of(s, logits, asked_of(way, num_rows)) for name, s in samplers.items()}
                found = quickest_in_turn(steps, options.seconds, time.perf_counter)
                cells.append(f"{found['C++']:.3f} / {found['PyTorch']:.2f}")
            rows.append((f"{vocab_size:,}", num_rows, *cells))

    print(heading(("torch",)))
    print(f"{kernels.description}, {options.num_threads} threads. Milliseconds, C++ / PyTorch:\n")
    print(markdown_table(("vocabulary", "batch", *WAYS), rows))


if __name__ == "__main__":
    main()
