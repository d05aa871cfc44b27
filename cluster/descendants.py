"""The processes below this one, and ending those that a start which was broken off leaves behind.

Owns reading /proc; where there is none, nothing is found. Knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path


def descendants() -> set[int]:
    """Children of this process, their children and so on."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, _, after_name = entry.read_text(errors="replace").rpartition(")")
            parents[int(entry.parent.name)] = int(after_name.split()[1])
    found, level = set[int](), {os.getpid()}
    while level := {pid for pid, parent in parents.items() if parent in level} - found:
        found |= level
    return found


def end_descendants(*, but: Collection[int] = ()) -> None:
    """Kill them all, except `but`. Each is stopped before its children are looked for, so that none starts unseen."""
    found: set[int] = set()
    while new := descendants().difference(found, but):
        _send(new, signal.SIGSTOP)
        found |= new
    _send(found, signal.SIGKILL)


def _send(pids: Collection[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
