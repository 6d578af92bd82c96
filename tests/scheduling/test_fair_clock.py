"""A tenant that floods the queue delays others by no more than its fair share."""

from collections import defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from saccade.scheduling.fair_clock import MANY, FairClock
from saccade.scheduling.request import Status
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from tests.engine.simulated import Loop, make_request, make_scheduler

LIMITS = SchedulerSettings(
    max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, encoder_budget_tokens=16, max_queued_requests=100
)
Waiting = list[tuple[float, int, str, float]]


def begin_first(clock: FairClock, waiting: Waiting) -> tuple[str, float]:
    start, number, tenant, cost = min(waiting)
    waiting.remove((start, number, tenant, cost))
    clock.begin(tenant, start, cost)
    return tenant, cost


def test_a_newcomer_waits_behind_at_most_one_request_of_each_tenant() -> None:
    clock, waiting = FairClock(), Waiting()
    for number in range(1000):
        for tenant in ("flood", "other flood"):
            waiting.append((clock.enter(tenant, 10.0), number, tenant, 10.0))
    for _ in range(7):
        begin_first(clock, waiting)
    waiting.append((clock.enter("newcomer", 50.0), 1000, "newcomer", 50.0))
    order = [begin_first(clock, waiting)[0] for _ in range(3)]
    assert "newcomer" in order


def test_a_tenant_keeps_the_order_of_its_requests() -> None:
    clock = FairClock()
    starts = [clock.enter("a", cost) for cost in (5.0, 1.0, 9.0)]
    assert starts == sorted(starts) and len(set(starts)) == 3


costs = st.integers(1, 50).map(float)
flows = st.dictionaries(st.sampled_from("abcd"), st.lists(costs, min_size=1, max_size=30), min_size=2)


@given(flows=flows, weights=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abcd"}))
def test_work_begun_for_two_tenants_differs_by_at_most_one_request_of_each(
    flows: dict[str, list[float]], weights: dict[str, float]
) -> None:
    """The theoretical bound, over every interval in which all tenants have requests waiting."""
    clock, waiting = FairClock(), Waiting()
    shares = {name: [cost / weights[name] for cost in flow] for name, flow in flows.items()}
    for name, flow in shares.items():
        waiting += [(clock.enter(name, cost), number, name, cost) for number, cost in enumerate(flow)]
    begun = []
    while waiting and len({name for _, _, name, _ in waiting}) == len(shares):
        begun.append(begin_first(clock, waiting))
    for first in range(len(begun)):
        work: dict[str, float] = defaultdict(float)
        for name, cost in begun[first:]:
            work[name] += cost
            for one in shares:
                for other in shares:
                    most = max(shares[one]) + max(shares[other])
                    assert work[one] - work[other] <= most + 1e-6


def test_requests_that_never_began_cost_nothing() -> None:
    clock = FairClock()
    begun = clock.enter("a", 10.0)
    clock.begin("a", begun, 10.0)
    for _ in range(100):
        clock.enter("a", 10.0)
    for _ in range(100):
        clock.leave("a")
    assert clock.enter("a", 10.0) == begun + 10.0


def test_outdated_tenants_are_forgotten() -> None:
    clock = FairClock()
    for number in range(10 * MANY):
        clock.begin(f"{number}", clock.enter(f"{number}", 1.0), 1.0)
        clock.begin("steady", clock.enter("steady", 1.0), 1.0)
    assert len(clock._ends) <= MANY + 1 and len(clock._begun_ends) <= MANY + 1


def test_tenants_that_wait_or_are_ahead_of_their_share_are_remembered() -> None:
    clock = FairClock()
    clock.begin("ahead", clock.enter("ahead", 1e6), 1e6)
    clock.enter("waits", 10.0)
    for number in range(2 * MANY):
        for tenant in (f"{number}", "steady"):
            clock.begin(tenant, clock.enter(tenant, 1.0), 1.0)
    assert len(clock._ends) <= MANY + 1 and "waits" in clock._ends
    assert clock.enter("ahead", 1.0) == 1e6


def test_the_clock_never_goes_back_and_idle_tenants_save_up_nothing() -> None:
    clock = FairClock()
    low = clock.enter("low priority", 5.0)
    for _ in range(10):
        clock.begin("busy", clock.enter("busy", 10.0), 10.0)
    clock.begin("low priority", low, 5.0)
    assert clock.enter("newcomer", 1.0) == 90.0 == clock.enter("low priority", 1.0)


def test_a_scheduler_that_was_idle_starts_afresh_for_all_tenants() -> None:
    loop = Loop(make_scheduler(LIMITS))
    loop.add(make_request("before", [5, 6, 7], tenant="busy"))
    loop.drain()
    for tenant in ("busy", "newcomer"):
        later = make_request(tenant, [5, 6, 7], tenant=tenant)
        loop.add(later)
        assert later.fair_start == 0.0


def test_a_flood_of_requests_does_not_keep_other_tenants_waiting() -> None:
    """With one slot, the other tenant's request starts after the running one and at most one more."""
    loop = Loop(make_scheduler(LIMITS))
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for number in range(50):
        loop.add(make_request(f"flood{number}", [5, 6, 7], params=params, tenant="flood"))
    loop.step()
    loop.add(make_request("small", [8, 9], params=params, tenant="other", arrival=100.0))
    order = deque[str]()
    for _ in range(1000):
        if loop.scheduler.is_idle:
            break
        running = [name for name, request in loop.scheduler.live.items() if request.status is Status.RUNNING]
        for name in running:
            if name not in order:
                order.append(name)
        loop.step()
    assert list(order).index("small") <= 2, list(order)[:5]
    assert [name for name in order if name != "small"] == [f"flood{number}" for number in range(50)]
