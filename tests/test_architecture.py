"""The shape of the code, read from its syntax: who imports whom, and how long files and functions are.

    configs <- scheduler <- workers <- cluster <- deploy.py

Left never imports right. Nothing is executed here, so the rules hold for code that this machine could not even import.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "scheduler", "workers", "cluster")

STEP_CONTRACT = ("scheduler.output", "scheduler.codec", "scheduler.sampling_params")
MAY_IMPORT = {
    "configs": ("configs",),
    "scheduler": ("configs", "scheduler"),
    "workers": ("configs", "workers", *STEP_CONTRACT),
    "cluster": ("configs", "scheduler", "workers", "cluster"),
}
THIRD_PARTY = {
    "configs": {"yaml"},
    "scheduler": {"numpy", "xxhash"},
    "workers": {
        "flash_attn", "gguf", "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "triton",
    },
    "cluster": {
        "fastapi", "jinja2", "msgspec", "numpy", "pydantic", "ray", "rich", "starlette", "tokenizers", "typer",
        "uvicorn", "uvloop", "xxhash",
    },
}  # fmt: skip
ONLY_IN = {"ray": "cluster/runtime.py", "yaml": "configs/loader.py"}
NO_CLOCK_NO_LOOP = {"time", "datetime", "asyncio", "threading", "socket", "random", "secrets"}
LOADS_WORKERS = {"cluster/local.py"}  # the engine without Ray, which runs the model in its own process

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 90
EXEMPT = ("workers/kernels/",)


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    is_lazy: bool  # inside a function: runs when called, not when the module is loaded

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def sources(package: str) -> list[Path]:
    return sorted((REPOSITORY / package).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def imports_of(path: Path) -> Iterator[Import]:
    """Every import statement; `from package import module` counts as `package.module` where there is such a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            assert node.module is not None
            modules = [_module(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module in modules:
            yield Import(name(path), node.lineno, module, id(node) in lazy)


def _module(package: str, member: str) -> str:
    folder = REPOSITORY.joinpath(*package.split("."))
    is_module = (folder / f"{member}.py").is_file() or (folder / member / "__init__.py").is_file()
    return f"{package}.{member}" if is_module else package


def all_imports(package: str) -> list[Import]:
    return [found for path in sources(package) for found in imports_of(path)]


def is_within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in allowed)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_to_its_right(package: str) -> None:
    ours = [found for found in all_imports(package) if found.module.split(".")[0] in (*PACKAGES, "tests", "benchmarks")]
    assert [str(found) for found in ours if not is_within(found.module, MAY_IMPORT[package])] == []


def test_no_files_import_each_other() -> None:
    """Not for types alone either; an import inside a function is asked for when it is needed, and may."""
    needs: dict[str, set[str]] = {}
    for package in PACKAGES:
        for found in all_imports(package):
            if not found.is_lazy:
                importer = found.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                needs.setdefault(importer, set()).add(found.module)
    TopologicalSorter(needs).prepare()  # CycleError names the files


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_only_the_libraries_it_is_allowed(package: str) -> None:
    known = sys.stdlib_module_names | set(PACKAGES) | THIRD_PARTY[package]
    assert [str(found) for found in all_imports(package) if found.module.split(".")[0] not in known] == []


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_some_libraries_have_one_door(library: str) -> None:
    found = [found for package in PACKAGES for found in all_imports(package) if found.module.split(".")[0] == library]
    assert {found.file for found in found} <= {ONLY_IN[library]}, [str(found) for found in found]


def test_the_scheduler_reads_no_clock_and_runs_no_loop_of_its_own() -> None:
    used = [str(found) for found in all_imports("scheduler") if found.module.split(".")[0] in NO_CLOCK_NO_LOOP]
    assert used == []


def test_cluster_processes_load_the_workers_only_when_they_become_one() -> None:
    eager = [
        str(found)
        for found in all_imports("cluster")
        if found.module.split(".")[0] == "workers" and not found.is_lazy and found.file not in LOADS_WORKERS
    ]
    assert eager == []


def test_the_entry_point_defines_nothing() -> None:
    tree = ast.parse((REPOSITORY / "deploy.py").read_text(encoding="utf-8"))
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert defined == []
    assert {found.module for found in imports_of(REPOSITORY / "deploy.py")} <= {"cluster.launch", "__future__"}


def test_driver_scheduler_and_ingress_never_load_torch() -> None:
    modules = ["cluster.launch", "cluster.supervisor", "cluster.engine", "cluster.ingress.app"]
    code = f"""
import importlib, sys
for library in ("torch", "transformers"):
    sys.modules[library] = None
for module in {modules}:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_says_what_it_owns(package: str) -> None:
    trees = {name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sources(package)}
    assert [file for file, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_stay_short(package: str) -> None:
    """The house rule is about 300 and 35 lines; only what is far beyond it fails."""
    too_long = []
    for path in sources(package):
        if name(path).startswith(EXEMPT):
            continue
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > MAX_FILE_LINES:
            too_long.append(f"{name(path)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{name(path)}:{node.lineno} {node.name}: {length} lines")
    assert too_long == []
