"""An executor on several ranks: rank 0 passes every order on before it obeys it, and all must do the same."""

from collections.abc import Sequence
from typing import Any

from saccade.choice.exact import ExactLayout
from saccade.choice.key import GraphKey
from saccade.execution.executor import DeviceExecutor, DeviceTicket
from saccade.execution.rank_messages import OrderOutcome, describe
from saccade.execution.rank_processes import RankProcesses
from saccade.scheduling.executing import Encoded
from saccade.scheduling.orders import Begin, Calibrate, Capture, Drop, Encode, Orders, Run, Sample, WarmUp

CALIBRATION_ROUNDS = 5  # ranks that measure together must do it equally often


class RankedExecutor:
    """Rank 0 of several. The others obey on their own; whether they did the same is checked afterwards."""

    def __init__(self, executor: DeviceExecutor, processes: RankProcesses) -> None:
        self._executor, self._processes = executor, processes
        self._number = 0  # of the newest order

    def begin(self, orders: Begin) -> None:
        self._execute(orders)

    def encode(self, orders: Encode) -> Encoded:
        encoded: Encoded = self._execute(orders)
        return encoded

    def run(self, orders: Run) -> DeviceTicket:
        ticket: DeviceTicket = self._execute(orders)
        return ticket

    def sample(self, orders: Sample) -> None:
        self._execute(orders)

    def capture_layout(self, layout: ExactLayout) -> int:
        nbytes: int = self._execute(Capture(layout))
        return nbytes

    def drop(self, keys: Sequence[GraphKey]) -> None:
        self._execute(Drop(tuple(keys)))

    def calibrate(self) -> None:
        self._execute(Calibrate(CALIBRATION_ROUNDS))

    def warm_up(self) -> None:
        self._execute(WarmUp())

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Of rank 0: the others replay the same."""
        return self._executor.snapshots()

    def require_device(self) -> None:
        """After an error. If all ranks met the same one they go on; otherwise this raises what is wrong with which
        rank."""
        self._executor.require_device()
        if self._number:
            self._processes.settle(self._number)

    def _execute(self, orders: Orders) -> Any:
        self._number = number = self._processes.send(orders)
        try:
            result = self._executor.execute(orders)
        except BaseException as error:
            self._processes.record(number, OrderOutcome(digest=self._executor.take_trace(), error=describe(error)))
            raise
        self._processes.record(number, OrderOutcome(digest=self._executor.take_trace()))
        return result
