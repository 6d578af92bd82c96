"""Sampling parameters: allowed values, and the texts of refusals."""

import math
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.wire.sampling_params import SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 128]),
        ("temperature", [0, 0.0, 2.5, 100]),
        ("top_p", [1e-9, 1]),
        ("top_k", [-1, 0, 1, 2**31 - 1]),
        ("min_p", [0, 1.0]),
        ("repetition_penalty", [0.01, 1, 100.0]),
        ("presence_penalty", [-2, 2.0]),
        ("frequency_penalty", [-2.0, 2]),
        ("max_tokens", [0, 1, None, 2**31 - 1]),
        ("min_tokens", [0, 16]),
        ("seed", [None, -(2**63), 2**63 - 1]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("prompt_logprobs_start", [0, 2**31 - 1]),
        ("logit_bias", [None, {}, {0: -100, 5: 100.0}]),
        ("allowed_token_ids", [None, [0], (1, 2)]),
        ("stop", ["x", [], ["a", "b"], "é"]),
        ("stop_token_ids", [[], [0, 2**31 - 1]]),
    ],
)
def test_bounds_are_allowed(name: str, values: list[Any]) -> None:
    for value in values:
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, 129, -1, 1.0, True, None, "1", math.nan, 10**5000]),
        ("temperature", [-0.1, 100.1, math.nan, math.inf, -math.inf, "0", None, True, 10**400]),
        ("top_p", [0, -1, 1.01, math.nan]),
        ("top_k", [-2, 2**31, 1.5, math.nan]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [0, -1, 101, math.nan, math.inf]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("max_tokens", [-1, 2**31, 1.0, True]),
        ("min_tokens", [-1, 17, None]),
        ("seed", [2**63, -(2**63) - 1, 0.5, False]),
        ("logprobs", [-1, 21, True]),
        ("prompt_logprobs", [-1, 21, "all"]),
        ("prompt_logprobs_start", [-1, 2**31, None, 1.0]),
        ("logit_bias", [{-1: 0}, {0: 101}, {0: math.nan}, {"5": 1}, [(1, 2)], dict.fromkeys(range(1025), 0)]),
        ("allowed_token_ids", [[], [-1], [1.0], "12", 5]),
        ("stop", ["", ["a", ""], [1], ["x" * 1025], ["s"] * 65, 3, None]),
        ("stop_token_ids", [[-1], [None], [True], "ab", None, range(2000)]),
        ("ignore_eos", [0, 1, None, "yes"]),
        ("skip_special_tokens", [0]),
        ("include_stop_str_in_output", ["true"]),
    ],
)
def test_anything_else_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
        assert str(caught.value).startswith(f"{name} is ")
        assert len(str(caught.value)) < 200


def test_a_refusal_says_what_was_found_and_what_is_allowed() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p=1.5)
    assert str(caught.value) == "top_p is 1.5; allowed are above 0 up to 1"
    with pytest.raises(RequestError) as caught:
        SamplingParams(min_tokens=17)
    assert str(caught.value) == "min_tokens is 17; the most is max_tokens, here 16"
    with pytest.raises(RequestError) as caught:
        SamplingParams(logprobs=21)
    assert str(caught.value) == "logprobs is 21; allowed are whole numbers 0..20 or none"


def test_values_are_normalised_and_copied() -> None:
    stops, bias = ["a"], {3: 1.0}
    params = SamplingParams(top_k=-1, stop="end", stop_token_ids=[1, 2], logit_bias=bias)
    assert (params.top_k, params.stop, params.stop_token_ids) == (0, ("end",), (1, 2))
    bias[3] = 9.0
    assert params.logit_bias == {3: 1.0}
    again = SamplingParams(stop=stops)
    stops.append("b")
    assert again.stop == ("a",)
    assert SamplingParams(stop=["a"]) == again


def test_an_endless_iterable_is_not_read_to_its_end() -> None:
    def endless() -> Any:
        while True:
            yield 1

    with pytest.raises(RequestError, match="the limit is 1024"):
        SamplingParams(stop_token_ids=endless())


@pytest.mark.parametrize("text", ["", "two\nlines", "\x1b[31mred", "x" * 1000, "x" * 61])
def test_errors_show_what_was_sent_in_one_short_printable_line(text: str) -> None:
    with pytest.raises(RequestError, match=r"pooling is .+; allowed are") as refused:
        SamplingParams(pooling=text, max_tokens=0)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 150
