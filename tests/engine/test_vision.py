"""The vision path against the tower run on each image alone, whatever shares a pass or ran before it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.cache.encoder import EncoderIndex
from saccade.choice.key import Reason
from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import ConfigError, GraphError
from saccade.execution.assembly import new_engine, new_executor
from saccade.execution.executor import ExecutorSettings
from saccade.execution.pixels import PlainPixels, Shapes, rounds, write_slot
from saccade.execution.state import StateSizes
from saccade.execution.vision_encoder import Encoder, largest_frame
from saccade.graphs.staging import NUM_STAGING_SLABS, Staging
from saccade.inputs.media_settings import read_placeholder_settings
from saccade.inputs.placeholders import Media, Prompt, place_media
from saccade.inputs.plans import MediaPlan, plan_image
from saccade.kernels.image_jobs import MAX_JOBS, TABLE_BYTES, Column
from saccade.kernels.reference_images import resize_patchify
from saccade.models.media import ImageSettings, VideoSettings
from saccade.models.vlm import Model
from saccade.scheduling.arrays import places
from saccade.scheduling.engine import Engine
from saccade.scheduling.executing import ENCODE_FAILED, Encoded
from saccade.scheduling.geometries import Geometries, geometry, vision_values
from saccade.scheduling.orders import Encode, Pass, PatchSource
from saccade.scheduling.step_plan import EncodeItem
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, executor_of, finish, image_settings, oracle_tokens, random_prompt
from tests.models.steps import vision_step
from tests.models.tiny import END, IMAGE, START, Tiny

Load = Callable[[str], Loaded]
PAGE_ROWS = 4
NUM_ROWS = 2048
TOWERS = ("qwen3_vl", "qwen2_5_vl", "gemma3_vl")
BOTH = frozenset({Tier.CAPACITY, Tier.EXACT})


def video_settings(images: ImageSettings) -> VideoSettings:
    return VideoSettings(
        **{name: getattr(images, name) for name in ("patch", "temporal_patch", "merge", "mean", "std", "resample")},
        min_pixels=1,
        max_pixels=2**20,
        budget="video",
        is_sampled=False,
        fps=None,
        num_frames=None,
        min_frames=1,
        max_frames=768,
        is_capped=False,
        max_video_tokens=768,
    )


class Rig:
    """Composes and executes vision passes as an engine does. Pages are handed out in turn, and rows are read back from
    where they should be."""

    def __init__(self, loaded: Loaded, *, max_units: int = 48, **graphs: Any) -> None:
        made, self.model = loaded
        self.images = image_settings(made.folder)
        has_videos = self.images.fixed_size is None
        self.videos = video_settings(self.images) if has_videos else None
        sizes = StateSizes(num_blocks=2, block_size=8, max_blocks=64, max_sequences=2, num_vision_rows=NUM_ROWS)
        settings = ExecutorSettings(
            max_tokens=8,
            max_units=max_units,
            page_rows=PAGE_ROWS,
            images=self.images,
            videos=self.videos,
            modes=dict.fromkeys(("vision", "prefill", "decode")),
            strict=False,
        )
        executor = new_executor(self.model, sizes, settings)
        self.state = executor.state
        self.encoder = executor.encoder = Encoder(self.state, settings, GraphSettings(**graphs))
        self.encoder.graphs.capture_buckets()
        limits = SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8)
        self.engine = new_engine(executor, limits, EncoderIndex(NUM_ROWS, PAGE_ROWS))
        assert self.engine.composer.vision is not None
        self.composer = self.engine.composer.vision
        self._page = 1

    def passes(self, media: Sequence[Media]) -> tuple[list[EncodeItem], list[Pass]]:
        items = [self._item(i, one) for i, one in enumerate(media)]
        return items, [self.composer.compose(parts, items, media) for parts in self.composer.packs(media)]

    def encode(self, media: Sequence[Media]) -> list[EncodeItem]:
        items, passes = self.passes(media)
        for one in passes:
            encoded = self.engine.executor.execute(Encode(0, one))
            assert encoded.problem is None, encoded.problem
        return items

    def rows(self, item: EncodeItem) -> Tensor:
        assert self.state.vision_rows is not None
        where = places(0, item.num_rows, item.pages, PAGE_ROWS)
        return self.state.vision_rows[:, where].clone()

    def run(self, media: Sequence[Media]) -> list[Tensor]:
        return [self.rows(item) for item in self.encode(media)]

    def image(self, rng: np.random.Generator, height: int = 0, width: int = 0) -> Media:
        high, wide = (height or int(rng.integers(6, 60))), (width or int(rng.integers(6, 60)))
        pixels = rng.integers(0, 256, (high, wide, 3)).astype(np.uint8)
        return Media("image", pixels, plan_image(high, wide, self.images), b"")

    def video(self, rng: np.random.Generator, steps: int, down: int, across: int) -> Media:
        assert self.videos is not None
        side, step = self.videos.patch * self.videos.merge, self.videos.temporal_patch
        pixels = rng.integers(0, 256, (steps * step, down * side + 3, across * side, 3)).astype(np.uint8)
        grid = (steps, down * self.videos.merge, across * self.videos.merge)
        count = grid[0] * grid[1] * grid[2]
        tokens = steps * down * across
        plan = MediaPlan((down * side, across * side), grid, count, tokens, second_per_grid=1.0)
        return Media("video", pixels, plan, b"")

    def mix(self, rng: np.random.Generator) -> list[Media]:
        media = []
        for _ in range(int(rng.integers(1, 5))):
            if self.videos is not None and rng.random() < 0.35:
                media.append(self.video(rng, *(int(n) for n in rng.integers(1, 4, 3))))
            else:
                media.append(self.image(rng))
        return media

    def _item(self, index: int, media: Media) -> EncodeItem:
        count = -(-media.plan.num_tokens // PAGE_ROWS)
        if (self._page + count) * PAGE_ROWS > NUM_ROWS:
            self._page = 1
        pages = tuple(range(self._page, self._page + count))
        self._page += count
        return EncodeItem(f"r{index}", 0, b"", media.plan.num_tokens, pages[::-1])


@torch.no_grad()
def alone(rig: Rig, media: Media, model: Model | None = None) -> Tensor:
    """The tower on one image or video, unpadded, from pixels resized by the oracle."""
    model = model or rig.model
    spec, tower = model.spec.vision, model.tower
    assert spec is not None and tower is not None
    settings = rig.images if media.kind == "image" else rig.videos
    assert settings is not None
    patches = resize_patchify(torch.from_numpy(media.pixels.copy()), media.plan.size_hw, settings)
    return tower(vision_step(spec, [media.plan.grid_thw], patches))


def check(rig: Rig, media: Sequence[Media], what: object = "") -> None:
    for found, one in zip(rig.run(media), media, strict=True):
        torch.testing.assert_close(found, alone(rig, one), rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")


class TestAgainstTheTowerAlone:
    @pytest.mark.parametrize(("family", "count"), [("qwen3_vl", 130), ("qwen2_5_vl", 130), ("gemma3_vl", 40)])
    def test_random_mixes_of_images_and_videos(self, loaded: Load, family: str, count: int) -> None:
        rig, rng = Rig(loaded(family), strict=True), np.random.default_rng(7)
        for i in range(count):
            check(rig, rig.mix(rng), f"mix {i}")
        stats = rig.encoder.graphs.stats
        assert stats.replays[Tier.CAPACITY] >= count and not stats.fallbacks
        assert len(rig.encoder.graphs.graphs) == len(rig.encoder.graphs.phase.buckets)

    @pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
    def test_equal_totals_with_different_boundaries_and_windows(self, loaded: Load, family: str) -> None:
        """One bucket for all: [4, 6, 8] and [5, 5, 8] units, then transposed grids, which change only the windows."""
        rig, rng = Rig(loaded(family), max_units=24, strict=True), np.random.default_rng(1)

        def strips(*lengths: int) -> list[Media]:
            return [rig.video(rng, 1, 1, n) for n in lengths]

        shaped = [[rig.video(rng, 1, a, b)] for a, b in ((2, 9), (9, 2), (3, 6), (6, 3))]
        for media in (strips(4, 6, 8), strips(5, 5, 8), strips(4, 6, 8), *shaped, shaped[0]):
            check(rig, media, [one.plan.grid_thw for one in media])
        used = [graph for graph in rig.encoder.graphs.graphs if graph.num_replays]
        assert len(used) == 1 and used[0].num_replays == 8

    def test_two_videos_of_one_size_in_a_batch(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(2)
        check(rig, [rig.video(rng, 2, 2, 3), rig.video(rng, 2, 2, 3), rig.image(rng)])

    def test_an_image_twice_in_a_batch_has_the_same_rows_twice(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen2_5_vl")), np.random.default_rng(3)
        one = rig.image(rng)
        first, other, again = rig.run([one, rig.image(rng), one])
        torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)
        assert first.shape != other.shape or not torch.allclose(first, other)

    @pytest.mark.parametrize("family", TOWERS)
    def test_small_large_small_and_poisoned_padding(self, loaded: Load, family: str) -> None:
        rig, rng = Rig(loaded(family)), np.random.default_rng(4)
        small, large = rig.image(rng, 8, 8), rig.image(rng, 50, 50)
        for media in (small, large, small):
            arena = rig.encoder.graphs.phase.arena
            arena.poison(arena.limits)
            check(rig, [media])

    def test_rows_in_the_cache_outlive_later_passes(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(5)
        items = [item for media in (rig.mix(rng) for _ in range(3)) for item in rig.encode(media)]
        kept = [rig.rows(item) for item in items]
        for _ in range(10):
            rig.run(rig.mix(rng))
        for item, rows in zip(items, kept, strict=True):
            assert torch.equal(rig.rows(item), rows)


class TestOrder:
    """What the host does for a pass, in which order."""

    def test_patches_are_launched_before_the_executor_does_anything_else(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(1)
        done: list[str] = []

        def noted(owner: Any, name: str) -> None:
            call = getattr(owner, name)

            def note(*args: Any) -> Any:
                done.append(name)
                return call(*args)

            monkeypatch.setattr(owner, name, note)

        for owner, name in (
            (rig.composer, "_targets"),
            (rig.composer._geometries, "packed"),
            (rig.composer.catalogue, "choose"),
            (rig.encoder._pixels, "patchify"),
            (rig.encoder.graphs.phase.arena, "admit"),
            (rig.encoder.graphs, "obey"),
        ):
            noted(owner, name)
        check(rig, [rig.image(rng), rig.video(rng, 2, 2, 1)])
        assert done == ["_targets", "packed", "choose", "patchify", "obey", "admit"]

    def test_patches_go_to_the_arena_of_the_current_runner(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(2)
        one = rig.image(rng, 20, 20)
        check(rig, [one])
        other = Rig(loaded("qwen3_vl")).encoder.graphs
        before, rig.encoder.graphs = rig.encoder.graphs, other
        _, [vision] = rig.passes([one])
        values = rig.encoder.values(vision)
        assert other.phase.arena.owns(values["patches"]) and not before.phase.arena.owns(values["patches"])
        rig.encoder.graphs = before
        check(rig, [one])

    def test_patches_are_views_of_the_arena_unless_there_are_too_many(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl"), max_units=24), np.random.default_rng(3)
        arena = rig.encoder.graphs.phase.arena
        for media in (rig.video(rng, 1, 2, 3), rig.video(rng, 1, 5, 6), rig.video(rng, 1, 2, 3)):
            _, [vision] = rig.passes([media])
            assert sum(picture.num_rows for picture in vision.pictures) == media.plan.num_patches
            patches = rig.encoder.values(vision)["patches"]
            assert len(patches) == media.plan.num_patches
            assert arena.owns(patches) == (media.plan.num_tokens <= 24)


class TestChoices:
    def test_more_frames_than_fit_one_pass_take_several(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl"), strict=True), np.random.default_rng(1)
        check(rig, [rig.video(rng, 70, 1, 1), rig.image(rng)])
        assert rig.encoder.graphs.stats.replays[Tier.CAPACITY] > 1

    def test_batches_too_large_for_any_bucket_run_eagerly_with_a_reason(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl"), max_units=24), np.random.default_rng(1)
        check(rig, [rig.video(rng, 2, 6, 6), rig.image(rng, 8, 8)])
        stats = rig.encoder.graphs.stats
        assert stats.fallbacks == {Reason.TOO_LARGE: 2} and stats.replays[Tier.CAPACITY] == 1
        spec = rig.encoder.spec
        grids = [(1, 2, 2)] * 8  # eight frames of one unit each, in buckets with room for four
        patches = torch.zeros(32, spec.patch_values)
        batch = rig.encoder.graphs.phase.arena.admit(vision_values(spec, grids, patches, np.zeros(8, dtype=np.int64)))
        decision = rig.encoder.graphs.decide(batch)
        assert decision.reason is Reason.TOO_LARGE and decision.detail == "frames: 9 > 5"

    def test_frequent_layouts_get_their_own_graphs_when_idle(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl"), tiers=BOTH), np.random.default_rng(2)
        engine = rig.engine

        def hot() -> bool:
            return engine.idle.can_capture

        for _ in range(3):
            assert not hot()
            check(rig, [rig.image(rng, 20, 30)])
        assert hot()
        kept = [(item, rig.rows(item)) for item in rig.encode([rig.image(rng, 20, 30), rig.image(rng)])]
        assert engine.idle.capture_next() is None
        assert not hot()
        for item, rows in kept:
            assert torch.equal(rig.rows(item), rows), "a capture wrote into the cache"
        check(rig, [rig.image(rng, 20, 30)])
        check(rig, [rig.image(rng, 30, 20)])  # transposed: without windows, the boundaries are the same
        check(rig, [rig.image(rng, 40, 40)])
        assert rig.encoder.graphs.stats.replays[Tier.EXACT] == 2

    def test_graphs_and_bytes_stay_bounded_over_500_sizes(self, loaded: Load) -> None:
        rig = Rig(loaded("qwen3_vl"), max_units=96, tiers=BOTH, exact_after=1, exact_max_graphs=4)
        graphs, rng = rig.encoder.graphs, np.random.default_rng(3)
        buckets = len(graphs.graphs)
        grids = [(1, 2 * a, 2 * b) for a in range(1, 30) for b in range(1, 96 // a + 1)]
        grids += [(f, 2 * a, 2 * b) for f in (2, 3) for a in range(1, 12) for b in range(1, 96 // a // f + 1)]
        assert len(grids) >= 500
        order = rng.permutation(len(grids))[:500]
        for count, i in enumerate(order):
            units = int(np.prod(grids[i])) // 4
            patches = torch.zeros(units * 4, rig.encoder.spec.patch_values)
            batch = graphs.phase.arena.admit(
                vision_values(rig.encoder.spec, [grids[i]], patches, np.zeros(units, dtype=np.int64))
            )
            graphs.catalogue.choose(batch.sizes, batch.structure)
            if count % 50 == 0:
                assert rig.engine.idle.capture_next() is None
            assert len(graphs.graphs) <= buckets + 4 and len(graphs.graphs) == buckets + len(
                graphs.catalogue.exact.graphs
            )
        assert len(graphs.catalogue.exact.graphs) == 4
        assert graphs.catalogue.exact.nbytes <= graphs.settings.exact_max_bytes
        assert len(graphs.catalogue.exact._pending) <= 64 and len(graphs.catalogue.exact._uses) <= 1024 + 4

    @pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3_vl"])
    def test_common_image_sizes_have_their_own_graphs_from_the_start(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch, family: str
    ) -> None:
        monkeypatch.setattr("saccade.scheduling.compose.USUAL_SIZES", ((24, 24), (24, 25), (40, 20), (999, 999)))
        rig, rng = Rig(loaded(family), tiers=BOTH, exact_max_graphs=3, max_units=64), np.random.default_rng(2)
        rig.engine.idle.capture_usual()
        graphs = rig.encoder.graphs
        assert 0 < len(graphs.catalogue.exact.graphs) <= 3
        if rig.images.fixed_size is None:
            assert graphs.catalogue.exact.is_full, "pairs of images fill up the rest"
        for _ in range(2):
            image = rig.image(rng, 24, 24)
            [rows] = rig.run([image])
            torch.testing.assert_close(rows, alone(rig, image), rtol=1e-4, atol=1e-4)
        assert graphs.stats.replays == {Tier.EXACT: 2}
        off = Rig(loaded(family), tiers=frozenset({Tier.CAPACITY}))
        off.engine.idle.capture_usual()
        assert len(off.encoder.graphs.catalogue.exact.graphs) == 0

    def test_words_of_the_graphs_setting(self) -> None:
        assert EngineSettings().vision_tiers() == BOTH
        assert EngineSettings(graphs="vision=capacity").vision_tiers() == {Tier.CAPACITY}
        assert EngineSettings(graphs="prefill=off,vision=exact").vision_tiers() == {Tier.EXACT}
        assert EngineSettings(graphs="vision=off").phase_modes()["vision"] is None
        with pytest.raises(ConfigError, match="a word of auto, capacity, exact, off"):
            EngineSettings(graphs="vision=sometimes")
        with pytest.raises(ConfigError, match="a word of auto, full, piecewise, off"):
            EngineSettings(graphs="prefill=exact")
        with pytest.raises(ConfigError, match="drop one of them"):
            EngineSettings(graphs="vision=exact", graphs_strict=True)


class TestFailures:
    """A failed pass is run again part by part. Requests whose parts fail alone get the error, the others an answer."""

    PARAMS = SamplingParams(temperature=0, max_tokens=5)

    @staticmethod
    def noted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The number of images in each pass that the executor gets."""
        counts: list[int] = []
        encode = executor_of(engine).encode

        def note(orders: Encode) -> Encoded:
            counts.append(len(orders.vision.pictures))
            return encode(orders)

        monkeypatch.setattr(engine.executor, "encode", note)
        return counts

    def test_one_bad_item_fails_only_its_request(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options(mode=Mode.FULL, max_num_seqs=4))
        rng = np.random.default_rng(1)
        prompts = {name: random_prompt(made, rng, num_images=1, length=6) for name in ("a", "b", "c")}
        counts = self.noted(engine, monkeypatch)
        for name, prompt in (
            ("a", prompts["a"]),
            ("bad", _unresizable(made)),
            ("b", prompts["b"]),
            ("c", prompts["c"]),
        ):
            engine.add(name, prompt, self.PARAMS)
        answers = finish(engine, ["a", "bad", "b", "c"])
        assert counts == [4, 1, 1, 1, 1]
        assert answers["bad"].finish.reason is FinishReason.ERROR
        assert "cannot resize" in answers["bad"].finish.detail
        for name, prompt in prompts.items():
            assert answers[name].token_ids == oracle_tokens(made, prompt, 5)

    def test_if_every_part_fails_every_request_gets_the_error(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options(max_num_seqs=4))
        rng = np.random.default_rng(2)
        prompts = [random_prompt(made, rng, num_images=1, length=6) for _ in range(3)]
        counts = self.noted(engine, monkeypatch)
        encoder = executor_of(engine).encoder
        assert encoder is not None
        with monkeypatch.context() as broken:
            broken.setattr(encoder.graphs, "obey", _raise(MemoryError()))
            names = [engine.add(f"r{i}", prompt, self.PARAMS)[0] for i, prompt in enumerate(prompts)]
            answers = finish(engine, names)
        assert counts == [3, 1, 1, 1]
        assert [answers[name].finish.detail for name in names] == [f"{ENCODE_FAILED}: MemoryError"] * 3
        engine.add("later", prompts[0], self.PARAMS)
        assert finish(engine, ["later"])["later"].token_ids == oracle_tokens(made, prompts[0], 5)

    def test_an_image_that_cannot_be_composed_fails_only_its_request(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options(max_num_seqs=4))
        rng = np.random.default_rng(3)
        prompts = {name: random_prompt(made, rng, num_images=1, length=10) for name in ("a", "b", "c")}
        assert engine.composer.vision is not None
        compose = engine.composer.vision.compose

        def fail(parts: Any, items: Any, media: Any) -> Pass:
            if any(items[part.item].request_id == "b" for part in parts):
                raise GraphError("no luck")
            return compose(parts, items, media)

        monkeypatch.setattr(engine.composer.vision, "compose", fail)
        names = [name for key, prompt in prompts.items() for name in engine.add(key, prompt, self.PARAMS)]
        answers = finish(engine, names)
        assert answers["b"].finish.reason is FinishReason.ERROR and answers["b"].finish.detail == "no luck"
        for name in ("a", "c"):
            assert answers[name].token_ids == oracle_tokens(made, prompts[name], 5)
        assert engine.scheduler.stats().encoder_usage == 0


