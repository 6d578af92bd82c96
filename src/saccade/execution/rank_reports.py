"""One report of what all ranks found. They check in lockstep, so their reports have the same rows."""

from collections.abc import Sequence
from dataclasses import replace

from saccade.graphs import AuditReport, AuditRow, VerifyReport, VerifyRow


def merge_verified(reports: Sequence[VerifyReport]) -> VerifyReport:
    if len(reports) == 1:
        return reports[0]
    return VerifyReport(tuple(map(_merge_checks, zip(*(report.rows for report in reports), strict=True))))


def merge_audits(reports: Sequence[AuditReport]) -> AuditReport:
    if len(reports) == 1:
        return reports[0]
    return AuditReport(tuple(map(_merge_findings, zip(*(report.rows for report in reports), strict=True))))


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _merge_checks(rows: Sequence[VerifyRow]) -> VerifyRow:
    """The worst row, with the ranks on which the replays were wrong and the problem of the first of them."""
    worst = max(row.difference for row in rows)
    wrong = [rank for rank, row in enumerate(rows) if not row.is_right]
    if not wrong:
        return replace(rows[0], difference=worst)
    return replace(rows[wrong[0]], difference=worst, problem=f"on {name_ranks(wrong)}: {rows[wrong[0]].problem}")


def _merge_findings(rows: Sequence[AuditRow]) -> AuditRow:
    found = dict.fromkeys(finding for row in rows for finding in row.findings)
    having = {finding: [rank for rank, row in enumerate(rows) if finding in row.findings] for finding in found}
    return replace(rows[0], findings=tuple(f"{finding} (on {name_ranks(having[finding])})" for finding in found))
