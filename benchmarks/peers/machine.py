"""What else the machine did, and what it could do, while something was measured.

Owns the calibration (`calibrate.c`, compiled on first use) and the accounting of CPU time. Two cores of a virtual
machine may be one real core at times, and others use the same memory: a ratio says little without these figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("calibrate.c")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-pthread")
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Calibration:
    read_gb_per_s: float
    fp32_gflop_per_s: float


@cache
def _program() -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    program = Path(tempfile.mkdtemp(prefix="calibrate-")) / "calibrate"
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True, timeout=TIMEOUT_S)
    return program


def calibrate(num_threads: int) -> Calibration | None:
    """About two seconds of all threads. None where there is no C compiler."""
    program = _program()
    if program is None:
        return None
    command = [str(program), str(num_threads)]
    done = subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True, text=True)
    bandwidth, flops = map(float, done.stdout.split())
    return Calibration(bandwidth, flops)


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """`count` processes that do nothing but use a core each, as neighbours do."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the machine started, all cores together."""

    busy: float
    stolen: float  # that the hypervisor gave to others

    @classmethod
    def now(cls) -> CpuTimes:
        ticks = os.sysconf("SC_CLK_TCK")
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) / ticks for field in fields)
        return cls(user + nice + system + irq + softirq, steal)