def _unresizable(made: Tiny) -> Prompt:
    """A prompt with an image of no rows, which a server would refuse."""
    placeholders = read_placeholder_settings(made.folder)
    assert placeholders is not None
    bad = Media("image", np.zeros((0, 4, 3), np.uint8), MediaPlan((8, 8), (1, 2, 2), 4, 1), b"of no rows at all")
    return place_media([5, START, IMAGE, END, 6], [bad], placeholders)


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


@dataclass
class LazyStream:
    """A device that does nothing until the host waits for it."""

    queue: deque[Callable[[], None]] = field(default_factory=deque)

    def run_until(self, mark: object) -> None:
        while self.queue:
            work = self.queue.popleft()
            work()
            if getattr(work, "mark", None) is mark:
                return


class LazyEvent:
    def __init__(self, stream: LazyStream) -> None:
        self.stream = stream
        self.mark: object = None

    def record(self) -> None:
        self.mark = object()

        def done() -> None: ...

        done.mark = self.mark  # type: ignore[attr-defined]
        self.stream.queue.append(done)

    def synchronize(self) -> None:
        if self.mark is not None:
            self.stream.run_until(self.mark)


class NeverWaits(LazyEvent):
    def synchronize(self) -> None: ...


class LazyTarget:
    """Memory of that device: a copy arrives when the device runs it."""

    def __init__(self, stream: LazyStream) -> None:
        self.stream, self.arrived = stream, list[int]()

    def __getitem__(self, rows: slice) -> "LazyTarget":
        return self

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        self.stream.queue.append(lambda: self.arrived.append(int(source[0])))


