"""Multiple choice: log-likelihoods and picks are those of transformers, choice by choice."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from saccade import LLM
from saccade.engine.settings import EngineSettings, SchedulerSettings
from saccade.errors import ConfigError
from saccade.eval import EvalSettings, run_eval
from saccade.eval.choices import Choice, read_choices, score_choices
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


def test_scores_are_those_of_transformers(llm: LLM, made: tiny.Tiny, task: Path) -> None:
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


def test_the_whole_task_counts_what_was_picked(made: tiny.Tiny, task: Path, llm: LLM) -> None:
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
    assert said.getvalue() == "asking choices\n", "no bar where there is no terminal"
    found = report.task("choices")
    assert [answer.said for answer in found.answers] == [c.choices[p] for c, p in zip(choices, picks, strict=True)]
    assert found.right == sum(pick in choice.right for choice, pick in zip(choices, picks, strict=True))


def test_several_choices_may_be_best(task: Path) -> None:
    assert read_choices(task)[2] == Choice("fox", ("a", "b", "c", "the lazy brown dog"), frozenset({1, 2}))


@pytest.mark.parametrize("text", ["{}", "[", '{"examples": [{"input": "a"}]}', '{"examples": [3]}'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "task.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not a multiple-choice task of BIG-bench"):
        read_choices(tmp_path / "task.json")


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
