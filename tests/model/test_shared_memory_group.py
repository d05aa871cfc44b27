"""Ranks that share memory: what they compute, how they learn that a peer is gone, and that nothing of them is left."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from configs import EngineConfig, ModelConfig, WorkerConfig
from tests.support.cpu_kernels import variants_here
from tests.support.shared_ranks import meet_as_threads, rank_processes, thread_groups
from workers import shared_memory_group
from workers.joining import join_group
from workers.parallel import ParallelError, TorchGroup, bind_store
from workers.shared_memory_group import SharedMemoryGroup

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not variants_here(), reason="no C++ compiler"),
]

HALF = 65536  # floats that one round carries


def on_all(groups, work):
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.fixture
def make_groups():
    made = []

    def make(size, timeout=20.0):
        groups = thread_groups(size, timeout)
        made.extend(groups)
        return groups

    yield make
    for group in made:
        group.close()


def random_parts(size, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(size)]


def in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_has_the_bits_of_adding_in_the_order_of_the_ranks(make_groups, size):
    groups = make_groups(size)
    for count in (1, 15, 16, 17, 592, HALF - 1, HALF, HALF + 1, 3 * HALF + 5):
        parts = random_parts(size, count, seed=count)
        expected = in_order(parts)
        results = on_all(groups, lambda group, parts=parts: group.all_reduce(parts[group.rank]))
        for result, part in zip(results, parts, strict=True):
            assert result is part
            assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_other_types_are_summed_too(make_groups, dtype):
    parts = [(part * 100).to(dtype) for part in random_parts(3, 7, 5)]
    expected = in_order([part.double() for part in parts]).to(dtype)
    for result in on_all(make_groups(3), lambda group: group.all_reduce(parts[group.rank])):
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 0, 1], [0, 0, 5], [1, 70_000, 3]])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_uneven_parts_are_gathered_in_rank_order(make_groups, sizes, dim, dtype):
    shape = [3, 2, 2]
    shape[dim] = sum(sizes)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype)
    parts = whole.split(sizes, dim=dim)
    results = on_all(make_groups(3), lambda group: group.all_gather(parts[group.rank], sizes, dim=dim))
    for result in results:
        assert torch.equal(result, whole)


def test_empty_tensors_need_no_message(make_groups):
    groups = make_groups(2)
    assert on_all(groups, lambda group: group.all_reduce(torch.empty(0, 5)).shape) == [(0, 5)] * 2
    assert on_all(groups, lambda group: group.all_gather(torch.empty(0, 2), [2, 2]).shape) == [(0, 4)] * 2
    assert on_all(groups, lambda group: group.all_gather(torch.empty(3, 0), [0, 0]).shape) == [(3, 0)] * 2
    on_all(groups, lambda group: group.barrier())


def test_a_barrier_waits_for_the_last(make_groups):
    groups = make_groups(3)
    arrived = []

    def come(group):
        time.sleep(0.1 * group.rank)
        arrived.append(group.rank)
        group.barrier()
        return len(arrived)

    assert on_all(groups, come) == [3, 3, 3]


def test_two_groups_share_a_process(make_groups):
    groups = [*make_groups(2), *make_groups(3)]
    assert on_all(groups, lambda group: group.all_reduce(torch.ones(1)).item()) == [2, 2, 3, 3, 3]


def many_operations(group, seed):
    """Sums and gatherings of sizes that all ranks draw alike; the number of those that went well."""
    draw, num_right = random.Random(seed), 0
    for number in range(300):
        count = draw.choice([1, 3, 16, 600, draw.randrange(1, 5000), draw.randrange(1, 200_000)])
        parts = [torch.arange(count, dtype=torch.float32) * (rank + number) for rank in range(group.size)]
        own = parts[group.rank].clone()
        if draw.random() < 0.5:
            num_right += torch.equal(group.all_reduce(own), in_order(parts))
        else:
            cuts = [draw.randrange(count + 1) for _ in range(group.size)]
            gathered = group.all_gather(own[: cuts[group.rank]], cuts)
            num_right += torch.equal(gathered, torch.cat([p[:cut] for p, cut in zip(parts, cuts, strict=True)]))
    return num_right


@pytest.mark.parametrize("size", [2, 3])
def test_processes_agree_over_many_operations_of_random_sizes(size):
    with rank_processes(size) as ranks:
        for rank in ranks:
            rank.call(many_operations, size)
        assert [rank.answer() for rank in ranks] == [300] * size


def sum_ones(group, num_times=1):
    for _ in range(num_times):
        total = group.all_reduce(torch.ones(600))
    return total[0].item()


def microseconds_of_a_sum_on_one_core(group):
    """CPU time: what others do meanwhile does not count."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    sum_ones(group, 100)
    started = time.process_time()
    sum_ones(group, 1000)
    return 1e3 * (time.process_time() - started)


def test_ranks_on_one_core_leave_it_to_each_other():
    with rank_processes(2) as ranks:
        for rank in ranks:
            rank.call(microseconds_of_a_sum_on_one_core)
        assert max(rank.answer() for rank in ranks) < 0.25 * shared_memory_group.SPIN_MICROSECONDS


def test_a_killed_peer_is_noticed_at_once():
    with rank_processes(3, timeout=60.0) as ranks:
        ranks[0].call(sum_ones)
        ranks[2].call(sum_ones)
        assert not ranks[0].has_answered(0.2)
        killed = time.monotonic()
        ranks[1].signal(signal.SIGKILL)
        answers = [ranks[0].answer(), ranks[2].answer()]
        assert time.monotonic() - killed < 2.0
        assert any("lost a peer during all_reduce: rank 1 died" in answer for answer in answers), answers
        for answer in answers:  # who sees first leaves the group, so the other may hear of that
            assert "lost a peer during all_reduce: rank" in answer
        ranks[0].call(sum_ones)
        assert ranks[0].answer() == "rank 0 has left its group and cannot all_reduce"


