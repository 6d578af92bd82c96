"""A few seconds of the fuzzer for HTTP/1.1; see fuzz_http11.py for longer runs."""

from typing import Any

import httptools
import pytest

from saccade.server.http.http11 import BoundedProtocol
from saccade.server.http_errors import HttpError
from tests.server.fuzz_http11 import make_case, run_cases

NUM_CASES = 1500


@pytest.mark.parametrize("seed", [1, 2])
def test_any_input_is_answered_in_valid_http_however_it_is_cut(seed: int) -> None:
    cases = run_cases(seed, iter(range(NUM_CASES)))
    assert [f"--seed {seed} --only {case.index}: {error}" for case, error in cases if error] == []


def test_a_case_is_the_same_every_time() -> None:
    found = [make_case(5, index).data for index in range(50)]
    assert found == [make_case(5, index).data for index in range(50)] and len(set(found)) > 40


def refuse_at_once(self: BoundedProtocol, error: HttpError) -> None:
    """An old bug: earlier requests lose their replies."""
    if not self.transport.is_closing():
        self._end_with(error)


def feed_without_care(self: BoundedProtocol, data: bytes) -> None:
    try:
        self.parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        raise RuntimeError("an upgrade") from upgrade
    except httptools.HttpParserError:
        self.transport.write(b"what?")


@pytest.mark.parametrize(("name", "broken"), [("_refuse", refuse_at_once), ("_feed", feed_without_care)])
def test_a_broken_protocol_is_found(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, name, broken)
    assert any(error for _, error in run_cases(1, iter(range(300))))