def make_staging(event: type[LazyEvent], stream: LazyStream) -> Any:
    staging: Any = Staging(4, torch.device("cpu"))
    staging._events = [event(stream) for _ in range(NUM_STAGING_SLABS)]
    return staging


class TestStaging:
    @staticmethod
    def copied(event: type[LazyEvent]) -> list[int]:
        """Sends ten values through a ring of three slots, and returns what a lagging device has copied."""
        stream = LazyStream()
        staging, target = make_staging(event, stream), LazyTarget(stream)
        for value in range(10):
            _, slot = staging.next_slab()
            slot[:] = value
            staging.send(target, 4)
        stream.run_until("the end")
        return target.arrived

    def test_a_slot_is_never_overwritten_before_its_copy_is_done(self) -> None:
        assert self.copied(LazyEvent) == list(range(10))

    def test_without_waiting_slots_would_be_overwritten(self) -> None:
        assert self.copied(NeverWaits) != list(range(10))

    def test_the_host_runs_ahead_by_the_number_of_slots(self) -> None:
        stream = LazyStream()
        staging, target = make_staging(LazyEvent, stream), LazyTarget(stream)
        turns = []
        for _ in range(3):
            turns.append(staging.next_slab()[0])
            staging.send(target, 4)
        assert sorted(turns) == [0, 1, 2] and len(stream.queue) == 6, "the host has not waited yet"
        assert staging.next_slab()[0] == turns[0]
        assert len(stream.queue) == 4, "the host waited for one copy and its event"

    @pytest.mark.parametrize("max_bytes", [20_000, 4_000, 3_000])
    def test_rounds_hold_all_pictures_within_their_slots(self, loaded: Load, max_bytes: int) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(4)
        media = [rig.image(rng, 30, 20), rig.image(rng, 9, 9), rig.video(rng, 2, 1, 2), rig.image(rng, 40, 41)]
        pictures, row = [], 0
        for one in media:
            pictures.append(PatchSource(0, one.kind, one.pixels, one.plan.size_hw, row, one.plan.num_patches))
            row += one.plan.num_patches
        slot = np.full(TABLE_BYTES + max_bytes, 255, dtype=np.uint8)
        written: list[int] = []
        assert rig.videos is not None
        shapes: Shapes = {"image": rig.images.alone(), "video": rig.videos.alone()}
        for shape, jobs in rounds(pictures, shapes, max_bytes):
            assert shape == rig.images.alone() and len(jobs) <= MAX_JOBS
            used, (lines, patches, widest) = write_slot(slot, jobs, shape)
            assert used <= len(slot) and sum(job.scratch_bytes for job in jobs) <= max_bytes
            table = slot[:TABLE_BYTES].view(np.int32).reshape(len(Column), MAX_JOBS)
            for i, job in enumerate(jobs):
                at = TABLE_BYTES + int(table[Column.PIXELS_AT, i])
                np.testing.assert_array_equal(slot[at : at + job.frames.nbytes], job.frames.ravel())
                written += range(job.out_row, job.out_row + job.num_patches(shape))
            assert patches == sum(job.num_patches(shape) for job in jobs)
            assert lines == sum(job.frames.shape[0] * job.frames.shape[1] for job in jobs)
            assert widest == max(job.size_hw[1] for job in jobs)
        assert sorted(written) == list(range(row)), "every row of patches is written once"

    def test_videos_with_different_settings_get_their_own_rounds(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(6)
        media = [rig.image(rng, 30, 20), rig.image(rng, 9, 9), rig.video(rng, 1, 1, 1), rig.image(rng, 9, 9)]
        pictures = [
            PatchSource(i, m.kind, m.pixels, m.plan.size_hw, 0, m.plan.num_patches) for i, m in enumerate(media)
        ]
        assert rig.videos is not None
        shapes: Shapes = {"image": rig.images.alone(), "video": replace(rig.videos.alone(), mean=(0.1, 0.2, 0.3))}
        found = [(shape, len(jobs)) for shape, jobs in rounds(pictures, shapes, 20_000)]
        assert found == [(shapes["image"], 2), (shapes["video"], 1), (shapes["image"], 1)]

    def test_plain_pixels_fill_the_given_rows(self, loaded: Load) -> None:
        rig, rng = Rig(loaded("qwen3_vl")), np.random.default_rng(5)
        one = rig.image(rng, 16, 24)
        out = torch.full((60, rig.encoder.spec.patch_values), float("nan"))
        PlainPixels({"image": rig.images.alone()}).patchify(
            [PatchSource(0, one.kind, one.pixels, one.plan.size_hw, 3, one.plan.num_patches)], out
        )
        assert out[3 : 3 + one.plan.num_patches].isfinite().all() and out[:3].isnan().all()


@pytest.mark.parametrize("family", TOWERS)
def test_cached_geometry_equals_geometry_of_all_grids_at_once(loaded: Load, family: str) -> None:
    _, model = loaded(family)
    spec = model.spec.vision
    assert spec is not None
    rng, remembered = np.random.default_rng(0), Geometries(spec)
    for _ in range(20):
        shapes = rng.integers(1, 6, (int(rng.integers(1, 5)), 3))
        grids = [(int(t), int(h) * spec.merge, int(w) * spec.merge) for t, h, w in shapes]
        at_once, found = geometry(spec, grids), remembered.packed(grids)
        assert found.keys() == at_once.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, at_once[name], err_msg=name)


