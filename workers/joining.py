"""How a rank finds the others of its replica: which kind of group they form, chosen once at start and told to the log.

Knows neither what the ranks compute nor who decided where they meet.
"""

from __future__ import annotations

import logging

from configs import EngineConfig
from workers.compute import configured_kernels
from workers.kernels.cpu import CpuKernels
from workers.kernels.cpu.build import KernelsUnavailable
from workers.parallel import ParallelGroup, SingleProcessGroup, connect, meeting
from workers.shared_memory_group import SharedMemoryGroup, meet

log = logging.getLogger(__name__)


def join_group(
    config: EngineConfig, host: str, port: int, rank: int, size: int, *, device: str, timeout: float
) -> ParallelGroup:
    """The group whose store listens at `host`:`port`; blocks until all `size` ranks have come, or `timeout` seconds.

    On GPUs it speaks over NCCL, on CPUs through shared memory where every rank can, else over gloo. `timeout` also
    bounds every later operation.

    Raises:
        ParallelError: not all ranks came in time; the message names this rank and the store.
    """
    if size == 1:
        return SingleProcessGroup(device)
    if device == "cuda":
        return connect(host, port, rank, size, "nccl", timeout)
    kernels: CpuKernels | str
    try:
        kernels = configured_kernels(config)
    except KernelsUnavailable as reason:
        kernels = f"no C++ kernels: {reason}"
    with meeting(host, port, rank, size, timeout) as store:
        group = meet(store, rank, size, kernels, timeout)
    if isinstance(group, SharedMemoryGroup):
        log.info("%d ranks speak through shared memory: all are on this host", size)
        return group
    log.info("%d ranks speak over gloo, not through shared memory: %s", size, group)
    return connect(host, port, rank, size, "gloo", timeout)
