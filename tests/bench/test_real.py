"""The benchmarks against the real server with a tiny model on a CPU."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.serving.serving_command import bench_serve, bench_startup
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan, StartupBenchSettings, VariantSettings
from tests.models import tiny

FLAGS = (
    "--device cpu --enforce-eager --max-model-len 256 --max-num-batched-tokens 256 --max-num-seqs 8 "
    "--encoder-budget-tokens 64 --kv-cache-tokens 4096 --encoder-cache-tokens 512"
)
BOUND_S = 300.0


def test_the_benchmark_of_a_server_that_it_starts(made: tiny.Tiny, tmp_path: Path) -> None:
    text = io.StringIO()
    target = TargetSettings(request_timeout_s=BOUND_S)
    workload = WorkloadSettings(
        num_prompts=9,
        image_resolution="mix:24x24,40x24:2",
        image_count=2,
        image_repeat_ratio=0.3,
        random_input_len=30,
        random_output_len=3,
        random_range_ratio=1.0,
    )
    load = LoadSettings(max_concurrency=4, warmup_requests=1)
    output = OutputSettings(
        result_dir=str(tmp_path), result_filename="x.json", save_detailed=True, report=str(tmp_path / "x.html")
    )
    variants = VariantSettings(serve_model=str(made.folder), serve_args=FLAGS, start_timeout_s=BOUND_S)
    code = bench_serve({"": ServingPlan(target, workload, load, output)}, Console(file=text, width=160), variants)
    assert code == 0, text.getvalue()
    saved = json.loads((tmp_path / "x.json").read_text())
    assert (saved["completed"], saved["failed"], saved["total_output_tokens"]) == (9, 0, 27)
    assert saved["total_input_vision_tokens"] > 0 and saved["total_images"] == 18
    assert saved["environment"]["text"].startswith("counted") and saved["environment"]["time_to_ready_s"] > 0
    texts = {total - images for total, images in zip(saved["input_lens"], saved["image_lens"], strict=True)}
    assert max(texts) - min(texts) <= 2 and min(texts) > 30  # as asked for, beside what the template adds
    phases = {phase["phase"]: phase for phase in saved["graphs"]}
    assert {"vision", "prefill", "decode"} <= phases.keys()
    assert phases["decode"]["fallbacks_by_reason"].keys() == {"graphs_off"} and phases["vision"]["fallbacks"] > 0
    stages = saved["stages"]
    assert {"receive", "preprocess", "queue", "prefill", "decode"} <= stages.keys()
    assert sum(told["mean_ms"] for told in stages.values()) == pytest.approx(saved["mean_e2el_ms"], rel=1e-3)
    assert sum(told["share"] for told in stages.values()) == pytest.approx(1, rel=1e-3)
    assert (tmp_path / "x.html").stat().st_size > 10_000


def test_the_stages_of_a_start_add_up(made: tiny.Tiny, tmp_path: Path) -> None:
    text = io.StringIO()
    settings = StartupBenchSettings(
        serve_args=FLAGS,
        starts=1,
        requests=3,
        image_resolution="24x24",
        random_input_len=20,
        start_timeout_s=BOUND_S,
        request_timeout_s=BOUND_S,
        json=str(tmp_path / "s.json"),
    )
    assert bench_startup(str(made.folder), settings, Console(file=text, width=160)) == 0, text.getvalue()
    [start] = json.loads((tmp_path / "s.json").read_text())["starts"]
    assert len(start["requests_ms"]) == 3 and start["failures"] == []
    assert sum(start["stages"].values()) == pytest.approx(start["ready_s"])
    assert {"process and imports", "loading weights", "warming up"} <= start["stages"].keys()
