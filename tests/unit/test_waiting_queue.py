"""The order of waiting requests under each policy."""

from __future__ import annotations

import pytest

from scheduler.sequence import Sequence, SequenceStatus
from scheduler.waiting_queue import Policy, WaitingQueue
from tests.support.factories import make_sequence


def arrive(
    queue: WaitingQueue, name: str, *, priority: int = 0, tenant: str = "", num_tokens: int = 10, index: int = 0
) -> Sequence:
    seq = make_sequence(1)
    seq.request_id, seq.index = name, index
    seq.queue_key = queue.arrival_key(priority=priority, tenant=tenant, num_tokens=num_tokens)
    queue.push(seq)
    return seq


def admit(queue: WaitingQueue) -> Sequence:
    seq = queue.pop()
    seq.status = SequenceStatus.RUNNING
    return seq


def discard(queue: WaitingQueue, seq: Sequence) -> None:
    seq.status = SequenceStatus.FINISHED
    queue.note_discarded()


def order(queue: WaitingQueue) -> str:
    return "".join(str(admit(queue).request_id) for _ in range(len(queue)))


def test_first_come_is_first_served() -> None:
    queue = WaitingQueue("fcfs")
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        arrive(queue, name, priority=priority)
    assert order(queue) == "abc"


def test_lower_priorities_go_first_and_equal_ones_in_order() -> None:
    queue = WaitingQueue("priority")
    for name, priority in (("a", 1), ("b", -5), ("c", 1), ("d", 0)):
        arrive(queue, name, priority=priority)
    assert order(queue) == "bdac"


def test_a_preempted_sequence_goes_back_to_its_place() -> None:
    queue = WaitingQueue("priority")
    for name in "abc":
        arrive(queue, name)
    first, second = admit(queue), admit(queue)
    for seq in (second, first):
        seq.status = SequenceStatus.WAITING
        queue.push(seq)
    assert order(queue) == "abc"


def test_siblings_stay_together_in_the_order_of_their_index() -> None:
    queue = WaitingQueue("priority")
    lead = arrive(queue, "a")
    arrive(queue, "b")
    for index in (2, 1):
        child = make_sequence(1)
        child.request_id, child.index, child.queue_key = index, index, lead.queue_key
        queue.push(child)
    assert order(queue) == "a12b"


def test_a_tenant_that_sends_more_does_not_get_more() -> None:
    queue = WaitingQueue("fair")
    for _ in range(6):
        arrive(queue, "x", tenant="loud")
    for _ in range(2):
        arrive(queue, "o", tenant="quiet")
    assert order(queue) == "xoxoxxxx"


def test_shares_are_counted_in_tokens() -> None:
    queue = WaitingQueue("fair")
    for _ in range(4):
        arrive(queue, "L", tenant="long", num_tokens=30)
    for _ in range(6):
        arrive(queue, "s", tenant="short", num_tokens=10)
    assert order(queue) == "LsssLsssLL"


def test_a_tenant_that_was_idle_saves_nothing_up() -> None:
    queue = WaitingQueue("fair")
    for _ in range(20):
        arrive(queue, "x", tenant="steady")
    for _ in range(10):
        admit(queue)
    for _ in range(4):
        arrive(queue, "o", tenant="late")
    assert order(queue)[:8] in ("xoxoxoxo", "oxoxoxox", "xooxoxox")


def test_priority_comes_before_fairness() -> None:
    queue = WaitingQueue("fair")
    for _ in range(3):
        arrive(queue, "x", tenant="loud", priority=-1)
    arrive(queue, "o", tenant="quiet")
    assert order(queue) == "xxxo"


def test_tenants_that_have_caught_up_are_forgotten() -> None:
    queue = WaitingQueue("fair")
    for tenant in range(3000):
        arrive(queue, "x", tenant=str(tenant))
        arrive(queue, "o", tenant="steady")
        if tenant:
            admit(queue)
            admit(queue)
    assert len(queue._virtual_finish) < 1100


def test_debts_end_with_the_rush() -> None:
    queue = WaitingQueue("fair")
    for _ in range(10):
        arrive(queue, "x", tenant="loud")
    order(queue)
    arrive(queue, "x", tenant="loud")
    arrive(queue, "o", tenant="quiet")
    assert order(queue) == "xo"


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_discarded_sequence_is_neither_counted_nor_met(policy: Policy) -> None:
    queue = WaitingQueue(policy)
    seqs = [arrive(queue, name) for name in "abcdef"]
    for i in (0, 3):
        discard(queue, seqs[i])
    assert len(queue) == 4
    assert sorted(str(seq.request_id) for seq in queue) == ["b", "c", "e", "f"]
    assert order(queue) == "bcef"
    assert queue.peek() is None


def test_many_discarded_ones_do_not_pile_up() -> None:
    queue = WaitingQueue("priority")
    arrive(queue, "a")
    for _ in range(1000):
        discard(queue, arrive(queue, "b"))
    assert len(queue) == 1
    assert len(queue._heap) <= 3


def test_an_empty_queue_has_no_head() -> None:
    queue = WaitingQueue("priority")
    assert (len(queue), queue.peek()) == (0, None)
    with pytest.raises(AssertionError, match="empty"):
        queue.pop()
