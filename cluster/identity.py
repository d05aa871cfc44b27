"""What a process runs: the hash of our source and the versions beside it.

Owns the comparison that refuses a rank which would compute something else. Knows nothing of Ray; a worker fills
the torch fields in, and no other process imports torch for it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.deployment_errors import StartupError, UsageError

PACKAGES = ("configs", "scheduler", "workers", "cluster")
SOURCE_SUFFIXES = frozenset({".py", ".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank's software and the device it was given."""

    rank: int
    address: str
    pid: int
    versions: dict[str, str] = field(default_factory=dict)
    device_name: str = "cpu"
    device_uuid: str = ""
    free_bytes: int = 0
    total_bytes: int = 0

    @property
    def where(self) -> str:
        return f"rank {self.rank} on node {self.address}"


def source_root() -> Path:
    """The one folder that holds all four packages.

    Raises:
        UsageError: they come from different folders, so that a process would mix two versions.
    """
    parents = {}
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise UsageError(f"package {package} is not importable; run deploy.py from a whole checkout")
        parents[package] = Path(found.submodule_search_locations[0]).resolve().parent
    if len(set(parents.values())) > 1:
        listing = ", ".join(f"{package} in {parent}" for package, parent in parents.items())
        raise UsageError(
            f"the four packages come from different folders ({listing}); "
            "uninstall the other copy or take its folder out of PYTHONPATH"
        )
    return parents[PACKAGES[0]]


def python_path(root: Path) -> str:
    """Makes another process import the same copy as this one."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(root), inherited] if inherited else [str(root)])


def source_hash(root: Path) -> str:
    """A hash over names and contents of the packages' source files, the same on every machine."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()[:16]


def model_fingerprint(directory: Path) -> str:
    """A hash over the model's shape and the names and sizes of its weight files, equal on every node."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()[:16]


def base_versions(root: Path) -> dict[str, str]:
    return {"source": source_hash(root), "python": platform.python_version()}


def check_same(expected: Mapping[str, str], identities: Sequence[Identity]) -> None:
    """Every rank runs what the driver (`expected`) and the other ranks run, each on a device of its own.

    Raises:
        StartupError: naming the first rank that differs, in what, and from whom.
    """
    first = identities[0]
    for identity in identities:
        for name, value in expected.items():
            _compare(identity, name, value, "the driver")
        for name, value in first.versions.items():
            _compare(identity, name, value, first.where)
    owners: dict[str, Identity] = {}
    for identity in identities:
        if not identity.device_uuid:
            continue
        other = owners.setdefault(identity.device_uuid, identity)
        if other is not identity:
            raise StartupError(
                f"{identity.where} and {other.where} were given the same device {identity.device_uuid}; "
                "unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES on that node"
            )


def _compare(identity: Identity, name: str, value: str, reference: str) -> None:
    found = identity.versions.get(name, "nothing")
    if found != value:
        remedy = (
            "install the same copy on every node, or deploy with `ray job submit --working-dir .`"
            if name == "source"
            else f"install the same {name} on every node"
        )
        raise StartupError(f"{identity.where} has {name} {found}, {reference} has {value}; {remedy}")
