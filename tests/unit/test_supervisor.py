from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cluster.bringup import BringUp
from cluster.deployment import Deployment, Replica
from cluster.deployment_errors import EngineLostError, InterruptedStartError, ModelError, StartupError
from cluster.phases import Phases
from cluster.supervisor import Ended, Observed, plan, root_reason
from cluster.waiting import ActorLostError, Call, CallFailedError, collect
from configs.schema import ClusterConfig, EngineConfig, ModelConfig


def ended(role: str = "rank", label: str = "rank 1", reason: str = "died", is_consequence: bool = False) -> Ended:
    return Ended(role=role, label=label, reason=reason, is_consequence=is_consequence)  # type: ignore[arg-type]


def test_a_healthy_deployment_is_watched():
    assert plan(Observed(now=5.0)) == "watch"


def test_the_first_signal_drains_once():
    assert plan(Observed(now=5.0, num_stop_requests=1)) == "drain"
    assert plan(Observed(now=5.1, num_stop_requests=1, draining_since=5.0, drain_timeout_s=30)) == "watch"


def test_a_drain_ends_when_it_is_done_when_it_is_late_and_on_a_second_signal():
    draining = {"draining_since": 5.0, "drain_timeout_s": 30.0}
    assert plan(Observed(now=6.0, num_stop_requests=1, is_drained=True, **draining)) == "end"  # type: ignore[arg-type]
    assert plan(Observed(now=35.1, num_stop_requests=1, **draining)) == "end"  # type: ignore[arg-type]
    assert plan(Observed(now=6.0, num_stop_requests=2, **draining)) == "end"  # type: ignore[arg-type]


def test_losing_any_process_ends_the_deployment_even_while_draining():
    assert plan(Observed(now=5.0, ended=(ended(),))) == "end"
    assert plan(Observed(now=5.0, ended=(ended("ingress"),), num_stop_requests=1, draining_since=4.0)) == "end"


def test_the_root_error_is_the_ranks_own_whatever_was_seen_first():
    survivor = ended(label="rank 0", reason="lost a peer", is_consequence=True)
    scheduler = ended("scheduler", "the scheduler", "rank 1 closed its stream", is_consequence=True)
    killed = ended(label="rank 1", reason="was killed")
    assert root_reason([survivor, scheduler, killed]) == "rank 1: was killed"
    assert root_reason([scheduler, survivor]) == "rank 0: lost a peer"
    assert root_reason([scheduler]) == "the scheduler: rank 1 closed its stream"


def test_a_scheduler_s_own_verdict_comes_before_the_ends_of_its_ranks():
    verdict = ended("scheduler", "the scheduler", "step 7 was not answered: rank 1 is silent")
    orphan = ended(label="rank 0", reason="its process was killed or crashed")
    assert root_reason([orphan, verdict]) == "the scheduler: step 7 was not answered: rank 1 is silent"


def test_an_end_without_a_reason_explains_nothing_if_another_has_one():
    silent = ended(label="rank 0", reason="")
    assert root_reason([silent, ended("ingress", "the ingress", "port lost")]) == "the ingress: port lost"
    assert "nobody asked" in root_reason([silent])


class FakeProcesses:
    """Calls that end in a given order, each with a value or an error, one per wait; an absent call never ends."""

    def __init__(self, outcomes: dict[str, Any]) -> None:
        self.outcomes = outcomes
        self.now = 0.0

    def wait_any(self, calls: Sequence[Call], timeout: float) -> list[Call]:
        self.now += timeout
        for label in self.outcomes:
            for call in calls:
                if call.label == label:
                    return [call]
        return []

    def result_of(self, call: Call) -> Any:
        outcome = self.outcomes.pop(call.label)
        if isinstance(outcome, BaseException):
            if isinstance(outcome, (CallFailedError, ActorLostError)):
                outcome.call = call
            raise outcome
        return outcome

    def collect(self, *labels: str, timeout: float = 10.0, stop: Any = lambda: None) -> list[Any]:
        calls = [Call(label, "load", object()) for label in labels]
        return collect(self, calls, phase="load", timeout=timeout, stop=stop, clock=lambda: self.now)


class FakeCluster(FakeProcesses):
    """Starts processes that answer nothing but what `outcomes` says."""

    def driver_node_id(self) -> str:
        return "node"

    def start_actor(self, *_: Any, where: str, **options: Any) -> Any:
        return SimpleNamespace(call=lambda method, *arguments: Call(where, method, object()))


class PeerLostError(Exception):
    is_consequence = True


def failed(cause: Exception, label: str = "rank 0") -> CallFailedError:
    return CallFailedError(Call(label, "load", None), cause)


def lost(label: str, how: str = "was killed") -> ActorLostError:
    return ActorLostError(Call(label, "load", None), how)


def test_results_come_in_the_order_of_the_calls_not_of_their_ends():
    assert FakeProcesses({"b": 2, "a": 1}).collect("a", "b") == [1, 2]


def test_a_late_answer_is_an_error_that_names_who_is_missing():
    with pytest.raises(StartupError, match=r"load: no answer from rank 1 within 10 s"):
        FakeProcesses({"rank 0": None}).collect("rank 0", "rank 1")


def test_the_cause_is_reported_although_its_consequence_came_first():
    processes = FakeProcesses({"rank 0": failed(PeerLostError("lost a peer")), "rank 1": lost("rank 1")})
    with pytest.raises(StartupError, match="rank 1: was killed"):
        processes.collect("rank 0", "rank 1")


def test_a_users_error_in_a_rank_is_a_model_error_as_it_stands():
    with pytest.raises(ModelError, match="tensor x is missing"):
        FakeProcesses({"rank 0": ModelError("tensor x is missing")}).collect("rank 0")


def test_a_request_to_stop_ends_the_wait():
    def stop() -> None:
        raise InterruptedStartError("stopped")

    with pytest.raises(InterruptedStartError):
        FakeProcesses({}).collect("rank 0", stop=stop)


@pytest.mark.parametrize("who", ["the scheduler", "the ingress"])
def test_a_process_that_is_lost_while_others_load_is_named_at_once(who: str):
    config = EngineConfig(model=ModelConfig(path="model"), cluster=ClusterConfig(startup_timeout_s=1.0))
    cluster: Any = FakeCluster({})
    plan: Any = SimpleNamespace(device="cpu", num_threads=1, bundle={})
    replica = Replica(0, cast(Any, SimpleNamespace(node_ids=("node",))), plan)
    deployment = Deployment(config, cluster, "token", "id", "name", Path("model"), [replica])
    phases = Phases(Console(file=io.StringIO()))
    bring_up = BringUp(config, lambda: cluster, phases=phases, stop=lambda: None, with_ingress=True)
    bring_up._start_actors(deployment, [])
    cluster.outcomes[who] = lost(who)
    with pytest.raises(StartupError, match=f"load: {who}: was killed"):
        bring_up._load(deployment)


def test_every_class_of_error_has_an_exit_code_of_its_own():
    codes = [error.exit_code for error in (ModelError, StartupError, EngineLostError, InterruptedStartError)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes
