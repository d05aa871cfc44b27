"""The life of a deployment: bring it up, watch it, drain it, take it down.

`plan` is pure: what was observed in, what to do out. The loop around it is small. Knows Ray only as a `Runtime`.
Restarting what was lost is not done here yet: a lost process ends the deployment, and says so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.bringup import BringUp
from cluster.deployment import Deployment, Replica
from cluster.deployment_errors import DeploymentError, EngineLostError
from cluster.phases import Phases, StopRequest
from cluster.waiting import CONSEQUENCES_S, ActorLostError, Call, CallFailedError, is_consequence
from configs.schema import EngineConfig

if TYPE_CHECKING:
    from cluster.runtime import Runtime

POLL_S = 0.1
CLOSE_TIMEOUT_S = 15.0
CLOSING_THREAD = "antiphon-close"
FLUSH_S = 2.0
"""How long answers and error events may take to reach their clients once the engine is done."""

Action = Literal["watch", "drain", "end"]
Role = Literal["rank", "scheduler", "ingress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The main call of a process has returned. `reason` is empty if it ended in order."""

    role: Role
    label: str
    reason: str
    is_consequence: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that `plan` decides by. Times in seconds of one clock; None: has not happened."""

    now: float
    ended: tuple[Ended, ...] = ()
    num_stop_requests: int = 0
    draining_since: float | None = None
    is_drained: bool = False
    drain_timeout_s: float = 0.0


def plan(observed: Observed) -> Action:
    """What to do next. Losing any process ends the deployment; a second signal ends a drain."""
    if observed.ended:
        return "end"
    if observed.num_stop_requests == 0:
        return "watch"
    if observed.draining_since is None:
        return "drain"
    late = observed.now > observed.draining_since + observed.drain_timeout_s
    return "end" if observed.is_drained or late or observed.num_stop_requests > 1 else "watch"


def root_reason(ended: Sequence[Ended]) -> str:
    """The error that explains the others: one's own before that of a survivor, before the scheduler's view of another.

    A scheduler that ended on its own account comes first: its ranks can then only end themselves, like a crash.
    """

    def depth(one: Ended) -> tuple[bool, bool, int]:
        roles: list[Role] = ["rank", "scheduler"] if one.is_consequence else ["scheduler", "rank"]
        return (not one.reason, one.is_consequence, [*roles, "ingress"].index(one.role))

    root = min(ended, key=depth)
    return f"{root.label}: {root.reason or 'ended although nobody asked it to'}"


class Supervisor:
    """Watches one deployment until a signal or a loss ends it."""

    def __init__(
        self, deployment: Deployment, phases: Phases, stop: StopRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.deployment = deployment
        self.runtime = deployment.runtime
        self.phases = phases
        self.stop = stop
        self.clock = clock
        self.ended: list[Ended] = []
        self._roles: dict[Call, tuple[Role, Replica | None]] = {}
        self._drains: list[Call] = []
        for replica in deployment.replicas:
            self._roles |= dict.fromkeys(replica.rank_runs, ("rank", replica))
            if replica.scheduler_run:
                self._roles[replica.scheduler_run] = ("scheduler", replica)
        if deployment.ingress_run:
            self._roles[deployment.ingress_run] = ("ingress", None)
        self._watched = list(self._roles)

    def watch(self) -> None:
        """Return after a drain that was asked for.

        Raises:
            EngineLostError: a process was lost; the message is the root error.
        """
        draining_since: float | None = None
        while True:
            self.poll(POLL_S)
            observed = Observed(
                now=self.clock(),
                ended=tuple(self.ended),
                num_stop_requests=self.stop.num_requests,
                draining_since=draining_since,
                is_drained=draining_since is not None and not self._drains,
                drain_timeout_s=self.deployment.config.cluster.drain_timeout_s,
            )
            action = plan(observed)
            if action == "drain":
                draining_since = self.clock()
                self._drain(observed.drain_timeout_s)
            elif action == "end":
                break
        if self.ended:
            self._raise_loss()

    def check(self) -> None:
        """For work that runs in this process meanwhile.

        Raises:
            EngineLostError: a process was lost.
        """
        self.poll(0.0)
        if self.ended:
            self._raise_loss()

    def poll(self, timeout: float) -> None:
        """Note which processes have ended; tell a scheduler what Ray saw of its ranks."""
        for call in self.runtime.wait_any([*self._watched, *self._drains], timeout):
            if call in self._drains:
                self._drains.remove(call)
                continue
            self._watched.remove(call)
            role, replica = self._roles[call]
            ended = self._explain(call, role)
            self.ended.append(ended)
            if role == "rank" and replica and replica.scheduler:
                replica.scheduler.call("fail", f"{ended.label}: {ended.reason or 'ended'}")

    def _explain(self, call: Call, role: Role) -> Ended:
        try:
            result = self.runtime.result_of(call)
            reason, is_secondhand = result if role == "scheduler" else ("", False)
            return Ended(role=role, label=call.label, reason=reason, is_consequence=is_secondhand)
        except ActorLostError as error:
            return Ended(role=role, label=call.label, reason=error.how)
        except CallFailedError as error:
            reason = str(error.cause)
            return Ended(role=role, label=call.label, reason=reason, is_consequence=is_consequence(error))
        except DeploymentError as error:
            return Ended(role=role, label=call.label, reason=str(error))

    def _raise_loss(self) -> None:
        """Let the others' ends come in, and error events reach the clients, before the one message."""
        give_up = self.clock() + CONSEQUENCES_S
        while self._watched and self.clock() < give_up:
            self.poll(POLL_S)
        raise EngineLostError(root_reason(self.ended))

    def _drain(self, timeout: float) -> None:
        self.phases.show(
            f"draining: no new requests, up to {timeout:g} s for the running ones; a second signal ends them"
        )
        self._drains = [
            replica.scheduler.call("drain", timeout) for replica in self.deployment.replicas if replica.scheduler
        ]

    def say_goodbye(self) -> None:
        """Let every process that still can leave in order: the door first, then the engines with their ranks."""
        deployment = self.deployment
        leaving = []
        if deployment.ingress and deployment.ingress_run in self._watched:
            deployment.ingress.call("stop")
            self._await_end([deployment.ingress_run], FLUSH_S)
        for replica in deployment.replicas:
            if replica.scheduler and replica.scheduler_run in self._watched:
                replica.scheduler.call("stop")
                leaving += [replica.scheduler_run, *replica.rank_runs]
        self._await_end([call for call in leaving if call in self._watched], FLUSH_S)

    def _await_end(self, calls: Sequence[Call], timeout: float) -> None:
        pending, give_up = list(calls), self.clock() + timeout
        while pending and self.clock() < give_up:
            for call in self.runtime.wait_any(pending, POLL_S):
                pending.remove(call)


