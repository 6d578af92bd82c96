"""However many items a caller has queued, another caller waits for at most one of them."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from saccade.jobs.fair_queue import MANY, FairQueue

costs = st.integers(1, 50).map(float)
flows = st.dictionaries(st.sampled_from("abcd"), st.lists(costs, min_size=1, max_size=20), min_size=2)


def test_a_newcomer_waits_for_one_item_of_each_other_caller() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.put("flood", "flood", cost=10.0)
        queue.put("other flood", "other flood", cost=10.0)
    for _ in range(7):
        queue.take()
    queue.put("newcomer", "newcomer", cost=50.0)
    assert "newcomer" in [queue.take() for _ in range(3)]


@given(flows=flows)
def test_callers_are_served_equally_up_to_one_item_each(flows: dict[str, list[float]]) -> None:
    """By cost, over every interval in which both callers always have something waiting."""
    queue: FairQueue[tuple[str, float]] = FairQueue()
    for name, flow in flows.items():
        for cost in flow:
            queue.put(name, (name, cost), cost=cost)
    assert len(queue) == sum(map(len, flows.values()))
    begun = []
    while {name for name, _ in queue} == flows.keys():
        begun.append(queue.take())
    for first in range(len(begun)):
        work: dict[str, float] = defaultdict(float)
        for name, cost in begun[first:]:
            work[name] += cost
        for one in flows:
            for other in flows:
                assert work[one] - work[other] <= max(flows[one]) + max(flows[other])


def test_a_callers_own_items_come_by_rank_then_by_age() -> None:
    queue: FairQueue[str] = FairQueue()
    for rank, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        queue.put("me", name, rank=rank)
    assert queue.first() == "a" and [queue.take() for _ in range(3)] == ["a", "b", "c"] and not queue


def test_an_item_that_leaves_is_not_taken_and_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    gone, kept, other = "gone", "kept", "other"
    queue.put("me", gone, cost=100.0)
    queue.put("me", kept, cost=1.0)
    queue.put("you", other, cost=1.0)
    queue.leave("me", gone)
    queue.leave("me", gone)
    queue.leave("nobody", gone)
    assert len(queue) == 2 and [queue.take(), queue.take()] == [kept, other]
    queue.put("me", "again")
    queue.leave("me", queue.first())
    assert not queue


def test_idle_callers_gain_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.put("busy", "busy")
    for _ in range(10):
        queue.take()
    for _ in range(10):
        queue.put("newcomer", "newcomer")
    assert [queue.take() for _ in range(10)].count("newcomer") in (5, 6)


def test_all_start_afresh_once_the_queue_is_empty() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("busy", "busy", cost=100.0)
    queue.take()
    queue.put("busy", "busy")
    queue.put("newcomer", "newcomer")
    assert [queue.take(), queue.take()] == ["busy", "newcomer"]


def test_callers_with_nothing_waiting_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.put("waits all the time", -number, cost=MANY**2)
    for number in range(3 * MANY):
        queue.put(f"caller {number}", number)
        queue.take()
    assert len(queue) == 3 and len(queue._ends) <= MANY + 4
