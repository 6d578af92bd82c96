"""How many answers are lost when real weights are rounded to FP8 as they are loaded, with graphs on.

Takes about six minutes on one core: `make accuracy` runs it and prints its rows of the table.
"""

from pathlib import Path

import pytest

from saccade.eval.choices import KNOWLEDGE, read_choices
from tests.accuracy.checkpoints import checkpoint
from tests.accuracy.test_families import Record, row
from tests.accuracy.ways import ask

ONE_POINT = 0.01


@pytest.mark.xdist_group("fp8")
def test_fp8_is_within_a_point_of_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    choices, folder = read_choices(KNOWLEDGE), checkpoint("llama", tmp_path)
    plain = ask(folder, "full", choices, monkeypatch, dtype="bfloat16")
    rounded = ask(folder, "full", choices, monkeypatch, dtype="bfloat16", quantization="fp8")
    record_property("accuracy", row("llama bf16", "full", choices, plain, plain))
    record_property("accuracy", row("llama fp8", "full", choices, rounded, plain))
    right, still_right = (sum(answer.is_right for answer in answers) for answers in (plain, rounded))
    assert still_right / len(choices) > right / len(choices) - ONE_POINT
    assert plain != rounded, "weights were rounded"
