"""What a rank's process can compute with: versions of the libraries, and the device it was given.

Owns the questions put to torch before anything is allocated. Knows neither models nor who decides on the answers.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """`free_bytes` and `total_bytes` are of this device: GPU memory, or the memory of the node."""

    name: str
    uuid: str
    free_bytes: int
    total_bytes: int
    versions: dict[str, str]


def describe_device(device: str, *, num_threads: int) -> DeviceReport:
    """The first device of the kind `device` ("cpu" or "cuda") that this process sees.

    Raises:
        ValueError: torch sees no such device.
    """
    torch.set_num_threads(num_threads)
    versions = {"torch": str(torch.__version__)}  # a plain str: its own type would make readers import torch
    if device == "cpu":
        free, total = _node_memory()
        return DeviceReport("cpu", "", free, total, versions)
    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA device; install a CUDA build or set worker.device=cpu"
        )
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    versions["cuda"] = str(torch.version.cuda)
    versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    versions["flash-attn"] = _version_of("flash-attn")
    return DeviceReport(properties.name, str(properties.uuid), free, total, versions)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _node_memory() -> tuple[int, int]:
    """Available and total bytes, from the kernel."""
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, value = line.split(":", 1)
            fields[name] = int(value.split()[0]) * 1024
    return fields["MemAvailable"], fields["MemTotal"]
