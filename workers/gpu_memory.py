"""What is left of a GPU for the KV cache, found by running what else will take memory and looking.

Owns the arithmetic; what is read off the device comes from a `Meter`, so tests run all of it on a CPU. Knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from workers.cuda_graph import DecodeGraphs

log = logging.getLogger(__name__)

NUM_TRIAL_GRAPHS = 4
"""The largest ones, captured before there is a cache, for what a graph costs."""

MOST_BYTES_PER_GRAPH = 64 << 20
"""Of what the driver keeps for one graph; beyond that a neighbour on the device has taken memory meanwhile."""


class Meter(Protocol):
    """Bytes of one device."""

    def free(self) -> int: ...

    def total(self) -> int: ...

    def held(self) -> int:
        """What this process's allocator has taken from the device."""
        ...

    def most_held(self) -> int:
        """The most that was held since `forget_most`."""
        ...

    def forget_most(self) -> None: ...

    def give_back(self) -> None:
        """Return to the device what is held and not in use."""
        ...


class CudaMeter:
    """What torch and the driver say."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def held(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def most_held(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))

    def forget_most(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def bytes_left(
    meter: Meter, utilization: float, *, run_largest: Callable[[], None], make_graphs: Callable[[], DecodeGraphs] | None
) -> int:
    """What is left of this process's share, `utilization` of the device.

    `run_largest` computes the largest steps; buffers that stay after them are part of what it held at most. Counts what
    this process holds, not what its neighbours on the device happen to hold at the moment; theirs matters only where
    less is free than the share promises.
    """
    free, held = meter.free(), meter.held()
    meter.forget_most()
    run_largest()
    most_held = meter.most_held()
    meter.give_back()
    of_graphs = 0 if make_graphs is None else bytes_of_graphs(make_graphs, meter)
    share = int(meter.total() * utilization) - most_held - of_graphs
    log.info("GPU memory: %.1f MB held by the largest step, %.1f MB for graphs", most_held / 1e6, of_graphs / 1e6)
    return min(share, free - (most_held - held) - of_graphs)


def bytes_of_graphs(make_graphs: Callable[[], DecodeGraphs], meter: Meter) -> int:
    """What capturing every size will take, from a trial of the largest few.

    All share one pool, which the largest fills. What the driver keeps for each lies outside the allocator's memory and
    is taken to be the same for all, as all have the same kernels.
    """
    held = meter.held()
    graphs = make_graphs()
    num_sizes = len(graphs.sizes)
    graphs.capture(1)
    meter.give_back()
    outside = meter.free() + meter.held()
    num_more = min(NUM_TRIAL_GRAPHS, num_sizes - 1)
    graphs.capture(1 + num_more)
    meter.give_back()
    of_pool = meter.held() - held
    outside -= meter.free() + meter.held()
    per_graph = min(max(0, outside // num_more), MOST_BYTES_PER_GRAPH) if num_more else MOST_BYTES_PER_GRAPH
    del graphs
    meter.give_back()
    return of_pool + num_sizes * per_graph
