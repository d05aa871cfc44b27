"""What only the cluster can refuse; what needs no cluster is in the unit tests."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.served import MARK, ROOT, processes_marked


def test_a_tokenizer_that_cannot_be_read_is_refused_by_the_door_and_leaves_nothing(tiny_model: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer.json").write_text("{")
    mark = secrets.token_hex(8)
    command = [sys.executable, str(ROOT / "deploy.py"), "serve", "tiny-random", "--set", f"model.path={model}"]
    command += ["--set", "ingress.port=0"]
    result = subprocess.run(
        command, env=os.environ | {MARK: mark}, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 3, result.stderr
    assert "tokenizer.json cannot be read as a tokenizer" in result.stderr.strip().splitlines()[-1]
    assert processes_marked(mark) == {}


@pytest.mark.parametrize(
    ("override", "exit_code", "message"),
    [
        ("parallel.tensor_parallel_size=64", 4, "need 64 CPU cores"),
        ("cache.num_blocks=100000000", 4, "lower cache.memory_gib or cache.num_blocks"),
        ("model.max_model_len=100000", 2, "the model's own limit is 512"),
    ],
)
def test_an_impossible_deployment_is_refused_in_time_and_leaves_nothing(
    tiny_model: Path, override: str, exit_code: int, message: str
):
    mark = secrets.token_hex(8)
    command = [sys.executable, str(ROOT / "deploy.py"), "serve", "tiny-random"]
    command += ["--set", f"model.path={tiny_model}", "--set", override]
    started = time.monotonic()
    result = subprocess.run(
        command, env=os.environ | {MARK: mark}, capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - started < 30
    assert result.returncode == exit_code, result.stderr
    assert message in " ".join(result.stderr.split())
    assert result.stderr.strip().splitlines()[-1].startswith("error:")
    assert processes_marked(mark) == {}
