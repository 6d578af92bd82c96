"""Images and videos to their rows of the encoder cache, on a stream of its own beside language steps.

Why nothing is read before it is written or overwritten while it is read:
- A language step waits (on the device) for the event behind the images of its own plan, and so for no others.
- Pages of the cache that are written for plan k + 1 were free when that plan was made. A page becomes free when the
  last plan that reads it is committed, and a plan is committed after the host has seen its end. So no step in flight
  reads them. A step that was not launched to its end is committed without that: the next images then wait for it.
- Buffers of the vision phase, staging included, are used by this stream alone, in order; graphs of the two streams have
  pools of their own. So the patches of a pass may be launched before the host knows anything else of it: they are
  written when the replay before it, which reads the same rows, is over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.config import GraphSettings, Tier
from saccade.engine.batch import Ints, Running, places
from saccade.engine.beside import Beside
from saccade.engine.buckets import few_buckets
from saccade.engine.packing import Bins, Part, default_cost, pack, split
from saccade.engine.pixels import Picture, new_pixels, warm_up_picture
from saccade.engine.plan import EncodeItem
from saccade.engine.state import DeviceState
from saccade.engine.vision import Geometries, vision_phase
from saccade.errors import SaccadeError
from saccade.graphs import GraphRunner, lane_for
from saccade.inputs.placeholders import Media
from saccade.inputs.plans import plan_image
from saccade.inputs.settings import ImageSettings, VideoSettings
from saccade.models.geometry import Grid

ENCODE_FAILED = "an image or video could not be encoded"
# Of images that are sent often, width and height in pixels, and how many of them at once.
USUAL_SIZES = (
    *((side, side) for side in (224, 336, 448, 512, 560, 672, 768, 1024)),
    *((640, 480), (1024, 768), (1280, 720), (720, 1280)),
)
USUAL_COUNTS = (1, 2, 3, 4)
MAX_VIEWS = 256  # of the arena's patches, one for each count that came lately


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Rows of the largest pass that has a graph, rows of a page of the cache, and how pixels become patches."""

    max_units: int
    page_rows: int
    images: ImageSettings | None
    videos: VideoSettings | None
    graphs: GraphSettings
    has_few_buckets: bool = False
    has_shadow: bool = False


