"""Many small arrays to the device in one copy: each copy by itself would cost as much as all of them together.

Knows nothing of what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: what kernels need of an address to read it in wide pieces."""


def upload(arrays: Sequence[NDArray], device: torch.device) -> list[Tensor]:
    """The arrays on the device; the host does not wait for them to get there. On CPU they stay where they are."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, pin=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[NDArray], *, pin: bool) -> Tensor:
    """The bytes of all arrays in one tensor, each from an aligned place on."""
    buffer = torch.empty(sum(map(_padded, arrays)), dtype=torch.uint8, pin_memory=pin)
    view, start = buffer.numpy(), 0
    for array in arrays:
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray]) -> list[Tensor]:
    """Tensors like `arrays`, as parts of the buffer that `pack` made of them, on whatever device it is now."""
    found, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array[:0]).dtype
        found.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _padded(array)
    return found


def _padded(array: NDArray) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
