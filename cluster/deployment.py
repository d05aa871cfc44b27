"""What a deployment consists of, for whoever starts, watches or uses it.

Owns the record alone; `cluster.bringup` fills it in and `cluster.supervisor` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.placement import GroupPlan
from cluster.waiting import Call
from configs.schema import EngineConfig

if TYPE_CHECKING:
    from cluster.runtime import Actor, Group, Runtime
    from cluster.transport import Address


@dataclass(slots=True, eq=False)
class Replica:
    """One scheduler and its ranks."""

    index: int
    group: Group
    plan: GroupPlan
    ranks: list[Actor] = field(default_factory=list)
    scheduler: Actor | None = None
    address: Address | None = None
    rank_runs: list[Call] = field(default_factory=list)
    scheduler_run: Call | None = None
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class Deployment:
    """What runs, and how to reach it."""

    config: EngineConfig
    runtime: Runtime
    token: str
    engine_id: str
    model_name: str
    model_directory: Path
    replicas: list[Replica] = field(default_factory=list)
    ingress: Actor | None = None
    ingress_run: Call | None = None
    url: str = ""

    @property
    def addresses(self) -> list[Address]:
        return [replica.address for replica in self.replicas if replica.address is not None]


def served_name(config: EngineConfig) -> str:
    return config.model.served_name or Path(config.model.path.rstrip("/")).name.removesuffix(".gguf")