class Encoder:
    def __init__(self, state: DeviceState, settings: EncoderSettings) -> None:
        model = state.model
        assert model.spec.vision is not None, f"{model.spec.architecture} has no vision tower"
        self.settings = settings
        self.beside = Beside(model.place.device)
        phase = vision_phase(model, state, settings.max_units)
        if settings.has_few_buckets:
            phase = replace(phase, buckets=few_buckets(phase.buckets, phase.rows))
        self.graphs = GraphRunner(phase, settings.graphs, lane_for(model.place.device))
        self.spec = model.spec.vision
        self._place = model.place
        self._geometries = Geometries(model.spec.vision)
        self._pixels = new_pixels(model.place.device)
        self._longest = min(state.max_keys, _num_rows(state) - settings.page_rows)

    @property
    def graphs(self) -> GraphRunner:
        return self._graphs

    @graphs.setter
    def graphs(self, runner: GraphRunner) -> None:
        """With it come the buckets that images are packed into."""
        self._graphs = runner
        buckets = sorted(runner.phase.buckets, key=lambda bucket: bucket["units"])
        self.bins = Bins(tuple(b["units"] for b in buckets), tuple(b["frames"] for b in buckets))
        self._rows_of_arena = lru_cache(MAX_VIEWS)(partial(runner.phase.arena.rows, "patches"))

    @torch.no_grad()
    def encode(self, items: Sequence[EncodeItem], running: Mapping[str, Running]) -> dict[str, str]:
        """Launch the passes of a plan. Returns what went wrong, by the request that an item is encoded for; the others
        are not touched by it."""
        failed: dict[str, str] = {}
        media = [running[item.request_id].prompt.media[item.media_idx] for item in items]
        with self.beside.work():
            for parts in self.packs(media):
                for part, error in self._run_or_blame(parts, items, media):
                    failed[items[part.item].request_id] = _message(error)
        return failed

    def packs(self, media: Sequence[Media]) -> list[list[Part]]:
        """Which frames of which media share a pass."""
        bins, unit = self.bins, self.spec.unit
        parts = [
            part
            for i, one in enumerate(media)
            for part in split(i, one.plan.grid_thw[0], one.plan.grid_thw[1] * one.plan.grid_thw[2] // unit, bins)
        ]
        return pack(parts, bins, self._cost())

    def patchify(self, parts: Sequence[Part], media: Sequence[Media]) -> None:
        """Only the patches of a pass."""
        with self.beside.work():
            self._patchify(parts, media)
        self.beside.wait()

    def values(self, parts: Sequence[Part], items: Sequence[EncodeItem], media: Sequence[Media]) -> dict[str, Any]:
        """The inputs of a pass. Its patches are under way first: while they are copied and resized, the host works out
        the rest."""
        patches_PC = self._patchify(parts, media)
        grids = [(part.count, *media[part.item].plan.grid_thw[1:]) for part in parts]
        return {"patches": patches_PC, "targets": self._targets(parts, items), **self._geometries.packed(grids)}

    def _patchify(self, parts: Sequence[Part], media: Sequence[Media]) -> Tensor:
        patches_PC = self._patches(parts)
        self._pixels.patchify(self._pictures(parts, media), patches_PC)
        return patches_PC

    def _patches(self, parts: Sequence[Part]) -> Tensor:
        """Where the patches of a pass go: into the arena, unless they are more than it holds."""
        count = sum(part.rows for part in parts) * self.spec.unit
        arena = self.graphs.phase.arena
        if count <= arena.limits["patches"]:
            return self._rows_of_arena(count)
        return torch.empty(count, self.spec.patch_values, dtype=self._place.dtype, device=self._place.device)

    def warm_up(self) -> None:
        """Compile what turns pixels into patches; it runs before the vision graph, not inside it. Twice: what was
        compiled is launched in another way from then on."""
        with self.beside.work():
            for settings in (self.settings.images, self.settings.videos) * 2:
                if settings is not None:
                    picture = warm_up_picture(settings)
                    self._pixels.patchify([picture], self._rows_of_arena(picture.num_rows))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For what runs vision passes on the current stream: captures, measurements, verification."""
        self.beside.wait()
        try:
            yield
        finally:
            self.beside.join()

    def calibrate(self) -> None:
        """Measure eager runs and replays, so that the faster one is chosen; only where there is a choice to make."""
        if Tier.EXACT in self.settings.graphs.tiers and self.graphs.graphs and not self.settings.graphs.strict:
            with self.beside.work():
                self.graphs.calibrate()

    @torch.no_grad()
    def capture_usual(self) -> None:
        """Fill the exact tier with layouts that are likely to come, up to its bound. So they are fast from the first
        request on, and a layout that gets hot later takes the place, and the memory, of another."""
        if Tier.EXACT not in self.settings.graphs.tiers:
            return
        with self.beside.work():
            self.graphs.reserve_small()
            for values in self.usual(self.graphs):
                self.graphs.capture_exact(values)

    def usual(self, graphs: GraphRunner) -> Iterator[dict[str, Any]]:
        """Inputs of passes over images of usual sizes, until these graphs are as many as they may be."""
        images = self.settings.images
        if images is None or Tier.EXACT not in self.settings.graphs.tiers:
            return
        for count in USUAL_COUNTS:
            for width, height in USUAL_SIZES:
                plan = plan_image(height, width, images)
                if not graphs.exact.is_full and count * plan.num_tokens <= self.settings.max_units:
                    yield self._example([plan.grid_thw] * count)

    def _example(self, grids: Sequence[Grid]) -> dict[str, Any]:
        """The inputs of a pass whose rows go nowhere."""
        num_rows = sum(t * h * w for t, h, w in grids) // self.spec.unit
        patches_PC = self._rows_of_arena(num_rows * self.spec.unit)
        targets = np.zeros(num_rows, dtype=np.int32)
        return {"patches": patches_PC, "targets": targets, **self._geometries.packed(grids)}

    @property
    def has_hot(self) -> bool:
        """Whether a layout came often enough to be worth a graph of its own."""
        return self.graphs.exact.has_pending

    def capture_hot(self) -> None:
        """Capture the hottest one. For idle moments: it takes some tens of milliseconds. In the order of vision passes,
        on whose stream `reserve` left memory for the run that comes before a capture."""
        with self.beside.work():
            self.graphs.capture_hot(limit=1)

    @torch.no_grad()
    def reserve(self) -> int:
        """Run the largest pass that may have to run without a graph, so that torch keeps the memory it needs. Returns
        how much that is: what is left for the KV cache is smaller by it."""
        rows = self._most_eager_rows()
        if self._place.device.type != "cuda" or rows == 0:
            return 0
        with self.beside.work():
            before = torch.cuda.memory_reserved(self._place.device)
            values = self.graphs.phase.example((rows,), torch.Generator().manual_seed(0))
            self.graphs.eager(values, lambda outputs: None)
            del values
            return torch.cuda.memory_reserved(self._place.device) - before

    def _most_eager_rows(self) -> int:
        """Rows of the largest frame where it is over budget; the whole budget where eager may be the faster way, and
        where layouts are run once before they get a graph of their own, or shadow checks run them again."""
        tiers, is_strict = self.settings.graphs.tiers, self.settings.graphs.strict
        largest = min(self._longest, _largest_frame(self.settings))
        if largest > self.settings.max_units and not is_strict:
            return largest
        is_eager = self.settings.has_shadow or Tier.EXACT in tiers or not (is_strict or tiers)
        return self.settings.max_units if is_eager else 0

    def _run_or_blame(
        self, parts: Sequence[Part], items: Sequence[EncodeItem], media: Sequence[Media]
    ) -> Iterator[tuple[Part, Exception]]:
        """Run a pass; if it fails, run each of its parts alone: one that fails alone is to blame."""
        try:
            self.graphs.run(self.values(parts, items, media), lambda outputs: None)
        except Exception as error:
            if len(parts) == 1:
                yield parts[0], error
                return
            for part in parts:
                yield from self._run_or_blame([part], items, media)

    def _pictures(self, parts: Sequence[Part], media: Sequence[Media]) -> list[Picture]:
        pictures, row = [], 0
        for part in parts:
            one = media[part.item]
            settings = self.settings.images if one.kind == "image" else self.settings.videos
            assert settings is not None, f"a {one.kind} for a model that takes none"
            num_patches = part.rows * self.spec.unit
            pictures.append(Picture(_frames(one, part, settings), one.plan.size_hw, settings, row, num_patches))
            row += num_patches
        return pictures

    def _targets(self, parts: Sequence[Part], items: Sequence[EncodeItem]) -> Ints:
        """Where the rows of a pass go in the cache."""
        page_rows = self.settings.page_rows
        found = [places(part.first * part.units, part.rows, items[part.item].pages, page_rows) for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _cost(self) -> Callable[[int], float]:
        gate = self.graphs.gate
        return default_cost if gate is None else gate.graph.at


def _frames(media: Media, part: Part, settings: ImageSettings | VideoSettings) -> Any:
    """The pixels of a part."""
    if media.pixels.ndim == 3:
        return media.pixels
    step = settings.temporal_patch
    return media.pixels[part.first * step : (part.first + part.count) * step]


def _largest_frame(settings: EncoderSettings) -> int:
    """Rows of the largest frame that the settings of images and videos allow."""
    found = [0]
    for media in (settings.images, settings.videos):
        if media is not None:
            height, width = getattr(media, "fixed_size", None) or (media.max_pixels, 1)
            found.append(height * width // (media.patch * media.merge) ** 2)
    return max(found)


def _num_rows(state: DeviceState) -> int:
    assert state.vision_rows is not None
    return state.vision_rows.shape[1]


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, SaccadeError) else f"{ENCODE_FAILED}: {type(error).__name__}"
