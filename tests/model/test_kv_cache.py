"""The memory of the paged cache on a CPU; what is kept in it is tested where it is read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from workers.kv_cache import KVCache

SHAPE = {"num_layers": 1, "block_size": 16, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}

on_linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")


def flags_of(tensor: torch.Tensor) -> list[str]:
    """Of the mapping that `tensor` lies in."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for entry in entries[1:]:
        first, last = (int(address, 16) for address in entry.split(" ", 1)[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return re.search("^VmFlags: (.*)$", entry, re.MULTILINE).group(1).split()
    raise AssertionError("the tensor lies in no mapping")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@on_linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_the_cache_asks_for_huge_pages_and_is_not_shared_memory_which_has_none(dtype):
    cache = KVCache.allocate(num_blocks=2000, dtype=dtype, **SHAPE)
    flags = flags_of(cache.k[0])
    assert "sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags
    assert cache.k[0].dtype == dtype
    assert not cache.k[0][:: len(cache.k[0]) - 1].view(torch.uint8).any()


@on_linux
def test_memory_is_taken_as_it_is_written():
    before = resident_bytes()
    cache = KVCache.allocate(num_blocks=10_000, dtype=torch.float32, **SHAPE)
    assert cache.k[0].nbytes > 70 << 20
    assert resident_bytes() - before < 20 << 20
    cache.k[0].fill_(1.0)
    assert resident_bytes() - before > 70 << 20


def test_more_memory_than_can_be_had_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"no memory for a KV cache .* lower cache.memory_gib or cache.num_blocks"):
        KVCache.allocate(num_blocks=1 << 40, dtype=torch.float32, **SHAPE)
