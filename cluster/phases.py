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
from rich.table import Table
from rich.text import Text

from cluster.deployment_errors import InterruptedStartError


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
        self._print_line(name, f"{self.clock() - started:6.2f} s", "; ".join(phase.notes))

    def _print_line(self, name: str, time_taken: str, notes: str) -> None:
        if not self.console.is_terminal:  # a log: one line each, however long
            self.console.print(f"{name:<11} {time_taken}  {notes}", markup=False, highlight=False, soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="bold", width=10)
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        grid.add_row(name, time_taken, Text(notes))
        self.console.print(grid)

    def show(self, what: RenderableType) -> None:
        as_log = isinstance(what, str) and not self.console.is_terminal
        self.console.print(what, markup=False, highlight=False, soft_wrap=as_log)  # names may hold brackets

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
