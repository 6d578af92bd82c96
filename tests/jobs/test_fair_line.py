"""However many items a caller has queued, another caller waits for at most one of them."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from saccade.jobs.fair_line import MANY, FairLine

costs = st.integers(1, 50).map(float)
flows = st.dictionaries(st.sampled_from("abcd"), st.lists(costs, min_size=1, max_size=20), min_size=2)


def test_a_newcomer_waits_for_one_item_of_each_other_caller() -> None:
    line: FairLine[str] = FairLine()
    for _ in range(100):
        line.put("flood", "flood", cost=10.0)
        line.put("other flood", "other flood", cost=10.0)
    for _ in range(7):
        line.take()
    line.put("newcomer", "newcomer", cost=50.0)
    assert "newcomer" in [line.take() for _ in range(3)]


@given(flows=flows)
def test_callers_are_served_equally_up_to_one_item_each(flows: dict[str, list[float]]) -> None:
    """By cost, over every interval in which both callers always have something waiting."""
    line: FairLine[tuple[str, float]] = FairLine()
    for name, flow in flows.items():
        for cost in flow:
            line.put(name, (name, cost), cost=cost)
    assert len(line) == sum(map(len, flows.values()))
    begun = []
    while {name for name, _ in line} == flows.keys():
        begun.append(line.take())
    for first in range(len(begun)):
        work: dict[str, float] = defaultdict(float)
        for name, cost in begun[first:]:
            work[name] += cost
        for one in flows:
            for other in flows:
                assert work[one] - work[other] <= max(flows[one]) + max(flows[other])


def test_a_callers_own_items_come_by_rank_then_by_age() -> None:
    line: FairLine[str] = FairLine()
    for rank, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        line.put("me", name, rank=rank)
    assert line.first() == "a" and [line.take() for _ in range(3)] == ["a", "b", "c"] and not line


def test_an_item_that_leaves_is_not_taken_and_costs_nothing() -> None:
    line: FairLine[str] = FairLine()
    gone, kept, other = "gone", "kept", "other"
    line.put("me", gone, cost=100.0)
    line.put("me", kept, cost=1.0)
    line.put("you", other, cost=1.0)
    line.leave("me", gone)
    line.leave("me", gone)
    line.leave("nobody", gone)
    assert len(line) == 2 and [line.take(), line.take()] == [kept, other]
    line.put("me", "again")
    line.leave("me", line.first())
    assert not line


def test_idle_callers_gain_no_credit() -> None:
    line: FairLine[str] = FairLine()
    for _ in range(20):
        line.put("busy", "busy")
    for _ in range(10):
        line.take()
    for _ in range(10):
        line.put("newcomer", "newcomer")
    assert [line.take() for _ in range(10)].count("newcomer") in (5, 6)


def test_all_start_afresh_once_the_queue_is_empty() -> None:
    line: FairLine[str] = FairLine()
    line.put("busy", "busy", cost=100.0)
    line.take()
    line.put("busy", "busy")
    line.put("newcomer", "newcomer")
    assert [line.take(), line.take()] == ["busy", "newcomer"]


def test_callers_with_nothing_waiting_are_forgotten() -> None:
    line: FairLine[int] = FairLine()
    for number in range(3):
        line.put("waits all the time", -number, cost=MANY**2)
    for number in range(3 * MANY):
        line.put(f"caller {number}", number)
        line.take()
    assert len(line) == 3 and len(line._ends) <= MANY + 4
