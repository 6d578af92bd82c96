"""A card has what was measured, and says what tasks ask whose names do not say it."""

import json
from pathlib import Path

from saccade.eval.results import Answered, EvalReport, TaskResult
from training.card import write


def report(path: Path, device: str = "cpu", **right: int) -> Path:
    """Of four questions each, so many right."""
    results = [
        TaskResult(task.replace("_", "-"), tuple(Answered("?", "a", "a", number < count) for number in range(4)))
        for task, count in right.items()
    ]
    skipped = TaskResult("unknown-photos", skipped="no photos")
    environment = {"device": device}
    path.write_text(json.dumps(EvalReport("m", {"default": [*results, skipped]}, environment).to_json()))
    return path


def test_a_card_gets_a_row_for_every_task_and_notes_for_those_measured(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# Model\n\n## Measured accuracy\n\nold | 1 |\n\n## Images\n\nAny.\n")
    write(card, [report(tmp_path / "a.json", shapes=3, known_pictures=4)])
    text = card.read_text()
    assert "| shapes | 4 | 75.0 % | 30.1 - 95.4 % |" in text and "| known-pictures | 4 | 100.0 % |" in text
    assert text.count("\n- ") == 1 and "- known-pictures: " in text, "only of what was measured"
    assert "old" not in text and text.startswith("# Model\n") and text.endswith("\n\n## Images\n\nAny.\n")
    write(card, [report(tmp_path / "b.json", shapes=4)])
    assert "\n- " not in card.read_text() and card.read_text().count("| task |") == 1
    assert "on a CPU (float32)" in card.read_text()
    write(card, [report(tmp_path / "c.json", "cuda", shapes=4)])
    assert "on a GPU (bfloat16)" in card.read_text()
