"""Results of an evaluation, as plain values."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Answered:
    """A question, the expected answer, the model's answer, and whether it counts as right. For multiple choice also the
    score of every choice; the answer is the choice with the highest."""

    question: str
    expected: str
    said: str
    is_right: bool
    scores: tuple[float, ...] = ()

    def off_by(self, other: "Answered") -> float:
        """The largest difference between the scores of a choice; infinite if one is NaN."""
        differences = (abs(ours - theirs) for ours, theirs in zip(self.scores, other.scores, strict=True))
        return max((math.inf if math.isnan(found) else found for found in differences), default=0.0)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """`skipped` says why a task was not run."""

    name: str
    answers: tuple[Answered, ...] = ()
    seconds: float = 0.0
    skipped: str = ""

    @property
    def right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    @property
    def total(self) -> int:
        return len(self.answers)

    @property
    def accuracy(self) -> float:
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.total)

    def confusions(self) -> Counter[tuple[str, str]]:
        return Counter((answer.expected, answer.said) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that differs between two ways of running."""

    task: str
    index: int
    question: str
    said: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EvalReport:
    """`results` holds the results of all tasks for every way of running (graphs full, piecewise, off)."""

    model: str
    results: Mapping[str, Sequence[TaskResult]]
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tasks(self) -> Sequence[TaskResult]:
        """Results of the first way, which is the default one."""
        return next(iter(self.results.values()))

    def differences(self) -> list[Difference]:
        """Answers that depend on how the model is run."""
        found = []
        for results in zip(*self.results.values(), strict=True):
            for index, answers in enumerate(zip(*(result.answers for result in results), strict=True)):
                said = {way: answer.said for way, answer in zip(self.results, answers, strict=True)}
                if len(set(said.values())) > 1:
                    found.append(Difference(results[0].name, index, answers[0].question, said))
        return found

    def score_gaps(self) -> dict[str, float]:
        """For multiple choice, the largest difference between each way's scores and those of the last way."""
        *_, last = self.results.values()
        gaps = {}
        for way, results in self.results.items():
            scored = [
                ours.off_by(theirs)
                for result, other in zip(results, last, strict=True)
                for ours, theirs in zip(result.answers, other.answers, strict=True)
                if ours.scores
            ]
            if scored:
                gaps[way] = max(scored)
        return gaps

    def to_json(self) -> dict[str, Any]:
        ways = {way: [_task_json(result) for result in results] for way, results in self.results.items()}
        different = [asdict(difference) for difference in self.differences()]
        found = {"model": self.model, "environment": dict(self.environment), "ways": ways, "differences": different}
        return found | ({"score_gaps": gaps} if (gaps := self.score_gaps()) else {})


def _task_json(result: TaskResult) -> dict[str, Any]:
    if result.skipped:
        return {"task": result.name, "skipped": result.skipped}
    low, high = result.interval
    confusions = [
        {"expected": expected, "said": said, "count": count}
        for (expected, said), count in sorted(result.confusions().items())
    ]
    return {
        "task": result.name,
        "right": result.right,
        "total": result.total,
        "accuracy": result.accuracy,
        "interval_95": [low, high],
        "seconds": round(result.seconds, 3),
        "confusions": confusions,
        "answers": [asdict(answer) for answer in result.answers],
    }


def wilson(right: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval, which stays within 0 and 1, and holds for few questions and if all are right."""
    share, weight = right / total, z * z / total
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return max(0.0, centre - half), min(1.0, centre + half)
