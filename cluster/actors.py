"""The bodies of our processes: a rank, a scheduler, an ingress. Thin shells over plain classes.

Owns the order of a process's life and nothing else. Each constructor is light; errors leave as text, so that the driver
never has to import what raised them. `workers` and torch are imported by `WorkerActor` alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.collector import settle, uncollected
from cluster.deployment_errors import PlacementError
from cluster.identity import Identity, base_versions, model_fingerprint, source_root
from cluster.preparation import run_preparation
from cluster.reporting import reporting
from cluster.transport import Address, Listener
from configs.build import config_from_dict
from configs.model_spec import ModelSpec

if TYPE_CHECKING:
    from cluster.engine import EngineLoop
    from cluster.frontend import Frontend
    from cluster.protocol import Status
    from cluster.text.processor import TextProcessor
    from configs.schema import EngineConfig

STATUS_POLL_S = 0.05
INGRESS_FLUSH_S = 5
DEFAULT_RANK_ENV = {"OMP_WAIT_POLICY": "PASSIVE"}
"""A thread that spins for the next piece of work is worth little alone, and steals from the scheduler, the ingress and
every neighbour: on a busy machine of two cores it makes a step ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which part of which replica a rank is, and with what it computes."""

    replica: int
    rank: int
    num_ranks: int
    device: str
    num_threads: int
    address: str  # of its node, as Ray knows it

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.address}, pid {os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a scheduler has to know of a model."""

    name: str
    fingerprint: str
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class _Said(logging.Handler):
    """Keeps what the modules of `workers` tell the log, for the driver to ask for, until it is closed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger = logging.getLogger("workers")
        self._level_before = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def close(self) -> None:
        """From here on nobody asks: lines go where they went before."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)
        super().close()


class WorkerActor:
    """One rank. Its methods are called once each, in the order they are written; `run` returns only at the end."""

    def __init__(self, config: Mapping[str, Any], place: RankPlace) -> None:
        self.config: EngineConfig = config_from_dict(config)
        self.place = place
        # Everything that torch reads when it is imported must be there before; a node's own settings win.
        for name, value in (DEFAULT_RANK_ENV | self.config.worker.env).items():
            os.environ.setdefault(name, value)
        os.environ["OMP_NUM_THREADS"] = str(place.num_threads)
        self._said = _Said()
        self.spec: ModelSpec | None = None
        self.store: Any = None
        self.group: Any = None
        self.worker: Any = None

    @reporting
    def identify(self) -> Identity:
        """What this process runs and what device it was given; imports torch."""
        from cluster import runtime

        with uncollected():
            from workers import worker  # noqa: F401 - `load` will need it; imports torch
            from workers.probe import describe_device

        accelerators = runtime.own_accelerators()  # asked before torch freezes its list of devices
        if self.place.device == "cuda" and not accelerators:
            raise PlacementError(f"{self.place.name} was given no GPU by Ray; set worker.device=cpu or free a GPU")
        device = describe_device(self.place.device, num_threads=self.place.num_threads)
        return Identity(
            rank=self.place.rank,
            address=self.place.address,
            pid=os.getpid(),
            versions=base_versions(source_root()) | device.versions,
            device_name=device.name,
            device_uuid=device.uuid,
            free_bytes=device.free_bytes,
            total_bytes=device.total_bytes,
        )

    @reporting
    def prepare_model(self, prepared: str | None, timeout: float) -> str:
        """Find or make the model on this node (`prepared`: it is there); the fingerprint of its files."""
        directory = Path(prepared) if prepared else run_preparation(self.config.model, timeout=timeout)
        self.spec = ModelSpec.from_directory(directory)
        return model_fingerprint(directory)

    @reporting
    def bind_store(self, host: str) -> int:
        """Rank 0: the port of the meeting place, which this process holds from now on."""
        from workers.parallel import bind_store

        self.store, port = bind_store(host)
        return port

    @reporting
    def join(self, host: str, port: int, timeout: float) -> None:
        from workers.joining import join_group

        place = self.place
        self.group = join_group(
            self.config, host, port, place.rank, place.num_ranks, device=place.device, timeout=timeout
        )

    @reporting
    def load(self) -> float:
        """Build the model and read this rank's weights; the seconds it took."""
        from workers.worker import Worker

        assert self.spec is not None, "prepare_model comes first"
        started = time.monotonic()
        self.worker = Worker(self.config, self.spec, self.group, num_threads=self.place.num_threads)
        self.worker.load_model()
        return time.monotonic() - started

    @reporting
    def measure_num_blocks(self) -> int:
        return int(self.worker.measure_num_blocks())

    @reporting
    def allocate_cache(self, num_blocks: int) -> None:
        self.worker.allocate_cache(num_blocks)

    @reporting
    def said(self) -> list[str]:
        """What this rank chose since it was last asked, and why: with what it computes, how it speaks to the others."""
        lines, self._said.lines = self._said.lines, []
        return lines

    @reporting
    def run(self, address: Address, token: str, engine_epoch: int) -> None:
        """Answer the scheduler until it says goodbye. The end of this call tells others that the rank is gone."""
        from cluster.rank_channel import RankChannel, Steps

        channel = RankChannel.connect(
            address,
            token=token,
            rank=self.place.rank,
            name=self.place.name,
            engine_epoch=engine_epoch,
            config=self.config.cluster,
        )
        self._said.close()
        settle()
        try:
            if self.worker.device.type == "cuda":
                channel.serve_ahead(Steps(self.worker.launch, self.worker.collect, lambda pending: pending.is_done()))
            else:
                channel.serve(self.worker.execute)
        finally:
            self.worker.close()


