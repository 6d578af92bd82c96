"""Multiple choice by log-likelihood, from the task files of BIG-bench. Nothing is generated: each choice is appended to
the prompt, and the highest sum of log-likelihoods, or the highest per character, wins. Ties go to the first choice."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from saccade.client.output import RequestOutput
from saccade.errors import ConfigError
from saccade.eval.results import Answered
from saccade.offline.llm import LLM
from saccade.wire.sampling_params import SamplingParams

KNOWLEDGE = Path(__file__).with_name("knowledge.json")
GROUP = 32
Advance = Callable[[int], None]
Place = tuple[int, int]
"""A question and one of its choices, by index."""


@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """`right` are the indices of the best choices."""

    question: str
    choices: tuple[str, ...]
    right: frozenset[int]


def read_choices(path: Path) -> list[ChoiceQuestion]:
    """The examples of a task.json that have `target_scores`."""
    try:
        task = json.loads(path.read_text(encoding="utf-8"))
        return [_read(example) for example in task["examples"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not a multiple-choice task of BIG-bench; its examples need input and target_scores (--data)"
        ) from None


def _read(example: dict[str, Any]) -> ChoiceQuestion:
    scores: dict[str, float] = example["target_scores"]
    best = max(scores.values())
    right = frozenset(index for index, score in enumerate(scores.values()) if score == best)
    return ChoiceQuestion(example["input"], tuple(scores), right)


def score_choices(
    llm: LLM, choices: Sequence[ChoiceQuestion], prompt: str, advance: Advance = lambda count: None
) -> list[list[float]]:
    """The summed log-likelihood of each question's choices. `advance` hears how many questions are done."""
    found = []
    for start in range(0, len(choices), GROUP):
        group = choices[start : start + GROUP]
        found += _score_group(llm, group, prompt)
        advance(start + len(group))
    return found


def _score_group(llm: LLM, group: Sequence[ChoiceQuestion], prompt: str) -> list[list[float]]:
    """Sends the first choice of every question first, so that the others find their question in the prefix cache."""
    encode = llm.processor.tokenizer.encode
    order = _by_turns([len(choice.choices) for choice in group])
    rows, params = [], []
    for question, index in order:
        context = prompt.replace("{input}", group[question].question)
        start = len(encode(context, has_bos=True))
        rows.append(encode(f"{context} {group[question].choices[index]}", has_bos=True))
        params.append(SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start))
    outputs = llm.generate(rows, params, progress=False)
    sums = {
        place: _likelihood(output, wanted.prompt_logprobs_start)
        for place, output, wanted in zip(order, outputs, params, strict=True)
    }
    return [[sums[question, i] for i in range(len(choice.choices))] for question, choice in enumerate(group)]


def _by_turns(counts: Sequence[int]) -> list[Place]:
    columns = zip_longest(*([(question, i) for i in range(count)] for question, count in enumerate(counts)))
    return [place for column in columns for place in column if place is not None]


def _likelihood(output: RequestOutput, start: int) -> float:
    assert output.prompt_logprobs is not None, "asked for"
    total = 0.0
    tokens = output.prompt_token_ids
    for token, known in zip(tokens[start:], output.prompt_logprobs[start:], strict=True):
        assert known is not None, "only the first token has none"
        total += known[token].logprob
    return total


def pick(choice: ChoiceQuestion, scores: Sequence[float]) -> Answered:
    """The choice with the highest score."""
    best = max(range(len(scores)), key=scores.__getitem__)
    right = choice.choices[min(choice.right)]
    return Answered(choice.question, right, choice.choices[best], best in choice.right, tuple(scores))


def per_character(choice: ChoiceQuestion, scores: Sequence[float]) -> list[float]:
    """Log-likelihood per character, so that long choices are not at a disadvantage."""
    return [score / max(len(text), 1) for score, text in zip(scores, choice.choices, strict=True)]
