"""Runs a command whose processes get no AMX from the kernel: `python -I refuse_amx.py COMMAND...`.

Tile registers must be asked for, by `arch_prctl(ARCH_REQ_XCOMP_PERM)`. A system call filter, which children inherit and
nobody can take off again, answers that call with EPERM, as a kernel that does not hand them out would. A tile
instruction then ends its process: whoever uses one in spite of it does not go unnoticed. x86-64 Linux alone. Imports
nothing of this repository, so that it can start what lives in another environment.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Sequence

SYS_ARCH_PRCTL, SYS_SECCOMP = 158, 317
REQUEST_PERMISSION, TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
PR_SET_NO_NEW_PRIVS = 38
SET_MODE_FILTER, SPEC_ALLOW = 1, 4  # the latter: no mitigations that would slow the command down
AUDIT_ARCH_X86_64 = 0xC000003E
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # classic BPF; loads are of 32 bits
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

# (code, instructions to skip if equal, if not, operand)
PROGRAM = (
    (LOAD, 0, 0, ARCHITECTURE),
    (JUMP_IF_EQUAL, 0, 5, AUDIT_ARCH_X86_64),
    (LOAD, 0, 0, NUMBER),
    (JUMP_IF_EQUAL, 0, 3, SYS_ARCH_PRCTL),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (JUMP_IF_EQUAL, 0, 1, REQUEST_PERMISSION),
    (RETURN, 0, 0, FAIL_WITH | errno.EPERM),
    (RETURN, 0, 0, ALLOW),
)


class Instruction(ctypes.Structure):
    """`struct sock_filter`"""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_equal", ctypes.c_uint8),
        ("if_not", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    ]


class Program(ctypes.Structure):
    """`struct sock_fprog`"""

    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]


def refuse_amx() -> None:
    """For this process and all that it starts. Raises OSError: this system has no such filter."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise OSError(errno.ENOSYS, "AMX can be withheld on x86-64 Linux alone")
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = (Instruction * len(PROGRAM))(*PROGRAM)
    program = Program(len(PROGRAM), instructions)
    number, mode, flags = (ctypes.c_long(value) for value in (SYS_SECCOMP, SET_MODE_FILTER, SPEC_ALLOW))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not let go of privileges")
    if libc.syscall(number, mode, flags, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no system call filter")


def amx_refusal() -> int:
    """What the kernel answers to who asks for tile registers: an errno, or 0 where it hands them out."""
    libc = ctypes.CDLL(None, use_errno=True)
    number, request, what = (ctypes.c_long(value) for value in (SYS_ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))
    return 0 if libc.syscall(number, request, what) == 0 else ctypes.get_errno()


def main(command: Sequence[str]) -> int:
    if not command:
        raise SystemExit("give the command to run")
    try:
        refuse_amx()
    except OSError as error:
        raise SystemExit(f"cannot withhold AMX: {error}") from error
    if amx_refusal() == 0:
        raise SystemExit("cannot withhold AMX: the kernel still hands it out")
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