class _Staying:
    """Of processes that wait for others during a start and answer no call meanwhile."""

    @reporting
    def stay(self) -> None:
        """Returns never. Its end is how the driver learns at once that the process was lost."""
        threading.Event().wait()


class SchedulerActor(_Staying):
    """One replica's scheduler and engine loop. Never imports torch."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config: EngineConfig = config_from_dict(config)
        self.listener: Listener | None = None
        self.loop: EngineLoop | None = None

    @reporting
    def listen(self, host: str) -> Address:
        """Bind and hold; `host` empty: this node's address, whatever node that is."""
        with uncollected():
            from cluster import engine, runtime  # noqa: F401 - `start` needs the former, when all others are ready
            from scheduler import scheduler  # noqa: F401

        host = host or runtime.own_address()
        self.listener = Listener(host)
        return self.listener.address

    @reporting
    def start(self, model: EngineFacts, token: str) -> None:
        """Build the scheduler and start the engine loop; ranks and ingresses may connect."""
        from cluster.engine import EngineLoop
        from scheduler.scheduler import Scheduler

        assert self.listener is not None
        scheduler = Scheduler(
            self.config.scheduler,
            self.config.cache,
            num_blocks=model.num_blocks,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            cache_namespace=model.fingerprint,
        )
        self.loop = EngineLoop(
            scheduler,
            self.listener,
            config=self.config,
            token=token,
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            num_ranks=self.config.parallel.tensor_parallel_size,
        )
        self.loop.start()

    @reporting
    def wait_until_healthy(self, timeout: float) -> None:
        self._running().wait_until_healthy(timeout)

    @reporting
    def run(self) -> tuple[str, bool]:
        """Wait for the end of the engine: the root error, if it was not stopped, and whether that is secondhand."""
        loop = self._running()
        settle()
        while (status := loop.status()).state not in ("failed", "stopped"):
            time.sleep(STATUS_POLL_S)
        return (status.reason, loop.is_reason_secondhand) if status.state == "failed" else ("", False)

    @reporting
    def status(self) -> Status:
        return self._running().status()

    @reporting
    def fail(self, reason: str) -> None:
        self._running().fail(reason)

    @reporting
    def drain(self, timeout: float) -> bool:
        return self._running().drain(timeout)

    @reporting
    def stop(self) -> None:
        self._running().stop()

    def _running(self) -> EngineLoop:
        assert self.loop is not None, "start comes first"
        return self.loop


class IngressActor(_Staying):
    """The HTTP door. Never imports torch."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config: EngineConfig = config_from_dict(config)
        self.socket: socket.socket | None = None
        self.text: TextProcessor | None = None
        self.server: Any = None

    @reporting
    def bind(self) -> int:
        """Take the port before the model is loaded, and hold it."""
        from cluster.preflight import listen

        self.socket = listen(self.config.ingress.host, self.config.ingress.port)
        return int(self.socket.getsockname()[1])

    @reporting
    def prepare(self, model_directory: str) -> None:
        """Import and read everything that `run` needs, while others load weights."""
        with uncollected():
            import uvicorn  # noqa: F401

            from cluster.ingress import app  # noqa: F401
            from cluster.text.processor import TextProcessor

        self.text = TextProcessor.from_directory(Path(model_directory))
        self.text.warm_up()

    @reporting
    def run(self, addresses: list[Address], token: str, model_name: str) -> None:
        """Serve HTTP until `stop`."""
        import uvicorn

        from cluster.frontend import Frontend
        from cluster.ingress.app import create_app

        assert self.socket is not None, "bind comes first"
        assert self.text is not None, "prepare comes before run"
        frontend = Frontend(addresses, token=token, text=self.text, seed=self.config.model.seed)
        app = create_app(frontend, self.config.ingress, model=model_name)
        self.server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=INGRESS_FLUSH_S
            )
        )
        settle()
        asyncio.run(_serve_http(frontend, self.server, self.socket))

    @reporting
    def wait_until_serving(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not (self.server and self.server.started):
            if time.monotonic() > deadline:
                raise TimeoutError(f"HTTP does not answer after {timeout:g} s")
            time.sleep(STATUS_POLL_S)

    @reporting
    def stop(self) -> None:
        """Close the door, let answers that are complete reach their clients."""
        if self.server:
            self.server.should_exit = True


async def _serve_http(frontend: Frontend, server: Any, bound: socket.socket) -> None:
    """Not a method: one coroutine would make the whole actor asynchronous."""
    async with frontend:
        await server.serve(sockets=[bound])
