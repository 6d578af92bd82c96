"""Writes the measured accuracies into the model card: `python -m training.card --card README.md REPORT.json ...`.

The reports are what `saccade eval --json` wrote.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

HEADING = "## Measured accuracy\n"
NOTES = {
    "two-questions": "two questions in one, in wordings that training does not have; both answers must be right",
    "describe": "one to three things, in wordings that training does not have; each must be named with its color",
    "unknown-photos": "parts of the photos of scikit-learn and matplotlib; the model must say that it does not know",
    "unknown-pictures": "fractals, trees and cellular automata, which training does not draw; likewise",
    "known-pictures": "the same questions about what the model knows; any answer is right that is not a refusal",
}
"""Explains tasks whose names do not. A card has the notes of the tasks that were measured."""


def rows(report: dict[str, Any]) -> list[str]:
    results = next(iter(report["ways"].values()))
    found = []
    for result in results:
        if "skipped" not in result:
            low, high = result["interval_95"]
            share = f"{100 * result['accuracy']:.1f} % | {100 * low:.1f} - {100 * high:.1f} %"
            found.append(f"| {result['task']} | {result['total']} | {share} |")
    return found


def where(report: dict[str, Any]) -> str:
    return "a GPU (bfloat16)" if report["environment"].get("device") == "cuda" else "a CPU (float32)"


def write(card: Path, reports: list[Path]) -> None:
    found = [json.loads(path.read_text()) for path in reports]
    lines = [row for report in found for row in rows(report)]
    [place] = {where(report) for report in found}
    measured = {line.split(" | ")[0].removeprefix("| ") for line in lines}
    notes = "".join(f"- {task}: {note}\n" for task, note in NOTES.items() if task in measured)
    table = "| task | questions | right | 95 % interval |\n|---|---|---|---|\n" + "\n".join(lines)
    text = f"Greedy answers through `saccade eval` on {place}, about pictures and digits that were not trained on.\n"
    section = f"{HEADING}\n{text}\n{table}\n\n" + (f"{notes}\n" if notes else "")
    old = card.read_text()
    card.write_text(re.sub(re.escape(HEADING) + r".*?(?=^## )", lambda _: section, old, flags=re.DOTALL | re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("reports", type=Path, nargs="+")
    options = parser.parse_args()
    write(options.card, options.reports)


if __name__ == "__main__":
    main()
