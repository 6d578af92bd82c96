"""Multiple choice by log-likelihood, from the task files of BIG-bench.

A question has no generated answer: every choice is put behind the prompt, and the one whose tokens are likeliest
together is picked. The first of equals wins, as everywhere.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.engine.llm import LLM
from saccade.engine.output import RequestOutput
from saccade.engine.params import SamplingParams
from saccade.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Choice:
    """A question with its choices; `right` are the indices of the best ones."""

    question: str
    choices: tuple[str, ...]
    right: frozenset[int]


def read_choices(path: Path) -> list[Choice]:
    """The examples of a task.json that have `target_scores`."""
    try:
        task = json.loads(path.read_text(encoding="utf-8"))
        return [_read(example) for example in task["examples"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not a multiple-choice task of BIG-bench; its examples need input and target_scores (--data)"
        ) from None


def _read(example: dict[str, Any]) -> Choice:
    scores: dict[str, float] = example["target_scores"]
    best = max(scores.values())
    right = frozenset(index for index, score in enumerate(scores.values()) if score == best)
    return Choice(example["input"], tuple(scores), right)


def score_choices(llm: LLM, choices: Sequence[Choice], prompt: str, *, progress: bool) -> list[list[float]]:
    """The summed log-likelihood of every choice of every question."""
    encode = llm.processor.tokenizer.encode
    rows: list[list[int]] = []
    starts: list[int] = []
    for choice in choices:
        context = prompt.replace("{input}", choice.question)
        for text in choice.choices:
            starts.append(len(encode(context, has_bos=True)))
            rows.append(encode(f"{context} {text}", has_bos=True))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(rows, params, progress=progress)
    sums = iter([_likelihood(output, start) for output, start in zip(outputs, starts, strict=True)])
    return [[next(sums) for _ in choice.choices] for choice in choices]


def _likelihood(output: RequestOutput, start: int) -> float:
    assert output.prompt_logprobs is not None, "asked for"
    total = 0.0
    tokens = output.prompt_token_ids
    for token, known in zip(tokens[start:], output.prompt_logprobs[start:], strict=True):
        assert known is not None, "only the first token has none"
        total += known[token].logprob
    return total
