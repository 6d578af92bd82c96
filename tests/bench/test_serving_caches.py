"""Caches that are warm from a run before are detected and said, whoever counts them; those of a first run are not."""

import io
import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from rich.console import Console

from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.load.workload import WorkloadPrompt
from saccade.bench.serving.serving_caches import CacheUse, cache_use
from saccade.bench.serving.serving_command import bench_serve
from saccade.bench.serving.serving_run import Shown
from saccade.bench.serving.serving_settings import OutputSettings, ServingPlan
from saccade.bench.serving.serving_target import Reading
from saccade.bench.serving.serving_turns import run_serving
from saccade.cli import main
from tests.bench.scripted import serving
from tests.bench.scripted_cache import CachingServer

SMALL = WorkloadSettings(num_prompts=8, image_resolution="32x20", random_input_len=30, random_output_len=2, seed=5)
LOAD = LoadSettings(max_concurrency=2, warmup_requests=2)
SILENT = Shown(Console(quiet=True))
RED = "\x1b[1;31m"


def plan(url: str, **workload: object) -> ServingPlan:
    settings = replace(SMALL, **workload)  # type: ignore[arg-type]
    return ServingPlan(TargetSettings(base_url=url), settings, LOAD)


@pytest.mark.parametrize(
    ("counters", "tells_cached", "has_images"), [("vllm", False, True), ("sglang", False, False), ("", True, False)]
)
def test_a_second_run_with_the_same_seed_is_said_to_be_warm(
    counters: str, tells_cached: bool, has_images: bool
) -> None:
    """By vLLM's counters (which are also Saccade's), by SGLang's, or by what replies tell."""
    server = CachingServer("any", counters=counters, tells_cached=tells_cached)
    with serving(server) as address:
        first, second, other = (run_serving(plan(address.url, seed=seed), SILENT) for seed in (5, 5, 6))
        flushed = run_serving(replace(plan(address.url), load=replace(LOAD, flush_cache=True)), SILENT)
    assert first.warnings == other.warnings == flushed.warnings == []
    assert second.warnings[0].startswith("WARM CACHE: 9") and "of the prompt tokens" in second.warnings[0]
    assert [line for line in second.warnings if "100.0% of the images (8 of 8)" in line] == second.warnings[1:]
    assert len(second.warnings) == 1 + has_images
    assert "--seed" in second.warnings[0] and "--flush-cache" in second.warnings[0]
    assert "at most" in second.warnings[0]
    assert "of 8 images" in first.caches.summary or not has_images


def test_a_server_that_counts_nothing_is_named() -> None:
    with serving(CachingServer("any", counters="")) as address:
        runs = [run_serving(plan(address.url), SILENT) for _ in range(2)]
    assert all(run.warnings == [] and "cannot be ruled out" in run.caches.summary for run in runs)


def test_the_warning_is_red_and_kept(tmp_path: Path) -> None:
    output = OutputSettings(result_dir=str(tmp_path), result_filename="x.json", report=str(tmp_path / "x.html"))
    with serving(CachingServer("any")) as address:
        for _ in range(2):
            text = io.StringIO()
            console = Console(file=text, width=100, force_terminal=True, color_system="standard")
            bench_serve({"": replace(plan(address.url), output=output)}, console)
    assert f"{RED}WARM CACHE: 9" in text.getvalue()
    saved = json.loads((tmp_path / "x.json").read_text())
    assert saved["warnings"][0].startswith("WARM CACHE") and saved["caches"]["hit_images"] == 8
    assert '<ul class="failed"><li>WARM CACHE' in (tmp_path / "x.html").read_text()


