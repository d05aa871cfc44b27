"""What every benchmark prints around its figures: versions, the machine, the command, and tables in markdown."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment(packages: Iterable[str] = ("numpy", "xxhash")) -> dict[str, str]:
    """The versions of Python and `packages`, and the CPU."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found | {"cpu": cpu_name()}


def command() -> str:
    """The command that was given, free of this machine's paths."""
    spec = sys.modules["__main__"].__spec__
    module = f"benchmarks.{Path(sys.argv[0]).stem}" if spec is None else spec.name
    arguments = [Path(a).name if "/" in a else a for a in sys.argv[1:]]
    return " ".join(["python -m", module, *arguments])


def heading(packages: Iterable[str] = ("numpy", "xxhash")) -> str:
    described = ", ".join(f"{name} {value}" for name, value in environment(packages).items())
    return f"`{command()}`\n\n{described}\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3f}" if abs(cell) < 10 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
