"""Everything that is asked of Ray, and the only file that imports it.

Owns connecting, what the nodes have free, placement groups, starting and ending actors, and waiting with a deadline.
Does not know what the actors do. `cluster.ray_environment` must have been applied before this module is imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import node as ray_node
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.deployment_errors import DeploymentError, InterruptedStartError, PlacementError, StartupError
from cluster.descendants import descendants, end_descendants
from cluster.placement import GroupPlan, Holder, NodeResources
from cluster.ray_environment import LOCAL
from cluster.waiting import ActorLostError, Call, CallFailedError

POLL_S = 0.2
NUM_ATTEMPTS_LOCAL = 2


@dataclass(slots=True, eq=False)
class Group:
    """A granted placement group; bundle i lies on `node_ids[i]`."""

    name: str
    node_ids: tuple[str, ...]
    handle: PlacementGroup


@dataclass(slots=True, eq=False)
class Actor:
    """One of our processes. `where` is for people: "rank 1 on node 10.0.0.7"."""

    name: str
    where: str
    node_id: str | None  # where it was asked to be
    handle: Any

    def call(self, method: str, *args: Any) -> Call:
        return Call(label=self.where, method=method, ref=getattr(self.handle, method).remote(*args))


@dataclass(slots=True, eq=False)
class Runtime:
    """One driver's connection to a cluster, with everything it has created there."""

    address: str
    python_path: str
    actors: list[Actor] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @classmethod
    def connect(cls, address: str, *, python_path: str, forward_logs: bool = False) -> Runtime:
        """Join the cluster at `address`, or start a private one (`local`).

        Raises:
            StartupError: Ray did not start or did not answer.
            InterruptedStartError: a signal came meanwhile.
        """
        if not forward_logs:
            _keep_ray_quiet()
        if address == LOCAL:  # its processes are our children
            os.environ["PYTHONPATH"] = python_path
        options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
        others = descendants()
        attempts = NUM_ATTEMPTS_LOCAL if address == LOCAL else 1
        for attempt in range(1, attempts + 1):
            try:
                # The second attempt is Ray's own way, whatever the first failed of.
                lean = address == LOCAL and attempt == 1
                with _without_bystanders(forward_logs) if lean else contextlib.nullcontext():
                    ray.init(
                        address=address,
                        namespace="antiphon",
                        log_to_driver=forward_logs,
                        logging_level=logging.ERROR,
                        configure_logging=True,
                        **options,
                    )
                return cls(address=address, python_path=python_path)
            except SystemExit as end:  # while it starts, Ray has a signal handler of its own
                if address == LOCAL:  # it ends its own children, but not theirs, which look for them for a minute
                    end_descendants(but=others)
                raise InterruptedStartError("stopped while Ray started") from end
            except Exception as error:  # Ray raises a dozen unrelated types here
                ray.shutdown()
                if attempt == attempts:  # a node that starts on a busy machine sometimes needs a second try
                    raise StartupError(f"Ray at {address} did not start: {_one_line(error)}") from error
        raise AssertionError("unreachable")

    # --- what there is ---

    def nodes(self) -> tuple[NodeResources, ...]:
        """The living nodes, the driver's first."""
        free = ray_state.available_resources_per_node()
        own = self.driver_node_id()
        nodes = [_node(entry, free.get(entry["NodeID"], {}), own) for entry in ray.nodes() if entry["Alive"]]
        return tuple(sorted(nodes, key=lambda node: (not node.is_driver, node.node_id)))

    def driver_node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def holders(self) -> tuple[Holder, ...]:
        """Everybody's placement groups that hold devices now."""
        held = []
        for group_id, group in placement_group_table().items():
            if group["state"] == "REMOVED" or not any(group["bundles_to_node_id"].values()):
                continue
            bundles = group["bundles"].values()
            held.append(
                Holder(
                    name=group["name"],
                    job_id=group_id[-8:],  # a group's id ends with that of its job
                    num_cpus=sum(bundle.get("CPU", 0.0) for bundle in bundles),
                    num_gpus=sum(bundle.get("GPU", 0.0) for bundle in bundles),
                )
            )
        return tuple(held)

    # --- what we create ---

    def create_group(self, name: str, plan: GroupPlan, *, timeout: float, stop: Callable[[], None]) -> Group:
        """The bundles of one replica, granted.

        Raises:
            PlacementError: the cluster did not grant them within `timeout` seconds.
        """
        handle = placement_group(
            [dict(plan.bundle) for _ in plan.node_ids],
            strategy=plan.strategy,
            name=name,
            _soft_target_node_id=plan.node_ids[0] if plan.strategy == "STRICT_PACK" else None,
        )
        group = Group(name, (), handle)
        self.groups.append(group)
        deadline = time.monotonic() + timeout
        ready = handle.ready()
        while not ray.wait([ready], timeout=min(POLL_S, timeout))[0]:
            stop()
            if time.monotonic() > deadline:
                raise PlacementError(
                    f"the cluster did not grant {plan.num_ranks} x {plan.bundle} ({plan.strategy}) "
                    f"within {timeout:g} s, although they looked free; somebody else took them: try again, "
                    "or raise cluster.placement_timeout_s"
                )
        granted = placement_group_table(handle)["bundles_to_node_id"]
        group.node_ids = tuple(granted[bundle] for bundle in range(len(plan.node_ids)))
        return group

    def start_actor(
        self,
        cls: type,
        *args: Any,
        name: str,
        where: str,
        node_id: str | None = None,
        group: Group | None = None,
        bundle: int = -1,
        resources: Mapping[str, float] | None = None,
        num_threads: int = 1,
    ) -> Actor:
        """Start one process: in a bundle of `group`, which lies on `node_id`, or preferably on `node_id`.

        It ends with this driver.
        """
        strategy: Any = "DEFAULT"
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group.handle, placement_group_bundle_index=bundle)
        elif node_id is not None:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
        wanted = dict(resources or {})
        handle = (
            ray.remote(cls)
            .options(
                name=name,
                num_cpus=wanted.get("CPU", 0),
                num_gpus=wanted.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=num_threads,
                enable_task_events=False,
                scheduling_strategy=strategy,
                runtime_env=self._runtime_env(),
            )
            .remote(*args)
        )
        actor = Actor(name, where, node_id, handle)
        self.actors.append(actor)
        return actor

    def _runtime_env(self) -> dict[str, Any] | None:
        """What our processes need beside what Ray gives them; in a private cluster they inherit it from this driver."""
        if self.address == LOCAL:
            return None
        return {"env_vars": {"PYTHONPATH": self.python_path, "RAY_worker_niceness": "0"}}

    # --- waiting: what `cluster.waiting.Waiter` asks for ---

    def wait_any(self, calls: Sequence[Call], timeout: float) -> list[Call]:
        """Those of `calls` that have ended, well or badly, after at most `timeout` seconds."""
        if not calls:
            time.sleep(timeout)
            return []
        refs = [call.ref for call in calls]
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout)
        if ready:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        done = set(ready)
        return [call for call in calls if call.ref in done]

    def result_of(self, call: Call) -> Any:
        """What an ended call returned.

        Raises:
            DeploymentError: raised by the actor as such.
            CallFailedError: the actor raised something else.
            ActorLostError: the process has died.
        """
        try:
            return ray.get(call.ref, timeout=0)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if isinstance(cause, DeploymentError):
                raise cause from None
            raise CallFailedError(call, cause) from error
        except RayError as error:
            raise ActorLostError(call, _death(error)) from error

    # --- how it ends ---

    def kill(self, actor: Actor) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor.handle, no_restart=True)

    def close(self) -> None:
        """End every actor and placement group of ours, then leave (a private cluster ends with that)."""
        if not ray.is_initialized():
            return
        for actor in self.actors:
            self.kill(actor)
        for group in self.groups:
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(group.handle)
        ray.shutdown()