@contextmanager
def deployed(
    config: EngineConfig,
    connect: Callable[[], Runtime],
    *,
    phases: Phases,
    stop: StopRequest,
    with_ingress: bool,
) -> Iterator[Supervisor]:
    """A deployment that is up; whatever happens inside, nothing of it is left afterwards."""
    bring_up = BringUp(config, connect, phases=phases, stop=stop.check, with_ingress=with_ingress)
    supervisor: Supervisor | None = None
    try:
        supervisor = Supervisor(bring_up.run(), phases, stop)
        yield supervisor
    finally:
        if supervisor:
            with contextlib.suppress(DeploymentError):
                supervisor.say_goodbye()
        if bring_up.runtime:
            _close(bring_up.runtime, phases)


def _close(runtime: Runtime, phases: Phases) -> None:
    """Ray may wait for a minute where its own processes are gone already; the program then ends without it."""
    closing = threading.Thread(target=runtime.close, name=CLOSING_THREAD, daemon=True)
    closing.start()
    closing.join(CLOSE_TIMEOUT_S)
    if closing.is_alive():
        phases.show(f"Ray did not let go within {CLOSE_TIMEOUT_S:g} s; leaving without it")


def is_still_closing() -> bool:
    """Whether an ordinary exit of this process would wait for Ray."""
    return any(thread.name == CLOSING_THREAD for thread in threading.enumerate())
