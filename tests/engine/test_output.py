"""Streamed text: stop strings are found across pieces, and no other text is held back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.client.output import OutputStream
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Update

LETTERS = "ab"


class Letters:
    """A detokenizer whose tokens are letters."""

    def push(self, token: int) -> str:
        return LETTERS[token]

    def flush(self) -> str:
        return ""


def stream(stops: list[str], **more: Any) -> OutputStream:
    params = SamplingParams(temperature=0, stop=stops, max_tokens=1000, **more)
    letters: Any = Letters()
    return OutputStream(0, letters, params)


def update(token: int) -> Update:
    return Update("r", (token,), None, None)


@given(st.lists(st.integers(0, 1), max_size=24), st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=3))
def test_a_stream_ends_at_a_stop_string_and_holds_back_no_more_text_than_needed(
    tokens: list[int], stops: list[str]
) -> None:
    output, shown, whole = stream(stops), "", ""
    for token in tokens:
        whole += LETTERS[token]
        text, stop_reason = output.take(update(token))
        shown += text
        found = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if found:
            assert (stop_reason, shown) == (min(found)[1], whole[: min(found)[0]])
            return
        held = whole.removeprefix(shown)
        assert stop_reason is None and whole.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops), "no stop string begins like this"
    assert not any(stop in whole for stop in stops)


@given(
    st.lists(st.integers(0, 1), max_size=24),
    st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_a_stop_string_before_min_tokens_ends_the_text_at_min_tokens(
    tokens: list[int], stops: list[str], least: int
) -> None:
    output, shown, whole = stream(stops, min_tokens=least), "", ""
    for count, token in enumerate(tokens, start=1):
        whole += LETTERS[token]
        text, stop_reason = output.take(update(token))
        shown += text
        found = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if count < least or not found:
            assert stop_reason is None and whole.startswith(shown)
            continue
        assert stop_reason in stops and output.output.finish_reason == "stop" and output.output.text == shown
        assert shown == (whole if count == least else whole[: min(found)[0]])
        return


def test_one_update_may_reach_and_exceed_min_tokens() -> None:
    output = stream(["b"], min_tokens=3)
    assert output.take(Update("r", (0, 1, 0, 0, 0), None, None)) == ("aba", "b")
    assert output.output.token_ids == [0, 1, 0]


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    output = stream(["baaaaaaaab"])
    assert [output.take(update(token))[0] for token in (0, 0, 1, 1, 0)] == ["a", "a", "", "b", ""]


@pytest.mark.parametrize("stops", [[], ["b"]])
def test_text_is_never_held_back_without_a_longer_stop_string(stops: list[str]) -> None:
    output = stream(stops)
    assert [output.take(update(0))[0] for _ in range(3)] == ["a", "a", "a"]
