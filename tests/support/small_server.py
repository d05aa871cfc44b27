"""The HTTP door on a small engine: uvicorn and uvloop in a thread, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
import uvloop

from cluster.frontend import Frontend
from cluster.ingress.app import create_app
from cluster.text.processor import TextProcessor
from configs.schema import IngressConfig
from tests.support.small_engine import MODEL, TOKEN, SmallEngine


class _QuickServer(uvicorn.Server):
    """uvicorn looks ten times a second whether it is to stop and whether it can; tests do not wait for that."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        state = self.server_state
        while state.connections or state.tasks:  # noqa: ASYNC110 - the same; `running_server` has a deadline
            await asyncio.sleep(0.005)
        await self.lifespan.shutdown()


@dataclass
class SmallServer:
    url: str = ""
    frontend: Frontend | None = None
    server: uvicorn.Server | None = None
    ready: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def running_server(engines: list[SmallEngine], directory: Path, config: IngressConfig) -> Iterator[SmallServer]:
    found = SmallServer()
    thread = threading.Thread(target=lambda: uvloop.run(_serve(found, engines, directory, config)), daemon=True)
    thread.start()
    assert found.ready.wait(10.0), "the server did not start"
    try:
        yield found
    finally:
        assert found.server is not None
        found.server.should_exit = True
        thread.join(10.0)
        assert not thread.is_alive(), "the server did not stop"


async def _serve(found: SmallServer, engines: list[SmallEngine], directory: Path, config: IngressConfig) -> None:
    text = TextProcessor.from_directory(directory)
    async with Frontend([engine.address for engine in engines], token=TOKEN, text=text) as frontend:
        app = create_app(frontend, config, model=MODEL)
        server = _QuickServer(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
        found.frontend, found.server = frontend, server
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        found.url = f"http://127.0.0.1:{port}"
        found.ready.set()
        await serving
