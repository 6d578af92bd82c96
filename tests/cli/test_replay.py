"""`saccade replay`: what a shadow check wrote, run again."""

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from saccade import LLM, SamplingParams
from saccade.cli import main
from saccade.cli.replay import show
from saccade.config import Mode
from saccade.execution.shadow_file import Origin, Replayed, ShadowFile, write_file
from saccade.graphs import Capacity, GraphKey
from saccade.graphs.compare import OutputDifference
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
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


def test_the_results_of_each_rank_are_shown() -> None:
    right = Replayed(replay_digest="aa", eager_digest="aa", differences=[], as_recorded=[])
    wrong = replace(right, eager_digest="bb", differences=[OutputDifference("trunk", 1, 8, 3, 1.0)])
    assert shown([right]) == ["in the graph    aa", "without a graph aa", "equal"]
    assert shown([right, wrong])[3:] == [
        "rank 1:",
        "in the graph    aa",
        "without a graph bb",
        "1 of 8 values of 'trunk' differ, the first in row 3",
        "DIFFERENT",
    ]
    *_, verdict, told = shown([right, replace(right, as_recorded=wrong.differences)])
    assert verdict == "equal" and "The server's replay was different: on rank 1: 1 of 8 values" in told


def shown(by_rank: list[Replayed]) -> list[str]:
    console = Console(file=StringIO(), width=400)
    show(console, file_of_ranks(Path("/model")), by_rank)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()[1:]


def file_of_ranks(model: Path) -> ShadowFile:
    settings = EngineSettings(device="cpu", tensor_parallel_size=2)
    parts = ("arrays", "inputs", "reads", "cached", "replayed", "eager")
    return ShadowFile(
        origin=Origin(model=str(model), settings=settings, limits=SchedulerSettings(), folder=None),
        rank=1,
        key=GraphKey("decode", Mode.FULL, Capacity.of(tokens=1)),
        most_bytes=1,
        digest="d",
        versions={},
        **{part: {"x": np.zeros(1) if part == "arrays" else torch.zeros(1)} for part in parts},  # type: ignore[arg-type]
    )


def test_a_missing_file_of_another_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_file(tmp_path, file_of_ranks(tmp_path))
    assert path.name == "decode-d.rank1.shadow.safetensors" and main(["replay", str(path)]) == 2
    assert "decode-d.rank0.shadow.safetensors is missing" in capsys.readouterr().err
