"""What a deployment is made of. Importing this package needs nothing but the standard library."""

from configs.schema import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    IngressConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)

__all__ = [
    "CacheConfig",
    "ClusterConfig",
    "EngineConfig",
    "IngressConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "WorkerConfig",
]
