"""The orders that check a rank's graphs. All ranks obey them together, and each learns what the others found. They
check in lockstep, so their reports have the same rows and are merged to one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import msgpack

from saccade.execution.executor import DeviceExecutor
from saccade.execution.shadow import Shadow
from saccade.execution.shadow_file import Replayed, file_of_rank, read_file, replay_file
from saccade.execution.verification import OnGraph, audit_graphs, verify_graphs
from saccade.graphs import AuditReport, AuditRow, VerifyReport, VerifyRow
from saccade.layers.parallel import ParallelGroup
from saccade.scheduling.orders import AuditGraphs, BeginShadow, CheckReplay, GraphCheck, RepeatReplay, VerifyGraphs

Found = TypeVar("Found", VerifyReport, AuditReport, Replayed)
Report = TypeVar("Report", VerifyReport, AuditReport)


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
                return _merged(self._from_all(own), _merge_checks)
            case AuditGraphs(is_short=is_short):
                audited = audit_graphs(self._executor, is_short=is_short, progress=self.on_graph)
                return _merged(self._from_all(audited), _merge_findings)
            case RepeatReplay(file=file):
                return self._from_all(
                    replay_file(self._executor, read_file(file_of_rank(Path(file), self._group.rank)))
                )

    def _from_all(self, own: Found) -> list[Found]:
        return [msgpack.decode(each, type=type(own)) for each in self._group.gather(msgpack.encode(own))]


def _merged(reports: Sequence[Report], merge: Callable[[Sequence[Any]], Any]) -> Report:
    if len(reports) == 1:
        return reports[0]
    return replace(reports[0], rows=tuple(map(merge, zip(*(report.rows for report in reports), strict=True))))


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _merge_checks(rows: Sequence[VerifyRow]) -> VerifyRow:
    """The worst row, with the ranks on which the replays were wrong and the problem of the first of them."""
    worst = max(row.difference for row in rows)
    wrong = [rank for rank, row in enumerate(rows) if not row.is_right]
    if not wrong:
        return replace(rows[0], difference=worst)
    return replace(rows[wrong[0]], difference=worst, problem=f"on {_name_ranks(wrong)}: {rows[wrong[0]].problem}")


def _merge_findings(rows: Sequence[AuditRow]) -> AuditRow:
    found = dict.fromkeys(finding for row in rows for finding in row.findings)
    having = {finding: [rank for rank, row in enumerate(rows) if finding in row.findings] for finding in found}
    return replace(rows[0], findings=tuple(f"{finding} (on {_name_ranks(having[finding])})" for finding in found))
