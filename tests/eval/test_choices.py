"""Multiple choice: the log-likelihood of every choice, and every pick, match transformers."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from saccade import LLM
from saccade.errors import ConfigError
from saccade.eval.choices import KNOWLEDGE, ChoiceQuestion, per_character, pick, read_choices, score_choices
from saccade.eval.eval_settings import EvalSettings
from saccade.eval.evaluation import run_eval
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from tests.models import tiny

ENGINE: dict[str, Any] = {"device": "cpu", "block_size": 8, "kv_cache_tokens": 2048, "encoder_cache_tokens": 512}
LIMITS: dict[str, Any] = {
    "encoder_budget_tokens": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "max_model_len": 400,
}
TASK = {
    "examples": [
        {"input": "The quick", "target_scores": {"brown fox": 1, "lazy dog": 0, "picture": 0}},
        {"input": "jumps over", "target_scores": {"the": 0, "What is in this": 1}},
        {"input": "fox", "target_scores": {"a": 0, "b": 1, "c": 1, "the lazy brown dog": 0}},
    ]
}
PROMPT = "Question: {input}\nAnswer:"


@pytest.fixture(scope="module")
def llm(made: tiny.Tiny) -> Iterator[LLM]:
    with LLM(made.folder, **ENGINE, **LIMITS) as opened:
        yield opened


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.json"
    path.write_text(json.dumps(TASK))
    return path


@torch.no_grad()
def oracle_score(made: tiny.Tiny, context: list[int], whole: list[int]) -> float:
    scores = made.oracle(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    return sum(float(scores[i - 1, whole[i]]) for i in range(len(context), len(whole)))


def test_scores_match_transformers(llm: LLM, made: tiny.Tiny, task: Path) -> None:
    choices = read_choices(task)
    encode = llm.processor.tokenizer.encode
    expected = []
    for choice in choices:
        context = PROMPT.replace("{input}", choice.question)
        expected.append([oracle_score(made, encode(context), encode(f"{context} {text}")) for text in choice.choices])
    found = score_choices(llm, choices, PROMPT)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3)
        assert ours.index(max(ours)) == theirs.index(max(theirs))


def test_a_task_counts_right_picks(made: tiny.Tiny, task: Path, llm: LLM) -> None:
    choices = read_choices(task)
    picks = [scores.index(max(scores)) for scores in score_choices(llm, choices, PROMPT)]
    said = io.StringIO()
    report = run_eval(
        made.folder,
        EvalSettings(task="choices", data=str(task), limit=0),
        engine=EngineSettings(**ENGINE, enforce_eager=True),
        limits=SchedulerSettings(**LIMITS),
        console=Console(file=said, force_terminal=False),
    )
    assert said.getvalue() == "asking choices: 0 of 3\n", "no bar where there is no terminal"
    assert [result.name for result in report.tasks] == ["choices", "choices, by length"]
    found = report.tasks[0]
    assert [answer.said for answer in found.answers] == [c.choices[p] for c, p in zip(choices, picks, strict=True)]
    assert found.right == sum(pick in choice.right for choice, pick in zip(choices, picks, strict=True))


def test_a_question_is_computed_once_for_all_its_choices(made: tiny.Tiny, task: Path) -> None:
    choices, prompt = read_choices(task), "{input}\nAnswer:"  # no two questions begin alike
    one_each = {"block_size": 2, "max_num_seqs": len(choices)}
    with LLM(made.folder, **(ENGINE | LIMITS | one_each), enforce_eager=True) as fresh:
        encode = fresh.processor.tokenizer.encode
        shared = [len(encode(prompt.replace("{input}", choice.question))) - 1 for choice in choices]
        before = fresh.engine.scheduler.stats().prefix_hit_tokens
        first = score_choices(fresh, choices, prompt)
        hits = fresh.engine.scheduler.stats().prefix_hit_tokens - before
    assert hits == sum((len(c.choices) - 1) * (rows - rows % 2) for c, rows in zip(choices, shared, strict=True))
    with LLM(made.folder, **ENGINE, **LIMITS, enforce_eager=True, enable_prefix_caching=False) as plain:
        for ours, theirs in zip(first, score_choices(plain, choices, prompt), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_long_choice_can_win_by_likelihood_per_character() -> None:
    choice = ChoiceQuestion("which?", ("no", "certainly"), frozenset({1}))
    scores = [-4.0, -9.0]
    assert (pick(choice, scores).said, pick(choice, scores).is_right) == ("no", False)
    by_length = pick(choice, per_character(choice, scores))
    assert (by_length.said, by_length.is_right, by_length.scores) == ("certainly", True, (-2.0, -1.0))


def test_a_benchmark_comes_with_the_package(made: tiny.Tiny) -> None:
    every = read_choices(KNOWLEDGE)
    assert len(every) == 237
    assert all(len(choice.choices) > 1 and 0 < len(choice.right) < len(choice.choices) for choice in every)
    report = run_eval(
        made.folder,
        EvalSettings(task="knowledge", limit=3),
        engine=EngineSettings(**ENGINE, enforce_eager=True),
        limits=SchedulerSettings(**LIMITS),
    )
    assert [answer.question for answer in report.tasks[0].answers] == [choice.question for choice in every[:3]]


def test_several_choices_may_be_best(task: Path) -> None:
    assert read_choices(task)[2] == ChoiceQuestion("fox", ("a", "b", "c", "the lazy brown dog"), frozenset({1, 2}))


@pytest.mark.parametrize("text", ["{}", "[", '{"examples": [{"input": "a"}]}', '{"examples": [3]}'])
def test_a_file_that_is_not_a_task_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "task.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not a multiple-choice task of BIG-bench"):
        read_choices(tmp_path / "task.json")


def test_a_task_without_questions_is_refused(made: tiny.Tiny, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"examples": []}')
    with pytest.raises(ConfigError, match=r"the task choices has no questions \(--data\)"):
        run_eval(made.folder, EvalSettings(task="choices", data=str(tmp_path / "task.json")))
    with pytest.raises(ConfigError, match=r"task is ''; known tasks are all, shapes"):
        EvalSettings(task=",")


def test_the_three_ways_of_running_give_the_same_answers(made: tiny.Tiny, task: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    report = run_eval(
        made.folder,
        EvalSettings(task="choices", data=str(task), limit=0, graphs_compare=True, json=str(out)),
        engine=EngineSettings(**ENGINE),
        limits=SchedulerSettings(**LIMITS),
    )
    assert list(report.results) == ["graphs full", "graphs piecewise", "graphs off"]
    assert report.differences() == []
    assert json.loads(out.read_text())["differences"] == []
