"""Verification of a whole engine: correct graphs pass, and a graph that froze something is named and refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import AddressError, ConfigError, GraphError
from saccade.execution.build import build_engine
from saccade.execution.executor import DeviceExecutor
from saccade.execution.verification import (
    _grid_sequences,
    audit_graphs,
    check_graphs,
    chosen_buckets,
    verify_graphs,
)
from saccade.graphs import Capacity, GraphRunner, VerifyRow
from saccade.graphs.compare import OutputDifference
from saccade.graphs.cuda_nodes import UnreadableError
from saccade.inputs.processor import Processor
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Stage
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, executor_of
from tests.engine.wrong_graphs import spoil
from tests.models import tiny

Load = Callable[[str], Loaded]
SMALL = Options(mode=Mode.FULL, max_tokens=24, max_num_seqs=3, max_units=40, num_blocks=12, max_model_len=64)


def thinned(loaded: Loaded, num_buckets: int = 2) -> DeviceExecutor:
    """An executor with only the smallest and the largest bucket of every phase, to save time."""
    executor = plain(loaded)
    for name in ("prefill", "decode", "head", "sampler", "vision"):
        phase = getattr(executor, name)
        buckets = sorted(phase.phase.buckets, key=lambda bucket: bucket[phase.phase.rows])
        kept = tuple({buckets[0], buckets[-1]})[:num_buckets]
        thin = GraphRunner(replace(phase.phase, buckets=kept), replace(phase.settings, tiers=frozenset({"capacity"})))
        if name == "vision":
            assert executor.encoder is not None
            executor.encoder.graphs = thin
        else:
            setattr(executor, name, thin)
    executor.capture()
    for cache in (tensor for pair in executor.state.caches for tensor in pair):
        cache.normal_()
    return executor


def plain(loaded: Loaded) -> DeviceExecutor:
    """An executor without graphs."""
    made, model = loaded
    return executor_of(build(model, made.folder, replace(SMALL, mode=None)))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_every_bucket_and_phase_is_verified_and_leaves_no_trace(loaded: Load, family: str) -> None:
    executor = thinned(loaded(family))
    seen: list[tuple[str, int, int]] = []
    report = verify_graphs(executor, progress=lambda *news: seen.append(news))
    assert report.is_right, f"\n{report}"
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["vision", "prefill", "decode", "head", "sample"]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[0][1] == 0 and seen[-1][1] == seen[-1][2] > len(executor.phases), "all graphs, and no more"
    keys = {str(graph.key) for phase in executor.phases for graph in phase.graphs}
    assert keys <= {row.key for row in report.rows}
    for phase in executor.phases:
        own = [row.difference for row in report.rows if row.key.startswith(phase.phase.name + "/")]
        assert phase.snapshot()["selfcheck"] == max(own)
    vision = {row.sequence for row in report.rows if row.key.startswith("vision")}
    assert {"equal totals", "small-large-small", "poisoned", "shuffled"} <= vision
    assert {"other shapes", "poisoned shapes", "videos", "the same image twice"} <= vision
    assert all(not phase.stats.replays and not phase.stats.fallbacks for phase in executor.phases)
    assert all(graph.num_replays == 0 for phase in executor.phases for graph in phase.graphs)


def test_every_bucket_and_phase_is_audited_and_leaves_no_trace(loaded: Load) -> None:
    executor = thinned(loaded("qwen2_5_vl"))
    seen: list[tuple[str, int, int]] = []
    report = audit_graphs(executor, progress=lambda *news: seen.append(news))
    assert report.is_right, f"\n{report}"
    assert seen[-1][1] == seen[-1][2] == sum(len(phase.graphs) for phase in executor.phases)
    assert {str(graph.key) for phase in executor.phases for graph in phase.graphs} <= {r.key for r in report.rows}
    assert all(graph.num_replays == 0 for phase in executor.phases for graph in phase.graphs)


def test_a_large_bfloat16_channel_does_not_hide_frozen_boundaries(
    made: tiny.Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(made.folder, dtype=torch.bfloat16)
    assert model.tower is not None
    shift = torch.zeros(model.spec.decoder.width, dtype=torch.bfloat16)
    shift[5] = 100
    scatter = model.place.kernels.scatter_rows

    def loud(rows: Tensor, targets: Tensor, cache: Tensor) -> None:
        scatter(rows.add_(shift), targets, cache)

    monkeypatch.setattr(model, "place", replace(model.place, kernels=model.place.kernels.replacing(scatter_rows=loud)))
    right = verify_graphs(thinned((made, model)))
    assert right.is_right, f"\n{right}"
    freeze_boundaries(model, monkeypatch)
    with pytest.raises(GraphError, match=r"graph \[vision/full .*Not serving"):
        check_graphs(thinned((made, model)), is_short=False)


def test_a_short_verification_samples_every_phase(loaded: Load) -> None:
    executor = thinned(loaded("qwen3_vl"))
    report = check_graphs(executor)
    assert {row.key.partition("/")[0] for row in report.rows} == {"vision", "prefill", "decode", "head", "sample"}
    for phase in executor.phases:
        assert 1 <= len(chosen_buckets(phase, is_short=True)) <= 2
    small = thinned(loaded("qwen3_vl"), num_buckets=1)
    news: list[tuple[str, int, int]] = []
    verify_graphs(small, is_short=True, progress=lambda *each: news.append(each))
    assert all(len(chosen_buckets(phase, is_short=True)) == 1 for phase in small.phases)
    assert news[-1][1] == news[-1][2] == 6, "five phases, vision counted twice"


@pytest.mark.parametrize("units", [8, 40, 256, 1024])
def test_a_vision_bucket_is_verified_with_other_shapes_of_equal_rows(loaded: Load, units: int) -> None:
    """Tall and wide images, videos of several frames, and images that recur; most fill much of the bucket."""
    encoder = plain(loaded("qwen3_vl")).encoder
    assert encoder is not None
    sequences = _grid_sequences(encoder, Capacity.of(units=units, frames=6))

    def rows(grids: tuple[tuple[int, int, int], ...]) -> int:
        return sum(frames * height * width for frames, height, width in grids) // encoder.spec.unit

    [tall], [wide], last = sequences["other shapes"]
    assert tall[1] > tall[2] and wide == (tall[0], tall[2], tall[1]) and last == (tall,)
    [video], [turned] = sequences["videos"]
    assert video[0] > 1 and turned == (video[0], video[2], video[1]) and video[1] != video[2]
    for large in (tall, video):
        assert units / 2 <= rows((large,)) <= units
    small, twice = sequences["poisoned shapes"][0], sequences["the same image twice"][0]
    assert 2 * rows(small) <= rows((wide,)) and twice == small * 2 and rows(twice) <= units


def test_an_engine_without_graphs_has_nothing_to_verify(loaded: Load) -> None:
    report = check_graphs(plain(loaded("qwen3_vl")))
    assert report.rows == () and not report.is_right


def freeze_boundaries(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes captures read segment boundaries on the host."""
    varlen = model.place.kernels.varlen_attention

    def frozen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, **how: Any) -> Tensor:
        return varlen(q, k, v, torch.tensor(cu.tolist(), dtype=torch.int32), longest, **how)

    assert model.tower is not None
    kernels = model.place.kernels.replacing(varlen_attention=frozen)
    for block in model.tower.blocks:
        monkeypatch.setattr(block.attention, "kernels", kernels)


