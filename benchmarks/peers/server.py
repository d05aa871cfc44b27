"""A system's server while it runs: started, healthy, weighed, stopped.

Owns one process tree and its log. Knows nothing of workloads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.peers.process_tree import ProcessTree
from benchmarks.peers.system import System

POLL_S = 0.05
STOP_TIMEOUT_S = 60.0
NUM_LOG_LINES = 25


class ServerError(RuntimeError):
    """A server that did not come up, with the end of its log."""


class Server:
    """`with Server(...) as server:` starts it and waits until it is healthy; `start_s` says how long that took."""

    def __init__(self, system: System, port: int, log: Path, *, start_timeout_s: float) -> None:
        self.system = system
        self.url = f"http://127.0.0.1:{port}"
        self.tree = ProcessTree()
        self.start_s = 0.0
        self._log = log
        self._start_timeout_s = start_timeout_s

    def __enter__(self) -> Server:
        """Raises: ServerError."""
        if self._is_healthy():
            raise ServerError(f"something else already answers at {self.url}; give another --port")
        # From an empty folder: what lies in the caller's is none of a peer's business.
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        environment = os.environ | self.system.environment | self.tree.environment
        started = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self.system.command,
                cwd=self._folder.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.tree.follow(self._process.pid)
        try:
            self._wait_until_healthy(started)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_healthy(self, started: float) -> None:
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise ServerError(f"{self.system.name} ended with {self._process.returncode}:\n{self._log_end()}")
            if time.monotonic() - started > self._start_timeout_s:
                raise ServerError(f"{self.system.name} not up in {self._start_timeout_s:g} s:\n{self._log_end()}")
            time.sleep(POLL_S)
        self.start_s = time.monotonic() - started

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.system.health, timeout=2.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _log_end(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])

    def stop(self) -> None:
        """SIGTERM to the process that was started; after a while, what is left of its tree is killed."""
        self.tree.processes()  # children that lose their parent now were seen before
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
            psutil.wait_procs(self.tree.processes(), timeout=5.0)
        except subprocess.TimeoutExpired:
            pass
        self.tree.kill(timeout_s=10.0)
        self._process.wait(10.0)
        self._folder.cleanup()