def test_example_batches_have_windows_like_real_images(loaded: Load) -> None:
    """Costs are measured with example batches. Strips would have more and smaller windows, and no rows to reorder."""
    spec = loaded("qwen2_5_vl")[1].spec.vision
    assert spec is not None
    phase = Rig(loaded("qwen2_5_vl")).encoder.graphs.phase
    for lengths, grids in (((36,), [(1, 6, 6)]), ((6, 7), [(1, 2, 3), (1, 1, 7)])):
        made = phase.example(lengths, torch.Generator().manual_seed(0))
        picture = geometry(spec, [(frames, h * spec.merge, w * spec.merge) for frames, h, w in grids])
        np.testing.assert_array_equal(made["window_cu_seqlens"], picture["window_cu_seqlens"])
        np.testing.assert_array_equal(made["window_order"], picture["window_order"])
        assert len(made["patches"]) == sum(lengths) * spec.unit
    squares = phase.example((36,), torch.Generator().manual_seed(0))["window_order"]
    assert sorted(squares) == list(range(36)) != list(squares)


def test_an_idle_engine_captures_a_frequent_layout(loaded: Load) -> None:
    """Images of the same size again and again, then an idle moment."""
    made, model = loaded("qwen3_vl")
    engine = build(model, made.folder, Options(mode=Mode.FULL, max_num_seqs=2, max_tokens=64, max_units=48))
    encoder = executor_of(engine).encoder
    assert encoder is not None
    encoder.graphs.catalogue.settings = GraphSettings(tiers=BOTH)
    encoder.graphs.forget_exact()
    assert (engine.idle.can_capture, engine.idle.capture_next()) == (False, None)
    assert len(encoder.graphs.catalogue.exact.graphs) == 0, "no layout was frequent yet"
    params = SamplingParams(temperature=0, max_tokens=2)
    for i in range(4):
        prompt = random_prompt(made, np.random.default_rng(11), num_images=1, length=6)
        engine.add(f"r{i}", prompt, params, cache_salt=str(i))
        finish(engine, [f"r{i}"])
    assert engine.idle.can_capture
    assert engine.idle.capture_next() is None
    assert len(encoder.graphs.catalogue.exact.graphs) == 1
    prompt = random_prompt(made, np.random.default_rng(11), num_images=1, length=6)
    engine.add("last", prompt, params, cache_salt="last")
    assert finish(engine, ["last"])["last"].token_ids == oracle_tokens(made, prompt, 2)
    assert encoder.graphs.stats.replays[Tier.EXACT] == 1


