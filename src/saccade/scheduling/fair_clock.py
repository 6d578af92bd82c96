"""Fair order between tenants: start-time fair queueing.

Every request gets a start time on a virtual clock: the clock's present time or the end of its tenant's last request,
whichever is later. It ends after its cost divided by its tenant's weight. Requests begin in order of their start times,
and the clock advances to the start time of the request that began last.

So a tenant's requests begin in order of arrival. While two tenants wait, the work begun for them differs, per weight,
by at most one request of each. A tenant with nothing waiting queues behind at most one request of every other tenant,
however many those have sent.

`jobs/fair_queue.py` has the same goal, but decides only when something begins. Here the start time is part of a
request's fixed order, between its priority and its arrival."""

from collections import Counter

MANY = 1024  # tenants to remember before outdated ones are dropped


class FairClock:
    """Invariant: `_ends` has every tenant with waiting requests, and every tenant whose end is in the future."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of each tenant's last request
        self._begun_ends: dict[str, float] = {}  # of each tenant's last request that has begun
        self._waiting: Counter[str] = Counter()

    def enter(self, tenant: str, cost: float) -> float:
        """Returns the start time of a new request. `cost` is already divided by the tenant's weight."""
        assert cost > 0, f"a request of {tenant!r} costs {cost}"
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + cost
        self._waiting[tenant] += 1
        return start

    def begin(self, tenant: str, start: float, cost: float) -> None:
        """Notes that a request runs for the first time."""
        self._now = max(self._now, start)
        self._begun_ends[tenant] = max(self._begun_ends.get(tenant, 0.0), start + cost)
        self.leave(tenant)

    def leave(self, tenant: str) -> None:
        """Notes that a request no longer waits. If no other does, those that never began have cost nothing."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._ends[tenant] = self._begun_ends.get(tenant, 0.0)
        if len(self._ends) > MANY:
            self._forget()

    def check(self, num_waiting: Counter[str]) -> None:
        assert self._waiting == num_waiting, f"{self._waiting} wait, but the queue has {num_waiting}"

    def _forget(self) -> None:
        past = [name for name, end in self._ends.items() if end <= self._now and name not in self._waiting]
        for name in past:
            del self._ends[name]
            self._begun_ends.pop(name, None)
