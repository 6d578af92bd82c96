"""An executor that does what a test says. It imports no torch, so its process starts quickly."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import ConfigError, RequestError
from saccade.execution.rank_messages import RankExecutor, RankStart


@dataclass(frozen=True, slots=True)
class Do:
    """An action of one rank, or of every rank if `rank` is 0."""

    what: str
    rank: int = 0
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Add:
    values: npt.NDArray[np.int64]


def digest_of(values: npt.NDArray[np.int64]) -> str:
    return f"the sum of {len(values)} is {values.sum()}"


class FakeExecutor:
    order_types = (Do, Add)

    def __init__(self, start: RankStart) -> None:
        self._start, self._digest = start, ""

    def execute(self, order: Do | Add) -> None:
        self._digest = ""
        match order:
            case Add(values=values):
                self._digest = digest_of(values)
            case Do(rank=rank) if rank in (0, self._start.rank):
                self._digest = self._do(order) or ""

    def take_digest(self) -> str:
        return self._digest

    def close(self) -> None:
        if "closed" in self._start.settings:
            Path(self._start.settings["closed"]).touch()

    def _do(self, order: Do) -> str | None:
        actions: dict[str, Callable[[Do], str | None]] = {
            "nothing": lambda order: None,
            "sleep": lambda order: time.sleep(order.seconds),
            "wait for file": _wait_for_file,
            "fail": _fail,
            "fail differently": _fail_differently,
            "say": lambda order: order.text,
            "answer too much": lambda order: "x" * 10**6,
            "log": lambda order: print(order.text, file=sys.stderr),
            "kill": lambda order: os.kill(os.getpid(), signal.SIGKILL),
            "exit": lambda order: sys.exit(7),
            "environment": lambda order: os.environ[order.text],
            "read store": lambda order: Path(self._start.store).read_text(),
        }
        return actions[order.what](order)


def _wait_for_file(order: Do) -> None:
    while not Path(order.text).exists():
        time.sleep(0.01)


def _fail(order: Do) -> str:
    raise RequestError(order.text)


def _fail_differently(order: Do) -> str:
    raise RuntimeError(order.text)


def make(start: RankStart) -> RankExecutor:
    """The settings say `how` the start of rank `who` fails."""
    if start.settings.get("who") == start.rank:
        _start_badly(start.settings["how"])
    fake = FakeExecutor(start)
    return RankExecutor(
        order_types=FakeExecutor.order_types,
        execute=fake.execute,
        take_digest=fake.take_digest,
        facts={"rank": start.rank, "device": start.device, "pid": os.getpid(), "settings": start.settings},
        close=fake.close,
    )


def _start_badly(how: str) -> Any:
    match how:
        case "config":
            raise ConfigError("8 heads cannot be divided by 3 ranks")
        case "error":
            raise RuntimeError("no such device")
        case "exit":
            sys.exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