def test_frozen_boundaries_are_reported_with_phase_bucket_and_sequence(
    loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_boundaries(loaded("qwen3_vl")[1], monkeypatch)
    executor = thinned(loaded("qwen3_vl"))
    with pytest.raises(GraphError, match=r"graph \[vision/full .*units=\d+\] differs .* in sequence '.*Not serving"):
        check_graphs(executor)
    wrong = [row for row in verify_graphs(executor, is_short=True).rows if not row.is_right]
    assert {row.key.partition("/")[0] for row in wrong} == {"vision"}


def test_encoded_rows_are_in_the_cache_where_their_targets_say(loaded: Load) -> None:
    """Not only in the output buffer."""
    executor = thinned(loaded("qwen3_vl"))
    encoder = executor.encoder
    assert encoder is not None and executor.state.vision_rows is not None
    phase = encoder.graphs.phase
    values = phase.example((7,), torch.Generator().manual_seed(3))
    rows = encoder.graphs.run(values, lambda outputs: outputs["rows"].clone())
    targets = torch.from_numpy(values["targets"])
    assert torch.equal(executor.state.vision_rows[:, targets], rows)


def test_a_built_engine_is_verified_before_it_serves(made: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64, encoder_budget_tokens=16)
    settings = EngineSettings(device="cpu", verify="short", encoder_cache_tokens=64, kv_cache_tokens=256)
    stages: list[str] = []

    def note(stage: Stage) -> None:
        stages.append(stage.name)

    def start(how: EngineSettings) -> DeviceExecutor:
        folder = Path(made.folder)
        return build_engine(folder, how, limits, processor=Processor.from_folder(folder), report=note).executor

    executor = start(settings)
    assert "verifying graphs" in stages and stages[-1] == "ready"
    stages.clear()
    start(replace(settings, verify="off"))
    assert "verifying graphs" not in stages
    wrong = [OutputDifference("rows", 1, 8, 3, 1.0)]
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["saccade.graphs.verify"], "bit_differences", lambda actual, expected: wrong)
        with pytest.raises(GraphError, match=r"1 of 8 values of 'rows' differ, the first in row 3.* Not serving"):
            start(settings)
    monkeypatch.setattr(sys.modules["saccade.graphs.audit"], "_undeclared", lambda nodes, memory: ["it froze 7"])
    with pytest.raises(GraphError, match=r"the audit of graph \[vision/.* found \d+ faults: it froze 7. Not serving"):
        check_graphs(executor)
    monkeypatch.setattr(sys.modules["saccade.graphs.audit"], "_undeclared", lambda nodes, memory: ["perhaps it did"])
    assert check_graphs(executor).is_right, "a doubt is reported, but does not stop a server"
    monkeypatch.setattr(sys.modules["saccade.graphs.audit"], "_undeclared", unreadable)
    assert check_graphs(executor).is_right, "an old driver that cannot list nodes does not stop a server"
    with pytest.raises(ConfigError, match="allowed: auto, short, full, off"):
        EngineSettings(verify="maybe")