def _keep_ray_quiet() -> None:
    """Ray prints a paragraph to standard output whenever a process dies, and offers no switch; we say it in a line."""
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _without_bystanders(forward_logs: bool) -> Iterator[None]:
    """Let a private cluster start without the processes that nobody in it talks to.

    Ray starts an autoscaler, a dashboard that serves no pages and a reader of logs for every cluster and offers no
    switch for them; on two cores they hold a start up for a second or two. Where a version of Ray has other names for
    them, they start.
    """
    bystanders = ["start_monitor", "start_api_server", *([] if forward_logs else ["start_log_monitor"])]
    found = {name: getattr(ray_node.Node, name) for name in bystanders if hasattr(ray_node.Node, name)}
    for name in found:
        setattr(ray_node.Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in found.items():
            setattr(ray_node.Node, name, method)


def own_address() -> str:
    """In an actor: the address of its node, as Ray knows it."""
    return str(ray.util.get_node_ip_address())


def own_accelerators() -> tuple[str, ...]:
    """In an actor: the ids of the GPUs that Ray gave to this process."""
    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


def _death(error: RayError) -> str:
    """Ray's long explanation in a few words."""
    text = str(error)
    if isinstance(error, ActorDiedError) and "ray.kill" in text:
        return "was ended by ray.kill"
    if "node" in text and "died" in text and "worker process has died" not in text:
        return "its node has died"
    if "ModuleNotFoundError" in text or "No module named" in text:
        return "cannot import this project there; install it on every node, or use `ray job submit --working-dir .`"
    if "OOM" in text and "memory monitor" in text.lower():
        return "was ended by Ray's memory monitor: the node ran out of memory"
    if "worker process has died" in text:
        return "its process was killed or crashed (kill -9, out of memory, or a segmentation fault)"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:400]


def _node(entry: Mapping[str, Any], free: Mapping[str, float], own: str) -> NodeResources:
    total = entry["Resources"]
    return NodeResources(
        node_id=entry["NodeID"],
        address=entry["NodeManagerAddress"],
        num_cpus=int(total.get("CPU", 0)),
        free_cpus=int(free.get("CPU", 0)),
        num_gpus=int(total.get("GPU", 0)),
        free_gpus=int(free.get("GPU", 0)),
        memory_bytes=int(total.get("memory", 0) + total.get("object_store_memory", 0)),
        is_driver=entry["NodeID"] == own,
    )
