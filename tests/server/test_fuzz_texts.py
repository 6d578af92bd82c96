"""A few seconds of the fuzzer for texts; see fuzz_texts.py for longer runs."""

from typing import Any

import pytest

from tests.server import fuzz_texts
from tests.server.fuzz_texts import FoundError, TextCase, check, make_case, run_cases

COUNTS = {"urls": 6000, "tools": 500, "reasoning": 4000, "limits": 700}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("parser", COUNTS)
def test_parsers_return_a_valid_result_or_refuse(parser: str, seed: int) -> None:
    cases = run_cases(parser, seed, iter(range(COUNTS[parser])))
    found = [f"--parser {parser} --seed {seed} --only {case.index}: {error}" for case, error in cases if error]
    assert found == []


@pytest.mark.parametrize("parser", COUNTS)
def test_a_case_is_the_same_every_time(parser: str) -> None:
    texts = [make_case(parser, 5, index).text for index in range(50)]
    assert texts == [make_case(parser, 5, index).text for index in range(50)] and len(set(texts)) > 40


@pytest.mark.parametrize("text", fuzz_texts.LIMIT_TEXTS)
def test_limits_files_are_read_quickly(text: str) -> None:
    check(TextCase("limits", 0, 0, text))


def forget_the_rest(self: Any, text: str) -> Any:
    return []


def raise_index(*words: Any, **more: Any) -> Any:
    raise IndexError("beyond the end")


@pytest.mark.parametrize(
    ("parser", "name", "broken", "problem"),
    [
        ("urls", "parse_url", raise_index, "IndexError"),
        ("limits", "read_limits", raise_index, "IndexError"),
        ("reasoning", "ReasoningParser.push", lambda self, text: (text[:1], ""), "open True"),
        ("tools", "HermesParser.push", forget_the_rest, "text was lost"),
        ("tools", "LlamaParser.finish", lambda self, is_cut: [], "text was lost"),
        ("tools", "HermesParser._stream", lambda self, arguments, text, events: self._grow("{}", events) or "", "cut"),
    ],
)
def test_a_broken_parser_is_found(
    parser: str, name: str, broken: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tests.server.fuzz_texts.{name}", broken)
    with pytest.raises(FoundError, match=problem):
        for index in range(200):
            check(make_case(parser, 0, index))
