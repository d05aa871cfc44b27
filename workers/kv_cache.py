"""The tensors of the paged KV cache, and how many blocks of it memory holds.

Knows neither sequences nor who uses which block: the scheduler owns the block table.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import GIB, CacheConfig
from workers.kv_format import as_bytes, row_bytes, row_width

UNLIMITED_BLOCKS = 2**31 - 2
"""What a rank without KV heads answers: its ids still fit int32, and the smallest rank decides."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of every layer, `(num_blocks + 1, block_size, num_kv_heads, row width)` each.

    A row is a head's numbers, in int8 and their scale: see `workers.kv_format`.

    The last block is a dummy: padded rows of a captured graph write there, no sequence ever owns it. The tensors start
    as zeros, so that a kernel which loads whole blocks never meets a NaN it did not store itself.
    """

    k: list[Tensor]
    v: list[Tensor]
    block_size: int

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        shape = (num_blocks + 1, block_size, num_kv_heads, row_width(head_dim, dtype))
        k = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]
        v = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]
        return cls(k=k, v=v, block_size=block_size)

    @property
    def num_blocks(self) -> int:
        return self.k[0].shape[0] - 1 if self.k else 0

    @property
    def dummy_block(self) -> int:
        return self.num_blocks

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks (int64 ids), copy-on-write. Every source is read before any target is written."""
        for cache in map(as_bytes, (*self.k, *self.v)):
            cache[targets] = cache[sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is taken as it is first written, in huge pages where the system has them.

    A cache larger than what its requests need costs nothing then, and attention spends less time on looking up
    addresses.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared: no huge pages
    except OSError as error:
        raise ValueError(
            f"no memory for a KV cache with layers of {num_bytes / GIB:.1f} GiB ({error}); "
            "lower cache.memory_gib or cache.num_blocks"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8).view(dtype).view(shape)


def bytes_per_block(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory that one block takes on this rank, all layers, keys and values."""
    return 2 * num_layers * block_size * num_kv_heads * row_bytes(head_dim, dtype)


def num_blocks_in(config: CacheConfig, *, block_bytes: int, available_bytes: int | None = None) -> int:
    """Blocks that this rank can hold.

    `available_bytes` is what a GPU rank found left of its share; None on CPU, where `memory_gib` decides.

    Raises:
        ValueError: not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if block_bytes == 0:
        return UNLIMITED_BLOCKS
    if available_bytes is None:
        available_bytes = config.cpu_bytes
    num_blocks = available_bytes // block_bytes - 1  # one is the dummy
    if num_blocks < 1:
        raise ValueError(
            f"{max(available_bytes, 0) / GIB:.3f} GiB is left for the KV cache and one block of {config.block_size} "
            f"tokens takes {block_bytes / GIB:.3f} GiB (and a spare one is kept); give cache.memory_gib or "
            "cache.gpu_memory_utilization more, make cache.block_size smaller, or use more ranks"
        )
    return min(num_blocks, UNLIMITED_BLOCKS)
