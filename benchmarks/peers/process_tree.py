"""All processes that one command started: found, weighed and, in the end, ended.

Owns finding them. Children may leave their parent (daemons, `setsid`) and overwrite their environment (process titles),
so both the parents and a mark in the environment are looked at, and who was once found is kept.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator

import psutil

MARK = "ANTIPHON_BENCHMARK"
POLL_S = 0.005


class ProcessTree:
    """`environment` must be in the environment of the process that is then given to `follow`."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self.environment = {MARK: self._token}
        self._found: dict[int, psutil.Process] = {}

    def follow(self, pid: int) -> None:
        self._found[pid] = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """Those that are alive, so none that only waits for its parent to ask how it ended."""
        self._forget_dead()
        for process in psutil.process_iter():
            if process.pid not in self._found and self._is_marked(process):
                self._found[process.pid] = process
        for process in list(self._found.values()):
            with contextlib.suppress(psutil.Error):
                self._found.update({child.pid: child for child in process.children(recursive=True)})
        self._forget_dead()
        return list(self._found.values())

    def _forget_dead(self) -> None:
        self._found = {pid: process for pid, process in self._found.items() if _is_alive(process)}

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARK) == self._token)
        except (psutil.Error, OSError):
            return False

    def pss_bytes(self) -> float:
        """Memory; a page that several processes share is split among them."""
        return sum(self._each(lambda process: float(process.memory_full_info().pss)))

    def cpu_seconds(self) -> float:
        return sum(self._each(lambda process: sum(process.cpu_times()[:2])))

    def _each(self, measure: Callable[[psutil.Process], float]) -> Iterator[float]:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                yield measure(process)

    def kill(self, timeout_s: float) -> int:
        """End at once whatever is left, and say how many those were."""
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + timeout_s
        while any(map(_is_alive, left)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return len(left)


def _is_alive(process: psutil.Process) -> bool:
    """`is_running` tells a process from a later one of the same number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
