"""Tensor-parallel ranks of one host that speak through memory which all of them map.

Owns how they find out that they can, and the group itself; what happens within an operation is in
`workers/kernels/cpu/all_reduce.cpp`. The memory is a file without a name: nothing is left of it when the ranks are
gone, however they went. Knows neither models nor Ray.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from ctypes import c_int64, cast
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.kernels.cpu.library import AllReduce, CpuKernels, SharedGroup
from workers.parallel import ParallelError, ParallelGroup

SPIN_MICROSECONDS = 100
"""How long a rank that waits for another looks before it sleeps, at most: with one thread each and a core each, ranks
come within that time. Where cores are short the library soon looks no more than a moment."""

_DONE, _CLOSED = 0, 1
_FATES = {
    2: "rank {peer} died",
    3: "rank {peer} has left the group",
    4: "rank {peer} did not come within {timeout:g} s",
    5: "rank {peer} is in another operation, or brings another size",
}
"""What an operation of the library can end with, in its lowest 8 bits; above them is the peer."""


class SharedMemoryGroup(ParallelGroup):
    """Made by `meet`. An operation that fails ends the group for this rank, and its peers are told."""

    def __init__(self, kernels: CpuKernels, file: int, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")
        self._kernels = kernels
        self._timeout = timeout
        self._shared = SharedGroup(kernels, file, rank, size, timeout=timeout, spin_microseconds=SPIN_MICROSECONDS)

    @property
    def direct_all_reduce(self) -> tuple[Any, int]:
        """For C++ that sums within a step: the function and what it is called with; `check` explains its status."""
        return cast(self._kernels.group_all_reduce, AllReduce), self._shared.handle

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "all_reduce works in place: give it a contiguous tensor"
        if x.numel() == 0:
            return x
        if x.dtype != torch.float32:
            return self._sum_of_all(x)
        self.check(self._kernels.group_all_reduce(self._shared.handle, x.data_ptr(), x.numel()), "all_reduce")
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        assert len(sizes) == self.size, f"{len(sizes)} sizes for {self.size} ranks"
        assert x.shape[dim] == sizes[self.rank], f"rank {self.rank} brings {x.shape[dim]}, not {sizes[self.rank]}"
        assert x.device.type == "cpu"
        dim %= x.dim()
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        out = x.new_empty((*before, sum(sizes), *after))
        if out.numel() == 0:
            return out
        entry_bytes = math.prod(after) * x.element_size()
        widths = (c_int64 * self.size)(*(size * entry_bytes for size in sizes))
        part = x.contiguous()
        status = self._kernels.group_all_gather(
            self._shared.handle, part.data_ptr(), math.prod(before), widths, out.data_ptr()
        )
        self.check(status, "all_gather")
        return out

    def barrier(self) -> None:
        one = torch.ones(1)
        self.check(self._kernels.group_all_reduce(self._shared.handle, one.data_ptr(), 1), "barrier")

    def close(self) -> None:
        self._kernels.group_leave(self._shared.handle)

    def check(self, status: int, operation: str) -> None:
        """Raises ParallelError: `status` is not that of an operation which was done."""
        outcome, peer = status & 255, status >> 8
        if outcome == _CLOSED:
            raise ParallelError(f"rank {self.rank} has left its group and cannot {operation}")
        if outcome != _DONE:
            fate = _FATES[outcome].format(peer=peer, timeout=self._timeout)
            raise ParallelError(f"rank {self.rank} of {self.size} lost a peer during {operation}: {fate}")

    def sees_all(self) -> bool:
        """Whether this rank would notice the death of each of its peers."""
        return all(
            self._kernels.group_is_alive(self._shared.handle, peer) for peer in range(self.size) if peer != self.rank
        )

    def _sum_of_all(self, x: Tensor) -> Tensor:
        """In the order of the ranks, as the library sums; floats of 16 bits in float32."""
        parts = self.all_gather(x.view(1, -1), [1] * self.size, dim=0)
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype)
        for part in parts[1:]:
            total = total + part
        return x.copy_(total.view_as(x))


def meet(store: dist.Store, rank: int, size: int, kernels: CpuKernels | str, timeout: float) -> SharedMemoryGroup | str:
    """The group of all `size` ranks, or why they cannot have one; every rank comes to the same answer.

    `kernels`: those of this rank, or why it has none. `timeout` bounds every operation of the group, in seconds.

    Raises:
        RuntimeError: another rank did not answer through the store.
    """
    talk = _Talk(store, rank, size)
    if len(set(talk.tell_all("place", _own_place()))) > 1:
        return "the ranks are not all on one host"
    if isinstance(kernels, str):
        why = talk.objection("kernels", kernels)
        assert why is not None
        return why
    return talk.objection("kernels", "") or _map_together(talk, kernels, timeout)


class _Talk:
    """What the ranks say to each other through the store before they have a group. All say the same stages."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store

    def tell_all(self, stage: str, said: str) -> list[str]:
        """What every rank says, in their order; waits for the last one."""
        self._store.set(f"shared_memory/{stage}/{self.rank}", said)
        return [self._store.get(f"shared_memory/{stage}/{rank}").decode() for rank in range(self.size)]

    def objection(self, stage: str, own: str) -> str | None:
        """The first rank's, of those that have one."""
        said = enumerate(self.tell_all(stage, own))
        return next((f"rank {rank}: {objection}" for rank, objection in said if objection), None)


def _map_together(talk: _Talk, kernels: CpuKernels, timeout: float) -> SharedMemoryGroup | str:
    """Rank 0's file is opened by all of them by way of its descriptor, which is kept until they have."""
    group: SharedMemoryGroup | None = None
    file, problem = _create_file(kernels.group_bytes(talk.size)) if talk.rank == 0 else (None, "")
    why: str | None = "not finished"
    try:
        address = talk.tell_all("file", "" if file is None else f"/proc/{os.getpid()}/fd/{file}")[0]
        if address:
            group, problem = _map(address, talk, kernels, timeout)
        why = talk.objection("mapped", problem)
        if why is None and group is not None:
            why = talk.objection("locks", "" if group.sees_all() else "the kernel does not tell who has died")
            if why is None:
                group.barrier()
                return group
        return why or "rank 0 has no memory to share"
    finally:
        if file is not None:
            os.close(file)
        if group is not None and why is not None:
            group.close()


def _own_place() -> str:
    """Equal where the same process has the same number: on one host, and within one container's view of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown {os.urandom(8).hex()}"  # equal to none


def _create_file(num_bytes: int) -> tuple[int | None, str]:
    """(descriptor, "") or (None, why not). All of its memory is there at once: no later access can fail."""
    try:
        file = os.memfd_create("antiphon-group")
    except OSError as error:
        return None, str(error)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.close(file)
        return None, f"{num_bytes} bytes of shared memory: {error}"
    return file, ""


def _map(address: str, talk: _Talk, kernels: CpuKernels, timeout: float) -> tuple[SharedMemoryGroup | None, str]:
    try:
        file = os.open(address, os.O_RDWR)
        return SharedMemoryGroup(kernels, file, talk.rank, talk.size, timeout), ""
    except (OSError, MemoryError) as error:
        return None, f"rank 0's memory cannot be opened, mapped or locked: {error}"
