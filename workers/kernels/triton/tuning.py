"""Tile sizes, warps and pipeline depths, by architecture and shape: a table instead of an autotuner.

The figures come from compiling ahead of time for each architecture and reading registers and spills
(`tests/model/test_triton_compile.py` holds them to that). Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` queries (times heads) by `keys` keys."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Device:
    """What launches depend on. `capability` 90 is sm_90; 0 is Triton's interpreter."""

    capability: int
    num_multiprocessors: int


INTERPRETER = Device(capability=0, num_multiprocessors=2)


@cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Device(10 * properties.major + properties.minor, properties.multi_processor_count)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def decode_tile(capability: int, *, group: int, head_dim: int, item_bytes: int) -> Tile:
    """Tiles of 16 or more packed query heads; about 16 KiB of keys and of values per stage, two of them in flight.

    The block table is read ahead of the keys, which takes two of the stages.
    """
    rows = max(16, next_power_of_2(group))
    if item_bytes == 4:
        return Tile(rows, 16 if head_dim > 128 else 32, num_warps=4, num_stages=2)
    keys = 64 if head_dim <= 128 else 32
    has_small_shared_memory = capability in (86, 89, 120)  # about 100 KiB per multiprocessor
    return Tile(rows, keys, num_warps=4, num_stages=3 if has_small_shared_memory and head_dim > 64 else 5)


def prefill_tile(
    capability: int, *, packed_rows: int, head_dim: int, item_bytes: int, is_converted: bool = False
) -> Tile:
    """`packed_rows`: the longest query times the query heads that share a key head.

    64 rows or more reach the warp-group matrix instructions of sm_90 and sm_100. `is_converted`: keys and values are
    kept in fp8, and what they become takes registers.
    """
    if item_bytes == 4:
        return Tile(16 if packed_rows <= 16 else 32, 16 if head_dim > 64 else 32, num_warps=4, num_stages=1)
    is_large = capability in (90, 100)
    if packed_rows <= 16:
        return Tile(16, 64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)
    if head_dim > 128 and is_converted and is_large:
        return Tile(64, 64, num_warps=8, num_stages=2)
    if head_dim > 128:
        return Tile(128 if is_large and packed_rows > 64 else 64, 32, num_warps=8, num_stages=2)
    if packed_rows <= 64:
        return Tile(64, 64, num_warps=4 if is_large else 8, num_stages=2)
    if is_converted and not is_large:
        return Tile(128, 32, num_warps=8, num_stages=2)
    return Tile(128, 64, num_warps=8, num_stages=3 if is_large else 2)


def fp8_product_tile(capability: int, *, num_tokens: int) -> Tile:
    """`rows` tokens by `keys` rows of the weight. Few tokens: many narrow tiles, with much of the weight on its way."""
    if num_tokens <= 16:
        return Tile(16, 32, num_warps=4, num_stages=8)
    if num_tokens <= 64:
        return Tile(64, 64, num_warps=4, num_stages=4)
    if capability == 90:
        return Tile(128, 128, num_warps=8, num_stages=4)
    return Tile(128, 64, num_warps=8, num_stages=4 if capability == 100 else 3)


PROGRAMS_PER_MULTIPROCESSOR = 3
"""Of the decode kernel: as many as fit at once with 70 KiB of shared memory each; more would wait for one to end."""


def max_splits(num_multiprocessors: int, num_kv_heads: int) -> int:
    """Parts that one sequence's keys are cut into at most: so many that one sequence alone occupies the device."""
    return min(128, max(8, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // max(1, num_kv_heads)))
