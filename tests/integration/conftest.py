"""Real Ray on this machine: every deployment is a `deploy.py serve` of a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.served import Served

Starter = Callable[..., Served]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_models import save_tiny_model

    return save_tiny_model("llama3", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts a deployment with the given overrides; whatever is left of it at the end of the module is killed."""
    started: list[Served] = []

    def start(*overrides: str) -> Served:
        log = tmp_path_factory.mktemp("serve") / "log.txt"
        server = Served(tiny_model, *overrides, log=log)
        started.append(server)
        return server.__enter__()

    yield start
    for server in started:
        server.__exit__(None, None, None)
