"""Runs evaluation tasks through the engine."""

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from saccade.errors import ConfigError
from saccade.eval import drawn, held_out
from saccade.eval.choices import KNOWLEDGE, Advance, ChoiceQuestion, per_character, pick, read_choices, score_choices
from saccade.eval.eval_settings import EvalSettings
from saccade.eval.examples import Example, folder, mnist, normalise, sklearn_digits
from saccade.eval.results import Answered, EvalReport, TaskResult
from saccade.offline.llm import LLM
from saccade.terminal import check_file, shown_progress, write_json
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams

MAKERS = {**drawn.MAKERS, **held_out.MAKERS}
DRAWN = 200
BATCH = 32
WAYS = {
    "graphs full": "vision=full,prefill=full,decode=full",
    "graphs piecewise": "vision=full,prefill=piecewise,decode=piecewise",
    "graphs off": "vision=off,prefill=off,decode=off",
}
FILES: dict[str, Callable[[EvalSettings], list[Example]]] = {
    "mnist": mnist,
    "sklearn-digits": sklearn_digits,
    "folder": folder,
}
CHOICES = ("knowledge", "choices")


def run_eval(
    model: str | Path,
    settings: EvalSettings,
    *,
    engine: EngineSettings | None = None,
    limits: SchedulerSettings | None = None,
    console: Console | None = None,
) -> EvalReport:
    """Runs every chosen task, with the graphs of `engine`, or in each graph mode with `graphs_compare`. If a task's
    data is missing, `all` skips it with the reason; a task chosen by name is an error. `console` shows a progress bar,
    or one line per task if it is not a terminal."""
    check_file(settings.json)
    engine, limits = engine or EngineSettings(), limits or SchedulerSettings()
    tasks = {name: _questions(name, settings) for name in settings.tasks()}
    ways: Mapping[str, dict[str, Any]] = {"default": {}}
    if settings.graphs_compare:
        ways = {way: {"graphs": graphs, "enforce_eager": False} for way, graphs in WAYS.items()}
    results = {}
    for way, changed in ways.items():
        with LLM(model, **(asdict(engine) | asdict(limits) | changed)) as llm:
            results[way] = [
                result
                for name, questions in tasks.items()
                for result in _run_task(llm, name, questions, settings, way, console)
            ]
    report = EvalReport(str(model), results, {"seed": settings.seed, "device": engine.device, "dtype": engine.dtype})
    if settings.json:
        write_json(settings.json, report.to_json())
    return report


def make_examples(name: str, settings: EvalSettings) -> list[Example]:
    """The questions of a task. Drawn ones depend neither on the limit nor on other tasks."""
    if name in MAKERS:
        seeds = [settings.seed, zlib.crc32(name.encode())]
        return [MAKERS[name](np.random.default_rng([*seeds, index])) for index in range(settings.limit or DRAWN)]
    found = FILES[name](settings)
    if not settings.limit or settings.limit >= len(found):
        return found
    order = np.random.default_rng(settings.seed).permutation(len(found))[: settings.limit]
    return [found[int(index)] for index in order]


def make_choices(name: str, settings: EvalSettings) -> list[ChoiceQuestion]:
    """The questions of a multiple-choice task. Those of `knowledge` come with the package."""
    if name == "choices" and not settings.data:
        raise ConfigError("the task choices needs a task.json of BIG-bench (--data FILE)")
    found = read_choices(KNOWLEDGE if name == "knowledge" else Path(settings.data))
    return found[: settings.limit] if settings.limit else found


def _questions(name: str, settings: EvalSettings) -> list[Any] | str:
    """The questions of a task, or the reason to skip it."""
    try:
        found = make_choices(name, settings) if name in CHOICES else make_examples(name, settings)
        if not found:
            raise ConfigError(f"the task {name} has no questions (--data)")
        return found
    except ConfigError as error:
        if settings.task != "all":
            raise
        return str(error)


def _run_task(
    llm: LLM,
    name: str,
    questions: list[Any] | str,
    settings: EvalSettings,
    way: str,
    console: Console | None,
) -> list[TaskResult]:
    """Multiple choice has two results."""
    if isinstance(questions, str):
        return [TaskResult(name, skipped=questions)]
    started = time.perf_counter()
    title = f"asking {name}" if way == "default" else f"asking {name}, {way}"
    with shown_progress(console) as hear:
        hear(title, 0, len(questions))
        ask = _choose if name in CHOICES else _answer
        found = ask(llm, questions, settings, lambda done: hear(title, done, len(questions)))
    seconds = time.perf_counter() - started
    return [TaskResult(f"{name}{kind}", tuple(answers), seconds) for kind, answers in found.items()]


def _answer(llm: LLM, examples: list[Example], settings: EvalSettings, advance: Advance) -> dict[str, list[Answered]]:
    params = SamplingParams(temperature=0, max_tokens=settings.max_tokens)
    answers = []
    for start in range(0, len(examples), BATCH):
        part = examples[start : start + BATCH]
        outputs = llm.chat([example.messages() for example in part], params, progress=False)
        for example, output in zip(part, outputs, strict=True):
            said = normalise(output.outputs[0].text)
            answers.append(Answered(example.question, normalise(example.answer), said, example.is_right(said)))
        advance(start + len(part))
    return {"": answers}


def _choose(
    llm: LLM, choices: list[ChoiceQuestion], settings: EvalSettings, advance: Advance
) -> dict[str, list[Answered]]:
    scored = list(zip(choices, score_choices(llm, choices, settings.prompt, advance), strict=True))
    return {
        "": [pick(choice, scores) for choice, scores in scored],
        ", by length": [pick(choice, per_character(choice, scores)) for choice, scores in scored],
    }