def test_a_stopped_peer_is_waited_for_no_longer_than_the_timeout():
    with rank_processes(2, timeout=0.5) as ranks:
        ranks[1].signal(signal.SIGSTOP)
        ranks[1].call(sum_ones)
        started = time.monotonic()
        ranks[0].call(sum_ones)
        expected = "rank 0 of 2 lost a peer during all_reduce: rank 1 did not come within 0.5 s"
        assert ranks[0].answer() == expected
        assert 0.4 < time.monotonic() - started < 3.0
        ranks[1].signal(signal.SIGCONT)
        assert isinstance(ranks[1].answer(), float), "rank 0 had brought its part"
        ranks[1].call(sum_ones)
        assert ranks[1].answer() == "rank 1 of 2 lost a peer during all_reduce: rank 0 has left the group"


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "barrier"])
def test_a_peer_that_leaves_is_named(make_groups, operation):
    waiting, leaving = make_groups(2, timeout=60.0)
    calls = {"all_reduce": (torch.ones(3),), "all_gather": (torch.ones(3), [3, 1]), "barrier": ()}
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(getattr(waiting, operation), *calls[operation])
        time.sleep(0.1)
        leaving.close()
        with pytest.raises(ParallelError, match=f"rank 0 of 2 lost a peer during {operation}: rank 1 has left the"):
            waits.result(2.0)


def test_what_a_rank_brought_before_it_left_is_still_received(make_groups):
    early, late = make_groups(2)
    posted = threading.Thread(target=lambda: early.all_reduce(torch.ones(3)))
    posted.start()
    time.sleep(0.05)
    result = late.all_reduce(torch.ones(3))
    early.close()
    posted.join(10)
    assert result.tolist() == [2.0] * 3


def test_closing_ends_the_wait_of_this_rank_too(make_groups):
    group, _ = make_groups(2, timeout=60.0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(group.all_reduce, torch.ones(3))
        time.sleep(0.1)
        group.close()
        with pytest.raises(ParallelError, match="rank 0 has left its group and cannot all_reduce"):
            waits.result(2.0)
    group.close()


def test_ranks_in_different_operations_are_told_apart(make_groups):
    first, second = make_groups(2)
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(first.all_reduce, torch.ones(3)), pool.submit(second.all_reduce, torch.ones(4))]
        for one in sums:
            with pytest.raises(ParallelError, match=r"in another operation, or brings another size|has left"):
                one.result(10)


def test_nothing_is_left_of_a_group():
    def traces():
        maps = Path("/proc/self/maps").read_text().count("antiphon-group")
        files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return maps, sum("antiphon-group" in file for file in files)

    named = set(os.listdir("/dev/shm"))
    groups = thread_groups(2)
    assert traces() == (2, 2)
    assert set(os.listdir("/dev/shm")) == named
    for group in groups:
        group.close()
    assert traces() == (0, 0)


def join_all(configs, timeout=20.0):
    store, port = bind_store("127.0.0.1")
    size = len(configs)

    def join(rank):
        return join_group(configs[rank], "127.0.0.1", port, rank, size, device="cpu", timeout=timeout)

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(join, range(size)))
    del store
    return groups


def configured(kernels):
    return EngineConfig(model=ModelConfig(path="any"), worker=WorkerConfig(cpu_kernels=kernels))


def test_ranks_of_one_host_share_memory_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO)
    groups = join_all([configured("auto")] * 2)
    assert all(isinstance(group, SharedMemoryGroup) for group in groups)
    assert "2 ranks speak through shared memory" in caplog.text
    for group in groups:
        group.close()


def test_one_rank_without_kernels_makes_all_speak_over_gloo_and_the_log_says_why(caplog):
    caplog.set_level(logging.INFO)
    groups = join_all([configured("auto"), configured("pytorch")])
    assert all(isinstance(group, TorchGroup) for group in groups)
    assert on_all(groups, lambda group: group.all_reduce(torch.ones(1)).item()) == [2, 2]
    assert "over gloo, not through shared memory: rank 1: no C++ kernels: worker.cpu_kernels is pytorch" in caplog.text
    for group in groups:
        group.close()


def test_ranks_of_several_hosts_do_not_try(monkeypatch):
    monkeypatch.setattr(shared_memory_group, "_own_place", lambda: f"thread {threading.get_ident()}")
    assert meet_as_threads(2) == ["the ranks are not all on one host"] * 2


def test_memory_that_cannot_be_had_or_opened_is_a_reason(monkeypatch):
    file, reason = shared_memory_group._create_file(0)
    assert file is None
    assert reason.startswith("0 bytes of shared memory: ")
    monkeypatch.setattr(shared_memory_group, "_create_file", lambda num_bytes: (None, "no room"))
    assert meet_as_threads(2) == ["rank 0: no room"] * 2


def test_a_file_that_is_not_the_group_s_is_refused(monkeypatch, tmp_path):
    """One that is too small: touching its memory would end the process."""
    empty = (tmp_path / "empty").open("w+")
    monkeypatch.setattr(shared_memory_group, "_create_file", lambda num_bytes: (os.dup(empty.fileno()), ""))
    (first, second) = meet_as_threads(2)
    assert first == second
    assert "cannot be opened, mapped or locked" in first
    empty.close()


def test_a_rank_that_does_not_come_is_missed_within_the_timeout():
    store, port = bind_store("127.0.0.1")
    with pytest.raises(ParallelError, match="rank 0 of 2 did not meet its peers"):
        join_group(configured("auto"), "127.0.0.1", port, 0, 2, device="cpu", timeout=0.5)
    del store
