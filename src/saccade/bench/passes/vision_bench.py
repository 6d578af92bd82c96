"""Times the encoding of images: eager, with capacity graphs and with exact graphs, against the hardware limit.
Everything runs as in the engine: packing into passes, pinned staging, resizing, filling, padding, scattering. Latency
is the time of one call on an idle device, until the rows are in the cache."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.bench.passes.limits import Rates, vision_limit
from saccade.bench.passes.pass_settings import VisionBenchSettings, suited_to
from saccade.bench.passes.timing import (
    A_VISION_PRODUCT,
    compared_ms,
    describe_model,
    device_ms,
    item_sizes,
    latency_ms,
    load_measured,
    rates_of,
    step_ms,
)
from saccade.config import GraphSettings, Tier
from saccade.errors import ConfigError
from saccade.execution.state import StateSizes, new_state
from saccade.execution.vision_encoder import Encoder, EncoderSettings
from saccade.inputs.media_settings import read_image_settings
from saccade.inputs.placeholders import Media
from saccade.inputs.plans import plan_image
from saccade.kernels.dispatch import device_named, sampling_for
from saccade.models.media import ImageSettings
from saccade.models.vlm import Model
from saccade.scheduling.compose import VisionComposer
from saccade.scheduling.packing import MediaPart, padded_rows
from saccade.scheduling.step_plan import EncodeItem

PAGE_ROWS = 16
WAYS = ("eager", "capacity", "exact")
MIXED_SIDES, MIXED_COUNTS = (224, 1280), (1, 16)
TRAIN_ROUNDS = 3
MIXED_ROUNDS = 7
PIXEL_ROUNDS = 10  # times the rounds of a pass, which takes much longer
BUSY_ROWS = 2600  # a longer pass keeps the device busy by itself, so its latency gives its throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeTimes:
    """One way to encode `count` images of one size. `rows` counts all passes, with padding."""

    size: str
    count: int
    way: str
    rows: int
    padding: float
    ms: float
    host_ms: float
    images_per_s: float
    limit_ms: float
    of_limit: float


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """One batch of images of random sizes. `padding` is that of replays; `ways` counts the tiers chosen for passes."""

    count: int
    rows: int
    padding: float
    num_passes: int
    eager_ms: float
    ms: float
    ways: dict[str, int]

    @property
    def ratio(self) -> float:
        """Time relative to the eager run."""
        return self.ms / self.eager_ms


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Times to upload, resize and normalise one image and cut it into patches: until the last patch is ready, until the
    call returns, and on the device (None without a GPU)."""

    size: str
    ms: float
    host_ms: float
    device_ms: float | None


@dataclass(slots=True)
class VisionBench:
    lines: list[EncodeTimes] = field(default_factory=list)
    mixed: list[MixedBatch] = field(default_factory=list)
    preprocessing: list[Preprocessing] = field(default_factory=list)
    num_graphs: int = 0
    capture_s: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)


def run_vision_bench(model_name: str, settings: VisionBenchSettings, report: Callable[[str], None]) -> VisionBench:
    device = device_named(settings.device)
    settings = suited_to(device.type, settings)
    report("weights")
    model = load_measured(model_name, settings, device)
    if model.spec.vision is None:
        raise ConfigError(f"{model_name} ({model.spec.architecture}) has no vision tower; give a model that sees")
    images = read_image_settings(Path(model_name))
    assert images is not None, f"{model_name} has a tower and no settings of images"
    rig = Rig(model, images, settings)
    bench = VisionBench()
    report("capture")
    rig.prepare()
    bench.num_graphs = len(rig.encoder.graphs.graphs)
    bench.capture_s = sum(graph.capture_s for graph in rig.encoder.graphs.graphs)
    rates = rates_of(device, model.place.dtype, settings.flop_per_s, settings.bytes_per_s)
    batches = [(width, height, count) for width, height in settings.pixel_sizes() for count in settings.counts]
    for width, height in settings.pixel_sizes():
        report(f"{width}x{height}")
        bench.preprocessing.append(rig.time_pixels(width, height))
        for count in settings.counts:
            bench.lines += rig.time_ways(width, height, count, rates)
    if settings.mixed:
        report("mixed sizes")
        bench.mixed = list(rig.time_mixed())
    bench.environment = describe_model(model) | asdict(rates)
    if settings.compare_transformers:
        report("transformers")
        bench.lines += [rig.time_transformers(Path(model_name), *batch, rates) for batch in batches]
    return bench


