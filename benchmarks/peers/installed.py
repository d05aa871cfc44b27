"""Versions of what is installed in another virtual environment, without running its Python."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path


def installed_version(environment: Path, package: str) -> str:
    folders = [str(folder) for folder in environment.glob("lib/python3*/site-packages")]
    found = next(iter(distributions(name=package, path=folders)), None)
    return "not installed" if found is None else found.version
