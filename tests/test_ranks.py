"""The runner of cases on several ranks reports what went wrong and leaves no process behind."""

from tests import failing_ranks
from tests.ranks import run_cases


def test_a_failing_rank_is_reported_and_ends_the_others() -> None:
    found = run_cases(2, failing_ranks.__name__)
    assert found["passes"] == ""
    assert "fails did not end on all ranks" in found["fails"] and "ValueError: rank 1 has had enough" in found["fails"]
    assert found["is not reached"] == "not run: fails failed before it"


def test_ranks_that_hang_are_ended() -> None:
    found = run_cases(2, failing_ranks.__name__, stall_s=0.5)  # they have not even started
    assert "passes did not end on all ranks" in found["passes"] and "exit -9" in found["passes"]
