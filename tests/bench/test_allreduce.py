"""`saccade bench allreduce`: a table of real ranks, and an end to all of them where one fails."""

import json
from pathlib import Path

import pytest
import torch

from saccade.bench.passes import allreduce
from saccade.bench.passes.allreduce import rank_device, run_allreduce_bench
from saccade.bench.passes.pass_settings import AllReduceBenchSettings
from saccade.cli import main
from saccade.errors import ConfigError


def test_it_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "figures.json"
    flags = ["--ranks", "2", "--rows", "1,7", "--width", "33", "--rounds", "1", "--device", "cpu"]
    assert main(["bench", "allreduce", *flags, "--json", str(report)]) == 0
    told = capsys.readouterr()
    assert "graph us" in told.out and "backend=gloo" in told.out
    assert "2 ranks on cpu" in told.err and "7 rows, gloo" in told.err
    written = json.loads(report.read_text())
    found = [(line["rows"], line["nbytes"], line["algorithm"]) for line in written["lines"]]
    assert found == [(1, 33 * 4, "gloo"), (7, 7 * 33 * 4, "gloo")]
    assert all(line["is_right"] and line["is_taken"] for line in written["lines"])
    assert all(line["graph_us"] > 0 and line["eager_us"] > 0 for line in written["lines"])
    assert not written["is_shared"] and written["environment"]["ranks"] == 2


def test_a_rank_that_fails_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce, "RANK", "saccade.bench.no_such_module")
    with pytest.raises(ConfigError, match=r"rank \d of 2 ended with 1:[\s\S]*no_such_module"):
        run_allreduce_bench(AllReduceBenchSettings(device="cpu"), lambda text: None)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--ranks", "1"], "ranks is 1; 2 to 64 are allowed (--ranks)"),
        (["--rows", "0"], "give numbers of at least 1 (--rows, --width)"),
        (["--dtype", "int8"], "dtype is 'int8'; allowed: auto, float32, bfloat16 (--dtype)"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "allreduce", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_ranks_have_a_gpu_each_or_share_one() -> None:
    assert [rank_device(torch.device("cuda"), rank, is_shared=False) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [rank_device(torch.device("cuda:3"), rank, is_shared=True) for rank in range(2)] == ["cuda:3", "cuda:3"]
    assert rank_device(torch.device("cpu"), 1, is_shared=False) == "cpu"
