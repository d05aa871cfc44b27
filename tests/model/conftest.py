"""What several files of model tests share: one thread, the CPU kernels of every instruction set here, and tiny models
whose checkpoints are saved once per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cpu_kernels import loaded, variants_here
from tests.support.tiny_models import save_tiny_model
from workers.kernels.cpu.library import CpuKernels, Pool


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=variants_here())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return loaded(request.param)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-thread", "2-threads"])
def pool(request: pytest.FixtureRequest, kernels: CpuKernels) -> Pool:
    return Pool(kernels, request.param)


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, by its name."""
    saved: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny_model(name, tmp_path_factory.mktemp(name))
        return saved[name]

    return get
