"""Callers and what each has used. A caller is the name of a key, or an address where there are no keys."""

import ipaddress
from functools import lru_cache
from time import monotonic

from saccade.server.http_errors import HttpError
from saccade.server.sharing.caller_limits import CallerLimits, LimitsFile

MANY = 4096  # callers remembered before idle ones are dropped


class Caller:
    """`inside` counts its requests in the server. Tokens are charged when their number is known. A caller that exceeded
    its rate must wait until it is paid back; its running requests continue."""

    def __init__(self, name: str, limits: CallerLimits) -> None:
        self.name, self.limits = name, limits
        self.inside = 0
        self._tokens = float(limits.tokens_per_minute)  # what it may use at once
        self._since = monotonic()

    @property
    def is_forgettable(self) -> bool:
        self._refill()
        return self.inside == 0 and self._tokens >= self.limits.tokens_per_minute

    def check(self, wait_s: float) -> None:
        """Raises if the caller may not send another request now. `wait_s` is how soon one of its own may end."""
        limits = self.limits
        if limits.max_requests and self.inside >= limits.max_requests:
            found = f"{self.inside} requests of this caller are running and waiting"
            raise _too_many(f"{found}; the limit is {limits.max_requests} (max_requests)", wait_s)
        if limits.tokens_per_minute:
            self._refill()
            if self._tokens <= 0:
                rate = limits.tokens_per_minute / 60
                found = f"this caller used more than {limits.tokens_per_minute} tokens a minute"
                raise _too_many(f"{found}, which is its limit (tokens_per_minute)", (1 - self._tokens) / rate)

    def take(self, num_tokens: int) -> None:
        if self.limits.tokens_per_minute:
            self._refill()
            self._tokens -= num_tokens

    def check_priority(self, priority: int) -> None:
        if priority < 0 and not self.limits.priority:
            text = f"priority is {priority}; only callers with priority: true in the --limits file may set one below 0"
            text += " (or all callers, with --allow-priority)"
            raise HttpError(403, text, code="priority_not_allowed", param="priority")

    def _refill(self) -> None:
        now, most = monotonic(), self.limits.tokens_per_minute
        self._tokens = min(self._tokens + (now - self._since) * most / 60, most)
        self._since = now


class Callers:
    def __init__(self, limits: LimitsFile, keys: tuple[str, ...]) -> None:
        """`keys` are API keys beyond those in the limits file."""
        self._limits = limits
        self._known: dict[str, Caller] = {}
        self.keys = limits.keys | {key: f"key {idx}" for idx, key in enumerate(keys) if key not in limits.keys}

    def find(self, key_name: str | None, address: str | None) -> Caller:
        """The caller with a key, or at an address."""
        name = key_name if key_name is not None else f"address {_network(address or '')}"
        if name not in self._known:
            if len(self._known) >= MANY:
                self._known = {other: caller for other, caller in self._known.items() if not caller.is_forgettable}
            self._known[name] = Caller(name, self._limits.callers.get(name, self._limits.default))
        return self._known[name]


@lru_cache(MANY)
def _network(address: str) -> str:
    """An IPv4 address, or the /64 network that an IPv6 subscriber gets."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


def _too_many(text: str, wait_s: float) -> HttpError:
    return HttpError(429, text, code="rate_limit_exceeded", retry_after_s=wait_s)
