"""Sparing Python's garbage collector the objects that stay for as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports: hundreds of thousands of objects that stay, and that the collector never visits."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """What a process has made by now stays: the collector need not go through it again and again between two steps."""
    gc.collect()
    gc.freeze()
