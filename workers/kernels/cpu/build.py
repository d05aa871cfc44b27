"""Compiles the CPU kernels for this machine, once.

The result is kept in the cache directory under a hash of the sources, the compiler and the flags; several processes may
ask at the same time. Knows neither what the library offers (`workers.kernels.cpu.library`) nor torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from workers.cache_dir import default_cache_dir, exclusive

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++")  # clang lacks the shuffles of simd.h
COMMON_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-psabi")
TIMEOUT_S = 300.0


class KernelsUnavailable(RuntimeError):  # noqa: N818  a state of the machine, not a fault
    """The kernels cannot be built or loaded here; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set: the flags that give it, and what the CPU must have to run the result."""

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...]
    needs: frozenset[str]

    def is_supported(self) -> bool:
        return platform.machine() in self.machines and self.needs <= usable_features()


_X86 = ("x86_64", "AMD64")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_AMX_FLAGS = ("-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16")
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")

# The best first.
VARIANTS = (
    Variant("amx", _X86, (*_VNNI_FLAGS, *_AMX_FLAGS), _AVX512 | _AMX | {"avx512_bf16"}),
    Variant("avx512", _X86, _VNNI_FLAGS, _AVX512),
    Variant("avx2", _X86, ("-march=x86-64-v3",), _AVX2),
    Variant("neon", ("aarch64", "arm64"), ("-mcpu=native",), frozenset()),
    Variant("portable", (*_X86, "aarch64", "arm64"), (), frozenset()),
)


def cpu_features() -> frozenset[str]:
    """The feature flags of this machine's first processor, as Linux spells them; none where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def usable_features() -> frozenset[str]:
    """Those that a process may use, too: Linux hands out AMX's tile registers on request, and may refuse them."""
    features = cpu_features()
    return features - _AMX if features & _AMX and not _amx_is_granted() else features


@functools.cache
def _amx_is_granted() -> bool:
    arch_prctl, request_permission, tile_data = map(ctypes.c_long, (158, 0x1023, 18))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(arch_prctl, request_permission, tile_data) == 0:
        return True
    log.info("CPU kernels: without AMX, which the system refuses: %s", os.strerror(ctypes.get_errno()))
    return False


def supported_variants() -> list[Variant]:
    return [variant for variant in VARIANTS if variant.is_supported()]


def choose_variant(name: str = "auto") -> Variant:
    """Raises KernelsUnavailable: none of that name, or not on this CPU."""
    supported = supported_variants()
    found = next((v for v in supported if name in ("auto", v.name)), None)
    if found is None:
        here = ", ".join(v.name for v in supported) or "none"
        raise KernelsUnavailable(f"no CPU kernels called {name!r} for this {platform.machine()} CPU; it runs: {here}")
    return found


def find_compiler() -> str:
    """Raises KernelsUnavailable: there is none."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else COMPILERS:
        path = shutil.which(candidate)
        if path is not None:
            return path
    raise KernelsUnavailable(f"no C++ compiler ({named or ', '.join(COMPILERS)}); install g++ 11 or newer")


def build(variant: Variant, cache_dir: Path | None = None) -> Path:
    """The shared library, compiled if no equal one is in the cache.

    Raises:
        KernelsUnavailable: no compiler, it failed, or the cache directory cannot be written.
    """
    compiler = find_compiler()
    directory = cache_dir or default_cache_dir() / "kernels"
    try:
        target = directory / f"antiphon-{variant.name}-{_fingerprint(compiler, variant)}.so"
        if target.is_file():
            log.debug("CPU kernels: found %s", target)
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with exclusive(directory / ".lock", TIMEOUT_S):
            if not target.is_file():
                _compile(compiler, variant, target)
        return target
    except OSError as error:
        raise KernelsUnavailable(f"cannot build the CPU kernels in {directory}: {error}") from error


def _fingerprint(compiler: str, variant: Variant) -> str:
    version = _run([compiler, "--version"]).stdout
    digest = hashlib.blake2b(digest_size=10)
    for text in (version, platform.machine(), *COMMON_FLAGS, *variant.flags):
        digest.update(text.encode() + b"\0")
    if "-mcpu=native" in variant.flags:
        digest.update(" ".join(sorted(cpu_features())).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    """All sources at once, as many processes as cores; the library appears under its name whole or not at all."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        objects = [Path(folder) / f"{path.stem}.o" for path in sources]
        command = [compiler, *COMMON_FLAGS, *variant.flags]
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            pairs = zip(sources, objects, strict=True)
            list(pool.map(lambda pair: _run([*command, "-c", str(pair[0]), "-o", str(pair[1])]), pairs))
        library = Path(folder) / target.name
        _run([*command, "-shared", *map(str, objects), "-o", str(library)])
        library.replace(target)
    log.info("CPU kernels: built %s in %.1f s", target, time.monotonic() - started)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        said = "\n".join(error.stderr.strip().splitlines()[:20])
        raise KernelsUnavailable(f"{' '.join(command)} failed:\n{said}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{' '.join(command)} took more than {TIMEOUT_S:g} s") from error
