"""Statistics and reports, against values worked out by hand."""

import json
import math
from io import StringIO

import pytest
from rich.console import Console

from saccade.eval.eval_report import print_eval
from saccade.eval.results import Answered, EvalReport, TaskResult, wilson


def result(name: str, *pairs: tuple[str, str]) -> TaskResult:
    answers = tuple(
        Answered(f"{name} {i}?", expected, said, expected == said) for i, (expected, said) in enumerate(pairs)
    )
    return TaskResult(name, answers, 1.5)


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (8, 10, 0.4901625, 0.9433178),
        (97, 100, 0.9154806, 0.9897455),
        (1, 2, 0.0945312, 0.9054688),
    ],
)
def test_the_interval_is_wilsons(right: int, total: int, low: float, high: float) -> None:
    assert wilson(right, total) == pytest.approx((low, high), abs=1e-6)


def test_the_interval_solves_its_defining_equation() -> None:
    """The ends are the values p with |right/total - p| = z sqrt(p (1 - p) / total)."""
    for right, total in ((3, 17), (250, 300), (40, 41)):
        for end in wilson(right, total, z=1.7):
            assert abs(right / total - end) == pytest.approx(1.7 * math.sqrt(end * (1 - end) / total), rel=1e-9)


def test_confusions_count_every_pair() -> None:
    found = result("colors", ("red", "red"), ("red", "blue"), ("red", "blue"), ("blue", "blue"))
    assert (found.right, found.total, found.accuracy) == (2, 4, 0.5)
    assert found.confusions() == {("red", "red"): 1, ("red", "blue"): 2, ("blue", "blue"): 1}


def test_differences_name_the_question_and_what_each_way_said() -> None:
    same, other = result("a", ("x", "x"), ("y", "y")), result("a", ("x", "x"), ("y", "z"))
    assert EvalReport("m", {"full": [same], "off": [same]}).differences() == []
    (found,) = EvalReport("m", {"full": [same], "off": [other]}).differences()
    assert (found.task, found.index, found.said) == ("a", 1, {"full": "y", "off": "z"})


def test_the_report_is_json_and_holds_every_answer() -> None:
    report = EvalReport("m", {"default": [result("a", ("x", "x"), ("y", "z")), TaskResult("b", skipped="no data")]})
    read = json.loads(json.dumps(report.to_json()))
    first, second = read["ways"]["default"]
    assert (first["right"], first["total"], first["accuracy"]) == (1, 2, 0.5)
    assert first["interval_95"] == pytest.approx([0.0945312, 0.9054688], abs=1e-6)
    assert first["answers"][1] == {"question": "a 1?", "expected": "y", "said": "z", "is_right": False, "scores": []}
    assert second == {"task": "b", "skipped": "no data"}


def test_the_tables_show_shares_confusions_and_differences() -> None:
    console = Console(width=160, record=True, file=StringIO())
    full = result("colors", ("red", "red"), ("red", "[b]blue"), ("blue", "blue"))
    off = result("colors", ("red", "red"), ("red", "red"), ("blue", "blue"))
    print_eval(EvalReport("m", {"graphs full": [full], "graphs off": [off]}), console)
    text = console.export_text()
    assert "66.7%" in text and "100.0%" in text
    assert "(other)" in text and "1 of 3 answers differ" in text and "[b]blue" in text


def scored(*scores: float, name: str = "choices") -> TaskResult:
    best = max(range(len(scores)), key=scores.__getitem__)
    return TaskResult(name, (Answered("which?", "a", "abc"[best], best == 0, scores),), 1.0)


def test_scores_are_off_by_their_largest_difference() -> None:
    (base,) = scored(-1.0, -2.0).answers
    assert base.off_by(base) == 0
    assert scored(-1.25, -1.5).answers[0].off_by(base) == 0.5
    assert scored(math.nan, -2.0).answers[0].off_by(base) == math.inf


def test_the_report_says_how_far_scores_are_from_graphs_off() -> None:
    ways = {
        "graphs full": scored(-1.0, -2.25),
        "graphs piecewise": scored(-1.0, -2.0),
        "graphs off": scored(-1.0, -2.0),
    }
    report = EvalReport("m", {way: [found, result("a", ("x", "x"))] for way, found in ways.items()})
    assert report.score_gaps() == {"graphs full": 0.25, "graphs piecewise": 0.0, "graphs off": 0.0}
    assert report.to_json()["score_gaps"]["graphs full"] == 0.25
    console = Console(width=160, record=True, file=StringIO())
    print_eval(report, console)
    told = (
        "largest difference of a choice's log-likelihood from graphs off: graphs full 2.5e-01, graphs piecewise 0.0e+00"
    )
    assert told in console.export_text()


def test_wrong_choices_are_listed_one_by_one() -> None:
    console = Console(width=160, record=True, file=StringIO())
    print_eval(EvalReport("m", {"default": [scored(-2.0, -1.0)]}), console)
    text = console.export_text()
    assert "which?" in text and "what was said" not in text


def test_answers_without_scores_have_no_gaps() -> None:
    plain = EvalReport("m", {"full": [result("a", ("x", "x"))], "off": [result("a", ("x", "x"))]})
    assert plain.score_gaps() == {} and "score_gaps" not in plain.to_json()


def test_right_answers_in_other_words_are_not_confusions() -> None:
    console = Console(width=160, record=True, file=StringIO())
    answers = (
        Answered("which?", "red circle", "a red circle", True),
        Answered("which?", "red circle", "a star", False),
    )
    print_eval(EvalReport("m", {"default": [TaskResult("describe", answers)]}), console)
    text = console.export_text()
    assert "(other)" not in text and "a star" in text and "a red circle" not in text
