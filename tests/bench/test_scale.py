"""Simulated replicas: every request ends once, one seed gives the same figures, and policies do what they promise."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path

import pytest

from saccade.bench.scale.scale_replica import H200_QWEN3_VL_8B, IMAGE_ROWS, replica_limits
from saccade.bench.scale.scale_settings import SCALE_POLICIES, ScaleSettings
from saccade.bench.scale.scale_workload import arrivals, image_prompt
from saccade.bench.scale.simulation import ScaleLine, Simulation, new_policy, run_scale_bench
from saccade.cli import main
from saccade.errors import ConfigError
from saccade.routing import ConsistentHashing, Policy
from saccade.scheduling.step_plan import Chunk, EncodeItem, StepPlan

SMALL = ScaleSettings(replicas=(8,), requests_per_replica=100, output_tokens=2, images_per_replica=50)


@cache
def line(policy: str, num_replicas: int = 8) -> ScaleLine:
    return Simulation(SMALL, num_replicas, policy).run()


@pytest.mark.parametrize("policy", SCALE_POLICIES)
def test_every_request_ends_once_and_replicas_are_left_empty(policy: str) -> None:
    settings = replace(SMALL, requests_per_replica=30, routers=3)
    simulation = Simulation(settings, 4, policy)
    found = simulation.run()
    ended = [*simulation.end_times, *simulation.refused, *simulation.failures]
    assert sorted(map(int, ended)) == list(range(120))
    assert (found.finished, found.refused, found.failed) == (120, 0, 0)
    assert sum(simulation.taken.values()) == 120
    for replica in simulation.replicas.values():
        assert replica.next_end is None and replica.scheduler.is_idle
        replica.scheduler.check()
    assert all(not any(router.loads.values()) for router in simulation.routers)


def test_full_queues_refuse_and_every_request_still_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SMALL, requests_per_replica=60, request_rate=1e5, max_num_seqs=2)
    short = replace(replica_limits(settings), max_queued_requests=8)
    monkeypatch.setattr("saccade.bench.scale.simulation.replica_limits", lambda _: short)
    simulation = Simulation(settings, 2, "affinity")
    found = simulation.run()
    assert found.refused > 0 and found.finished > 0
    assert found.finished + found.refused == 120 == len({*simulation.end_times, *simulation.refused})
    assert all(not any(router.loads.values()) for router in simulation.routers)


def test_the_same_seed_gives_the_same_figures_and_another_seed_others() -> None:
    settings = replace(SMALL, requests_per_replica=30, replicas=(2, 3), policies=("affinity", "least-loaded"))
    once, again = run_scale_bench(settings), run_scale_bench(settings)
    assert once == again
    assert run_scale_bench(replace(settings, seed=1)).lines != once.lines


def test_with_affinity_caches_hit_as_on_a_single_replica_and_far_more_than_in_turns() -> None:
    alone, affinity, turns = line("affinity", 1), line("affinity"), line("round-robin")
    for name in ("encoder_hit_rate", "prefix_hit_rate"):
        assert getattr(affinity, name) > 0.85 * getattr(alone, name)
        assert getattr(affinity, name) > 1.5 * getattr(turns, name)
    assert affinity.ttft_p50_ms is not None and turns.ttft_p50_ms is not None
    assert affinity.ttft_p50_ms < turns.ttft_p50_ms


def test_without_the_bound_a_hot_image_overloads_its_replica() -> None:
    hot = replace(SMALL, hot_share=0.4)
    bounded, unbounded = (Simulation(hot, 8, policy).run() for policy in ("affinity", "affinity-unbounded"))
    assert unbounded.busiest > 3 > bounded.busiest
    assert bounded.ttft_p99_ms is not None and unbounded.ttft_p99_ms is not None
    assert unbounded.ttft_p99_ms > 2 * bounded.ttft_p99_ms


def test_routers_that_hear_of_each_others_loads_keep_a_hot_image_from_one_replica() -> None:
    hot = replace(SMALL, hot_share=0.4, routers=8, requests_per_replica=150)
    deaf, hearing = (Simulation(replace(hot, report_s=period), 8, "affinity").run() for period in (0.0, 0.02))
    assert hearing.busiest < 0.8 * deaf.busiest


class _Watched:
    """A policy whose choices are compared with its bound."""

    def __init__(self, policy: ConsistentHashing) -> None:
        self.policy, self.num_kept = policy, 0

    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        found = self.policy.order(key, tokens, loads)
        mean = (sum(loads.values()) + tokens) / len(loads)
        most = max(ceil(self.policy.bound * mean), self.policy.room_tokens)
        assert loads[found[0]] + tokens <= most or loads[found[0]] == min(loads.values())
        self.num_kept += found[0] != self.policy.ranked(key, loads)[0]
        return found


def test_the_bound_is_kept_for_every_request() -> None:
    made: list[_Watched] = []

    def watched(_: int) -> Policy:
        made.append(_Watched(ConsistentHashing(room_tokens=2000)))
        return made[-1]

    Simulation(replace(SMALL, hot_share=0.3, request_rate=200.0), 6, "affinity", policy_for=watched).run()
    assert made[0].num_kept > 10  # requests that the bound sent elsewhere


def test_a_step_takes_what_its_passes_took() -> None:
    times = H200_QWEN3_VL_8B
    decode = StepPlan(0, chunks=tuple(Chunk(str(i), 9, 1, (1,)) for i in range(64)))
    assert times.of_step(decode) == pytest.approx(7.95e-3)
    image = EncodeItem("a", 0, b"", IMAGE_ROWS, (1,))
    prefill = StepPlan(0, encode=(image,) * 8, chunks=(Chunk("a", 0, 406, (1,)),))
    assert times.of_step(prefill) == pytest.approx(24.0e-3 + 9.52e-3 + 0.42e-3)


def test_a_replica_without_cache_hits_is_as_fast_as_the_measured_server() -> None:
    """`saccade bench serve` reached 80 to 82 requests/s with one new image each and one token out. Passes are added up
    here, and the server overlaps some, so the simulation may be a little slower."""
    settings = ScaleSettings(
        requests_per_replica=700, zipf=0, hot_share=0, images_per_replica=10**6, output_tokens=1, request_rate=100.0
    )
    found = Simulation(settings, 1, "round-robin").run()
    assert found.encoder_hit_rate < 0.01
    assert 0.85 * 81 < found.throughput < 1.02 * 81


def test_requests_have_images_of_the_asked_popularity() -> None:
    drawn = list(arrivals(replace(SMALL, hot_share=0.25, requests_per_replica=500), 4))
    assert [one.time for one in drawn] == sorted(one.time for one in drawn)
    keys = [one.affinity_key for one in drawn]
    share = keys.count(image_prompt(0).affinity_key) / len(keys)
    assert 0.2 < share < 0.3
    counts = [keys.count(image_prompt(image).affinity_key) for image in (1, 200)]
    assert counts[0] > 5 * counts[1]
    assert len({image_prompt(image).affinity_key for image in range(300)}) == 300


def test_the_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, plot = tmp_path / "scale.json", tmp_path / "scale.svg"
    flags = ["--replicas", "1,2", "--policies", "affinity,round-robin", "--requests-per-replica", "10"]
    assert main(["bench", "scale", *flags, "--json", str(json_file), "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "round-robin" in shown.out and "2 replicas, affinity: 0 of 20" in shown.err
    lines = json.loads(json_file.read_text())["lines"]
    assert [(one["replicas"], one["policy"]) for one in lines] == [
        *((1, "affinity"), (1, "round-robin")),
        *((2, "affinity"), (2, "round-robin")),
    ]
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"replicas": (0,)}, "give numbers of 1 to 4096 .--replicas."),
        ({"policies": ("random",)}, "allowed: affinity, affinity-unbounded, least-loaded, round-robin .--policies."),
        ({"hot_share": 1.0}, "below 1 .--hot-share."),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"plot": "figures.gif"}, "must end in .png or .svg"),
        ({"replicas": (4096,), "requests_per_replica": 10**6}, "more than 10000000 requests"),
        ({"zipf": float("nan")}, "zipf is nan; it must be at least 0"),
    ],
)
def test_wrong_settings_are_refused_with_what_would_work(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replace(SMALL, **wrong)  # type: ignore[arg-type]


def test_the_policies_are_the_servers() -> None:
    affinity = new_policy("affinity", 8192)
    assert isinstance(affinity, ConsistentHashing) and (affinity.bound, affinity.room_tokens) == (1.25, 16384)
