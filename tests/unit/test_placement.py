from __future__ import annotations

import pytest

from cluster.deployment_errors import PlacementError
from cluster.placement import Holder, NodeResources, choose_device, order_ranks, plan_groups


def make_node(
    name: str,
    *,
    cpus: int = 8,
    free_cpus: int | None = None,
    gpus: int = 0,
    free_gpus: int | None = None,
    driver: bool = False,
) -> NodeResources:
    return NodeResources(
        node_id=name,
        address=f"10.0.0.{name}",
        num_cpus=cpus,
        free_cpus=cpus if free_cpus is None else free_cpus,
        num_gpus=gpus,
        free_gpus=gpus if free_gpus is None else free_gpus,
        is_driver=driver,
    )


def test_auto_takes_gpus_as_soon_as_any_node_has_one():
    assert choose_device("auto", [make_node("1"), make_node("2", gpus=1)]) == "cuda"
    assert choose_device("auto", [make_node("1")]) == "cpu"
    assert choose_device("cpu", [make_node("1", gpus=1)]) == "cpu"


def test_two_ranks_and_no_other_process_share_the_cores_of_a_two_core_machine():
    (plan,) = plan_groups([make_node("1", cpus=2)], num_replicas=1, ranks_per_replica=2, device="cpu")
    assert plan.bundle == {"CPU": 1.0}
    assert plan.num_threads == 1
    assert plan.strategy == "STRICT_PACK"


def test_one_rank_gets_all_cores_and_as_many_threads():
    (plan,) = plan_groups([make_node("1", cpus=2)], num_replicas=1, ranks_per_replica=1, device="cpu")
    assert (plan.bundle, plan.num_threads) == ({"CPU": 2.0}, 2)


def test_a_configured_number_of_threads_wins_and_takes_no_more_cores_than_there_are():
    (few,) = plan_groups([make_node("1", cpus=8)], num_replicas=1, ranks_per_replica=1, device="cpu", num_threads=3)
    (many,) = plan_groups([make_node("1", cpus=2)], num_replicas=1, ranks_per_replica=1, device="cpu", num_threads=6)
    assert (few.bundle, few.num_threads) == ({"CPU": 3.0}, 3)
    assert (many.bundle, many.num_threads) == ({"CPU": 2.0}, 6)


def test_a_group_that_fits_on_one_node_is_not_spread():
    nodes = [make_node("1", gpus=8, free_gpus=3), make_node("2", gpus=8, free_gpus=5)]
    (plan,) = plan_groups(nodes, num_replicas=1, ranks_per_replica=4, device="cuda")
    assert plan.strategy == "STRICT_PACK"
    assert plan.node_ids == ("2",) * 4
    assert plan.bundle == {"GPU": 1.0}


def test_a_group_that_fits_on_no_node_is_packed_over_several():
    nodes = [make_node("1", gpus=4), make_node("2", gpus=4)]
    (plan,) = plan_groups(nodes, num_replicas=1, ranks_per_replica=6, device="cuda")
    assert plan.strategy == "PACK"
    assert sorted(plan.node_ids) == ["1"] * 4 + ["2"] * 2


def test_replicas_go_to_different_nodes_while_these_have_room():
    nodes = [make_node("1", gpus=8), make_node("2", gpus=8)]
    plans = plan_groups(nodes, num_replicas=2, ranks_per_replica=4, device="cuda")
    assert {plan.node_ids[0] for plan in plans} == {"1", "2"}


def test_replicas_on_one_node_share_its_cores():
    plans = plan_groups([make_node("1", cpus=8)], num_replicas=2, ranks_per_replica=2, device="cpu")
    assert [plan.num_threads for plan in plans] == [2, 2]


def test_the_drivers_node_wins_a_tie():
    nodes = [make_node("1", gpus=8), make_node("2", gpus=8, driver=True)]
    (plan,) = plan_groups(nodes, num_replicas=1, ranks_per_replica=8, device="cuda")
    assert plan.node_ids[0] == "2"


def test_too_few_devices_are_refused_with_the_numbers_the_holder_and_a_remedy():
    nodes = [make_node("1", gpus=8, free_gpus=4), make_node("2", gpus=8, free_gpus=1)]
    holders = [Holder(name="training", job_id="02000000", num_cpus=0, num_gpus=11)]
    with pytest.raises(PlacementError) as refused:
        plan_groups(nodes, num_replicas=1, ranks_per_replica=8, device="cuda", holders=holders)
    message = str(refused.value)
    assert "need 8 GPUs" in message
    assert "node 10.0.0.1 has 4 of 8 free" in message
    assert "training of job 02000000 (11)" in message
    assert "parallel.tensor_parallel_size to at most 5" in message
    assert "\n" not in message


def test_a_cluster_without_a_free_device_is_refused():
    with pytest.raises(PlacementError, match="end what holds them"):
        plan_groups([make_node("1", free_cpus=0)], num_replicas=1, ranks_per_replica=1, device="cpu")


def test_ranks_of_one_node_are_neighbours_and_the_fullest_node_comes_first():
    slots = order_ranks(["a", "b", "a", "b", "b"])
    assert [(slot.rank, slot.bundle, slot.node_id) for slot in slots] == [
        (0, 1, "b"),
        (1, 3, "b"),
        (2, 4, "b"),
        (3, 0, "a"),
        (4, 2, "a"),
    ]


def test_the_preferred_node_has_rank_zero_where_nodes_are_alike():
    assert order_ranks(["a", "b"], first_node="b")[0].node_id == "b"
    assert order_ranks(["a", "b"], first_node="elsewhere")[0].node_id == "a"
