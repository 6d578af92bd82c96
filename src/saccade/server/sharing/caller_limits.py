"""Limits of each caller, read from a YAML file (`--limits`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from saccade.errors import ConfigError

MAX_WEIGHT = 1000.0
MAX_SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerLimits:
    """0 sets no limit. A caller is a key, or an address where there are no keys."""

    max_requests: int = 0  # running and waiting together
    tokens_per_minute: int = 0  # of prompts and answers
    queue_share: float = 1.0  # most of the server's places, as a fraction
    weight: float = 1.0  # a caller with twice the weight gets twice the turns
    priority: bool = False  # may go ahead of others with a negative priority


@dataclass(frozen=True, slots=True)
class LimitsFile:
    """`callers` has the limits of those with a name, `keys` the name for each of their keys."""

    default: CallerLimits = CallerLimits()
    callers: dict[str, CallerLimits] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


def read_limits(path: str, *, allow_priority: bool = False) -> LimitsFile:
    """`default` applies to everybody whom `callers` does not name. Without a file there are no limits."""
    own = CallerLimits(priority=allow_priority)
    if not path:
        return LimitsFile(own)
    found = _table(_load(Path(path)), path, {"default", "callers"})
    default = _limits(_table(found.get("default"), f"{path}: default", _NAMES), f"{path}: default", own)
    callers: dict[str, CallerLimits] = {}
    keys: dict[str, str] = {}
    for name, given in _table(found.get("callers"), f"{path}: callers").items():
        where = f"{path}: callers: {name}"
        entry = dict(_table(given, where, {"key", *_NAMES}))
        key = entry.pop("key", None)
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{where}: key is missing; write the caller's API key as text, in quotes (--limits)")
        if key in keys:
            raise ConfigError(f"{where}: it has the key of {keys[key]}; keys must differ (--limits)")
        keys[key], callers[str(name)] = str(name), _limits(entry, where, default)
    return LimitsFile(default, callers, keys)


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror} (--limits)") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path} cannot be read as YAML (--limits)") from None


def _table(value: Any, where: str, allowed: set[str] | None = None) -> Mapping[Any, Any]:
    if not isinstance(value or {}, dict):
        raise ConfigError(f"{where} is a {type(value).__name__}; write `name: value` lines (--limits)")
    found: Mapping[Any, Any] = value or {}
    if allowed is not None and (unknown := [name for name in found if name not in allowed]):
        raise ConfigError(f"{where}: unknown {unknown[0]}; allowed are {', '.join(sorted(allowed))} (--limits)")
    return found


def _limits(given: Mapping[Any, Any], where: str, default: CallerLimits) -> CallerLimits:
    chosen = {field.name: getattr(default, field.name) for field in fields(CallerLimits)}
    for name, value in given.items():
        kind, low, high = _RANGES[name]
        is_right = isinstance(value, bool) if kind is bool else isinstance(value, kind) and not isinstance(value, bool)
        if not is_right or not low <= value <= high:  # NaN fails too
            what = "true or false" if kind is bool else f"a number from {low:g} to {high:g}"
            raise ConfigError(f"{where}: {name} is {_shown(value)}; it must be {what} (--limits)")
        chosen[name] = value
    return CallerLimits(**chosen)


def _shown(value: Any) -> str:
    """Short, whatever the file has: a few YAML lines can describe a list of millions, and a number can be huge."""
    if not isinstance(value, bool | int | float | str):
        return f"a {type(value).__name__}"
    return repr(value)[:MAX_SHOWN] if not isinstance(value, int) or abs(value) < 10**MAX_SHOWN else "a huge number"


_RANGES: dict[str, tuple[Any, float, float]] = {
    "max_requests": (int, 0, 2**31),
    "tokens_per_minute": (int, 0, 10**12),
    "queue_share": (int | float, 0.001, 1.0),
    "weight": (int | float, 0.001, MAX_WEIGHT),
    "priority": (bool, 0, 1),
}
_NAMES = set(_RANGES)
