import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade import LLM, SamplingParams, __version__
from saccade.bench.passes.graph_bench import CPU_TOKENS, GPU_TOKENS, GraphBench, GraphTimes
from saccade.cli import main
from saccade.cli import run as cli_run
from saccade.cli.model import looks_like_model
from saccade.cli.prompt_parts import parts_of
from saccade.errors import ConfigError
from saccade.wire.update import Update
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny

SMALL = ["--device", "cpu", "--max-tokens", "5", "--max-model-len", "256"]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 30, 3)).astype(np.uint8)).save(path)
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"saccade {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert "serve" in shown and "bench graphs" in shown
    assert main(["bench"]) == 0
    assert "bench offline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sevre"], "unknown command sevre; did you mean serve"),
        (["bench", "graph"], "unknown command bench graph; did you mean bench graphs"),
        (["--verbose"], "unknown flag --verbose"),
    ],
)
def test_an_unknown_command_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = "import sys; from saccade.cli import main; main(['serve', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_a_bad_setting_exits_with_2_and_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_bench_graphs_fails_if_a_graph_differs_from_its_eager_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GraphBench((GraphTimes(16, "full", 1.0, 1.0, 0.1, 1.0, equals_eager=False),), {}, {})
    monkeypatch.setattr("saccade.bench.passes.passes_command.run_graph_bench", lambda settings, say: bench)
    assert main(["bench", "graphs", "--device", "cpu"]) == 1


def test_bench_graphs_picks_sizes_for_the_device_and_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("saccade.bench.passes.graph_bench.CPU_TOKENS", (16, 24))
    assert max(CPU_TOKENS) <= 1024 < max(GPU_TOKENS), "a CPU takes minutes for more"
    assert main(["bench", "graphs", "--device", "cpu", "--layers", "1"]) == 0
    told = capsys.readouterr()
    assert {line.split()[1] for line in told.out.splitlines() if "piecewise │" in line} == {"16", "24"}
    assert "weights of size tiny on cpu" in told.err.splitlines() and "tokens=24" in told.err


JSON_COMMANDS = ("graphs", "offline", "vision", "allreduce", "startup", "soak", "scale")


@pytest.mark.parametrize(
    ("command", "flag"),
    [*((f"bench {name}", "--json") for name in JSON_COMMANDS), ("eval", "--json")]
    + [("bench vision", "--plot"), ("bench scale", "--plot"), ("bench serve", "--report")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.bench.passes.passes_command.stages", _nothing_runs)
    monkeypatch.setattr("saccade.bench.serving.serving_command.run_startup_bench", _nothing_runs)
    monkeypatch.setattr("saccade.bench.serving.serving_command.run_loads", _nothing_runs)
    monkeypatch.setattr("saccade.bench.soak.soak_command.stages", _nothing_runs)
    monkeypatch.setattr("saccade.bench.scale.scale_command.run_scale_bench", _nothing_runs)
    monkeypatch.setattr("saccade.eval.evaluation.LLM", _nothing_runs)
    monkeypatch.setattr("saccade.terminal.find_spec", lambda name: "installed")
    (folder := tmp_path / "folder.png").mkdir()
    for path, reason in (
        (tmp_path / "no" / "x.png", "its folder does not exist"),
        (tmp_path / f"{'x' * 300}.png", "File name too long"),
        (folder, "it is a folder"),
    ):
        assert main([*command.split(), flag, str(path)]) == 2
        assert f"{path} cannot be written: {reason} ({flag})" in capsys.readouterr().err


def _nothing_runs(*given: Any, **named: Any) -> Any:
    raise AssertionError("it runs")


def test_an_unknown_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "graphs", "--size", "70b"]) == 2
    assert "size is '70b'; known are 8b, tiny (--size)" in capsys.readouterr().err


def test_run_asks_about_an_image(made: tiny.Tiny, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(made.folder), "What is this?", "--image", str(picture), *SMALL]) == 0
    flagged = capsys.readouterr().out
    assert len(flagged.strip()) > 0
    assert main(["run", str(made.folder), f"{picture} What is this?", *SMALL]) == 0
    assert capsys.readouterr().out == flagged, "an image in the prompt is the same image"


def test_run_uses_the_bundled_model_by_default(picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "What shape is this?", "--image", str(picture), *SMALL]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("place", ["before", "behind", "file"])
def test_run_uses_the_model_of_a_flag_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    """Not the bundled model, which would answer too."""
    missing = str(tmp_path / "nothing")
    (tmp_path / "run.yaml").write_text(f"model: {missing}")
    named = ["--config", str(tmp_path / "run.yaml")] if place == "file" else ["--model", missing]
    words = ["hello", *named] if place == "behind" else [*named, "hello"]
    assert main(["run", *words]) == 2
    assert missing in capsys.readouterr().err


def test_a_model_left_empty_in_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("model:")
    assert main(["run", "hello", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "run.yaml: model: None is a NoneType, which the setting cannot hold" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", [[], [""], [" \n"]])
def test_run_needs_a_prompt_where_nobody_types(
    prompt: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(" "))
    assert main(["run", *prompt]) == 2
    assert "no prompt was given" in capsys.readouterr().err


def test_run_names_a_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "nothing"), "hello"]) == 2
    assert "nothing" in capsys.readouterr().err


