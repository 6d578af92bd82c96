"""Vision on the GPU at the dimensions of Qwen3-VL-8B and Qwen2.5-VL-7B: kernels, pixels, memory."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.choice.exact import ExactLayout
from saccade.config import Tier
from saccade.execution.executor import DeviceExecutor
from saccade.execution.pixels import PlainPixels, Shapes, StagedPixels
from saccade.execution.verification import check_graphs
from saccade.execution.vision_encoder import Encoder, EncoderSettings
from saccade.graphs import GraphSettings, Verifier
from saccade.graphs.staging import NUM_STAGING_SLABS
from saccade.inputs.media.images import digest_pixels
from saccade.inputs.placeholders import Media
from saccade.inputs.plans import plan_image
from saccade.kernels import reference
from saccade.kernels.dispatch import kernels_for
from saccade.kernels.reference_vision import ACTIVATIONS
from saccade.models.vlm import Model
from saccade.scheduling.buckets import PART_UNITS
from saccade.scheduling.compose import VisionComposer
from saccade.scheduling.orders import Encode, Pass, PatchSource
from saccade.scheduling.step_plan import EncodeItem
from tests.gpu.engine_rig import (
    PAGE_ROWS,
    Sizes,
    image_settings,
    new_runner,
    used_bytes,
)
from tests.kernels.cases import photo, randn

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("clean")]

DEVICE, BF16 = "cuda", torch.bfloat16
SIZES = Sizes(bucket_stride=4)
MIB = 2**20


def error_of(actual: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(actual).all()
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class TestKernels:
    """Against the float32 oracles."""

    @pytest.mark.parametrize(("heads", "width"), [(16, 72), (16, 80)])
    @pytest.mark.parametrize("rows", [1, 1296, 1308])
    def test_rotary_in_place(self, rows: int, heads: int, width: int) -> None:
        kernels = kernels_for(DEVICE, BF16)
        qkv = randn(rows, 3 * heads * width, seed=1, dtype=BF16, device=DEVICE)
        angles = torch.cat([randn(rows, width // 2, seed=2, device=DEVICE)] * 2, dim=1)
        expected = reference.rotate_packed(qkv.float(), heads, angles.cos(), angles.sin())
        for ours, theirs in zip(kernels.rotate_packed(qkv, heads, angles.cos(), angles.sin()), expected, strict=True):
            assert error_of(ours, theirs) < 3e-3

    def test_the_gelu_of_the_product_is_the_tanh_one(self) -> None:
        """In float32, where the two kinds differ by more than rounding."""
        x, weight, bias = (randn(*s, seed=i, device=DEVICE) for i, s in enumerate([(64, 32), (48, 32), (48,)]))
        ours = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        sums = F.linear(x, weight, bias)
        to_tanh = (ours - F.gelu(sums, approximate="tanh")).abs().max()
        to_erf = (ours - F.gelu(sums)).abs().max()
        assert to_tanh < 2e-5 < 1e-4 < to_erf, (to_tanh, to_erf)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    @pytest.mark.parametrize("rows", [2, 1296, 10368])
    def test_activated_linear(self, rows: int, kind: str) -> None:
        kernels = kernels_for(DEVICE, BF16)
        x, bias = randn(rows, 1152, seed=1, dtype=BF16, device=DEVICE), randn(4304, seed=2, dtype=BF16, device=DEVICE)
        weight = randn(4304, 1152, seed=3, dtype=BF16, device=DEVICE) / 34
        expected = reference.activated_linear(x.float(), weight.float(), bias.float(), kind)
        assert error_of(kernels.activated_linear(x, weight, bias, kind), expected) < 4e-3

    def test_positions_and_scattered_rows(self) -> None:
        kernels = kernels_for(DEVICE, BF16)
        x, table = (randn(*s, seed=i, dtype=BF16, device=DEVICE) for i, s in enumerate([(1308, 1152), (2304, 1152)]))
        indices = torch.randint(0, 2304, (4, 1308), dtype=torch.int32, device=DEVICE)
        weights = torch.rand(4, 1308, device=DEVICE)
        expected = reference.add_positions(x.float(), table.float(), indices, weights)
        assert error_of(kernels.add_positions(x, table, indices, weights), expected) < 4e-3
        rows, targets = randn(4, 327, 4096, seed=3, dtype=BF16, device=DEVICE), torch.randperm(999, device=DEVICE)[:327]
        ours, theirs = (torch.zeros(4, 1000, 4096, dtype=BF16, device=DEVICE) for _ in range(2))
        kernels.scatter_rows(rows, targets, ours)
        reference.scatter_rows(rows, targets, theirs)
        assert torch.equal(ours, theirs)


class TestPixels:
    def pictures(self, model: Model, sizes: list[tuple[int, int]], seed: int = 0) -> list[PatchSource]:
        settings = image_settings(model, max_pixels=2**22)
        made, row = [], 0
        for i, (height, width) in enumerate(sizes):
            plan = plan_image(height, width, settings)
            count = plan.grid_thw[1] * plan.grid_thw[2]
            made.append(PatchSource(i, "image", photo(height, width, seed=seed + i).numpy(), plan.size_hw, row, count))
            row += count
        return made

    def shapes(self, model: Model) -> Shapes:
        return {"image": image_settings(model, max_pixels=2**22).alone()}

    def both(self, model: Model, pictures: list[PatchSource], staged: StagedPixels) -> tuple[Tensor, Tensor]:
        count = sum(picture.num_rows for picture in pictures)
        ours = torch.full((count, 1536), float("nan"), dtype=BF16, device=DEVICE)
        staged.patchify(pictures, ours)
        theirs = torch.zeros(count, 1536)
        PlainPixels(self.shapes(model)).patchify(pictures, theirs)
        return ours.float().cpu(), theirs

    @pytest.mark.parametrize("slot_bytes", [32 * MIB, 300_000])
    def test_many_pictures_at_once_and_in_bands(self, model: Model, slot_bytes: int) -> None:
        pictures = self.pictures(model, [(560, 560), (224, 900), (33, 40), (1080, 720), (64, 64)])
        ours, theirs = self.both(model, pictures, StagedPixels(torch.device(DEVICE), self.shapes(model), slot_bytes))
        assert (ours - theirs).abs().max() <= 1.01 / 255 / 0.5 + 0.005  # one level, and bfloat16

    def test_staging_is_not_overwritten_before_its_copy_is_done(self, model: Model) -> None:
        """A busy device delays the copies, while the host goes around the ring several times."""
        staged = StagedPixels(torch.device(DEVICE), self.shapes(model), 2 * MIB)
        rounds = [self.pictures(model, [(560, 560)], seed=i) for i in range(3 * NUM_STAGING_SLABS)]
        outs = [torch.zeros(r[0].num_rows, 1536, dtype=BF16, device=DEVICE) for r in rounds]
        expected = [self.both(model, r, staged)[0] for r in rounds]
        busy = torch.randn(8192, 8192, device=DEVICE)
        for pictures, out in zip(rounds, outs, strict=True):
            busy = busy @ busy * 1e-3
            staged.patchify(pictures, out)
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out.float().cpu(), right)

    def test_preprocessing_allocates_no_memory(self, model: Model) -> None:
        staged = StagedPixels(torch.device(DEVICE), self.shapes(model))
        pictures = self.pictures(model, [(560, 560)])
        out = torch.zeros(pictures[0].num_rows, 1536, dtype=BF16, device=DEVICE)
        for _ in range(3):
            staged.patchify(pictures, out)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(20):
            staged.patchify(pictures, out)
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def new_encoder(model: Model, runner: DeviceExecutor, part_units: int = PART_UNITS, **graphs: Any) -> Encoder:
    settings = EncoderSettings(
        max_units=1024,
        part_units=part_units,
        page_rows=PAGE_ROWS,
        images=image_settings(model, max_pixels=2**22),
        videos=None,
    )
    return Encoder(runner.state, settings, GraphSettings(**graphs))


class Passes:
    """Composes and runs vision passes in an encoder."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.composer = VisionComposer(encoder.facts, PAGE_ROWS, encoder.graphs.catalogue)

    def compose(self, model: Model, sizes: list[tuple[int, int]], seed: int) -> list[Pass]:
        media, items = some_media(model, sizes, seed)
        return [self.composer.compose(parts, items, media) for parts in self.composer.packs(media)]

    def encode(self, passes: list[Pass]) -> None:
        for one in passes:
            assert self.encoder.encode(Encode(0, one)).problem is None

    def capture_usual(self) -> None:
        for layout in self.composer.usual_layouts():
            self.capture(layout)

    def capture(self, layout: ExactLayout) -> None:
        nbytes = self.encoder.graphs.capture_layout(layout)
        self.encoder.graphs.drop(self.composer.catalogue.exact.add(layout.key, nbytes))


