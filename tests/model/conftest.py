"""What several files of model tests share: one thread, and tiny checkpoints that are saved once per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, by its name."""
    saved: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny_model(name, tmp_path_factory.mktemp(name))
        return saved[name]

    return get
