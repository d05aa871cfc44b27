"""How an error leaves one of our processes: as text that every other process can read.

Owns that translation. The traceback stays in the log of the process: the driver never has to import what raised.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from cluster.deployment_errors import DeploymentError, ModelError

P = ParamSpec("P")
T = TypeVar("T")


class ReportedError(Exception):
    """An error of another process, as text. `is_consequence`: it only says that a peer was lost."""

    def __init__(self, message: str, is_consequence: bool = False) -> None:
        super().__init__(message, is_consequence)
        self.message = message
        self.is_consequence = is_consequence

    def __str__(self) -> str:
        return self.message


def reporting(method: Callable[P, T]) -> Callable[P, T]:
    """Log the traceback here, raise something that every process can read."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except DeploymentError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise _reported(error) from None

    return wrapped


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"


def _reported(error: Exception) -> Exception:
    text = one_line(error)
    if isinstance(error, ValueError):
        return ModelError(text)
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_consequence = isinstance(error, (ConnectionError, TimeoutError))  # a rank's ParallelError is one of the former
    where = f"{Path(place.filename).name}:{place.lineno}"
    return ReportedError(f"{type(error).__name__}: {text} ({where})", is_consequence)
