"""Settings of `saccade eval`. Imports no torch, because the command line reads its flags from here."""

from dataclasses import dataclass

from saccade.config import setting
from saccade.errors import ConfigError

OWN_TASKS = (
    *("shapes", "colors", "counts", "positions", "presence", "words", "new-fonts", "numbers"),
    *("pairs", "motion", "text", "refusal"),
    *("two-questions", "describe", "unknown-photos", "unknown-pictures", "known-pictures"),
)
"""Tasks whose questions are drawn or written by Saccade, from a seed."""

OTHER_TASKS = ("mnist", "sklearn-digits", "folder", "knowledge", "choices")
TASKS = OWN_TASKS + OTHER_TASKS


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Which tasks to run, how many questions of each, and where their data is."""

    task: str = setting("all", f"task, several with commas, or all: {', '.join(TASKS)}")
    limit: int = setting(200, "questions of a task; 0 takes all there are (drawn tasks: 200)")
    seed: int = setting(0, "seed of the drawn tasks")
    data: str = setting(
        "", "mnist: folder of its IDX files; folder: FOLDER/LABEL/*.png or a CSV of file,label; choices: a task.json"
    )
    question: str = setting("What is this?", "question of the task folder")
    prompt: str = setting(
        "Question: {input}\nAnswer:",
        "prompt of the tasks knowledge and choices; {input} is the question, a choice follows a space",
    )
    max_tokens: int = setting(24, "longest answer in tokens")
    graphs_compare: bool = setting(False, "run with graphs off, piecewise and full, and compare the answers one by one")
    json: str = setting("", "file to write the report to")

    def __post_init__(self) -> None:
        for name in self.tasks() or ("",):
            if name not in TASKS:
                raise ConfigError(f"task is {name!r}; known tasks are all, {', '.join(TASKS)} (--task)")
        if self.limit < 0 or self.max_tokens < 1:
            raise ConfigError("limit must be 0 or more and max_tokens at least 1 (--limit, --max-tokens)")
        if "{input}" not in self.prompt:
            raise ConfigError("prompt has no {input}; write where the question goes (--prompt)")

    def tasks(self) -> tuple[str, ...]:
        """`all` is every task that needs no file."""
        if self.task == "all":
            return (*OWN_TASKS, "sklearn-digits")
        return tuple(filter(None, (part.strip() for part in self.task.split(","))))
