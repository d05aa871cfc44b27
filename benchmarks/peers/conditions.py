"""What is done alike to every system that is compared: AMX withheld, or nothing compiled kept from before.

Owns those changes of a system's command and environment, and how a report says them. Starts nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.system import System

HERE = Path(__file__).resolve().parent
LAUNCHER = (sys.executable, "-I", str(HERE / "refuse_amx.py"))
OLDER_CPU_FOLDER = HERE / "older_cpu"  # a sitecustomize.py
OLDER_CPU = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",  # with VNNI
    "TORCHINDUCTOR_CPP_MARCH": "cascadelake",  # instead of this machine's own
}
MORE_OPTIONS = {"ours": ("--set", "worker.cpu_kernels=avx512")}
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Conditions:
    without_amx: bool = False
    cold: bool = False
    peers: Path = Path()  # keeps what is compiled without AMX, apart from the rest

    @contextmanager
    def applied(self, system: System) -> Iterator[System]:
        """The system to start instead, as long as the block lasts."""
        if self.without_amx:
            system = without_amx(system)
        if self.cold:
            with tempfile.TemporaryDirectory(prefix="cold-", ignore_cleanup_errors=True) as folder:
                yield with_cache(system, Path(folder))
        elif self.without_amx:
            yield with_cache(system, self.peers / "cache-without-amx" / system.name.partition("-")[0])
        else:
            yield system

    def recorded(self) -> dict[str, bool]:
        return {"without_amx": self.without_amx, "cold": self.cold}

    def check(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError: `records` are of other conditions, or AMX cannot be withheld on this machine."""
        for name, value in self.recorded().items():
            if any(record.get(name, False) != value for record in records):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"the records to resume were made with{'out' * value} {option}; give another --json")
        if not self.without_amx:
            return
        done = subprocess.run([*LAUNCHER, "true"], capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise ValueError(f"--without-amx: {done.stderr.strip()}; leave it out")


def without_amx(system: System) -> System:
    """As on a CPU with AVX-512 and VNNI, but neither AMX nor bfloat16 arithmetic.

    The kernel refuses the tile registers, which all ask it for; libraries that go by the CPU's flags are told the rest.
    """
    path = system.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    python_path = os.pathsep.join([str(OLDER_CPU_FOLDER), *([path] if path else [])])
    more = MORE_OPTIONS.get(system.name.partition("-")[0], ())
    return replace(
        system,
        command=[*LAUNCHER, *system.command, *more],
        environment={**system.environment, **OLDER_CPU, "PYTHONPATH": python_path},
    )


def with_cache(system: System, folder: Path) -> System:
    """Keeps what it compiles in `folder`."""
    return replace(system, environment={**system.environment, **dict.fromkeys(system.cache_variables, str(folder))})


def said(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A report's paragraphs on the conditions of its records; none where nothing is special."""
    texts = {
        "without_amx": "AMX was withheld from every system (`--without-amx`): the kernel refused it, and libraries "
        "were told of a CPU with AVX-512 and VNNI and nothing newer.\n",
        "cold": "Every start was a first one (`--cold`): nothing that a system had compiled before was there.\n",
    }
    return [text for name, text in texts.items() if any(record.get(name) for record in records)]
