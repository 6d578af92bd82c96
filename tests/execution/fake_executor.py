"""An executor that obeys tests. It imports no torch, so that its process starts quickly."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import ConfigError, RequestError
from saccade.execution.rank_messages import Outcome, RankStart


@dataclass(frozen=True, slots=True)
class Do:
    """Something to do by one rank; 0: by every one."""

    what: str
    rank: int = 0
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Add:
    values: npt.NDArray[np.int64]


class FakeExecutor:
    order_types = (Do, Add)

    def __init__(self, start: RankStart) -> None:
        self._start = start
        self.facts = {"rank": start.rank, "device": start.device, "pid": os.getpid(), "settings": start.settings}

    def execute(self, order: Do | Add) -> Outcome | None:
        match order:
            case Add(values=values):
                return Outcome(digest=f"sum of {len(values)}", value=int(values.sum()))
            case Do(rank=rank) if rank in (0, self._start.rank):
                return self._do(order)
        return None

    def close(self) -> None:
        if "closed" in self._start.settings:
            Path(self._start.settings["closed"]).touch()

    def _do(self, order: Do) -> Outcome | None:
        match order.what:
            case "sleep":
                time.sleep(order.seconds)
            case "fail":
                raise RequestError(order.text)
            case "fail otherwise":
                raise RuntimeError(order.text)
            case "say":
                return Outcome(digest=order.text)
            case "answer much":
                return Outcome(value="x" * 10**6)
            case "log":
                print(order.text, file=sys.stderr)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(7)
            case "environment":
                return Outcome(value=os.environ.get(order.text))
            case "read store":
                return Outcome(value=Path(self._start.store).read_text())
        return None


def make(start: RankStart) -> FakeExecutor:
    """How the start goes for rank `who` is in the settings."""
    if start.settings.get("who") == start.rank:
        _start_badly(start.settings["how"])
    return FakeExecutor(start)


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