class TestParts:
    def test_parts_with_language_passes_in_between_give_the_bits_of_an_eager_run(self, model: Model) -> None:
        runner = new_runner(model, SIZES, "full")
        encoder = new_encoder(model, runner, part_units=128)
        encoder.graphs.capture_buckets()
        runner.prefill.capture_buckets()
        values = runner.prefill.example_values(runner.prefill.catalogue.shape.ordered[-1])

        def run_language() -> None:
            runner.prefill.run(values, lambda outputs: None)

        divided = [graph.key for graph in encoder.graphs.graphs if graph.num_parts > 1]
        for key in divided[::3]:
            row = Verifier(encoder.graphs).in_parts(key, [encoder.graphs.example_values(key.capacity)], run_language)
            assert row.is_right, row
        assert divided


class TestMemory:
    @pytest.mark.alone
    def test_memory_is_flat_while_sizes_change(self, model: Model, show: Any) -> None:
        runner = new_runner(model, SIZES, "full")
        encoder = new_encoder(model, runner, tiers=frozenset({Tier.CAPACITY, Tier.EXACT}))
        encoder.graphs.capture_buckets()
        encoder.warm_up()
        encoder.reserve()
        rng, images = np.random.default_rng(1), Passes(encoder)

        def traffic(count: int) -> None:
            for i in range(count):
                sizes = [tuple(int(s) for s in rng.integers(64, 700, 2)) for _ in range(int(rng.integers(1, 4)))]
                images.encode(images.compose(model, sizes, i))  # type: ignore[arg-type]
            torch.cuda.synchronize()

        traffic(10)
        before = used_bytes()
        traffic(300)
        after = used_bytes()
        show(f"300 passes of random sizes: {(after - before) / MIB:.1f} MiB more; {encoder.graphs.stats.snapshot()}")
        assert after <= before

    @pytest.mark.alone
    def test_a_full_exact_tier_takes_no_memory_for_layouts_that_get_hot(self, model: Model, show: Any) -> None:
        runner = new_runner(model, SIZES, "full")
        encoder = new_encoder(model, runner, tiers=frozenset({Tier.CAPACITY, Tier.EXACT}), exact_max_graphs=8)
        encoder.graphs.capture_buckets()
        encoder.warm_up()
        encoder.reserve()
        images = Passes(encoder)
        images.capture_usual()
        assert encoder.graphs.catalogue.exact.is_full
        before = used_bytes()
        for i in range(8):  # each hotter than an unused graph
            for _ in range(3):
                images.encode(images.compose(model, [(320 + 32 * i, 224)], i))
            layout = encoder.graphs.catalogue.exact.next_pending()
            assert layout is not None, "it is hot"
            images.capture(layout)
            images.encode(images.compose(model, [(320 + 32 * i, 224)], i))
        torch.cuda.synchronize()
        after = used_bytes()
        show(f"8 graphs at the start, 8 captured in their place: {(after - before) / MIB:.1f} MiB more")
        assert encoder.graphs.stats.replays[Tier.EXACT] == 8
        assert after - before <= 8 * MIB, "less than a graph each"


def test_a_short_verification_passes_and_covers_every_phase(model: Model, show: Any) -> None:
    runner = new_runner(model, SIZES, "full")
    runner.capture()
    report = check_graphs(runner)
    assert {row.key.partition("/")[0] for row in report.rows} == {one.phase.name for one in runner.phases}
    assert report.is_right, f"\n{report}"
    show(f"{len(report.rows)} checks, largest difference {max(row.difference for row in report.rows):.1e}")


def some_media(model: Model, sizes: list[tuple[int, int]], seed: int) -> tuple[list[Media], list[EncodeItem]]:
    settings = image_settings(model, max_pixels=2**20)
    rng = np.random.default_rng(seed)
    media, items, page = [], [], 1
    for i, (height, width) in enumerate(sizes):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        plan = plan_image(height, width, settings)
        media.append(Media("image", pixels, plan, digest_pixels(pixels, b"")))
        count = -(-plan.num_tokens // PAGE_ROWS)
        items.append(EncodeItem("r", i, media[-1].digest, plan.num_tokens, tuple(range(page, page + count))))
        page += count
    return media, items
