import json
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade import __version__
from saccade.cli import human_int, main
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"saccade {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "bench" in shown


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5K", 1536), ("2M", 2**21)])
def test_human_integers(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "8q", "1.5", "0.3k1"])
def test_what_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        human_int(text)


def test_a_bad_setting_exits_with_2_and_says_what_to_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "port is 70000; allowed are 0..65535 (--port)" in capsys.readouterr().err


def test_bench_graphs_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "graphs.json"
    flags = ["--size", "tiny", "--layers", "2", "--tokens", "16,32", "--device", "cpu", "--json", str(report)]
    assert main(["bench", "graphs", *flags]) == 0
    assert "piecewise" in capsys.readouterr().out
    lines = json.loads(report.read_text())["lines"]
    assert [(line["tokens"], line["way"]) for line in lines] == [
        (tokens, way) for tokens in (16, 32) for way in ("eager", "piecewise", "full")
    ]
    assert all(line["equals_eager"] for line in lines)


def test_an_unknown_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "graphs", "--size", "70b"]) == 2
    assert "size is '70b'; known are 8b, tiny (--size)" in capsys.readouterr().err


def test_run_asks_about_an_image(made: tiny.Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 30, 3)).astype(np.uint8)).save(picture)
    flags = ["--device", "cpu", "--max-tokens", "5", "--max-model-len", "256", "--max-num-seqs", "2", "--enforce-eager"]
    assert main(["run", str(made.folder), "What is this?", "--image", str(picture), *flags]) == 0
    assert len(capsys.readouterr().out.strip()) > 0


def test_run_names_a_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "nothing"), "hello"]) == 2
    assert "nothing" in capsys.readouterr().err
