"""`saccade bench vision`: the limit against numbers worked out by hand, and a whole run on a tiny model."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from saccade.bench.passes.limits import ItemSizes, Rates, vision_limit
from saccade.bench.passes.pass_settings import OfflineBenchSettings, VisionBenchSettings, suited_to
from saccade.bench.passes.timing import NUM_WARM_UPS, TRAIN_LENGTH
from saccade.bench.passes.vision_bench import MIXED_ROUNDS, TRAIN_ROUNDS, Rig, VisionBench, run_vision_bench
from saccade.bench.passes.vision_report import plot_vision_bench, print_vision_bench
from saccade.config import Tier
from saccade.errors import ConfigError
from saccade.inputs.media_settings import read_image_settings
from saccade.models.families.qwen2_5_vl import read_vision as read_windowed
from saccade.models.families.qwen3_vl import read_vision
from saccade.models.model_config import Config
from saccade.models.weights import load_model
from tests.models import tiny

H200 = Rates(flop_per_s=783e12, bytes_per_s=4.3e12)
SETTINGS = VisionBenchSettings(
    load_format="dummy",
    device="cpu",
    sizes=("16x16", "24x40"),
    counts=(1, 3),
    mixed=False,
    encoder_budget_tokens=48,
    rounds=1,
    flop_per_s=1e12,
    bytes_per_s=1e11,
)
QWEN3_VL_8B = {
    "hidden_size": 1152,
    "depth": 27,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [8, 16, 24],
}


def test_the_limit_of_one_image_of_the_benchmark() -> None:
    """1296 patches through 27 blocks, four mergers of 324 units, and attention of 1296 patches to each other."""
    limit = vision_limit(read_vision(Config({"vision_config": QWEN3_VL_8B})), [(1, 36, 36)], ItemSizes(2, 2), H200)
    products = 2 * 1296 * (27 * (4 * 1152**2 + 2 * 1152 * 4304) + 1536 * 1152)
    products += 2 * 324 * 4 * (4608 * 4608 + 4608 * 4096)
    attention = 27 * 4 * 1152 * 1296**2
    assert limit.products_ms == pytest.approx(products / 783e12 * 1e3)
    assert limit.flop_ms == pytest.approx((products + attention) / 783e12 * 1e3)
    assert 1.5 < limit.ms < 1.8 and limit.bound_by == "FLOPs"


def test_windows_see_less(tmp_path: Path) -> None:
    spec = read_windowed(tiny_vision(tmp_path))
    assert spec.window and spec.full_layers
    whole = replace(spec, window=0, full_layers=frozenset())
    grid, side = (2, 12, 10), spec.window * spec.merge
    down = [min(side, 12 - i) for i in range(0, 12, side)]
    across = [min(side, 10 - i) for i in range(0, 10, side)]
    pairs = 2 * sum((a * b) ** 2 for a in down for b in across)
    num_windowed = spec.depth - len(spec.full_layers)
    expected = 4 * spec.block.width * (len(spec.full_layers) * 2 * 120**2 + num_windowed * pairs)
    rates = Rates(1.0, 1e30)
    windowed, products = (vision_limit(s, [grid], ItemSizes(4, 4), rates) for s in (spec, whole))
    assert (windowed.flop_ms - windowed.products_ms) / 1e3 == pytest.approx(expected)
    assert windowed.flop_ms < products.flop_ms


def tiny_vision(folder: Path) -> Config:
    made = tiny.make("qwen2_5_vl", folder)
    return Config.read(made.folder / "config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make("qwen3_vl", tmp_path_factory.mktemp("vision"))
    raw = {"patch_size": 4, "min_pixels": 64, "max_pixels": 1600, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (made.folder / "preprocessor_config.json").write_text(json.dumps(raw))
    return made.folder


@pytest.fixture(scope="module")
def bench(folder: Path) -> VisionBench:
    settings = replace(SETTINGS, mixed=True, mixed_batches=2, compare_transformers=True)
    return run_vision_bench(str(folder), settings, lambda stage: None)


def test_every_size_count_and_way_has_a_line(bench: VisionBench) -> None:
    found = {(line.size, line.count, line.way) for line in bench.lines}
    ways = ("eager", "capacity", "exact", "transformers")
    assert found == {(size, count, way) for size in SETTINGS.sizes for count in (1, 3) for way in ways}
    for line in bench.lines:
        assert line.ms > 0 and line.images_per_s > 0 and line.limit_ms > 0
        assert (line.padding > 0) <= (line.way == "capacity")
    assert [line.size for line in bench.preprocessing] == list(SETTINGS.sizes)


def test_mixed_batches_tell_their_padding_and_their_choices(bench: VisionBench) -> None:
    assert len(bench.mixed) == 2
    for batch in bench.mixed:
        assert 1 <= batch.count <= 16 and batch.padding >= 0 and batch.ratio > 0
        assert batch.ways.keys() <= {"capacity", "eager: eager_faster", "eager: too_large"}
        assert sum(batch.ways.values()) == batch.num_passes * (NUM_WARM_UPS + MIXED_ROUNDS), (
            "eager runs are not counted"
        )


def test_a_mixed_batch_has_up_to_16_images(folder: Path) -> None:
    class Most:
        def integers(self, low: int, high: int, size: Any = (), *, endpoint: bool = False, dtype: Any = int) -> Any:
            return np.full(size, high if endpoint else high - 1, dtype)

    images = read_image_settings(folder)
    assert images is not None
    rig = Rig(load_model(folder, dtype=torch.float32), images, replace(SETTINGS, mixed=True, mixed_batches=1))
    rig.prepare()
    rig.rng = Most()  # type: ignore[assignment]
    assert [batch.count for batch in rig.time_mixed()] == [16]


def test_each_way_is_run_as_it_is_called(folder: Path) -> None:
    """What is measured as eager is neither a replay nor a fallback, and what is measured as exact is no bucket."""
    images = read_image_settings(folder)
    assert images is not None
    rig = Rig(load_model(folder, dtype=torch.float32), images, SETTINGS)
    rig.prepare()
    stats = rig.encoder.graphs.stats
    calls = NUM_WARM_UPS + SETTINGS.rounds + TRAIN_LENGTH * (NUM_WARM_UPS + TRAIN_ROUNDS)
    seen = []
    for line in rig.time_ways(16, 16, 3, H200):
        seen.append((line.way, dict(stats.replays), dict(stats.fallbacks)))
    capacity = {Tier.CAPACITY: calls}
    exact = {Tier.CAPACITY: calls + 1, Tier.EXACT: calls}  # one pass told which layout to capture
    assert seen == [("eager", {}, {}), ("capacity", capacity, {}), ("exact", exact, {})]
    assert len(rig.encoder.graphs.catalogue.exact.graphs) == 0, "the next size finds none"


def test_the_report_shows_all_of_it(bench: VisionBench, tmp_path: Path) -> None:
    out = io.StringIO()
    print_vision_bench(bench, Console(file=out, width=160))
    for text in ("24x40", "transformers", "capacity", "padding", "vision graphs captured in", "pixels to patches"):
        assert text in out.getvalue()
    json.dumps(asdict(bench))
    pytest.importorskip("matplotlib").use("Agg")
    plot_vision_bench(bench, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_settings_and_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write WIDTHxHEIGHT"):
        VisionBenchSettings(sizes=("560",))
    with pytest.raises(ConfigError, match="counts"):
        VisionBenchSettings(counts=(0,))
    made = tiny.make("llama", tmp_path)
    with pytest.raises(ConfigError, match="has no vision tower"):
        run_vision_bench(str(made.folder), SETTINGS, lambda stage: None)


def test_what_was_not_chosen_suits_the_device() -> None:
    """A CPU's graphs hold every temporary of a pass: those of 8192 image rows took all memory."""
    chosen = VisionBenchSettings(counts=(3,), rounds=2)
    cpu, gpu = (suited_to(device, chosen) for device in ("cpu", "cuda"))
    assert cpu.counts == gpu.counts == (3,) and cpu.rounds == gpu.rounds == 2
    assert cpu.encoder_budget_tokens <= 512 < gpu.encoder_budget_tokens and cpu.mixed_batches < gpu.mixed_batches
    offline = OfflineBenchSettings(batches=(5,))
    assert suited_to("cuda", offline).max_model_len == max(suited_to("cuda", offline).tokens) == 8192
    assert max(suited_to("cpu", offline).tokens) < 1000 and suited_to("cpu", offline).batches == (5,)
