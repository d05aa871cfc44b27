"""A deployment under test: `deploy.py serve` in a process of its own, its HTTP interface, and every process it left.

The processes are found by a mark in their environment, which Ray hands on to all it starts.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parents[2]
MARK = "ANTIPHON_TEST_MARK"
START_TIMEOUT_S = 90.0
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Two helpers of a Ray node that may spend a minute on reporting the death of their parent before they leave."""


def processes_marked(mark: str) -> dict[int, str]:
    """pid -> command line of every living process that carries `mark`."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if state not in "ZX":
            found[int(entry.name)] = command
    return found


@dataclass
class Reply:
    status: int
    body: Any


@dataclass
class StreamResult:
    """What one client saw of its stream. `ended_at` is on the clock of `time.monotonic`."""

    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False  # the closing [DONE] came
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(choice.get("text", "") for event in self.events for choice in event.get("choices", []))

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice.get("finish_reason") for event in self.events for choice in event.get("choices", [])]
        return next((reason for reason in reversed(reasons) if reason), None)

    @property
    def error(self) -> str | None:
        return next((event["error"]["message"] for event in self.events if "error" in event), None)


class Served:
    """`with Served(overrides...) as server:` is up; afterwards it is gone."""

    def __init__(self, model: Path, *overrides: str, log: Path) -> None:
        self.mark = secrets.token_hex(8)
        self.log = log
        command = [sys.executable, str(ROOT / "deploy.py"), "serve", "tiny-random"]
        for override in (f"model.path={model}", *overrides):
            command += ["--set", override]
        with log.open("wb") as output:
            # In a group of its own: signals to it then reach the driver and what belongs to it, as from a shell.
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | {MARK: self.mark}, start_new_session=True
            )
        self.port = 0

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (found := re.search(r"serving tiny-random at http://127\.0\.0\.1:(\d+)/v1", self.output)):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        self.port = int(found[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error:")]

    def processes(self) -> dict[int, str]:
        return processes_marked(self.mark)

    def pids_of(self, role: str) -> list[int]:
        """The processes of one kind of actor, e.g. `WorkerActor`."""
        return [pid for pid, command in self.processes().items() if command.startswith(f"ray::{role}")]

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def wait_until_gone(self, timeout: float, *, but_agents: bool = False) -> dict[int, str]:
        """What is left of the deployment after at most `timeout` seconds; `but_agents` leaves Ray's out."""
        deadline = time.monotonic() + timeout
        while True:
            left = self.processes()
            if but_agents:
                left = {pid: command for pid, command in left.items() if not command.startswith(RAYS_AGENTS)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, path: str) -> Reply:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        return self._ask("POST", path, body)

    def complete(self, prompt: str, **options: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **options})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            return Reply(response.status, json.loads(response.read()))
        finally:
            connection.close()

    def open_stream(self, prompt: str, **options: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self.connect()
        body = {"prompt": prompt, "temperature": 0, "stream": True, **options}
        connection.request("POST", "/v1/completions", json.dumps(body))
        return connection, connection.getresponse()

    def stream(self, prompt: str, **options: Any) -> StreamResult:
        result = StreamResult()
        self._follow(result, threading.Event(), prompt, options)
        return result

    def start_streams(self, prompts: list[str], **options: Any) -> Streams:
        """Streams in threads; returns when each has received something."""
        streams = Streams([StreamResult() for _ in prompts])
        for result, prompt in zip(streams.results, prompts, strict=True):
            begun = threading.Event()
            thread = threading.Thread(target=self._follow, args=(result, begun, prompt, options), daemon=True)
            thread.start()
            streams.threads.append(thread)
            streams.begun.append(begun)
        assert all(begun.wait(30) for begun in streams.begun)
        return streams

    def _follow(self, result: StreamResult, begun: threading.Event, prompt: str, options: dict[str, Any]) -> None:
        connection, response = self.open_stream(prompt, **options)
        try:
            for event in _events(response):
                if event == "[DONE]":
                    result.is_done = True
                else:
                    result.events.append(json.loads(event))
                begun.set()
        except (OSError, http.client.HTTPException):
            pass  # what came before is in `result`
        finally:
            result.ended_at = time.monotonic()
            begun.set()
            connection.close()


@dataclass
class Streams:
    results: list[StreamResult]
    threads: list[threading.Thread] = field(default_factory=list)
    begun: list[threading.Event] = field(default_factory=list)

    @property
    def are_running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self, timeout: float) -> list[StreamResult]:
        for thread in self.threads:
            thread.join(timeout)
            assert not thread.is_alive(), "a stream never ended"
        return self.results


def _events(lines: http.client.HTTPResponse | IO[bytes]) -> Iterator[str]:
    for line in lines:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()
