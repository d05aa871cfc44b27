"""A whole engine without Ray and without a model: scheduler, engine loop, fake ranks, all over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.engine import EngineLoop
from cluster.transport import Address, Listener
from configs.schema import CacheConfig, ClusterConfig, EngineConfig, ModelConfig, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.support.fake_ranks import FakeRank

TOKEN = "engine token of the tests"
VOCAB_SIZE = 264
MODEL = "tiny"


class ManualClock:
    """The engine's time in a test: it stands still unless told otherwise. Ranks go by the real one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SmallEngine:
    loop: EngineLoop
    scheduler: Scheduler
    address: Address
    ranks: list[FakeRank] = field(default_factory=list)

    def let_pass(self, clock: ManualClock, seconds: float, *, heard: Sequence[int] = (), at_once: float = 0.06) -> None:
        """Move the engine's clock in steps of `at_once`: a little more than a heartbeat, as floats are not exact.

        After each the engine looks after its ranks, and those in `heard` give a sign of life, unless it has failed.
        """
        end = clock.now + seconds
        while clock.now < end:
            clock.now += at_once
            self._let_turn()
            self._let_turn()  # deadlines are looked at in the beginning of a turn
            deadline = time.monotonic() + 5.0
            while not self._has_heard(heard, clock.now) and self.loop.status().state != "failed":
                assert time.monotonic() < deadline, "no sign of life"
                time.sleep(0.001)

    def _let_turn(self) -> None:
        turned = threading.Event()
        self.loop._command(turned.set)
        assert turned.wait(5.0), "the engine loop is stuck"

    def _has_heard(self, ranks: Sequence[int], now: float) -> bool:
        peers = self.loop._ranks.peers
        return all(rank in peers and peers[rank].last_heard >= now for rank in ranks)


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
    rank_heartbeat_s: float | None = None,
) -> Iterator[SmallEngine]:
    """Healthy on entry, unless fewer fakes than ranks join; stopped on exit, with every block free again.

    With `rank_heartbeat_s` the ranks have times of their own, and patience: for engines with another clock.
    """
    config = config or make_config()
    rank_config = config.cluster if rank_heartbeat_s is None else ClusterConfig(heartbeat_s=rank_heartbeat_s)
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
                FakeRank(engine.address, token=TOKEN, rank=rank, config=rank_config, seconds_per_step=seconds_per_step)
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
