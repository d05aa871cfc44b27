"""Groups of ranks: sums, uneven gathering, several groups at once, and what a lost peer looks like."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workers.parallel import ParallelError, SingleProcessGroup, bind_store, connect


@pytest.fixture
def make_group():
    """Groups over real gloo, each rank in a thread of its own, as the groups allow: none of them is global."""
    made, stores = [], []

    def make(size, timeout=20.0):
        store, port = bind_store("127.0.0.1")
        stores.append(store)
        with ThreadPoolExecutor(size) as pool:
            groups = list(pool.map(lambda rank: connect("127.0.0.1", port, rank, size, "gloo", timeout), range(size)))
        made.extend(groups)
        return groups

    yield make
    for group in made:
        group.close()


def on_all(groups, work):
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def test_all_ranks_get_the_sum_in_place(make_group):
    groups = make_group(3)
    tensors = [torch.full((4, 2), float(10**group.rank)) for group in groups]
    returned = on_all(groups, lambda group: group.all_reduce(tensors[group.rank]))
    for tensor, result in zip(tensors, returned, strict=True):
        assert result is tensor
        assert (tensor == 111).all()


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 0, 1], [0, 0, 5]])
@pytest.mark.parametrize("dim", [0, -1])
def test_uneven_parts_are_gathered_in_rank_order(make_group, sizes, dim):
    whole = torch.arange(7.0 * sum(sizes)).view(7, -1)
    whole = whole if dim == -1 else whole.t().contiguous()
    parts = whole.split(sizes, dim=dim)
    results = on_all(make_group(3), lambda group: group.all_gather(parts[group.rank], sizes, dim=dim))
    for result in results:
        torch.testing.assert_close(result, whole)


def test_a_group_of_one_does_nothing():
    group = SingleProcessGroup()
    x = torch.ones(3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [3]) is x


def test_two_groups_share_a_process(make_group):
    small, large = make_group(2), make_group(3)
    sums = on_all([*small, *large], lambda group: group.all_reduce(torch.ones(1)).item())
    assert sums == [2, 2, 3, 3, 3]


def test_empty_tensors_need_no_message(make_group):
    assert on_all(make_group(2), lambda group: group.all_reduce(torch.empty(0, 5)).shape) == [(0, 5)] * 2


def test_a_missing_rank_ends_the_wait_with_its_name():
    store, port = bind_store("127.0.0.1")
    started = time.monotonic()
    with pytest.raises(ParallelError, match=rf"rank 0 of 2 did not meet its peers at 127.0.0.1:{port} within 1 s"):
        connect("127.0.0.1", port, 0, 2, "gloo", timeout=1.0)
    assert time.monotonic() - started < 10
    del store


def test_a_store_that_is_not_there_ends_the_wait():
    store, port = bind_store("127.0.0.1")
    del store
    with pytest.raises(ParallelError, match="did not meet"):
        connect("127.0.0.1", port, 1, 2, "gloo", timeout=1.0)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="give gloo or nccl"):
        connect("127.0.0.1", 1, 0, 1, "mpi")


def test_a_group_that_was_left_says_so(make_group):
    group = make_group(2)[0]
    group.close()
    with pytest.raises(ParallelError, match="has left its group"):
        group.all_reduce(torch.ones(1))


def _join_and_die(port):
    group = connect("127.0.0.1", port, 1, 2, "gloo", 60.0)
    group.all_reduce(torch.ones(1))
    os._exit(9)


def test_a_dead_peer_is_noticed_at_once():
    store, port = bind_store("127.0.0.1")
    process = multiprocessing.get_context("spawn").Process(target=_join_and_die, args=(port,), daemon=True)
    process.start()
    group = connect("127.0.0.1", port, 0, 2, "gloo", 60.0)
    group.all_reduce(torch.ones(1))
    process.join(20)
    started = time.monotonic()
    with pytest.raises(ParallelError, match="rank 0 of 2 lost a peer during all_reduce"):
        group.all_reduce(torch.ones(1))
    assert time.monotonic() - started < 5
    group.close()
    del store
