"""How the decode rows of a step are cut into parts ("splits"), and how what the parts gave becomes one again.

Shape letters: S sequences, H query heads, D head size.

- Work is listed on the device once per step (`plan_splits`): one entry per part that exists. A fixed number of
  programs walks the list, so nothing is launched for parts that do not exist, long and short sequences balance, and a
  captured graph serves every length.
- How a sequence is cut follows from its length alone, so its result does not depend on the batch around it.
"""

# Kernels are typed by what they are launched with.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.triton.tuning import Device, max_splits, next_power_of_2

MIN_SPLIT = 256
"""Keys in one part at least: below that, merging costs more than it gains. A multiple of every tile's keys."""


@triton.jit
def split_length(num_keys, MAX_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """Keys per part: a multiple of MIN_SPLIT / 4, so that tiles stay whole."""
    UNIT: tl.constexpr = MIN_SPLIT // 4
    even = (num_keys + MAX_SPLITS - 1) // MAX_SPLITS
    return tl.maximum((even + UNIT - 1) // UNIT * UNIT, MIN_SPLIT)


@triton.jit
def first_key(seq_len, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """The first key of a sequence's first part: where its window begins, rounded down to whole tiles."""
    if WINDOW == 0:
        first = seq_len * 0
    else:
        UNIT: tl.constexpr = MIN_SPLIT // 4
        first = tl.maximum(seq_len - WINDOW, 0) // UNIT * UNIT
    return first


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["seq_lens"])
def plan_splits_kernel(
    seq_lens,
    first_items,
    items,
    num_seqs,
    WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """first_items [S + 1]: where each sequence's entries begin; items: sequence * MAX_SPLITS + part."""
    seq = tl.program_id(0)
    before = tl.zeros((), dtype=tl.int32)
    own = tl.zeros((), dtype=tl.int32)
    for start in range(0, seq + 1, BLOCK):
        index = start + tl.arange(0, BLOCK)
        length = tl.load(seq_lens + index, mask=index <= seq, other=0)
        num_keys = length - first_key(length, WINDOW, MIN_SPLIT)
        per_part = split_length(num_keys, MAX_SPLITS, MIN_SPLIT)
        parts = (num_keys + per_part - 1) // per_part
        before += tl.sum(tl.where(index < seq, parts, 0))
        own += tl.sum(tl.where(index == seq, parts, 0))
    tl.store(first_items + seq, before)
    part = tl.arange(0, BLOCK_SPLITS)
    tl.store(items + before + part, seq * MAX_SPLITS + part, mask=part < own)
    if seq == num_seqs - 1:
        tl.store(first_items + num_seqs, before + own)


@triton.jit(do_not_specialize_on_alignment=["first_items", "seq_lens"])
def merge_kernel(
    out,
    partial_out,
    partial_lse,
    first_items,
    seq_lens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per sequence and head. A sequence of no part gets zeros, one of a single part is left alone."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_items + seq)
    num_parts = tl.load(first_items + seq + 1) - first
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    if num_parts != 1:
        highest = tl.full((), float("-inf"), dtype=tl.float32)
        total = tl.zeros((), dtype=tl.float32)
        acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for start in range(0, num_parts, CHUNK):
            part = start + tl.arange(0, CHUNK)
            is_part = part < num_parts
            entry = (first + part).to(tl.int64) * NUM_HEADS + head
            lse = tl.load(partial_lse + entry, mask=is_part, other=float("-inf"))
            at = entry[:, None] * HEAD_DIM + dim[None, :]
            values = tl.load(partial_out + at, mask=is_part[:, None] & is_dim[None, :], other=0.0)
            now_highest = tl.maximum(highest, tl.max(lse, 0))
            shift = tl.where(now_highest == float("-inf"), 0.0, now_highest)
            weight = tl.exp2(lse - shift)
            fade = tl.exp2(highest - shift)
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade + tl.sum(values * weight[:, None], 0)
            highest = now_highest
        result = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (seq.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim, result, mask=is_dim)


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """The work list of one step's decode rows under one window, on the device."""

    first_items: Tensor  # [S + 1] int32
    items: Tensor  # [S * max_splits] int32
    max_splits: int
    min_split: int
    window: int


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Where parts wait to be merged; one pair serves all layers of a step, which run one after another."""

    out: Tensor  # [entries, H, D] float32
    lse: Tensor  # [entries, H] float32

    @classmethod
    def allocate(cls, num_entries: int, num_heads: int, head_dim: int, device: torch.device) -> Partials:
        shape = (num_entries, num_heads, head_dim)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )


def plan_splits(seq_lens: Tensor, *, num_kv_heads: int, window: int | None, device: Device) -> SplitPlan:
    """How the decode sequences of `seq_lens` [S] are cut; nothing is read back."""
    num_seqs = seq_lens.shape[0]
    splits = max_splits(device.num_multiprocessors, num_kv_heads)
    plan = SplitPlan(
        first_items=torch.empty(num_seqs + 1, dtype=torch.int32, device=seq_lens.device),
        items=torch.empty(num_seqs * splits, dtype=torch.int32, device=seq_lens.device),
        max_splits=splits,
        min_split=MIN_SPLIT,
        window=window or 0,
    )
    plan_splits_kernel[(num_seqs,)](
        seq_lens,
        plan.first_items,
        plan.items,
        num_seqs,
        WINDOW=plan.window,
        MAX_SPLITS=splits,
        MIN_SPLIT=plan.min_split,
        BLOCK=min(1024, max(16, next_power_of_2(num_seqs))),
        BLOCK_SPLITS=next_power_of_2(splits),
        num_warps=4,
    )
    return plan


def merge_parts(out: Tensor, partials: Partials, plan: SplitPlan, seq_lens: Tensor) -> None:
    """out [S, H, D]: the rows of sequences in several parts become whole."""
    num_seqs, num_heads, head_dim = out.shape
    merge_kernel[(num_seqs, num_heads)](
        out,
        partials.out,
        partials.lse,
        plan.first_items,
        seq_lens,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        CHUNK=16,
        num_warps=4,
    )
