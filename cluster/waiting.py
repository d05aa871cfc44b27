"""Waiting for several processes at once: a deadline, a stop request, and the first root error.

Owns what "all of them, or the one error that explains it" means. Knows Ray only through two functions that
`cluster.runtime` provides, so that tests wait for fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.deployment_errors import DeploymentError, ModelError, StartupError
from cluster.reporting import one_line

POLL_S = 0.2
CONSEQUENCES_S = 1.0
"""After a first error others follow, among them sometimes the cause of the first: a survivor of a collective often
reports before the process that broke it is known to be dead."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A method of one of our processes that is running. `label` says whose: "rank 1 on node 10.0.0.7"."""

    label: str
    method: str
    ref: Any


class CallFailedError(Exception):
    """The process raised `cause`, which is foreign to us."""

    def __init__(self, call: Call, cause: BaseException) -> None:
        super().__init__(f"{call.label}: {describe(cause)}")
        self.call = call
        self.cause = cause


class ActorLostError(Exception):
    """The process of `call` is gone; `how` in a few words."""

    def __init__(self, call: Call, how: str) -> None:
        super().__init__(f"{call.label}: {how}")
        self.call = call
        self.how = how


class Waiter(Protocol):
    def wait_any(self, calls: Sequence[Call], timeout: float) -> list[Call]: ...

    def result_of(self, call: Call) -> Any: ...


def describe(error: BaseException) -> str:
    """One line: users' errors speak for themselves, others say their type."""
    text = one_line(error)
    return text if isinstance(error, (ValueError, DeploymentError)) else f"{type(error).__name__}: {text}"


def collect(
    waiter: Waiter,
    calls: Sequence[Call],
    *,
    phase: str,
    timeout: float,
    stop: Callable[[], None],
    guards: Sequence[Call] = (),
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """The results of all `calls`, in their order. `stop` is asked often and raises to give up.

    `guards` are calls that do not end while all is well: if one does, its error is the result.

    Raises:
        DeploymentError: the root error of those that failed, or who was still waited for at the deadline.
    """
    deadline = clock() + timeout
    pending, results = list(calls), {}
    while pending:
        stop()
        for call in waiter.wait_any([*pending, *guards], POLL_S):
            try:
                result = waiter.result_of(call)
            except (DeploymentError, CallFailedError, ActorLostError) as error:
                others = [other for other in (*pending, *guards) if other is not call]
                raise _root_error(waiter, [error], others, phase) from error
            if call not in pending:
                raise StartupError(f"{phase}: {call.label} has ended: {result or 'nobody asked it to'}")
            pending.remove(call)
            results[call] = result
        if pending and clock() > deadline:
            names = ", ".join(call.label for call in pending)
            raise StartupError(
                f"{phase}: no answer from {names} within {timeout:g} s; look at its log on that node, "
                "in /tmp/ray/session_latest/logs, or raise cluster.startup_timeout_s"
            )
    return [results[call] for call in calls]


def _root_error(waiter: Waiter, errors: list[Exception], pending: list[Call], phase: str) -> DeploymentError:
    """The error that explains the others, as one that ends the start."""
    give_up = time.monotonic() + CONSEQUENCES_S
    while pending and all(is_consequence(error) for error in errors) and time.monotonic() < give_up:
        for call in waiter.wait_any(pending, POLL_S):
            pending.remove(call)
            try:
                waiter.result_of(call)
            except (DeploymentError, CallFailedError, ActorLostError) as error:
                errors.append(error)
    root = min(errors, key=is_consequence)  # the first that is no consequence, else the first
    if isinstance(root, DeploymentError):
        return root
    kind = ModelError if isinstance(root, CallFailedError) and isinstance(root.cause, ValueError) else StartupError
    return kind(f"{phase}: {root}")


def is_consequence(error: Exception) -> bool:
    """Whether `error` only says that a peer was lost."""
    return isinstance(error, CallFailedError) and bool(getattr(error.cause, "is_consequence", False))
