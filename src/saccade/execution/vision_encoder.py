"""Encodes images and videos into rows of the encoder cache.

Vision passes run on the same stream as language steps, in the order of their launches, so that nothing is read before
it is written or overwritten while it is read. The patches of a pass may be launched before its other inputs are known:
they are written after the previous replay, which reads the same rows, has finished.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from saccade.choice.exact import ExactLayout
from saccade.config import GraphSettings, Tier
from saccade.execution.device_lap import DeviceLap, now
from saccade.execution.pixels import new_pixels, warm_up_picture
from saccade.execution.state import DeviceState
from saccade.execution.vision_phase import vision_phase
from saccade.graphs import GraphRunner, lane_for
from saccade.inputs.text.chat_messages import MediaKind
from saccade.models.media import ImageSettings, VideoSettings
from saccade.scheduling.buckets import few_buckets
from saccade.scheduling.compose import VisionFacts
from saccade.scheduling.executing import ENCODE_FAILED, Encoded, problem
from saccade.scheduling.orders import Encode, Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Rows of the largest pass that has a graph, rows of a page of the cache, and how pixels become patches."""

    max_units: int
    page_rows: int
    images: ImageSettings | None
    videos: VideoSettings | None
    has_few_buckets: bool = False  # as on a CPU, where graphs save no time
    has_shadow: bool = False  # any pass may be run again without its graph


class Encoder:
    def __init__(self, state: DeviceState, settings: EncoderSettings, graphs: GraphSettings) -> None:
        model = state.model
        assert model.spec.vision is not None and model.tower is not None, f"{model.spec.architecture} sees no images"
        self._sharing = model.tower.sharing
        if self._sharing.size > 1:  # ranks with different images share no structure, but always a bucket
            graphs = replace(graphs, tiers=graphs.tiers and frozenset({Tier.CAPACITY}))
        self.settings, self._place, self.spec = settings, model.place, model.spec.vision
        phase = vision_phase(model, state, settings.max_units)
        if settings.has_few_buckets:
            phase = replace(phase, buckets=few_buckets(phase.buckets, phase.rows))
        self.graphs = GraphRunner(phase, graphs, lane_for(model.place.device))
        kinds: dict[MediaKind, ImageSettings | VideoSettings | None]
        kinds = {"image": settings.images, "video": settings.videos}
        self._shapes = {kind: one.alone() for kind, one in kinds.items() if one is not None}
        self._pixels = new_pixels(model.place.device, self._shapes)
        assert state.vision_rows is not None, "a model with a tower has rows for its images"
        self._longest = min(state.max_keys, state.vision_rows.shape[1] - settings.page_rows)

    @property
    def facts(self) -> VisionFacts:
        frames = {kind: shape.temporal_patch for kind, shape in self._shapes.items()}
        num_ranks = self._sharing.size
        return VisionFacts(spec=self.spec, temporal_patch=frames, images=self.settings.images, num_ranks=num_ranks)

    @torch.no_grad()
    def encode(self, orders: Encode) -> Encoded:
        """Launch a pass. A failed launch does not affect later ones."""
        rank = self._sharing.rank
        begin = now(self._place.device)
        try:
            self.run(orders.others[rank - 1] if orders.others and rank else orders.vision)
        except Exception as error:
            return Encoded(problem=problem(error, ENCODE_FAILED))
        return Encoded(lap=DeviceLap(begin, now(self._place.device)))

    def run(self, one: Pass) -> None:
        try:
            values = self.values(one)
        except Exception:
            if self._sharing.size > 1 and one.is_padded:  # other ranks wait for this one in the pass
                self.graphs.obey(one.decision, self._nothing(one), lambda outputs: None)
            raise
        self.graphs.obey(one.decision, values, lambda outputs: None)

    def values(self, one: Pass) -> dict[str, Any]:
        """The inputs of a pass. Its patches are launched first, into the arena unless they exceed it."""
        arena, count = self.graphs.phase.arena, sum(picture.num_rows for picture in one.pictures)
        if count <= arena.limits["patches"]:
            patches_PC = arena.rows("patches", count)
        else:
            shape = (count, self.spec.patch_values)
            patches_PC = torch.empty(shape, dtype=self._place.dtype, device=self._place.device)
        self._pixels.patchify(one.pictures, patches_PC)
        return {"patches": patches_PC, **one.values}

    def _nothing(self, one: Pass) -> dict[str, Any]:
        empty = self.graphs.phase.arena.empty_batch()
        return {**empty.tensors, **empty.arrays, "targets": one.values["targets"]}

    def warm_up(self) -> None:
        """Compile the kernels that turn pixels into patches; they run outside the vision graph. Runs twice, because the
        first launch after compilation takes a different path from later ones."""
        for kind, shape in (*self._shapes.items(),) * 2:
            picture = warm_up_picture(kind, shape)
            self._pixels.patchify([picture], self.graphs.phase.arena.rows("patches", picture.num_rows))

    def calibrate(self, num_rounds: int = 0) -> None:
        """Time eager runs and replays to choose the faster one, if there is a choice."""
        if Tier.EXACT in self.graphs.settings.tiers and self.graphs.graphs and not self.graphs.settings.strict:
            self.graphs.calibrate(num_rounds)

    def time_replays(self) -> None:
        """Time replays, unless they were compared with eager runs."""
        if self.graphs.catalogue.seconds is None:
            self.graphs.time_replays()

    @torch.no_grad()
    def capture_layout(self, layout: ExactLayout) -> int:
        """Capture a graph for one layout. Takes tens of milliseconds, so only call it when idle. `reserve` left memory
        for the run before a capture."""
        return self.graphs.capture_layout(layout)

    @torch.no_grad()
    def reserve(self) -> int:
        """Run the largest pass that may run without a graph, so that torch keeps its memory; returns the bytes."""
        if Tier.EXACT in self.graphs.settings.tiers:
            self.graphs.lane.reserve_small()
        rows = self.most_eager_rows()
        if self._place.device.type != "cuda" or rows == 0:
            return 0
        before = torch.cuda.memory_reserved(self._place.device)
        values = self.graphs.phase.example((rows,), torch.Generator().manual_seed(0))
        self.graphs.eager(values, lambda outputs: None)
        del values
        return torch.cuda.memory_reserved(self._place.device) - before

    def most_eager_rows(self) -> int:
        """The largest frame if over budget; the whole budget where eager may be faster, layouts run once before they
        get an exact graph, or shadow checks rerun passes."""
        tiers, is_strict = self.graphs.settings.tiers, self.graphs.settings.strict
        largest = min(self._longest, largest_frame(self.settings.images, self.settings.videos))
        if largest > self.settings.max_units and not is_strict:
            return largest
        is_eager = self.settings.has_shadow or Tier.EXACT in tiers or not (is_strict or tiers)
        return self.settings.max_units if is_eager else 0


def largest_frame(*media: ImageSettings | VideoSettings | None) -> int:
    """Rows of the largest frame that the image and video settings allow."""
    found = [0]
    for one in media:
        if one is not None:
            height, width = getattr(one, "fixed_size", None) or (one.max_pixels, 1)
            found.append(height * width // (one.patch * one.merge) ** 2)
    return max(found)
