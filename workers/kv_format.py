"""How the numbers of one head become a row of the KV cache, and come back.

A row is the numbers themselves in the cache's dtype; in int8 a float32 scale follows them, so that whatever copies or
shares blocks need not know. Owns the format that kernels read and write (`workers/kernels/cpu/kv_row.h`); which device
can hold what is `configs.cache_dtype`'s matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.cache_dtype import SCALE_BYTES, head_bytes

INT8_LIMIT = 127
FP8_LIMIT = torch.finfo(torch.float8_e4m3fn).max

_NAMED = {"fp8": torch.float8_e4m3fn}
_NAMES = {torch_dtype: name for name, torch_dtype in _NAMED.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Of a resolved `cache.dtype`."""
    found: torch.dtype = _NAMED.get(name) or getattr(torch, name)
    return found


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """One head's key, or value, of one token."""
    return head_bytes(_NAMES.get(dtype, str(dtype).removeprefix("torch.")), head_dim)


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row."""
    return row_bytes(head_dim, dtype) // dtype.itemsize


def encode(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """x [..., head_dim] -> rows [..., width] of `dtype`.

    In fp8 the numbers are divided by `scale`, and those beyond its range become its largest.
    """
    if dtype == torch.float8_e4m3fn:
        return (x.to(torch.float32) * (1.0 / scale)).clamp_(-FP8_LIMIT, FP8_LIMIT).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    x = x.to(torch.float32)
    scales = x.abs().amax(dim=-1, keepdim=True) / INT8_LIMIT
    numbers = torch.round(x / torch.where(scales > 0, scales, 1)).to(torch.int8)
    return torch.cat([numbers, scales.view(torch.int8)], dim=-1)


def decode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows [..., width] -> [..., head_dim] of `dtype`."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    numbers, scales = rows.split([rows.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return (numbers * scales.contiguous().view(torch.float32)).to(dtype)


def as_bytes(cache: Tensor) -> Tensor:
    """A cache whose numbers are bytes, as those; any other as it is. Indexing serves bytes on every device, fp8 not."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