def test_the_cpu_twin_reveals_frozen_boundaries(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that these tests are about: frozen boundaries give wrong rows."""
    model: Model = loaded("qwen3_vl")[1]
    varlen = model.place.kernels.varlen_attention

    def frozen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, **how: Any) -> Tensor:
        return varlen(q, k, v, torch.tensor(cu.tolist(), dtype=torch.int32), longest, **how)

    assert model.tower is not None
    for block in model.tower.blocks:
        monkeypatch.setattr(block.attention, "kernels", block.attention.kernels.replacing(varlen_attention=frozen))
    rig, rng = Rig(loaded("qwen3_vl"), max_units=24), np.random.default_rng(1)
    strips = [[rig.video(rng, 1, 1, n) for n in lengths] for lengths in ((4, 6, 8), (5, 5, 8))]
    with pytest.raises(AssertionError):
        for media in strips:
            check(rig, media)


@pytest.mark.parametrize(
    ("largest", "tiers", "strict", "has_shadow", "rows"),
    [
        (48, {Tier.CAPACITY}, False, False, 0),
        (48, BOTH, False, False, 48),
        (48, set(), False, False, 48),
        (48, {Tier.CAPACITY}, True, False, 0),
        (48, {Tier.CAPACITY}, False, True, 48),
        (60, {Tier.CAPACITY}, False, False, 60),
        (60, {Tier.CAPACITY}, True, False, 0),
        (10**6, {Tier.CAPACITY}, False, False, 512),
    ],
)
def test_memory_is_kept_for_the_largest_pass_that_may_run_eagerly(
    loaded: Load, largest: int, tiers: set[Tier], strict: bool, has_shadow: bool, rows: int
) -> None:
    """Passes of up to 48 rows have graphs. A larger image runs eagerly, and so does a pass without a graph. No image
    has more rows than a request has tokens, 512 here."""
    encoder = Rig(loaded("qwen3_vl")).encoder
    images = encoder.settings.images
    assert images is not None
    images = replace(images, max_pixels=largest * (images.patch * images.merge) ** 2)
    encoder.settings = replace(encoder.settings, images=images, videos=None, has_shadow=has_shadow)
    encoder.graphs.settings = GraphSettings(tiers=frozenset(tiers), strict=strict)
    assert encoder.most_eager_rows() == rows


def test_the_largest_frame_is_that_of_images_or_videos(loaded: Load) -> None:
    images = Rig(loaded("qwen3_vl")).images
    side = images.patch * images.merge
    videos = video_settings(images)
    assert largest_frame(None, None) == 0
    assert largest_frame(replace(images, max_pixels=10 * side**2 + side), None) == 10
    assert largest_frame(replace(images, max_pixels=10 * side**2), replace(videos, max_pixels=12 * side**2)) == 12
    assert largest_frame(replace(images, fixed_size=(3 * side, 5 * side), max_pixels=1), None) == 15
