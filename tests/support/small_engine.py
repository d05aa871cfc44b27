"""A whole engine without Ray and without a model: scheduler, engine loop, fake ranks, all over real sockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster.engine import EngineLoop
from cluster.transport import Address, Listener
from configs.schema import CacheConfig, ClusterConfig, EngineConfig, ModelConfig, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.support.fake_ranks import FakeRank

TOKEN = "engine token of the tests"
VOCAB_SIZE = 264
MODEL = "tiny"


@dataclass
class SmallEngine:
    loop: EngineLoop
    scheduler: Scheduler
    address: Address
    ranks: list[FakeRank] = field(default_factory=list)


def make_config(
    *, step_timeout_s: float = 5.0, heartbeat_s: float = 0.5, block_size: int = 16, **scheduler: object
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=MODEL),
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_prefill_chunk": 32, **scheduler}),
        cluster=ClusterConfig(step_timeout_s=step_timeout_s, heartbeat_s=heartbeat_s),
    )


@contextlib.contextmanager
def running_engine(
    config: EngineConfig | None = None,
    *,
    num_ranks: int = 1,
    num_fakes: int | None = None,
    num_blocks: int = 64,
    max_model_len: int = 512,
    eos_token_ids: tuple[int, ...] = (),
    seconds_per_step: float = 0.0,
    port: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[SmallEngine]:
    """Healthy on entry, unless fewer fakes than ranks join; stopped on exit, with every block free again."""
    config = config or make_config()
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
    )
    listener = Listener("127.0.0.1", port)
    loop = EngineLoop(
        scheduler,
        listener,
        config=config,
        token=TOKEN,
        model=MODEL,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        num_ranks=num_ranks,
        clock=clock,
    )
    engine = SmallEngine(loop, scheduler, listener.address)
    loop.start()
    try:
        for rank in range(num_ranks if num_fakes is None else num_fakes):
            engine.ranks.append(
                FakeRank(
                    engine.address, token=TOKEN, rank=rank, config=config.cluster, seconds_per_step=seconds_per_step
                )
            )
        if len(engine.ranks) == num_ranks:
            loop.wait_until_healthy(5.0)
        yield engine
    finally:
        for fake in engine.ranks:
            fake.model.blocked.clear()
        loop.stop()
    assert not scheduler.has_unfinished
    scheduler.check_integrity()
