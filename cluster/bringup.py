"""The start of a deployment, in named phases, each with a deadline.

Owns the order: connect, model, preflight, placement, actors, rendezvous, load, profile, serve. Knows Ray only as a
`Runtime`. What has been started when a phase fails is ended by the caller, who owns the runtime.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.actors import EngineFacts, IngressActor, RankPlace, SchedulerActor, WorkerActor
from cluster.deployment import Deployment, Replica, served_name
from cluster.deployment_errors import ModelError
from cluster.identity import Identity, base_versions, check_same, source_root
from cluster.phases import Phase, Phases
from cluster.placement import GroupPlan, NodeResources, choose_device, order_ranks, plan_groups
from cluster.preflight import Budget, check_memory, check_table, compute_budget
from cluster.preparation import Preparation
from cluster.waiting import Call, collect
from configs.build import config_to_dict
from configs.model_spec import ModelSpec
from configs.schema import EngineConfig

if TYPE_CHECKING:
    from cluster.runtime import Runtime

ENGINE_EPOCH = 0
PATIENCE_S = 1.0


class BringUp:
    """One start. `run` gives the deployment, or raises the DeploymentError that explains why there is none."""

    def __init__(
        self,
        config: EngineConfig,
        connect: Callable[[], Runtime],
        *,
        phases: Phases,
        stop: Callable[[], None],
        with_ingress: bool,
    ) -> None:
        self.config = config
        self.connect = connect
        self.phases = phases
        self.stop = stop
        self.with_ingress = with_ingress
        self.engine_id = config.cluster.engine_id or secrets.token_hex(3)
        self.timeout = config.cluster.startup_timeout_s
        self.runtime: Runtime | None = None  # for whoever ends what a failed start leaves
        self.staying: list[Call] = []  # scheduler and ingress, which nobody else would miss before they are needed
        self.preparing: list[Call] = []  # what the ingress does while weights are loaded

    def run(self) -> Deployment:
        preparation = Preparation(self.config.model)  # it runs while Ray starts
        try:
            preparation.fail_early(PATIENCE_S)
            runtime = self._connect()
            spec = self._await_model(preparation)
        finally:
            preparation.cancel()
        nodes = runtime.nodes()
        plans = self._preflight(runtime, spec, nodes)
        deployment = Deployment(
            config=self.config,
            runtime=runtime,
            token=secrets.token_hex(32),
            engine_id=self.engine_id,
            model_name=served_name(self.config),
            model_directory=spec.directory,
        )
        self._place(deployment, plans)
        self._start_actors(deployment, nodes)
        fingerprint = self._identify(deployment, nodes)
        self._meet(deployment, nodes)
        self._load(deployment)
        self._profile(deployment)
        self._serve(deployment, spec, fingerprint)
        return deployment

    def _connect(self) -> Runtime:
        with self.phases.phase("connect") as phase:
            runtime = self.runtime = self.connect()
            self.stop()
            nodes = runtime.nodes()
            kind = "private cluster" if runtime.address == "local" else f"cluster at {runtime.address}"
            cores, gpus = sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes)
            phase.note(f"{kind}, {len(nodes)} node{'s' * (len(nodes) > 1)}, {cores} cores, {gpus} GPUs")
        return runtime

    def _await_model(self, preparation: Preparation) -> ModelSpec:
        with self.phases.phase("model") as phase:
            directory = preparation.wait(self.timeout, self.stop)
            phase.note(str(directory))
            try:
                if not self.with_ingress:  # which will find out for itself, also before the weights are loaded
                    from cluster.text.processor import TextProcessor

                    TextProcessor.from_directory(directory)
                return ModelSpec.from_directory(directory)
            except ValueError as error:
                raise ModelError(str(error)) from error

    def _preflight(self, runtime: Runtime, spec: ModelSpec, nodes: Sequence[NodeResources]) -> tuple[GroupPlan, ...]:
        with self.phases.phase("preflight") as phase:
            device = choose_device(self.config.worker.device, nodes)
            budget = compute_budget(self.config, spec, device)
            plans = plan_groups(
                nodes,
                num_replicas=self.config.parallel.num_replicas,
                ranks_per_replica=self.config.parallel.tensor_parallel_size,
                device=device,
                num_threads=self.config.worker.num_threads,
                holders=runtime.holders(),
            )
            check_memory(budget, plans, nodes)
            self._freeze(spec, budget, plans[0])
            phase.note("all checks passed; what they looked at:")
        self.phases.show(check_table(self.config, spec, budget, plans, nodes))
        return plans

    def _freeze(self, spec: ModelSpec, budget: Budget, plan: GroupPlan) -> None:
        """From here on the configuration has no `auto` that two processes could read differently."""
        model = replace(self.config.model, dtype=budget.dtype, max_model_len=budget.max_model_len)  # type: ignore[arg-type]
        worker = replace(self.config.worker, device=plan.device, num_threads=plan.num_threads)
        wanted = replace(self.config.cache, dtype=budget.cache_dtype)  # type: ignore[arg-type]
        cache = spec.cache_config(wanted, budget.max_model_len)
        if wanted.enable_prefix_caching and not cache.enable_prefix_caching:
            self.phases.show("prefix caching is off: with dynamic rope equal prefixes have unequal KV")
        self.config = replace(self.config, model=model, worker=worker, cache=cache)

    def _place(self, deployment: Deployment, plans: Sequence[GroupPlan]) -> None:
        with self.phases.phase("placement") as phase:
            for index, plan in enumerate(plans):
                name = f"antiphon-{self.engine_id}-{index}"
                timeout = self.config.cluster.placement_timeout_s
                group = deployment.runtime.create_group(name, plan, timeout=timeout, stop=self.stop)
                deployment.replicas.append(Replica(index, group, plan))
            phase.note(f"engine {self.engine_id}, {len(plans)} group{'s' * (len(plans) > 1)}")

    def _start_actors(self, deployment: Deployment, nodes: Sequence[NodeResources]) -> None:
        """Ask for every process at once; `_identify` waits for them."""
        runtime, data = deployment.runtime, config_to_dict(self.config)
        addresses = {node.node_id: node.address for node in nodes}
        own = runtime.driver_node_id()
        for replica in deployment.replicas:
            prefix = f"antiphon-{self.engine_id}-{replica.index}"
            slots = order_ranks(replica.group.node_ids, first_node=own)
            for slot in slots:
                place = RankPlace(
                    replica=replica.index,
                    rank=slot.rank,
                    num_ranks=len(slots),
                    device=replica.plan.device,
                    num_threads=replica.plan.num_threads,
                    address=addresses.get(slot.node_id, slot.node_id),
                )
                rank = runtime.start_actor(
                    WorkerActor,
                    data,
                    place,
                    name=f"{prefix}-rank-{slot.rank}",
                    where=self._label(f"rank {slot.rank} on node {place.address}", replica),
                    node_id=slot.node_id,
                    group=replica.group,
                    bundle=slot.bundle,
                    resources=replica.plan.bundle,
                )
                replica.ranks.append(rank)
            replica.scheduler = runtime.start_actor(
                SchedulerActor,
                data,
                name=f"{prefix}-scheduler",
                where=self._label("the scheduler", replica),
                node_id=slots[0].node_id,
                num_threads=8,
            )
            self.staying.append(replica.scheduler.call("stay"))
        if self.with_ingress:
            name = f"antiphon-{self.engine_id}-ingress"
            deployment.ingress = runtime.start_actor(
                IngressActor, data, name=name, where="the ingress", node_id=own, num_threads=5
            )
            self.staying.append(deployment.ingress.call("stay"))

    def _label(self, text: str, replica: Replica) -> str:
        return f"{text} (replica {replica.index})" if self.config.parallel.num_replicas > 1 else text

    def _identify(self, deployment: Deployment, nodes: Sequence[NodeResources]) -> str:
        """Wait until every process is up and runs the same; the fingerprint of the model's files."""
        host = _host(nodes)
        own = deployment.runtime.driver_node_id()
        with self.phases.phase("actors") as phase:
            ranks = [rank for replica in deployment.replicas for rank in replica.ranks]
            schedulers = [replica.scheduler for replica in deployment.replicas if replica.scheduler]
            binding = [deployment.ingress.call("bind")] if deployment.ingress else []
            listening = [scheduler.call("listen", host) for scheduler in schedulers]
            identifying = [rank.call("identify") for rank in ranks]
            answers = iter(self._collect(deployment, "actors", [*binding, *listening, *identifying]))
            if deployment.ingress:
                deployment.url = f"http://{self.config.ingress.host}:{next(answers)}"
                self.preparing = [deployment.ingress.call("prepare", str(deployment.model_directory))]
            for replica in deployment.replicas:
                replica.address = next(answers)
            identities: list[Identity] = list(answers)
            check_same(base_versions(source_root()), identities)
            here = str(deployment.model_directory)
            prepared = [
                rank.call("prepare_model", here if rank.node_id == own else None, self.timeout) for rank in ranks
            ]
            fingerprints = self._collect(deployment, "actors", prepared)
            for identity, fingerprint in zip(identities, fingerprints, strict=True):
                if fingerprint != fingerprints[0]:
                    raise ModelError(
                        f"{identity.where} has other model files than {identities[0].where}; "
                        f"remove its copy of {self.config.model.path}, or put the same files on both nodes"
                    )
            versions = ", ".join(f"{name} {value}" for name, value in identities[0].versions.items())
            phase.note(f"{len(deployment.runtime.actors)} processes; every rank has {versions}")
        return str(fingerprints[0])

    def _meet(self, deployment: Deployment, nodes: Sequence[NodeResources]) -> None:
        host = _host(nodes)
        addresses = {node.node_id: node.address for node in nodes}
        with self.phases.phase("rendezvous") as phase:
            joining = []
            for replica in deployment.replicas:
                meeting, port = host, 0
                if len(replica.ranks) > 1:
                    meeting = host or addresses[str(replica.ranks[0].node_id)]
                    (port,) = self._collect(deployment, "rendezvous", [replica.ranks[0].call("bind_store", meeting)])
                joining += [rank.call("join", meeting, port, self.timeout) for rank in replica.ranks]
            self._collect(deployment, "rendezvous", joining)
            phase.note(f"{len(joining)} rank{'s' * (len(joining) > 1)}")

    def _load(self, deployment: Deployment) -> None:
        with self.phases.phase("load") as phase:
            loading = [rank.call("load") for replica in deployment.replicas for rank in replica.ranks]
            seconds = self._collect(deployment, "load", [*loading, *self.preparing])[: len(loading)]
            phase.note(f"weights on every rank, the slowest took {max(seconds):.2f} s")
            self._note_choices(deployment, phase)

    def _profile(self, deployment: Deployment) -> None:
        """Blocks are the minimum over the ranks of a replica, so that a block exists on each of them."""
        with self.phases.phase("profile") as phase:
            for replica in deployment.replicas:
                measuring = [rank.call("measure_num_blocks") for rank in replica.ranks]
                replica.num_blocks = min(self._collect(deployment, "profile", measuring))
            allocating = [
                rank.call("allocate_cache", replica.num_blocks)
                for replica in deployment.replicas
                for rank in replica.ranks
            ]
            self._collect(deployment, "profile", allocating)
            size = self.config.cache.block_size
            for replica in deployment.replicas:
                phase.note(f"{replica.num_blocks} KV blocks of {size} = {replica.num_blocks * size:,} tokens")
            self._note_choices(deployment, phase)

    def _note_choices(self, deployment: Deployment, phase: Phase) -> None:
        """What the ranks chose to compute with, each thing once."""
        asking = [rank.call("said") for replica in deployment.replicas for rank in replica.ranks]
        said: list[list[str]] = self._collect(deployment, phase.name, asking)
        for line in dict.fromkeys(line for lines in said for line in lines):
            phase.note(line)

    def _serve(self, deployment: Deployment, spec: ModelSpec, fingerprint: str) -> None:
        with self.phases.phase("serve") as phase:
            for replica in deployment.replicas:
                self._start_engine(deployment, replica, spec, fingerprint)
            healthy = [
                replica.scheduler.call("wait_until_healthy", self.timeout)
                for replica in deployment.replicas
                if replica.scheduler
            ]
            ranks = [call for replica in deployment.replicas for call in replica.rank_runs]
            self._collect(deployment, "serve", healthy, guards=ranks)
            if deployment.ingress:
                deployment.ingress_run = deployment.ingress.call(
                    "run",
                    deployment.addresses,
                    deployment.token,
                    deployment.model_name,
                )
                waiting = deployment.ingress.call("wait_until_serving", self.timeout)
                self._collect(deployment, "serve", [waiting], guards=[*ranks, deployment.ingress_run])
            phase.note(deployment.url or "ready")

    def _start_engine(self, deployment: Deployment, replica: Replica, spec: ModelSpec, fingerprint: str) -> None:
        assert replica.scheduler is not None
        facts = EngineFacts(
            name=deployment.model_name,
            fingerprint=fingerprint,
            num_blocks=replica.num_blocks,
            max_model_len=self.config.model.max_model_len or spec.max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
        )
        self._collect(deployment, "serve", [replica.scheduler.call("start", facts, deployment.token)])
        replica.scheduler_run = replica.scheduler.call("run")
        replica.rank_runs = [
            rank.call("run", replica.address, deployment.token, ENGINE_EPOCH) for rank in replica.ranks
        ]

    def _collect(
        self, deployment: Deployment, phase: str, calls: Sequence[Call], guards: Sequence[Call] = ()
    ) -> list[Any]:
        guards = [*guards, *self.staying]
        return collect(deployment.runtime, calls, phase=phase, timeout=self.timeout, stop=self.stop, guards=guards)


def _host(nodes: Sequence[NodeResources]) -> str:
    """Where our processes listen for each other: nowhere else than on this machine, if that is all there is."""
    return "127.0.0.1" if len(nodes) == 1 else ""