class Rig:
    """An encoder set up as in the engine, and images for it."""

    def __init__(self, model: Model, images: ImageSettings, settings: VisionBenchSettings) -> None:
        self.settings, self.images, self.model = settings, images, model
        self.rng = np.random.default_rng(0)
        sizes = StateSizes(
            num_blocks=2, block_size=16, max_blocks=1, max_sequences=1, num_vision_rows=self._most_rows() + PAGE_ROWS
        )
        state = new_state(model, sampling_for(model.place.device), sizes)
        self.encoder = Encoder(
            state,
            EncoderSettings(
                max_units=settings.encoder_budget_tokens,
                page_rows=PAGE_ROWS,
                images=images,
                videos=None,
                has_few_buckets=model.place.device.type != "cuda",
            ),
            GraphSettings(tiers=frozenset({Tier.CAPACITY, Tier.EXACT}), exact_after=1),
        )
        self.composer = VisionComposer(self.encoder.facts, PAGE_ROWS, self.encoder.graphs.catalogue)
        self.device = model.place.device

    def prepare(self) -> None:
        self.encoder.graphs.capture_buckets()
        self.encoder.warm_up()

    def image(self, width: int, height: int) -> Media:
        pixels = self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Media("image", pixels, plan_image(height, width, self.images), b"")

    def time_pixels(self, width: int, height: int) -> Preprocessing:
        media = [self.image(width, height)]
        one = self.composer.compose(self.composer.packs(media)[0], _items(media), media)
        rounds = PIXEL_ROUNDS * self.settings.rounds

        def patchify() -> None:
            self.encoder.values(one)

        ms, host_ms = latency_ms(patchify, self.device, rounds)
        return Preprocessing(f"{width}x{height}", ms, host_ms, device_ms(patchify, self.device, rounds))

    def time_ways(self, width: int, height: int, count: int, rates: Rates) -> Iterator[EncodeTimes]:
        media = [self.image(width, height) for _ in range(count)]
        packs, items = self.composer.packs(media), _items(media)
        for way in WAYS:
            rows = padded_rows(packs, self.composer.bins) if way == "capacity" else None
            yield self._time(way, self._call(way, packs, items, media), media, rates, rows)
        self.encoder.graphs.forget_exact()

    def time_transformers(self, folder: Path, width: int, height: int, count: int, rates: Rates) -> EncodeTimes:
        media = [self.image(width, height)] * count
        place = self.model.place
        grids = torch.tensor([one.plan.grid_thw for one in media], device=place.device)
        patches = torch.randn(
            int(grids.prod(1).sum()), self.encoder.spec.patch_values, device=place.device, dtype=place.dtype
        )
        tower = transformers_tower(str(folder), place.device, place.dtype)
        return self._time("transformers", lambda: tower(patches, grid_thw=grids), media, rates)

    @torch.no_grad()
    def _time(
        self, way: str, call: Callable[[], object], media: list[Media], rates: Rates, padded: int | None = None
    ) -> EncodeTimes:
        plans = [one.plan for one in media]
        real = sum(plan.num_tokens for plan in plans)
        sizes = item_sizes(self.model, A_VISION_PRODUCT)
        limit = vision_limit(self.encoder.spec, [plan.grid_thw for plan in plans], sizes, rates)
        ms, host_ms = latency_ms(call, self.device, self.settings.rounds)
        is_busy = real > BUSY_ROWS or way == "transformers"
        train_ms = ms if is_busy else step_ms(call, self.device, TRAIN_ROUNDS)[0]
        height, width, _ = media[0].pixels.shape
        return EncodeTimes(
            size=f"{width}x{height}",
            count=len(media),
            way=way,
            rows=padded or real,
            padding=(padded or real) / real - 1,
            ms=ms,
            host_ms=host_ms,
            images_per_s=len(media) / train_ms * 1e3,
            limit_ms=limit.ms,
            of_limit=limit.ms / ms,
        )

    def time_mixed(self) -> Iterator[MixedBatch]:
        """Chooses tiers by measured costs, as the engine does. There are no exact graphs, because no layout repeats."""
        graphs = self.encoder.graphs
        self.encoder.calibrate()
        for _ in range(self.settings.mixed_batches):
            graphs.forget_exact()
            count = int(self.rng.integers(*MIXED_COUNTS, endpoint=True))
            sides = self.rng.integers(*MIXED_SIDES, (count, 2), endpoint=True)
            media = [self.image(int(w), int(h)) for w, h in sides]
            packs, items = self.composer.packs(media), _items(media)
            real = sum(one.plan.num_tokens for one in media)
            before = _decisions(self.encoder)
            calls = [self._call(way, packs, items, media) for way in ("eager", "capacity")]
            eager_ms, ms = compared_ms(calls, self.device, MIXED_ROUNDS)
            after = _decisions(self.encoder)
            padding = padded_rows(packs, self.composer.bins) / real - 1
            ways = {name: after[name] - before.get(name, 0) for name in after if after[name] > before.get(name, 0)}
            yield MixedBatch(len(media), real, padding, len(packs), eager_ms, ms, ways)
        graphs.catalogue.costs = None

    def _call(
        self, way: str, packs: list[list[MediaPart]], items: list[EncodeItem], media: list[Media]
    ) -> Callable[[], None]:
        if way == "exact":
            self._capture_exact(packs, items, media)

        @torch.no_grad()
        def call() -> None:
            for parts in packs:
                one = self.composer.compose(parts, items, media)
                if way == "eager":
                    self.encoder.graphs.eager(self.encoder.values(one), lambda outputs: None)
                else:
                    self.encoder.run(one)

        return call

    def _capture_exact(self, packs: list[list[MediaPart]], items: list[EncodeItem], media: list[Media]) -> None:
        self._call("capacity", packs, items, media)()
        while self.encoder.graphs.catalogue.exact.has_pending:
            self.encoder.graphs.capture_hot()

    def _most_rows(self) -> int:
        """For the images in the cache at the same time, each in its own pages."""
        largest = [plan_image(h, w, self.images).num_tokens for w, h in self.settings.pixel_sizes()]
        rows = max(-(-n // PAGE_ROWS) * PAGE_ROWS for n in largest) * max(self.settings.counts)
        side = MIXED_SIDES[1]
        mixed = (plan_image(side, side, self.images).num_tokens + PAGE_ROWS) * MIXED_COUNTS[1]
        return max(rows, mixed if self.settings.mixed else 0)


def _items(media: Sequence[Media]) -> list[EncodeItem]:
    """Puts each image into its own pages, one after the other."""
    items, page = [], 1
    for i, one in enumerate(media):
        count = -(-one.plan.num_tokens // PAGE_ROWS)
        items.append(EncodeItem("bench", i, b"", one.plan.num_tokens, tuple(range(page, page + count))))
        page += count
    return items


def _decisions(encoder: Encoder) -> dict[str, int]:
    stats = encoder.graphs.stats
    found = {tier.value: count for tier, count in stats.replays.items()}
    return found | {f"eager: {reason.name.lower()}": count for reason, count in stats.fallbacks.items()}


@lru_cache(maxsize=1)
def transformers_tower(folder: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The tower of Hugging Face transformers (not a dependency). Its random weights do not affect the time."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            "transformers is not installed; `pip install transformers` for --compare-transformers"
        ) from None
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    tower = getattr(getattr(model, "model", model), "visual", None)
    if tower is None:
        raise ConfigError(f"{config.model_type} has no tower over packed patches; only Qwen-VL models are compared")
    tower = tower.to_empty(device=device).eval()
    with torch.no_grad():
        for tensor in (*tower.parameters(), *tower.buffers()):
            tensor.normal_(std=0.02)
    return tower
