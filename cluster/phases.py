"""What the user sees of a start: one line per phase, with its time and what it found.

Owns the lines on the console. Everything here goes to standard error, so that answers alone are on standard output.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from rich.console import Console, RenderableType

from cluster.exit_codes import InterruptedStartError


@dataclass(slots=True)
class Phase:
    """A named step that runs now."""

    name: str
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Phases:
    """Prints phases as they end; on a terminal also the one that runs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.started = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        phase = Phase(name)
        started = self.clock()
        with self.console.status(f"{name} ..."):
            yield phase
        line = f"[bold]{name:<11}[/bold] {self.clock() - started:6.2f} s  {'; '.join(phase.notes)}"
        self.console.print(line, highlight=False, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        self.console.print(what, highlight=False, soft_wrap=isinstance(what, str))

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started


class StopRequest:
    """SIGINT and SIGTERM as a number that loops look at. Install it from the main thread."""

    def __init__(self) -> None:
        self.num_requests = 0

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._count)
        signal.signal(signal.SIGTERM, self._count)

    def _count(self, signum: int, frame: FrameType | None) -> None:
        self.num_requests += 1

    def check(self) -> None:
        """Raises: InterruptedStartError, once the user has asked to stop."""
        if self.num_requests:
            raise InterruptedStartError("stopped before the deployment was up")
