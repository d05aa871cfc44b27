"""Where ranks and the launcher keep what they made once: converted models and compiled kernels."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.1


def default_cache_dir() -> Path:
    return Path(os.environ.get("ANTIPHON_CACHE") or "~/.cache/antiphon").expanduser()


@contextlib.contextmanager
def exclusive(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path`, which the system drops when its holder dies.

    Raises:
        TimeoutError: another process has held it for longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {timeout_s:.0f} s; end it and retry"
                    ) from None
                time.sleep(POLL_S)
        yield
