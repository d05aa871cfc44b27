"""The checks before anything is allocated, and the table that shows them.

Owns the arithmetic of what a deployment will need per rank. Does not know Ray or torch: nodes come as
`NodeResources`, the model as a `ModelSpec`. What only a worker can see is compared in `cluster.identity`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from cluster.deployment_errors import AddressError, PlacementError, UsageError
from cluster.placement import DeviceKind, GroupPlan, NodeResources
from configs.cache_dtype import refusal
from configs.matrices import num_parameters, rank_weight_bytes
from configs.model_spec import ModelSpec
from configs.schema import GIB, EngineConfig
from configs.sharding import HeadShard, imbalance, split_heads

RUNTIME_BYTES = 400 * 2**20
"""What a CPU rank takes beside weights and KV: the interpreter, torch, activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """What one rank will hold."""

    rank: int
    shard: HeadShard
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int | None  # None: whatever the GPU has left, known once a worker has profiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one replica will hold, and how evenly."""

    dtype: str
    cache_dtype: str
    max_model_len: int
    ranks: tuple[RankBudget, ...]
    head_imbalance: float

    @property
    def num_cache_tokens(self) -> int | None:
        fits = [rank.kv_bytes // max(1, rank.kv_bytes_per_token) for rank in self.ranks if rank.kv_bytes is not None]
        return min(fits) if fits else None


def compute_budget(config: EngineConfig, spec: ModelSpec, device: DeviceKind) -> Budget:
    """Bytes per rank of one replica.

    Raises:
        UsageError: a length limit that the model does not have, or a cache that the device cannot hold.
    """
    max_model_len = config.model.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise UsageError(
            f"model.max_model_len is {max_model_len}, the model's own limit is {spec.max_model_len}; "
            "lower it or leave it out"
        )
    dtype = config.model.dtype_on(device, spec.dtype)
    cache_dtype = config.cache.dtype_for(dtype)
    problem = refusal(cache_dtype, device=device, model_dtype=dtype, cpu_kernels=config.worker.cpu_kernels)
    if problem is not None:
        raise UsageError(problem)
    shards = split_heads(spec.num_heads, spec.num_kv_heads, config.parallel.tensor_parallel_size)
    return Budget(
        dtype=dtype,
        cache_dtype=cache_dtype,
        max_model_len=max_model_len,
        ranks=tuple(
            _rank_budget(config, spec, device, dtype, spec.kv_bytes_per_token(cache_dtype), rank, shard)
            for rank, shard in enumerate(shards)
        ),
        head_imbalance=imbalance(shards),
    )


def _rank_budget(
    config: EngineConfig,
    spec: ModelSpec,
    device: DeviceKind,
    dtype: str,
    kv_bytes_per_token: int,
    rank: int,
    shard: HeadShard,
) -> RankBudget:
    loaded = spec.unquantized() if config.model.load_format == "random" else spec
    num_ranks = config.parallel.tensor_parallel_size
    kv_per_token = kv_bytes_per_token * shard.num_kv_heads // spec.num_kv_heads
    return RankBudget(
        rank=rank,
        shard=shard,
        weight_bytes=rank_weight_bytes(loaded, rank, num_ranks, dtype, kept=device == "cuda"),
        kv_bytes_per_token=kv_per_token,
        kv_bytes=_kv_bytes(config, device, kv_per_token),
    )


def _kv_bytes(config: EngineConfig, device: DeviceKind, kv_bytes_per_token: int) -> int | None:
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks * cache.block_size * kv_bytes_per_token
    if device == "cpu":
        return cache.cpu_bytes
    return None


def check_memory(budget: Budget, groups: Sequence[GroupPlan], nodes: Sequence[NodeResources]) -> None:
    """Weights and KV of the CPU ranks against the memory of their nodes. A GPU's memory is checked by its worker.

    Raises:
        PlacementError: naming the node, bytes needed and bytes there, and what to lower.
    """
    for node in nodes:
        needed = sum(
            rank.weight_bytes + (rank.kv_bytes or 0) + RUNTIME_BYTES
            for group in groups
            if group.device == "cpu"
            for rank, node_id in zip(budget.ranks, group.node_ids, strict=True)
            if node_id == node.node_id
        )
        if node.memory_bytes and needed > node.memory_bytes:
            raise PlacementError(
                f"the ranks on node {node.address} need {gib(needed)} for weights and KV cache, it has "
                f"{gib(node.memory_bytes)}; lower cache.memory_gib or cache.num_blocks, choose a smaller "
                "model.dtype or cache.dtype, or add nodes"
            )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound and held; port 0 takes any free one.

    Raises:
        AddressError: the address is in use, is not this machine's, or may not be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise AddressError(_address_problem(host, port, error)) from error


def check_port_free(host: str, port: int) -> None:
    """Refuse an occupied address now instead of after the model is loaded.

    Raises:
        AddressError: see `listen`.
    """
    listen(host, port).close()


def _address_problem(host: str, port: int, error: OSError) -> str:
    number = error.errno or 0
    reason = os.strerror(number) if number > 0 else error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --set ingress.port=N (0: any free one)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} may not be used by this user; choose one above 1023 with --set ingress.port=N"
    return f"cannot listen on {host}:{port} ({reason}); set ingress.host to an address of this machine"


