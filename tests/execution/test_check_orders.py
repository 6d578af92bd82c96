"""What ranks find when they check their graphs together becomes one report."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import msgpack

from saccade.execution import check_orders
from saccade.execution.check_orders import GraphChecks
from saccade.graphs import AuditReport, AuditRow, VerifyReport, VerifyRow
from saccade.layers.parallel import ALONE, ParallelGroup
from saccade.scheduling.orders import AuditGraphs, VerifyGraphs

RIGHT = VerifyRow("decode/full tokens=4", "poisoned", 2, 1e-6)
WRONG = VerifyRow("decode/full tokens=4", "poisoned", 1, 0.5, "1 of 8 values differ")


class Others:
    """Stands in for ranks 1 and 2."""

    def __init__(self, *found: Any) -> None:
        self.found = found

    def gather(self, data: bytes) -> list[bytes]:
        return [data, *map(msgpack.encode, self.found)]


def checks(*others: Any) -> GraphChecks:
    group = ParallelGroup(rank=0, size=3, control=Others(*others)) if others else ALONE  # type: ignore[arg-type]
    return GraphChecks(None, group, new_shadow=pytest.fail)  # type: ignore[arg-type]


def verified(monkeypatch: pytest.MonkeyPatch, own: VerifyRow, *others: VerifyRow) -> VerifyRow:
    monkeypatch.setattr(check_orders, "verify_graphs", lambda executor, **how: VerifyReport((own, RIGHT)))
    report = checks(*(VerifyReport((row, RIGHT)) for row in others)).obey(VerifyGraphs(is_short=True))
    first, second = report.rows
    assert second == RIGHT
    return first  # type: ignore[no-any-return]


def test_a_row_is_wrong_if_it_is_wrong_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    worse = replace(RIGHT, difference=0.25)
    assert verified(monkeypatch, RIGHT, worse, RIGHT) == worse, "it has the largest difference"
    found = verified(monkeypatch, RIGHT, WRONG, WRONG)
    assert found == replace(WRONG, problem="on rank 1, 2: 1 of 8 values differ")
    assert verified(monkeypatch, WRONG, RIGHT, RIGHT).problem == "on rank 0: 1 of 8 values differ"
    assert verified(monkeypatch, WRONG) == WRONG, "a single rank is not named"


def test_findings_name_the_ranks_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(*findings: str) -> AuditReport:
        return AuditReport((AuditRow("decode/full tokens=4", 7, findings),))

    monkeypatch.setattr(check_orders, "audit_graphs", lambda executor, **how: report("a", "b"))
    merged = checks(report(), report("b", "c")).obey(AuditGraphs(is_short=True))
    assert merged == report("a (on rank 0)", "b (on rank 0, 2)", "c (on rank 2)")
    assert checks().obey(AuditGraphs(is_short=True)) == report("a", "b")
