"""Several arrays in one copy, the copy left out."""

from __future__ import annotations

import numpy as np
import torch

from workers.upload import ALIGNMENT, pack, unpack, upload

ARRAYS = [
    np.arange(5, dtype=np.int32),
    np.zeros(0, dtype=np.int64),
    np.arange(-3, 3, dtype=np.int64),
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(10, dtype=np.int32)[::2],
]


def test_what_is_packed_comes_out_again():
    for tensor, array in zip(unpack(pack(ARRAYS, pin=False), ARRAYS), ARRAYS, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_every_array_begins_at_an_aligned_place():
    buffer = pack(ARRAYS, pin=False)
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in unpack(buffer, ARRAYS)]
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert starts == sorted(starts)


def test_on_the_cpu_nothing_is_copied():
    (tensor,) = upload(ARRAYS[:1], torch.device("cpu"))
    assert tensor.data_ptr() == ARRAYS[0].ctypes.data
