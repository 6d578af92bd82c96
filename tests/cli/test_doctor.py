import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import checks, main
from saccade.cli.checks import Finding, Level
from saccade.cli.checks_model import check_ranks
from saccade.server.http.addresses import address_of
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Finding]]:
    code = main(["doctor", "--json", "--port", "0", *words])
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] == (code == 0)
    return code, {
        item["check"]: Finding(item["check"], Level(item["level"]), item["found"], item["fix"])
        for item in data["findings"]
    }


def test_a_whole_checkpoint_passes_from_its_files_to_an_answer(
    made: tiny.Tiny, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code, found = examined(capsys, str(made.folder))
    assert code == 0, found
    assert not caplog.messages, "nobody asked for the limits that the sample has"
    assert found["config"].found.startswith("Qwen3VLForConditionalGeneration, 3 layers")
    assert found["sample"].level is Level.OK and "answered" in found["sample"].found
    assert "of them for an image" in found["template"].found
    assert found["ranks"].level is Level.OK and found["ranks"].found.startswith("runs with --tensor-parallel-size 1, 2")
    assert {"python", "torch", "gpu", "gpus", "kernels", "compiler", "disk", "cache", "files", "port"} <= found.keys()


def test_a_broken_checkpoint_is_named_with_what_to_do(
    made: tiny.Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in made.folder.iterdir():
        if file.suffix != ".safetensors" and file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, found = examined(capsys, str(tmp_path))
    assert code == 1
    assert {name for name, item in found.items() if item.level is Level.BROKEN} == {"weights", "template"}
    assert found["sample"].level is Level.NOTE and "report" not in found["sample"].fix, "nothing was asked of the model"
    assert all(item.fix for item in found.values() if item.level is Level.BROKEN)
    assert found["config"].level is Level.OK


def test_a_missing_checkpoint_ends_the_examination_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examined(capsys, str(tmp_path / "nothing"))
    assert code == 1
    assert found["checkpoint"].level is Level.BROKEN and "config" not in found


def test_a_taken_port_is_broken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = checks.check_port("127.0.0.1", taken.getsockname()[1])
    assert found.level is Level.BROKEN and "--port" in found.fix


def test_a_name_with_addresses_of_one_kind_is_taken_as_that_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, port: int, **how: Any) -> list[Any]:
        kinds = {"both": (socket.AF_INET6, socket.AF_INET), "six": (socket.AF_INET6,)}[host]
        return [(kind, socket.SOCK_STREAM, 6, "", ("::1" if kind == socket.AF_INET6 else "127.0.0.1", port))
                for kind in kinds]  # fmt: skip

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert address_of("six", 80) == (socket.AF_INET6, ("::1", 80))
    assert address_of("both", 80) == (socket.AF_INET, ("127.0.0.1", 80))


def test_what_is_no_host_name_is_a_finding() -> None:
    assert checks.check_port("a..b", 80).found == "a..b:80 cannot be bound: this is not a host name"


def test_folders_that_this_user_may_not_write_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (found := checks.check_cache()).level is Level.OK and str(tmp_path) in found.found
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    for found, moved_by in ((checks.check_disk(), "HF_HOME"), (checks.check_cache(), "XDG_CACHE_HOME")):
        assert found.level is Level.NOTE and moved_by in found.fix and "this user" in found.found
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert checks.check_cache().level is Level.NOTE


@pytest.mark.parametrize(("gpus", "level"), [([], Level.OK), (["driver: H200, 580.1, 143771 MiB"], Level.BROKEN)])
def test_a_missing_c_compiler_matters_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], level: Level
) -> None:
    monkeypatch.setattr(checks, "nvidia_gpus", lambda: gpus)
    monkeypatch.setenv("CC", "no-such-compiler")
    found = checks.check_compiler()
    assert found.level is level and ("apt-get install gcc" in found.fix) == bool(gpus)


def test_a_check_that_raises_is_a_finding() -> None:
    def fails() -> Finding:
        raise ZeroDivisionError("oh")

    assert checks.guarded("x", fails, "do this") == Finding("x", Level.BROKEN, "ZeroDivisionError: oh", "do this")


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "nvidia_gpus", lambda: ["driver: H200, 580.1, 143771 MiB"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert checks.check_gpu().level is Level.BROKEN


@pytest.mark.parametrize(
    ("count", "apart", "level", "text"),
    [
        (0, set(), Level.OK, "0: tensor-parallel ranks run on the CPU"),
        (1, set(), Level.OK, "1: no tensor parallelism"),
        (4, set(), Level.OK, "4: each can read the others' memory (symmetric memory)"),
        (4, {(1, 2), (2, 1)}, Level.NOTE, "4: GPU 1 cannot read the memory of GPU 2 (2 of 12 pairs)"),
    ],
)
def test_gpus_are_counted_and_asked_whether_they_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, count: int, apart: set[tuple[int, int]], level: Level, text: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: (a, b) not in apart)
    found = checks.check_gpus()
    assert (found.level, found.found) == (level, text) and bool(found.fix) == bool(apart)


def test_a_model_says_how_many_ranks_can_share_it(real_size: Path) -> None:
    """32 query heads and 16 of the tower; with 8 heads of keys, two of 16 ranks share one."""
    assert check_ranks(real_size).found == "runs with --tensor-parallel-size 1, 2, 4, 8, 16"
    config = json.loads((real_size / "config.json").read_text())
    config["vision_config"] |= {"num_heads": 4}
    (folder := real_size.parent / "four heads").mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    found = check_ranks(folder).found
    assert found.startswith("runs with --tensor-parallel-size 1, 2, 4; ")
    assert found.endswith("also 8, 16, where each rank encodes whole images (--mm-encoder-tp-mode data)")


def test_marks_and_fixes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "nothing"), "--port", "0"]) == 1
    shown = capsys.readouterr().out
    assert "✓ python" in shown and "✗ checkpoint" in shown and "→ give a folder" in shown