def test_every_run_of_the_command_draws_other_content_and_says_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    server = CachingServer("any")
    flags = ["--num-prompts", "4", "--warmup-requests", "0", "--image-resolution", "32x20", "--random-input-len", "20"]
    with serving(server) as address:
        command = ["bench", "serve", "--base-url", address.url, *flags]
        assert main(command) == main(command) == 0
        seeds = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("Seed:")]
        assert len(set(seeds)) == 2 and len(set(server.contents)) == 8
        assert main([*command, "--seed", seeds[0]]) == 0
        shown = capsys.readouterr().out
    assert sorted(server.contents[:4]) == sorted(server.contents[8:]) and "WARM CACHE" in shown


def test_what_the_content_itself_repeats_is_no_warm_cache() -> None:
    with serving(CachingServer("any")) as address:
        run = run_serving(plan(address.url, image_repeat_ratio=0.5), SILENT)
        again = run_serving(plan(address.url, image_repeat_ratio=0.5), SILENT)
    assert run.warnings == [] and run.caches.hit_images > 0
    assert len(again.warnings) == 1 and "100.0% of the images" in again.warnings[0]


def reading(**counts: float) -> Reading:
    return Reading(
        metrics={f'saccade:{name}_total{{engine="{rank}"}}': n for name, n in counts.items() for rank in "01"}
    )


def test_counters_are_summed_over_engines_and_taken_between_two_readings() -> None:
    prompts = [WorkloadPrompt("x", 1, images=(number,)) for number in (0, 1, 1)]
    names = ("prefix_cache_queries", "prefix_cache_hits", "mm_cache_queries", "mm_cache_hits")
    before = reading(**dict(zip(names, (100, 50, 5, 5), strict=True)))
    after = reading(**dict(zip(names, (150, 80, 8, 6), strict=True)))
    outcomes = [Outcome(index, 0.0, image_tokens=7) for index in range(3)]
    use = cache_use(before, after, outcomes, prompts, 10)
    assert (use.tokens, use.hit_tokens, use.images, use.hit_images) == (100, 60, 6, 2)
    assert (use.own_tokens, use.own_images) == (3 * 12 + 2 * 7, 1)
    assert cache_use(before, after, outcomes, prompts, None).own_tokens == 3 * 66 + 14
    assert cache_use(after, before, outcomes, prompts, 10).tokens is None  # started anew in between
    silent = [Outcome(index, 0.0) for index in range(3)]
    unknown = cache_use(before, after, silent, prompts, 10)
    assert unknown.own_tokens == inf and unknown.as_data()["own_tokens"] is None


def test_a_template_that_nobody_counts_is_estimated_from_the_shortest_prompt() -> None:
    prompts = [
        WorkloadPrompt("one two", 1),
        WorkloadPrompt([{"type": "text", "text": "one two three"}], 1, sizes=((8, 8),)),
    ]
    told = [Outcome(0, 0.0, prompt_tokens=14), Outcome(1, 0.0, prompt_tokens=30, image_tokens=16)]
    assert cache_use(Reading(), Reading(), told, prompts, None).own_tokens == 2 * (11 + 2)
    assert cache_use(Reading(), Reading(), told[:1], prompts[:1], None).own_tokens == 12 + 2
    silent = [Outcome(1, 0.0, prompt_tokens=30)]  # of which an unknown part is the image
    assert cache_use(Reading(), Reading(), silent, prompts, None).own_tokens == 2 * (64 + 2)


def test_uses_add_up_and_little_is_not_said() -> None:
    use = CacheUse(1000, 500, 100, 10, 1, 0)
    assert use + use == CacheUse(2000, 1000, 200, 20, 2, 0)
    assert (use + CacheUse()).tokens is None
    assert [line.split("%")[0] for line in use.warnings("")] == ["WARM CACHE: 50.0", "WARM CACHE: 10.0"]
    assert CacheUse(1000, 109, 100, 1000, 9, 0).warnings("") == []
    assert CacheUse(1000, 110, 100).warnings("Do this.") == [
        "WARM CACHE: 11.0% of the prompt tokens (110 of 1000) came from the prefix cache; "
        "the run's own content accounts for 10.0% at most. Do this."
    ]
