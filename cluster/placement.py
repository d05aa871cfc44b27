"""Which node and device each rank gets: pure arithmetic over what the cluster says is free.

Owns the choice of device, the bundles to ask the cluster for and the order of ranks. Does not know Ray, and
does not allocate: `cluster.runtime` turns a `GroupPlan` into a placement group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.deployment_errors import PlacementError

DeviceKind = Literal["cpu", "cuda"]
MAX_THREADS_BESIDE_GPU = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """One node as the cluster sees it. A CPU rank takes cores, a GPU rank takes one GPU."""

    node_id: str
    address: str
    num_cpus: int
    free_cpus: int
    num_gpus: int = 0
    free_gpus: int = 0
    memory_bytes: int = 0
    is_driver: bool = False

    def num_devices(self, device: DeviceKind) -> int:
        return self.num_gpus if device == "cuda" else self.num_cpus

    def num_free(self, device: DeviceKind) -> int:
        return self.free_gpus if device == "cuda" else self.free_cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A placement group of somebody that holds devices: whom to ask."""

    name: str
    job_id: str
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The bundles of one replica: one per rank, all alike. `node_ids` are expected, one per rank."""

    strategy: Literal["STRICT_PACK", "PACK"]
    bundle: dict[str, float]
    node_ids: tuple[str, ...]
    num_threads: int
    device: DeviceKind

    @property
    def num_ranks(self) -> int:
        return len(self.node_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """Rank -> bundle -> node, fixed before any actor exists."""

    rank: int
    bundle: int
    node_id: str


def choose_device(wanted: str, nodes: Iterable[NodeResources]) -> DeviceKind:
    """`auto` is cuda as soon as any node has a GPU."""
    if wanted in ("cpu", "cuda"):
        return "cuda" if wanted == "cuda" else "cpu"
    return "cuda" if any(node.num_gpus for node in nodes) else "cpu"


def plan_groups(
    nodes: Sequence[NodeResources],
    *,
    num_replicas: int,
    ranks_per_replica: int,
    device: DeviceKind,
    num_threads: int | None = None,
    holders: Sequence[Holder] = (),
) -> tuple[GroupPlan, ...]:
    """One plan per replica.

    A replica goes to the node with the most free devices, whole where it fits and over several nodes where it does
    not; the driver's node wins a tie.

    Raises:
        PlacementError: too few devices are free; the message says how many are, where, and who holds the others.
    """
    free = {node.node_id: node.num_free(device) for node in nodes}
    if sum(free.values()) < num_replicas * ranks_per_replica:
        raise PlacementError(_refusal(nodes, num_replicas, ranks_per_replica, device, holders))
    preference = {node.node_id: node.is_driver for node in nodes}
    replicas = [_take(free, preference, ranks_per_replica) for _ in range(num_replicas)]
    return tuple(_group(nodes, replicas, mine, device, num_threads) for mine in replicas)


def _take(free: dict[str, int], preference: dict[str, bool], num_ranks: int) -> tuple[str, ...]:
    """Node ids for `num_ranks` devices, removed from `free`."""
    by_room = sorted(free, key=lambda node: (-free[node], not preference[node]))
    taken: list[str] = []
    for node in by_room:
        share = min(free[node], num_ranks - len(taken))
        taken += [node] * share
        free[node] -= share
    assert len(taken) == num_ranks
    return tuple(taken)


def _group(
    nodes: Sequence[NodeResources],
    replicas: Sequence[tuple[str, ...]],
    mine: tuple[str, ...],
    device: DeviceKind,
    num_threads: int | None,
) -> GroupPlan:
    by_id = {node.node_id: node for node in nodes}
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK" if len(set(mine)) == 1 else "PACK"
    if device == "cuda":
        cores_per_gpu = min(by_id[node].num_cpus // max(1, by_id[node].num_gpus) for node in mine)
        threads = num_threads or max(1, min(MAX_THREADS_BESIDE_GPU, cores_per_gpu))
        return GroupPlan(strategy=strategy, bundle={"GPU": 1.0}, node_ids=mine, num_threads=threads, device=device)
    everyone = [node for replica in replicas for node in replica]
    share = min(by_id[node].free_cpus // everyone.count(node) for node in set(mine))
    cores = min(share, num_threads or share)
    return GroupPlan(
        strategy=strategy,
        bundle={"CPU": float(cores)},
        node_ids=mine,
        num_threads=num_threads or cores,
        device=device,
    )


def order_ranks(bundle_nodes: Sequence[str], *, first_node: str | None = None) -> tuple[RankSlot, ...]:
    """Ranks of one replica over the bundles the cluster granted.

    Ranks of one node are neighbours; the node with most bundles comes first, `first_node` wins a tie.
    """
    nodes = sorted(set(bundle_nodes), key=lambda node: (-bundle_nodes.count(node), node != first_node, node))
    bundles = [bundle for node in nodes for bundle, granted in enumerate(bundle_nodes) if granted == node]
    return tuple(
        RankSlot(rank=rank, bundle=bundle, node_id=bundle_nodes[bundle]) for rank, bundle in enumerate(bundles)
    )


def _refusal(
    nodes: Sequence[NodeResources],
    num_replicas: int,
    ranks_per_replica: int,
    device: DeviceKind,
    holders: Sequence[Holder],
) -> str:
    unit = "GPU" if device == "cuda" else "CPU core"
    needed = num_replicas * ranks_per_replica
    replicas = f"{num_replicas} replicas" if num_replicas > 1 else "1 replica"
    total_free = sum(node.num_free(device) for node in nodes)
    table = ", ".join(
        f"node {node.address} has {node.num_free(device)} of {node.num_devices(device)} free"
        for node in sorted(nodes, key=lambda node: -node.num_free(device))
    )
    message = f"need {needed} {unit}s ({replicas} of {ranks_per_replica} ranks, one {unit} each), {table or 'no node'}"
    held = [
        f"{holder.name or 'an unnamed placement group'} of job {holder.job_id} ({amount:g})"
        for holder in holders
        if (amount := holder.num_gpus if device == "cuda" else holder.num_cpus) > 0
    ]
    if held:
        message += f"; held by {', '.join(held)}"
    if num_replicas > 1:
        lower = f"lower parallel.num_replicas x parallel.tensor_parallel_size to at most {total_free}"
    else:
        lower = f"lower parallel.tensor_parallel_size to at most {total_free}"
    remedy = f"{lower}, or add nodes" if total_free else "add nodes, or end what holds them"
    return f"{message}; {remedy}"
