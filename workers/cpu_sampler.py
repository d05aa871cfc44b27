"""Tokens chosen from logits by the C++ kernels: the same as `workers.sampler.choose_with_torch` chooses.

Owns how the rows of a step are handed over. Knows neither the adjustments before it nor how a token is found.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.kernels.cpu.library import CpuKernels, CSampleCall, Pool, Sampler
from workers.sampler import SamplingRows


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInMemory:
    """The addresses of what rows are sampled by, for C++. It may be done again when other numbers are there."""

    addresses: CSampleCall
    tensors: tuple[object, ...]  # which live as long


class CpuSampler:
    """A `workers.sampler.ChooseTokens` for float32 logits on a CPU, on the threads of `pool`."""

    def __init__(self, kernels: CpuKernels, pool: Pool, vocab_size: int) -> None:
        self._kernels = kernels
        self._pool = pool  # the sampler needs it to live
        self._sampler = Sampler(kernels, pool, vocab_size)
        self._vocab_size = vocab_size

    @property
    def handle(self) -> int:
        return self._sampler.handle

    def __call__(self, tokens: Tensor, logits: Tensor, asked: SamplingRows) -> None:
        call = self.lay_out(tokens, logits, asked)
        self._kernels.sampler_sample(self.handle, byref(call.addresses))

    def lay_out(self, tokens: Tensor, logits: Tensor, asked: SamplingRows) -> SamplingInMemory:
        num_rows, vocab_size = logits.shape
        assert vocab_size == self._vocab_size and logits.dtype == torch.float32 and logits.stride(1) == 1
        assert tokens.shape == (num_rows,) and tokens.dtype == torch.int64 and tokens.is_contiguous()
        call = CSampleCall(logits=logits.data_ptr(), stride=logits.stride(0), tokens=tokens.data_ptr())
        floor = None
        if asked.greedy is not None:
            call.num_greedy, call.greedy = _count_and_address(asked.greedy, num_rows)
        if asked.drawn is not None:
            drawn = asked.drawn
            call.num_drawn, call.drawn = _count_and_address(drawn.rows, num_rows)
            call.temperature, call.seeds = drawn.temperature.data_ptr(), drawn.seeds.data_ptr()
            call.positions = drawn.positions.data_ptr()
            if drawn.top_k is not None and drawn.top_p is not None:
                call.top_k, call.top_p = drawn.top_k.data_ptr(), drawn.top_p.data_ptr()
            if drawn.min_p is not None:
                floor = torch.log(drawn.min_p)
                call.floor = floor.data_ptr()
        return SamplingInMemory(call, (tokens, logits, asked, floor))


def _count_and_address(rows: Tensor | slice, num_rows: int) -> tuple[int, int | None]:
    """Of row numbers; no address where all rows are meant."""
    if isinstance(rows, Tensor):
        return len(rows), rows.data_ptr()
    assert rows == slice(None)
    return num_rows, None
