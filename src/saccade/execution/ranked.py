"""An executor on several ranks: rank 0 passes every order on before it obeys it, and all must do the same."""

from typing import Any

from saccade.execution.executor import DeviceExecutor
from saccade.execution.rank_messages import OrderOutcome, describe
from saccade.execution.rank_processes import RankProcesses
from saccade.scheduling.orders import Orders

CALIBRATION_ROUNDS = 5  # ranks that measure together must do it equally often


class RankedExecutor:
    """Rank 0 of several. The others obey on their own; whether they did the same is checked afterwards."""

    def __init__(self, executor: DeviceExecutor, processes: RankProcesses) -> None:
        self._executor, self._processes = executor, processes
        self._number = 0  # of the newest order

    def execute(self, orders: Orders) -> Any:
        """What rank 0 got from it."""
        self._number = number = self._processes.send(orders)
        try:
            result = self._executor.execute(orders)
        except BaseException as error:
            self._processes.record(number, OrderOutcome(digest=self._executor.take_trace(), error=describe(error)))
            raise
        self._processes.record(number, OrderOutcome(digest=self._executor.take_trace()))
        return result

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Of rank 0: the others replay the same."""
        return self._executor.snapshots()

    def require_device(self) -> None:
        """After an error. If all ranks met the same one they go on; otherwise this raises what is wrong with which
        rank."""
        self._executor.require_device()
        if self._number:
            self._processes.settle(self._number)
