"""`saccade bench serve --loads`: several loads, one table, content of its own for each."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.serving.serving_command import bench_serve
from saccade.bench.serving.serving_settings import (
    FIVE_SIZES,
    USUAL_LOADS,
    AgainstSettings,
    LoadsSettings,
    OutputSettings,
    ServingPlan,
)
from saccade.cli import main
from saccade.errors import ConfigError
from tests.bench.scripted import BOUND_S, Reply, nobody
from tests.bench.scripted_cache import CachingServer
from tests.bench.test_serving_against import running, with_times

SMALL = WorkloadSettings(num_prompts=4, image_resolution="32x20", random_input_len=20, random_output_len=3, seed=9)
QUIET = LoadSettings(max_concurrency=2, warmup_requests=0)
LOADS = """
small images: {}
text only:
    dataset-name: random
    num-prompts: 6
    max-concurrency: 3
"""


@pytest.fixture
def loads(tmp_path: Path) -> LoadsSettings:
    path = tmp_path / "loads.yaml"
    path.write_text(LOADS)
    return LoadsSettings(loads=str(path))


def test_each_load_has_its_own_requests_and_its_own_row(loads: LoadsSettings, tmp_path: Path) -> None:
    server, text = CachingServer("a"), io.StringIO()
    output = OutputSettings(result_dir=str(tmp_path), result_filename="all.json")
    with running(server) as [url]:
        plan = ServingPlan(TargetSettings(base_url=url), SMALL, QUIET, output)
        assert bench_serve(loads.plans(plan), Console(file=text, width=200)) == 0
    assert len(server.contents) == len(set(server.contents)) == 4 + 6
    assert ["image_url" in content for content in server.contents] == [True] * 4 + [False] * 6
    shown = text.getvalue()
    assert "small images" in shown and "text only" in shown and "requests/s" in shown and "ratio" not in shown
    saved = json.loads((tmp_path / "all.json").read_text())["loads"]
    assert [(one["name"], one["targets"][0]["completed"]) for one in saved] == [("small images", 4), ("text only", 6)]
    assert [one["targets"][0]["max_concurrency"] for one in saved] == [2, 3]


def test_two_servers_under_all_loads_have_ratios_with_intervals(
    loads: LoadsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, text = [CachingServer("quick"), CachingServer("slow")], io.StringIO()
    with running(*servers) as urls:
        with_times(monkeypatch, dict(zip(urls, (0.1, 0.2), strict=True)))
        plan = ServingPlan(TargetSettings(base_url=urls[0]), SMALL, QUIET)
        against = AgainstSettings(against=(urls[1],), rounds=2, settle_s=0)
        assert bench_serve(loads.plans(plan), Console(file=text, width=240), against=against) == 0
    rows = [line for line in text.getvalue().splitlines() if "slow" in line]
    assert len(rows) == 2 and all(row.count("2.00 (2.00 to 2.00)") == 2 for row in rows)
    first, other = (server.contents for server in servers)
    assert sorted(first) == sorted(other) and len(set(first)) == 2 * (4 + 6)


def test_failed_requests_fail_the_command_and_are_counted(loads: LoadsSettings) -> None:
    server, text = CachingServer("a"), io.StringIO()
    server.is_dead = True
    with running(server) as [url]:
        plan = ServingPlan(TargetSettings(base_url=url), SMALL, QUIET)
        assert bench_serve(loads.plans(plan), Console(file=text, width=200)) == 1
    assert " 4 " in text.getvalue() and " 6 " in text.getvalue()


# Background jobs of a shell ignore SIGINT, and so may these tests.
COMMAND = """
import signal, sys
from saccade.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


class EndingServer(CachingServer):
    """Counts requests, and calls `end` before it answers those behind the first `num_answers`."""

    def __init__(self, name: str, num_answers: int) -> None:
        super().__init__(name)
        self.num_answers = num_answers

    def end(self) -> None:
        self.is_dead = True

    async def chat(self, body: Any) -> Reply:
        if len(self.contents) >= self.num_answers:
            self.end()
        async for data in super().chat(body):
            yield data


