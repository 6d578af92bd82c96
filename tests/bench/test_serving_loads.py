"""`saccade bench serve --loads`: several loads, one table, content of its own for each."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.serving.serving_against_settings import AgainstSettings
from saccade.bench.serving.serving_command import bench_serve
from saccade.bench.serving.serving_loads_settings import FIVE_SIZES, USUAL_LOADS, LoadsSettings
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan, VariantSettings
from saccade.cli import main
from saccade.errors import ConfigError
from tests.bench.scripted_cache import CachingServer
from tests.bench.test_serving_against import few_resamples as few_resamples
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
        assert bench_serve(plan, VariantSettings(), Console(file=text, width=200), None, loads) == 0
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
        assert bench_serve(plan, VariantSettings(), Console(file=text, width=240), against, loads) == 0
    rows = [line for line in text.getvalue().splitlines() if "slow" in line]
    assert len(rows) == 2 and all(row.count("2.00 (2.00 to 2.00)") == 2 for row in rows)
    first, other = (server.contents for server in servers)
    assert sorted(first) == sorted(other) and len(set(first)) == 2 * (4 + 6)


def test_failed_requests_fail_the_command_and_are_counted(loads: LoadsSettings) -> None:
    server, text = CachingServer("a"), io.StringIO()
    server.is_dead = True
    with running(server) as [url]:
        plan = ServingPlan(TargetSettings(base_url=url), SMALL, QUIET)
        assert bench_serve(plan, VariantSettings(), Console(file=text, width=200), None, loads) == 1
    assert " 4 " in text.getvalue() and " 6 " in text.getvalue()


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
    loads, console = LoadsSettings(loads="usual"), Console(quiet=True)
    with pytest.raises(ConfigError, match="leave out --compare and --report"):
        plan = ServingPlan(output=OutputSettings(report="x.html"))
        bench_serve(plan, VariantSettings(), console, None, loads)
    with pytest.raises(ConfigError, match="leave out --serve-model"):
        against = AgainstSettings(against=("http://127.0.0.1:8001",))
        bench_serve(ServingPlan(), VariantSettings(serve_model="m"), console, against, loads)
