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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from saccade.choice.exact import ExactLayout
from saccade.config import GraphSettings, Tier
from saccade.execution.lap import DeviceLap
from saccade.execution.pixels import Shapes, new_pixels, warm_up_picture
from saccade.execution.side_stream import SideStream
from saccade.execution.state import DeviceState
from saccade.execution.vision_phase import vision_phase
from saccade.graphs import GraphRunner, lane_for
from saccade.inputs.messages import MediaKind
from saccade.models.media import ImageSettings, VideoSettings
from saccade.scheduling.buckets import few_buckets
from saccade.scheduling.compose import VisionFacts
from saccade.scheduling.executing import Encoded, encode_problem
from saccade.scheduling.orders import Encode, Pass

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
        assert model.spec.vision is not None and model.tower is not None, f"{model.spec.architecture} sees no images"
        self._sharing = model.tower.sharing
        if self._sharing.size > 1:
            settings = replace(settings, graphs=_shared(settings.graphs))
        self.settings = settings
        self.side_stream = SideStream(model.place.device)
        phase = vision_phase(model, state, settings.max_units)
        if settings.has_few_buckets:
            phase = replace(phase, buckets=few_buckets(phase.buckets, phase.rows))
        self.graphs = GraphRunner(phase, settings.graphs, lane_for(model.place.device))
        self.spec = model.spec.vision
        self._place = model.place
        self._shapes = _shapes(settings)
        self._pixels = new_pixels(model.place.device, self._shapes)
        self._longest = min(state.max_keys, _num_rows(state) - settings.page_rows)

    @property
    def graphs(self) -> GraphRunner:
        return self._graphs

    @graphs.setter
    def graphs(self, runner: GraphRunner) -> None:
        self._graphs = runner
        self._rows_of_arena = lru_cache(MAX_VIEWS)(partial(runner.phase.arena.rows, "patches"))

    @property
    def facts(self) -> VisionFacts:
        """For whoever composes passes."""
        frames = {kind: shape.temporal_patch for kind, shape in self._shapes.items()}
        num_ranks = self._sharing.size
        return VisionFacts(spec=self.spec, temporal_patch=frames, images=self.settings.images, num_ranks=num_ranks)

    @torch.no_grad()
    def encode(self, orders: Encode) -> Encoded:
        """Launch a pass. If it cannot be launched, others still can."""
        device, one = self._place.device, orders.of_rank(self._sharing.rank)
        with self.side_stream.work():
            lap = DeviceLap.start(device)
            try:
                self.run(one)
            except Exception as error:
                return Encoded(problem=encode_problem(error))
            lap.stop(device)
        return Encoded(lap=lap)

    def run(self, one: Pass) -> None:
        """One pass, on the current stream."""
        try:
            values = self.values(one)
        except Exception:
            if self._sharing.size > 1 and one.is_padded:  # other ranks, whose images are well, wait in this pass
                self.graphs.obey(one.decision, self._nothing(one), lambda outputs: None)
            raise
        self.graphs.obey(one.decision, values, lambda outputs: None)

    def values(self, one: Pass) -> dict[str, Any]:
        """The inputs of a pass. Its patches are launched first."""
        patches_PC = self._patches(one.num_patches)
        self._pixels.patchify(one.pictures, patches_PC)
        return {"patches": patches_PC, **one.values}

    def _nothing(self, one: Pass) -> dict[str, Any]:
        """The inputs of a pass in which this rank has no images."""
        empty = self.graphs.phase.arena.empty_batch()
        return {**empty.tensors, **empty.arrays, "targets": one.values["targets"]}

    def patchify(self, one: Pass) -> None:
        """Only the patches of a pass."""
        with self.side_stream.work():
            self._pixels.patchify(one.pictures, self._patches(one.num_patches))
        self.side_stream.wait()

    def _patches(self, count: int) -> Tensor:
        """Where the patches of a pass go: into the arena, unless they are more than it holds."""
        if count <= self.graphs.phase.arena.limits["patches"]:
            return self._rows_of_arena(count)
        return torch.empty(count, self.spec.patch_values, dtype=self._place.dtype, device=self._place.device)

    def warm_up(self) -> None:
        """Compile what turns pixels into patches; it runs before the vision graph, not inside it. Twice: what was
        compiled is launched in another way from then on."""
        with self.side_stream.work():
            for kind, shape in (*self._shapes.items(),) * 2:
                picture = warm_up_picture(kind, shape)
                self._pixels.patchify([picture], self._rows_of_arena(picture.num_rows))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For what runs vision passes on the current stream: captures, measurements, verification."""
        self.side_stream.wait()
        try:
            yield
        finally:
            self.side_stream.join()

    def calibrate(self, num_rounds: int = 0) -> None:
        """Measure eager runs and replays, so that the faster one is chosen; only where there is a choice to make."""
        if Tier.EXACT in self.settings.graphs.tiers and self.graphs.graphs and not self.settings.graphs.strict:
            with self.side_stream.work():
                self.graphs.calibrate(num_rounds)

    @torch.no_grad()
    def capture_layout(self, layout: ExactLayout) -> int:
        """Capture a graph of one layout. For idle moments: it takes some tens of milliseconds. In the order of vision
        passes, on whose stream `reserve` left memory for the run that comes before a capture."""
        with self.side_stream.work():
            return self.graphs.capture_layout(layout)

    @torch.no_grad()
    def reserve(self) -> int:
        """Run the largest pass that may have to run without a graph, so that torch keeps the memory it needs. Returns
        how much that is: what is left for the KV cache is smaller by it."""
        if Tier.EXACT in self.settings.graphs.tiers:
            with self.side_stream.work():
                self.graphs.reserve_small()
        rows = self.most_eager_rows()
        if self._place.device.type != "cuda" or rows == 0:
            return 0
        with self.side_stream.work():
            before = torch.cuda.memory_reserved(self._place.device)
            values = self.graphs.phase.example((rows,), torch.Generator().manual_seed(0))
            self.graphs.eager(values, lambda outputs: None)
            del values
            return torch.cuda.memory_reserved(self._place.device) - before

    def most_eager_rows(self) -> int:
        """Rows of the largest frame where it is over budget; the whole budget where eager may be the faster way, and
        where layouts are run once before they get a graph of their own, or shadow checks run them again."""
        tiers, is_strict = self.settings.graphs.tiers, self.settings.graphs.strict
        largest = min(self._longest, largest_frame(self.settings.images, self.settings.videos))
        if largest > self.settings.max_units and not is_strict:
            return largest
        is_eager = self.settings.has_shadow or Tier.EXACT in tiers or not (is_strict or tiers)
        return self.settings.max_units if is_eager else 0


def _shared(graphs: GraphSettings) -> GraphSettings:
    """Ranks with images of their own have no structure in common, but always a bucket."""
    return replace(graphs, tiers=frozenset({Tier.CAPACITY}) if graphs.tiers else frozenset())


def _shapes(settings: EncoderSettings) -> Shapes:
    """How pixels are cut into patches, by the kind of media."""
    kinds: tuple[tuple[MediaKind, ImageSettings | VideoSettings | None], ...]
    kinds = ("image", settings.images), ("video", settings.videos)
    return {kind: given.alone() for kind, given in kinds if given is not None}


def largest_frame(*media: ImageSettings | VideoSettings | None) -> int:
    """Rows of the largest frame that the settings of images and videos allow."""
    found = [0]
    for one in media:
        if one is not None:
            height, width = getattr(one, "fixed_size", None) or (one.max_pixels, 1)
            found.append(height * width // (one.patch * one.merge) ** 2)
    return max(found)


def _num_rows(state: DeviceState) -> int:
    assert state.vision_rows is not None
    return state.vision_rows.shape[1]