def unreadable(*of: object) -> list[str]:
    raise UnreadableError("a graph's nodes are read with cuFuncGetParamInfo, which this CUDA driver does not have")


def test_a_language_pass_that_disturbs_the_parts_of_a_vision_graph_is_found(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    executor = executor_of(build(model, made.folder, replace(SMALL, part_units=2, max_units=24)))
    vision = executor.vision
    assert vision is not None

    def rows_in_parts() -> list[VerifyRow]:
        return [row for row in verify_graphs(executor, is_short=True).rows if row.sequence == "in parts"]

    def disturb() -> None:
        for storage in vision.lane._pool.storages:  # type: ignore[union-attr]
            torch.empty(0).set_(storage).zero_()

    divided = [graph.key for graph in vision.graphs if graph.num_parts > 1]
    smallest = min(divided, key=lambda key: key.capacity["units"])
    assert rows_in_parts() == [VerifyRow(str(smallest), "in parts", 1, 0.0)]
    for graph in executor.prefill.graphs:
        spoil(graph, disturb)
    [wrong] = rows_in_parts()
    assert "values of 'rows' differ" in wrong.problem
    assert all(not phase.stats.replays for phase in executor.phases), "no replay of a check is counted"


def test_exact_graphs_are_verified_if_there_are_no_others(loaded: Load) -> None:
    executor = plain(loaded("qwen3_vl"))
    encoder = executor.encoder
    assert encoder is not None
    encoder.graphs = GraphRunner(encoder.graphs.phase, GraphSettings(tiers=frozenset({Tier.EXACT})))
    for is_short in (True, False):  # captured before, or not
        if is_short:
            encoder.graphs.capture_exact(encoder.graphs.phase.example((3, 2), torch.Generator().manual_seed(0)))
        (row,) = verify_graphs(executor, is_short=is_short).rows
        assert row.key == "vision/full exact" and row.is_right


def test_state_that_moves_is_noticed(loaded: Load) -> None:
    executor = thinned(loaded("qwen3_vl"), num_buckets=1)
    state, runner = executor.state, executor.prefill
    assert state.vision_rows is not None
    values = runner.phase.example((1,), torch.Generator().manual_seed(0))
    read = {"vision rows": state.vision_rows, "newest ids": state.newest_ids, "keys of layer 1": state.caches[1][0]}
    for name, tensor in read.items():
        runner.run(values, lambda outputs: None)
        before = tensor.data
        tensor.data = tensor.clone()
        with pytest.raises(AddressError, match=f"'{name}' was at"):
            runner.run(values, lambda outputs: None)
        tensor.data = before


def test_a_replaced_layer_is_noticed(loaded: Load) -> None:
    """The graph reads the old layer, whose weights have not changed, so the path to it must be watched as well."""
    made, _ = loaded("qwen3_vl")
    model = load_model(made.folder, dtype=torch.float32)
    executor = thinned((made, model), num_buckets=1)
    runner = executor.decode
    values = runner.phase.example((1,), torch.Generator().manual_seed(0))  # fits any bucket
    runner.run(values, lambda outputs: None)
    assert runner.stats.replays.total() == 1
    model.decoder.layers[0] = model.decoder.layers[1]
    with pytest.raises(AddressError, match=r"'layers.0' was replaced"):
        runner.run(values, lambda outputs: None)