def check_table(
    config: EngineConfig,
    spec: ModelSpec,
    budget: Budget,
    groups: Sequence[GroupPlan],
    nodes: Sequence[NodeResources],
) -> Table:
    """Everything the checks looked at, for the eye."""
    table = Table(show_header=False, expand=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for rows in (_model_rows(config, spec, budget), _rank_rows(budget, spec), _device_rows(config, groups, nodes)):
        for name, value in rows.items():
            table.add_row(name, value)
    return table


def _model_rows(config: EngineConfig, spec: ModelSpec, budget: Budget) -> Mapping[str, str]:
    size = f"{num_parameters(spec) / 1e6:,.1f}M parameters"
    if spec.quantization is not None and config.model.load_format == "auto":
        size += f", {spec.quantization.describe()}"
    return {
        "model": f"{config.model.path} ({spec.architecture}, {size}, {budget.dtype})",
        "longest sequence": f"{budget.max_model_len:,} tokens (the model's own limit: {spec.max_model_len:,})",
    }


def _rank_rows(budget: Budget, spec: ModelSpec) -> Mapping[str, str]:
    shards = [rank.shard for rank in budget.ranks]
    heads = "+".join(str(shard.num_heads) for shard in shards)
    kv_heads = "+".join(str(shard.num_kv_heads) for shard in shards)
    cost = "evenly"
    if budget.head_imbalance > 1.0:
        cost = f"unevenly: the busiest has {budget.head_imbalance:.2f}x the mean, and attention takes that much longer"
    weights = " + ".join(gib(rank.weight_bytes) for rank in budget.ranks)
    kv = " + ".join("what the GPU has left" if rank.kv_bytes is None else gib(rank.kv_bytes) for rank in budget.ranks)
    tokens = "" if budget.num_cache_tokens is None else f"{budget.num_cache_tokens:,} tokens in "
    return {
        "query heads": str(spec.num_heads)
        if len(shards) == 1
        else f"{spec.num_heads} = {heads} over the ranks, {cost}",
        "KV heads": (str(spec.num_kv_heads) if len(shards) == 1 else f"{spec.num_kv_heads} as {kv_heads}")
        + _replication(shards, spec),
        "weights per rank": weights,
        "KV cache per rank": f"{kv} ({tokens}{budget.cache_dtype})",
    }


def _replication(shards: Sequence[HeadShard], spec: ModelSpec) -> str:
    held = sum(shard.num_kv_heads for shard in shards)
    return f" (replicated: {held / spec.num_kv_heads:.1f}x the KV memory)" if held > spec.num_kv_heads else ""


def _device_rows(
    config: EngineConfig, groups: Sequence[GroupPlan], nodes: Sequence[NodeResources]
) -> Mapping[str, str]:
    device = groups[0].device
    placed = [node_id for group in groups for node_id in group.node_ids]
    lines = [
        f"{node.address}: ranks {placed.count(node.node_id)}, "
        f"{node.num_free(device)} of {node.num_devices(device)} free"
        + (f", {gib(node.memory_bytes)} of memory" if device == "cpu" else "")
        for node in nodes
    ]
    plan = groups[0]
    bundle = " + ".join(f"{amount:g} {name}" for name, amount in plan.bundle.items())
    return {
        "GPUs" if device == "cuda" else "CPU cores": "\n".join(lines),
        "placement": f"{len(groups)} x {plan.strategy}; per rank {bundle}, threads {plan.num_threads}",
        "listen": f"{config.ingress.host}:{config.ingress.port or 'any free port'}",
    }


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
