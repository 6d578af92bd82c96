"""Limits that are left to the machine."""

import pytest

from saccade.engine.settings import CPU_LIMITS, GPU_LIMITS, SchedulerSettings
from saccade.errors import ConfigError


def test_a_gpu_and_a_cpu_have_limits_of_their_own() -> None:
    for is_cuda, own in ((True, GPU_LIMITS), (False, CPU_LIMITS)):
        found = SchedulerSettings().resolved(is_cuda=is_cuda, max_position=10**6)
        assert {name: getattr(found, name) for name in own} == own


def test_what_is_given_stays_and_no_request_is_longer_than_the_model_allows() -> None:
    given = SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=77, max_model_len=5000, encoder_budget_tokens=9)
    assert given.resolved(is_cuda=False, max_position=10**6) == given
    assert given.resolved(is_cuda=True, max_position=2048).max_model_len == 2048
    assert SchedulerSettings().resolved(is_cuda=True, max_position=2048).max_model_len == 2048


def test_limits_that_are_left_open_agree_with_those_that_are_given() -> None:
    few_rows = SchedulerSettings(max_num_batched_tokens=8).resolved(is_cuda=True, max_position=100)
    assert few_rows.max_num_seqs == 8
    many = SchedulerSettings(max_num_seqs=1000).resolved(is_cuda=False, max_position=100)
    assert many.max_num_batched_tokens == 1000


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "encoder_budget_tokens"])
def test_negative_limits_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1; it must be at least 0"):
        SchedulerSettings(**{name: -1})
