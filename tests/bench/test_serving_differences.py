"""Two results that are not of the same thing: every difference is a line."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.serving.serving_command import bench_serve
from saccade.bench.serving.serving_differences import differences, unequal_work
from saccade.bench.serving.serving_results import as_data, load
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan
from tests.bench.scripted import serving
from tests.bench.scripted_cache import CachingServer
from tests.bench.test_report import make_run

SMALL = WorkloadSettings(num_prompts=8, image_resolution="32x20", random_input_len=30, random_output_len=2, seed=5)
PLAN = ServingPlan(TargetSettings(), SMALL, LoadSettings(max_concurrency=2, warmup_requests=0))


def result(plan: ServingPlan = PLAN, **environment: Any) -> dict[str, Any]:
    known = {"content": "abc", "server": "vllm 0.26", "model": "m", "server_info": {"kv": {"tokens": 5}, "tasks": 3}}
    run = replace(make_run(failures=0), settings=plan.as_data(), environment={"date": "", **known, **environment})
    data: dict[str, Any] = json.loads(json.dumps(as_data(run)))
    return data


def test_equal_results_have_no_difference() -> None:
    assert differences(result(), result(date="later")) == []


@pytest.mark.parametrize(
    ("part", "name", "value", "line"),
    [
        ("workload", "num_prompts", 9, "UNEQUAL: --num-prompts was 8, is 9"),
        ("workload", "image_resolution", "20x32", "UNEQUAL: --image-resolution was 32x20, is 20x32"),
        ("workload", "random_output_len", 3, "UNEQUAL: --random-output-len was 2, is 3"),
        ("workload", "seed", 6, "OTHER CONTENT: seed was 5, is 6; --seed 5 repeats it (with --flush-cache)"),
        ("load", "max_concurrency", 4, "UNEQUAL: --max-concurrency was 2, is 4"),
        ("load", "request_rate", 2.5, "UNEQUAL: --request-rate was inf, is 2.5"),
        ("load", "flush_cache", True, "UNEQUAL: --flush-cache was False, is True"),
        ("target", "backend", "vllm-chat", "UNEQUAL: --backend was openai-chat, is vllm-chat"),
        ("target", "disable_stream", True, "UNEQUAL: --disable-stream was False, is True"),
        ("output", "goodput", "ttft:5", "UNEQUAL: --goodput was not told, is ttft:5"),
    ],
)
def test_unequal_settings_are_named_by_their_flag(part: str, name: str, value: Any, line: str) -> None:
    other = replace(PLAN, **{part: replace(getattr(PLAN, part), **{name: value})})
    assert differences(result(), result(other)) == [line]


@pytest.mark.parametrize(("part", "name", "value"), [("target", "port", 9), ("output", "label", "x")])
def test_where_a_server_is_and_what_is_shown_does_not_matter(part: str, name: str, value: Any) -> None:
    other = replace(PLAN, **{part: replace(getattr(PLAN, part), **{name: value})})
    assert differences(result(), result(other)) == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"server": "vllm 0.27"}, "UNEQUAL: server was vllm 0.26, is vllm 0.27"),
        ({"model": "n"}, "UNEQUAL: model was m, is n"),
        ({"serve_flags": "--x"}, "UNEQUAL: serve_flags was not told, is --x"),
        ({"content": "xyz"}, "OTHER CONTENT: digest of the prompts was abc, is xyz"),
        ({"server_info": {"kv": {"tokens": 6}, "tasks": 9}}, "UNEQUAL: server kv.tokens was 5, is 6"),
    ],
)
def test_unequal_servers_are_named(changed: dict[str, Any], line: str) -> None:
    assert differences(result(), result(**changed)) == [line]


def test_settings_in_the_labels_of_metrics_are_read() -> None:
    runs = [result(), result()]
    for run, size in zip(runs, (16, 32), strict=True):
        run["server_gauges"] = {f'vllm:cache_config_info{{block_size="{size}",model_name="{size}"}}': 1.0}
    assert differences(*runs) == ["UNEQUAL: server cache_config.block_size was 16, is 32"]


def test_the_work_of_a_request_is_compared() -> None:
    runs = [result(), result()]
    runs[1]["total_input_tokens"] *= 1.05
    [line] = unequal_work(("a", "b"), runs)
    assert line.startswith("NOT THE SAME WORK: input tokens a request: a 90.0, b 94.5")
    assert differences(*runs) == ["NOT THE SAME WORK: input tokens a request: earlier 90.0, now 94.5"]
    drawn_anew = result(content="xyz") | {"total_input_tokens": runs[1]["total_input_tokens"]}
    assert not [line for line in differences(runs[0], drawn_anew) if "WORK" in line]


def test_what_was_wrong_with_the_earlier_run_is_said() -> None:
    earlier = result() | {"warnings": ["WARM CACHE: 90%"], "failed": 3}
    assert differences(earlier, result()) == [
        "the earlier run: WARM CACHE: 90%",
        "the earlier run: 3 requests failed, and figures are over the others",
    ]


def test_results_of_other_benchmarks_are_compared_as_far_as_they_tell(tmp_path: Path) -> None:
    told = {
        "request_throughput": 2.0,
        "max_concurrency": 4,
        "request_rate": "inf",
        "num_prompts": 40,
        "backend": "vllm",
    }
    told |= dict.fromkeys(("settings", "environment", "warnings", "server_gauges"), "of vLLM's --metadata")
    told |= {"burstiness": 1.0, "model_id": "m", "completed": 40, "total_input_tokens": 90 * 40}
    (tmp_path / "x.json").write_text(json.dumps(told))
    lines = differences(load(str(tmp_path / "x.json")), result())
    assert lines[0].startswith("NOT FULLY COMPARABLE") and len(lines) == 3
    assert lines[1:3] == ["UNEQUAL: backend was vllm, is openai-chat", "UNEQUAL: max_concurrency was 4, is 2"]


def test_a_comparison_says_them_in_red_and_in_the_page(tmp_path: Path) -> None:
    first = OutputSettings(result_dir=str(tmp_path), result_filename="a.json")
    second = OutputSettings(compare=str(tmp_path / "a.json"), report=str(tmp_path / "r.html"))
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True, color_system="standard")
    for size, output, concurrency in ((16, first, 2), (32, second, 3)):
        with serving(CachingServer("any", block_size=size)) as address:
            plan = replace(PLAN, target=TargetSettings(base_url=address.url), output=output)
            plan = replace(plan, load=replace(PLAN.load, max_concurrency=concurrency))
            bench_serve({"": plan}, console)
    lines = ("UNEQUAL: --max-concurrency was 2, is 3", "UNEQUAL: server cache_config.block_size was 16, is 32")
    for line in lines:
        assert f"\x1b[1;31m{line}" in text.getvalue() and f"<li>{line}</li>" in (tmp_path / "r.html").read_text()
    assert text.getvalue().count("UNEQUAL") == 2 and "OTHER CONTENT" not in text.getvalue()
