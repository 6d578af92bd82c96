"""The orders that check a rank's graphs. All ranks obey them together, and each learns what the others found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec import msgpack

from saccade.execution.executor import DeviceExecutor
from saccade.execution.rank_reports import merge_audits, merge_verified
from saccade.execution.shadow import Shadow
from saccade.execution.shadow_file import Replayed, file_of_rank, read_file, replay_file
from saccade.execution.verification import OnGraph, audit_graphs, verify_graphs
from saccade.graphs import AuditReport, VerifyReport
from saccade.layers.parallel import ParallelGroup
from saccade.scheduling.orders import AuditGraphs, BeginShadow, CheckReplay, GraphCheck, RepeatReplay, VerifyGraphs

Found = TypeVar("Found", VerifyReport, AuditReport, Replayed)


class GraphChecks:
    def __init__(self, executor: DeviceExecutor, group: ParallelGroup, new_shadow: Callable[[], Shadow]) -> None:
        self._executor, self._group, self._new_shadow = executor, group, new_shadow
        self._shadow: Shadow | None = None
        self.on_graph: OnGraph = lambda *news: None  # shows the progress of verification and audit

    def obey(self, orders: GraphCheck) -> Any:
        match orders:
            case BeginShadow():
                self._shadow = self._new_shadow()
                return self._shadow
            case CheckReplay(number=number, key=key):
                assert self._shadow is not None, f"{orders} came before BeginShadow"
                return self._shadow.check_together(number, key)
            case VerifyGraphs(is_short=is_short):
                own = verify_graphs(self._executor, is_short=is_short, progress=self.on_graph, group=self._group)
                return merge_verified(self._from_all(own))
            case AuditGraphs(is_short=is_short):
                return merge_audits(
                    self._from_all(audit_graphs(self._executor, is_short=is_short, progress=self.on_graph))
                )
            case RepeatReplay(file=file):
                return self._from_all(
                    replay_file(self._executor, read_file(file_of_rank(Path(file), self._group.rank)))
                )

    def _from_all(self, own: Found) -> list[Found]:
        return [msgpack.decode(each, type=type(own)) for each in self._group.gather(msgpack.encode(own))]