def test_run_names_a_missing_image(made: tiny.Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(made.folder), "hello", "--image", "gone.png"]) == 2
    assert "gone.png is not a file (--image, --video)" in capsys.readouterr().err


def test_run_keeps_the_order_of_images_and_videos(picture: Path) -> None:
    words = [word for kind in ("image", "video", "image") for word in (f"--{kind}", str(picture))]
    kinds = [part["type"] for part in cli_run.new_parser("run").read(words).media]
    assert kinds == ["image", "video", "image"]


def test_paths_in_a_prompt_become_images_in_place(picture: Path) -> None:
    image = {"type": "image", "image": picture}
    assert parts_of(f"Compare {picture} with '{picture}', please") == [
        {"type": "text", "text": "Compare"},
        image,
        {"type": "text", "text": "with"},
        image,
        {"type": "text", "text": ", please"},
    ]
    assert parts_of(str(picture)) == [image]
    assert parts_of("What is in photo.png?") == [{"type": "text", "text": "What is in photo.png?"}]
    with pytest.raises(ConfigError, match="does not exist"):
        parts_of("What is in ./missing.png?")
    spaced = picture.with_name("a b.png")
    spaced.write_bytes(picture.read_bytes())
    image, plain = {"type": "image", "image": spaced}, str(spaced).replace(" ", "\\ ")
    for written in (f"'{spaced}'", f'"{spaced}"', plain):
        asked = parts_of(f"Is it's colour red in {written}?")
        assert asked == [{"type": "text", "text": "Is it's colour red in"}, image, {"type": "text", "text": "?"}]


@pytest.mark.parametrize("word", ["why " * 5000, "~nobody-of-this-name x.png", "a\0b.png", "x" * 300 + ".png"])
def test_a_question_need_not_be_a_name(word: str) -> None:
    assert not looks_like_model(word + " ?")
    assert parts_of(word) == [{"type": "text", "text": word.strip()}]


def test_a_refused_question_does_not_end_the_conversation(
    made: tiny.Tiny, picture: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = picture.with_name("broken.png")
    broken.write_bytes(b"no image")
    lines = iter(["hello", "What is ./missing.png ?", f"And {broken} ?", "hello again"])

    def ask(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("XDG_CACHE_HOME", str(picture.parent))
    asked: list[list[str]] = []
    stream = cli_run._stream

    def noted(llm: Any, messages: list[dict[str, Any]], params: Any) -> tuple[str, bool]:
        asked.append([message["role"] for message in messages])
        return stream(llm, messages, params)

    monkeypatch.setattr(cli_run, "_stream", noted)
    assert main(["run", str(made.folder), *SMALL]) == 0
    told = capsys.readouterr().err
    assert "./missing.png, which does not exist" in told and f"{broken}: the image format is not known" in told
    assert asked[0] == ["user"] and asked[-1] == ["user", "assistant", "user"]


def test_ctrl_c_ends_the_answer_but_not_the_conversation(
    made: tiny.Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(made.folder, device="cpu", max_model_len=256, enforce_eager=True, warm_up=False) as llm:
        params, talk = SamplingParams(max_tokens=50, temperature=0), [{"role": "user", "content": "hello"}]
        whole, is_right = cli_run._stream(llm, talk, params)
        assert is_right
        engine, step, num_steps = llm.engine, llm.engine.step, 0

        def interrupted() -> list[Update]:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt) as stopped:
            cli_run._stream(llm, talk, params)
        assert isinstance(stopped.value, cli_run.AnswerStoppedError)
        assert whole.startswith(stopped.value.text) and len(stopped.value.text) < len(whole)
        assert not engine.has_work and "(stopped)" in capsys.readouterr().err
        assert cli_run._stream(llm, talk, params) == (whole, True), "it answers again"


def test_verify_prints_every_graph(made: tiny.Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--max-num-batched-tokens", "24", "--max-num-seqs", "2", "--max-model-len", "64"]
    media = ["--encoder-budget-tokens", "40", "--encoder-cache-tokens", "256"]
    assert main(["verify", str(made.folder), "--device", "cpu", "--short", "--json", *limits, *media]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["right"]
    phases = {"vision", "prefill", "decode", "head", "sample"}
    assert {row["key"].split("/")[0] for row in report["rows"]} == phases
    assert report["audit"]["right"] and {row["key"].split("/")[0] for row in report["audit"]["rows"]} == phases


def test_audit_says_what_it_checked(made: tiny.Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--max-num-batched-tokens", "24", "--max-num-seqs", "2", "--max-model-len", "64"]
    media = ["--encoder-budget-tokens", "40", "--encoder-cache-tokens", "256"]
    assert main(["audit", str(made.folder), "--device", "cpu", "--short", *limits, *media]) == 0
    shown = capsys.readouterr()
    assert "no varying value is frozen" in shown.out and "auditing took" in shown.err
    assert main(["audit", str(made.folder), "--device", "cpu", "--enforce-eager", *limits, *media]) == 1
    assert "there are no graphs to audit" in capsys.readouterr().out
