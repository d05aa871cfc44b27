"""Ending what is below a process: whole families, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

from cluster.descendants import descendants, end_descendants

FAMILY = "sleep 60 & sleep 60 & wait"  # a shell with two children


def wait_until(condition: Callable[[], bool], timeout: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_children_of_children_end_too_and_those_that_were_there_before_go_on():
    other = subprocess.Popen(["sleep", "60"])
    before = descendants()
    family = subprocess.Popen(["sh", "-c", FAMILY])
    try:
        assert other.pid in before
        assert wait_until(lambda: len(descendants() - before) == 3)
        members = descendants() - before
        end_descendants(but=before)
        assert family.wait(5.0) == -signal.SIGKILL
        assert wait_until(lambda: not any(map(is_running, members)))
        assert other.poll() is None
        assert os.getpid() not in members
    finally:
        other.kill()
        other.wait()
