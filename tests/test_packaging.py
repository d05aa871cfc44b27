"""What is installed is what is in this folder, whole, and with the versions it says."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "scheduler", "workers", "cluster")
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

DISTRIBUTION_OF = {"yaml": "pyyaml", "flash_attn": "flash-attn", "pydantic": "fastapi", "starlette": "fastapi"}
USED_BY_NAME = {"uvloop": "uvicorn", "httptools": "uvicorn"}  # never imported here: uvicorn picks them up


def run_python(code: str, *, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60)


def requirements(*groups: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for group in groups:
        lines += PROJECT["optional-dependencies"][group]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, Version]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def imported_libraries() -> set[str]:
    found = set()
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tests_see_the_copy_in_this_folder(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).parent == REPOSITORY / package


def test_no_installed_copy_hides_behind_this_one(tmp_path: Path) -> None:
    done = run_python(f"from importlib.util import find_spec; print([find_spec(p) for p in {PACKAGES}])", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for origin in re.findall(r"origin='([^']+)'", done.stdout):
        assert Path(origin).is_relative_to(REPOSITORY), "pip uninstall antiphon, then make install"


def test_tests_are_files_and_not_a_package() -> None:
    assert list((REPOSITORY / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("package", ["configs", "scheduler"])
def test_a_pure_package_works_where_neither_torch_nor_ray_can_be_imported(package: str) -> None:
    code = f"""
import importlib, pkgutil, sys
for library in ("torch", "ray", "transformers"):
    sys.modules[library] = None
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, "{package}."):
    importlib.import_module(module.name)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_code_is_a_package_so_that_none_is_left_out(package: str) -> None:
    folders = {path.parent for path in (REPOSITORY / package).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_that_is_not_python_is_declared_as_package_data(package: str) -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"][package]
    root = REPOSITORY / package
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    data = [file for file in files if not file.endswith((".py", ".pyc"))]
    assert [file for file in data if not any(fnmatch(file, pattern.replace("**/", "*")) for pattern in patterns)] == []


def test_every_library_that_is_imported_is_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements("gpu")}
    needed = {canonicalize_name(DISTRIBUTION_OF.get(library, library)) for library in imported_libraries()}
    assert needed - declared == set()


def test_every_library_that_is_declared_is_used() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements()}
    used = {canonicalize_name(DISTRIBUTION_OF.get(library, library)) for library in imported_libraries()}
    used |= {extra for extra, by in USED_BY_NAME.items() if by in used}
    assert declared - used == set()


def test_the_tests_run_with_versions_inside_the_declared_ranges() -> None:
    pinned = pins()
    for requirement in requirements("dev"):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"
    assert next(iter(pinned)) == "torch"


def test_continuous_integration_runs_the_command_of_the_readme_and_no_other() -> None:
    path = REPOSITORY / ".ci" / "run"
    commands = [line for line in path.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
    assert os.access(path, os.X_OK)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert "make test" in readme
    assert "make demo" in readme
