"""Compiling Triton kernels for a GPU that is not there, by the very launches that would run them.

Within `compiling_for` a launch compiles its kernel for the given architecture and starts nothing; tensors may be on
the CPU. Must not share a process with `tests.support.triton_interpreter`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of one kernel. A stack without a spill does not occur in these kernels."""

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: str  # PTX


class AbsentDriver:
    """Says what the compiler asks a driver for."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # compiled kernels are remembered by device

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return "cpu"


@contextmanager
def compiling_for(capability):
    """Yields the list that `Compiled` entries are added to, one for each launch."""
    found = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        del warmup
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_describe(kernel, capability))
        return kernel

    driver.set_active(AbsentDriver(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def _describe(kernel, capability):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return Compiled(
        kernel=kernel.metadata.name,
        capability=capability,
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"],
        local_bytes=numbers["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        instructions=kernel.asm["ptx"],
    )