class SignallingServer(EndingServer):
    """Sends a signal to the benchmark instead, and notes what its file held then."""

    def __init__(self, num_answers: int, number: int, file: Path) -> None:
        super().__init__("a", num_answers)
        self.number, self.file = number, file
        self.process: subprocess.Popen[str] | None = None
        self.held = ""

    def end(self) -> None:
        if not self.held:
            assert self.process is not None
            self.held = self.file.read_text()
            os.kill(self.process.pid, self.number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_benchmark_shows_and_saves_the_finished_loads(
    number: int, status: int, loads: LoadsSettings, tmp_path: Path
) -> None:
    path = tmp_path / "all.json"
    server = SignallingServer(4, number, path)
    flags = "--image-resolution 32x20 --random-input-len 20 --num-prompts 4 --warmup-requests 0 --max-concurrency 1"
    with running(server) as [url]:
        line = ["bench", "serve", "--base-url", url, "--loads", loads.loads, "--json", str(path), *flags.split()]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        server.process = subprocess.Popen([sys.executable, "-c", COMMAND, *line], text=True, **pipes)
        out, err = server.process.communicate(timeout=BOUND_S)
    assert server.process.returncode == status, err
    assert "small images: " in err and err.index(" requests/s, mean TTFT ") < err.index("load: text only")
    assert "small" in out and "INCOMPLETE, not finished: text only" in out and "Traceback" not in err
    held, saved = json.loads(server.held), json.loads(path.read_text())
    assert held == saved and not saved["is_complete"] and saved["unfinished"] == ["text only"]
    assert [(one["name"], one["targets"][0]["completed"]) for one in saved["loads"]] == [("small images", 4)]


def test_a_load_that_fails_in_its_second_round_has_figures_but_no_ratios(
    loads: LoadsSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers, text = [CachingServer("a"), EndingServer("b", 4 + 4 + 6)], io.StringIO()
    output = OutputSettings(result_dir=str(tmp_path), result_filename="all.json")
    with running(*servers) as urls, pytest.raises(ConfigError, match="answered none of 6 requests"):
        plan = ServingPlan(TargetSettings(base_url=urls[0]), SMALL, QUIET, output)
        against = AgainstSettings(against=(urls[1],), rounds=2, settle_s=0)
        bench_serve(loads.plans(plan), Console(file=text, width=240), against=against)
    rows = [line for line in text.getvalue().splitlines() if "│ b " in line]
    assert [row.count(" to ") for row in rows] == [2, 0]  # intervals
    assert "text only: INCOMPLETE: 1 of 2 rounds, without ratios" in text.getvalue()
    assert "INCOMPLETE, not finished: text only" in text.getvalue()
    first, second = json.loads((tmp_path / "all.json").read_text())["loads"]
    assert first["is_complete"] and first["ratios"]["b"] and not second["is_complete"] and second["ratios"] == {}
    assert [target["completed"] for target in second["targets"]] == [6, 6]
    err = capsys.readouterr().err
    assert "round 1 of 2: b: " in err and "small images: b: ratios, above 1 if a is ahead: requests/s " in err


def test_a_server_that_is_not_there_has_an_error_and_no_table(
    loads: LoadsSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    with nobody() as url:
        assert main(["bench", "serve", "--base-url", url, "--loads", loads.loads]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and f"saccade: {url} cannot be reached" in shown.err


def test_usual_loads_are_six_plans_that_other_flags_apply_to() -> None:
    plan = ServingPlan(TargetSettings(port=81), WorkloadSettings(image_quality=70, seed=3))
    plans = LoadsSettings(loads="usual").plans(plan)
    assert list(plans) == list(USUAL_LOADS) and len(plans) == 6
    assert all(one.workload.image_quality == 70 and one.target.port == 81 for one in plans.values())
    first, sizes, alone, long, text, large = plans.values()
    assert first == plan and sizes.workload.image_resolution == FIVE_SIZES and alone.load.max_concurrency == 1
    assert (long.workload.random_output_len, long.load.max_concurrency) == (128, 32)
    assert (text.workload.dataset_name, text.workload.random_input_len, text.load.max_concurrency) == (
        "random",
        512,
        64,
    )
    assert (large.workload.image_resolution, large.load.max_concurrency) == ("1920x1080", 16)


def test_the_command_takes_a_file_of_loads(loads: LoadsSettings, capsys: pytest.CaptureFixture[str]) -> None:
    with running(CachingServer("a")) as [url]:
        flags = ["--image-resolution", "32x20", "--random-input-len", "20", "--num-prompts", "2"]
        assert main(["bench", "serve", "--base-url", url, "--loads", loads.loads, *flags]) == 0
    shown = capsys.readouterr().out  # words of a narrow table may stand on lines of their own
    assert all(word in shown for word in ("small", "images", "text", "only"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must map the name of each load to its flags"),
        ("", "must map the name of each load to its flags"),
        ("a: 7\n", "must map the name of each load to its flags"),
        ("a: [", "is not YAML"),
        ("a: {speed: 7}\n", "the load 'a' has speed, which is not a flag"),
        ("a: {seed: 7}\n", "the load 'a' has seed, which is not a flag"),
        ("a: {num-prompts: many}\n", r"the load 'a' has num-prompts: 'many'; the value must be of type int"),
        ("a: {num-prompts: true}\n", r"the load 'a' has num-prompts: True; the value must be of type int"),
        ("a: {num-prompts: 0}\n", "the load 'a': num_prompts is 0; it must be at least 1"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_sent(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "loads.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        LoadsSettings(loads=str(path)).plans(ServingPlan())


def test_a_file_that_is_missing_is_named_with_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: .*give a YAML file, or usual \(--loads\)"):
        LoadsSettings(loads=str(tmp_path / "none.yaml")).plans(ServingPlan())


def test_what_does_not_go_together_is_refused() -> None:
    plans = LoadsSettings(loads="usual").plans(ServingPlan(output=OutputSettings(report="x.html")))
    with pytest.raises(ConfigError, match="leave out --compare and --report"):
        bench_serve(plans, Console(quiet=True))
