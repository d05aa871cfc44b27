"""Having a model on this node: `workers.prepare` in a process of its own, so that torch never enters this one.

Owns the subprocess and what its failure means. Does not know how a model is found or converted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.deployment_errors import ModelError, StartupError
from cluster.identity import python_path, source_root
from configs.schema import ModelConfig

POLL_S = 0.05


class Preparation:
    """A running `workers.prepare`. End it with `wait` or `cancel`."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        command = [sys.executable, "-m", "workers.prepare", model.path]
        if model.cache_dir:
            command += ["--cache-dir", model.cache_dir]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path(source_root())},
        )

    def fail_early(self, patience: float) -> None:
        """Wait a moment, so that a wrong path is refused before anything else is begun.

        Raises:
            ModelError: see `wait`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(patience):
                self.wait(patience)

    def wait(self, timeout: float, stop: Callable[[], None] = lambda: None) -> Path:
        """The directory of the prepared model.

        Raises:
            ModelError: it cannot be found or read; the message is the preparation's own.
            StartupError: it took longer than `timeout` seconds since it began.
        """
        while True:
            stop()
            try:
                output, errors = self.process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - self.started > timeout:
                    self.cancel()
                    raise StartupError(
                        f"model {self.model.path} was not ready within {timeout:g} s; raise cluster.startup_timeout_s, "
                        "or prepare it once with `python -m workers.prepare`"
                    ) from None
        if self.process.returncode < 0:  # it had no time to say why
            raise ModelError(
                f"the preparation of {self.model.path} was ended by {signal.Signals(-self.process.returncode).name}; "
                "if that was for lack of memory, free some, or prepare it on a larger machine"
            )
        if self.process.returncode:
            raise ModelError(_last_line(errors) or f"the model {self.model.path} cannot be prepared")
        return Path(_last_line(output))

    def cancel(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(ValueError):  # already read to the end
            self.process.communicate()


def run_preparation(model: ModelConfig, *, timeout: float) -> Path:
    preparation = Preparation(model)
    try:
        return preparation.wait(timeout)
    finally:
        preparation.cancel()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
