"""`saccade replay`: what a shadow check wrote, run again."""

import sys
from pathlib import Path
from typing import Any

import pytest

from saccade import LLM, SamplingParams
from saccade.cli import main
from tests.engine.conftest import made as made  # a fixture
from tests.engine.test_frozen_inputs import freezing
from tests.models import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "kv_cache_tokens": 512,
    "encoder_cache_tokens": 256,
    "encoder_budget_tokens": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 24,
    "max_model_len": 64,
    "graphs": "vision=off",
}


def freeze(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on graphs are captured with one of their inputs frozen."""
    monkeypatch.setattr(sys.modules["saccade.graphs.capture"], "Frame", freezing(name))


def found_wrong(made: tiny.Tiny, folder: Path) -> list[Path]:
    """Files of an `LLM` whose graphs are wrong."""
    with LLM(made.folder, **SETTINGS, shadow=1.0, shadow_dir=str(folder)) as llm:
        llm.generate(["The quick brown fox", "What is this"], GREEDY, progress=False)
        metrics = {(one.plain, one.labels.get("result")): one.value for one in llm.get_metrics()}
    assert metrics["shadow_checks", "different"] > 0
    return sorted(folder.iterdir())


def test_a_wrong_graph_is_wrong_again(
    made: tiny.Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        freeze(patched, "positions")
        [file, *_] = found_wrong(made, tmp_path / "files")
        capsys.readouterr()
        assert main(["replay", str(file)]) == 1
        told = capsys.readouterr().out
        assert "DIFFERENT" in told and "values of" in told and "differ, the first in row" in told
    assert main(["replay", str(file)]) == 0, "captured without the fault"
    told = capsys.readouterr().out
    assert "equal" in told and "The server's replay was different" in told
    assert main(["replay", str(file), str(made.folder)]) == 0
    capsys.readouterr()
    refused(made, file, tmp_path, capsys)


def refused(made: tiny.Tiny, file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.make("llama", folder / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other.folder / name).write_bytes((made.folder / name).read_bytes())
    assert main(["replay", str(file), str(other.folder)]) == 2
    assert "of another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no file was given"), (["missing"], "cannot read missing"), ([__file__], "is not a file of")],
)
def test_what_is_no_file_of_ours_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *words]) == 2
    assert message in capsys.readouterr().err


def test_right_graphs_leave_no_file(made: tiny.Tiny, tmp_path: Path) -> None:
    with LLM(made.folder, **SETTINGS, shadow=1.0, shadow_dir=str(tmp_path)) as llm:
        llm.generate(["The quick brown fox"], GREEDY, progress=False)
        shadow = llm.engine.idle.shadow
        assert shadow is not None and sum(shadow.counts(phase).get("equal", 0) for phase in ("prefill", "decode")) > 0
    assert not list(tmp_path.iterdir())
