"""Fair order between tenants: start-time fair queueing.

Every request gets a start on a virtual clock: the moment that the clock shows, or the end of its tenant's last request,
whichever is later; it ends its cost, divided by the tenant's weight, after that. Requests begin in the order of their
starts, and the clock follows the request that began last.

So a tenant's requests come in the order of their arrival, and while two tenants wait, what was begun for each differs,
per weight, by at most one request of each. A tenant that had nothing waiting is behind at most one request of every
other, however many those sent before.

`jobs/fair_line.py` has the same aim, but decides only when something begins. Here the start is a part of a request's
fixed order, between its priority and its arrival."""

from collections import Counter

MANY = 1024  # tenants to remember before those that no longer matter are dropped


class FairClock:
    """Invariant: `_ends` has every tenant with waiting requests, and others only while their end is to come."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of the last request of each tenant
        self._begun_ends: dict[str, float] = {}  # of the last that began
        self._waiting: Counter[str] = Counter()

    def enter(self, tenant: str, cost: float) -> float:
        """The start of a new request. `cost` is already divided by the tenant's weight."""
        assert cost > 0, f"a request of {tenant!r} costs {cost}"
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + cost
        self._waiting[tenant] += 1
        return start

    def begin(self, tenant: str, start: float, cost: float) -> None:
        """A request begins for the first time."""
        self._now = max(self._now, start)
        self._begun_ends[tenant] = max(self._begun_ends.get(tenant, 0.0), start + cost)
        self.leave(tenant)

    def leave(self, tenant: str) -> None:
        """A request waits no more. Those that end without having begun cost nothing, once no others wait behind."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._ends[tenant] = self._begun_ends.get(tenant, 0.0)
        if len(self._ends) > MANY:
            self._forget()

    def clear(self) -> None:
        """Nothing waits and nothing runs: everybody starts anew."""
        self._now = 0.0
        self._ends.clear()
        self._begun_ends.clear()
        self._waiting.clear()

    def check(self, num_waiting: Counter[str]) -> None:
        assert self._waiting == num_waiting, f"{self._waiting} wait, but the queue has {num_waiting}"

    def _forget(self) -> None:
        past = [name for name, end in self._ends.items() if end <= self._now and name not in self._waiting]
        for name in past:
            del self._ends[name]
            self._begun_ends.pop(name, None)
