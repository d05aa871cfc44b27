"""Tensor-parallel groups: what the ranks of one replica say to each other within a step.

A group is an object passed to whoever needs it; nothing here is global, and several groups may live in one process.
Knows neither models nor Ray. Who is which rank, and where rank 0's store listens, is decided elsewhere.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ParallelError(ConnectionError):
    """A rank could not reach its peers, or lost them: usually the consequence of another rank's failure.

    Told from a rank's own failures by its base class, which those know too who do not import this module.
    """


class ParallelGroup(ABC):
    """The ranks that hold one model together. Every rank calls the same methods in the same order."""

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place; returns x. All ranks end with the same bits."""

    @abstractmethod
    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        """Concatenate the ranks' x along `dim`, where rank r brings `sizes[r]` entries (possibly none)."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Safe to call twice, and after a peer has died."""


class SingleProcessGroup(ParallelGroup):
    """The group of one: every operation is free."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = 0
        self.size = 1
        self.device = torch.device(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        assert x.shape[dim] == sum(sizes), f"{x.shape[dim]} entries, not {list(sizes)}"
        return x

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchGroup(ParallelGroup):
    """Ranks in several processes, over gloo or NCCL; made by `connect`.

    Holds its own c10d process group, unknown to `torch.distributed`'s default one.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._process_group: dist.ProcessGroup | None = process_group

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "all_reduce works in place: give it a contiguous tensor"
        if x.numel() > 0:
            with self._speaking("all_reduce") as group:
                group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
        assert len(sizes) == self.size, f"{len(sizes)} sizes for {self.size} ranks"
        assert x.shape[dim] == sizes[self.rank], f"rank {self.rank} brings {x.shape[dim]}, not {sizes[self.rank]}"
        shape = list(x.shape)
        shape[dim] = max(sizes)
        if 0 in shape:
            return x
        # Backends want equal shapes: pad to the largest part, cut the padding off again.
        padded = x.contiguous()
        if x.shape[dim] != max(sizes):
            padded = x.new_zeros(shape)
            padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        parts = [x.new_empty(shape) for _ in sizes]
        with self._speaking("all_gather") as group:
            group.allgather([parts], [padded]).wait()
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim=dim)

    def barrier(self) -> None:
        # A sum, because NCCL's own barrier guesses a device.
        self.all_reduce(torch.zeros(1, device=self.device)).sum().item()

    def close(self) -> None:
        group, self._process_group = self._process_group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    @contextmanager
    def _speaking(self, operation: str) -> Iterator[dist.ProcessGroup]:
        if self._process_group is None:
            raise ParallelError(f"rank {self.rank} has left its group and cannot {operation}")
        try:
            yield self._process_group
        except RuntimeError as error:
            raise ParallelError(
                f"rank {self.rank} of {self.size} lost a peer during {operation}; see the other ranks: {error}"
            ) from error


def bind_store(host: str) -> tuple[dist.TCPStore, int]:
    """Rank 0's meeting place on a port that the system chooses. Keep the store as long as the group lives.

    `host` is an address of this machine by which the other ranks reach it.
    """
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, store.port


def connect(
    host: str,
    port: int,
    rank: int,
    size: int,
    backend: str = "gloo",
    timeout: float = 60.0,
    device: torch.device | str | None = None,
) -> ParallelGroup:
    """Join the group whose store listens at `host`:`port`; blocks until all `size` ranks have, or `timeout` seconds.

    `backend` is "gloo" (CPU) or "nccl" (CUDA; `device` defaults to the current one). `timeout` also bounds every
    later operation.

    Raises:
        ParallelError: not all ranks came in time; the message names this rank and the store.
    """
    assert 0 <= rank < size, f"rank {rank} of {size}"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"no such backend: {backend!r}; give gloo or nccl")
    limit = timedelta(seconds=timeout)
    with meeting(host, port, rank, size, timeout) as store:
        if backend == "gloo":
            target = torch.device(device or "cpu")
            group = _gloo_group(store, rank, size, _own_address(host, port), limit)
        else:
            target = torch.device(device if device is not None else f"cuda:{torch.cuda.current_device()}")
            group = _nccl_group(store, rank, size, limit)
        joined = TorchGroup(group, rank, size, target)
        joined.barrier()
    return joined


@contextmanager
def meeting(host: str, port: int, rank: int, size: int, timeout: float) -> Iterator[dist.Store]:
    """The store at `host`:`port`, for ranks that are about to form a group; it waits for an answer for `timeout` s.

    Raises:
        ParallelError: whatever went wrong within; the message names this rank and the store.
    """
    try:
        yield dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, OSError) as error:  # c10d's own errors are RuntimeErrors
        raise ParallelError(
            f"rank {rank} of {size} did not meet its peers at {host}:{port} within {timeout:g} s: {error}"
        ) from error


def _gloo_group(store: dist.Store, rank: int, size: int, address: str, limit: timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`: gloo's own guess, the host name, often resolves elsewhere."""
    if host in LOOPBACK:
        return "127.0.0.1"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing, only chooses a route
        return str(probe.getsockname()[0])
