"""Encodes images and videos into rows of the encoder cache.

Vision passes and language steps run on one stream in launch order, so nothing is read before it is written, or
overwritten while it is read. For the same reason the patches of a pass can be launched before its other inputs are
known: they are written once the previous replay, which reads the same rows, has finished.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from saccade.config import GraphSettings, Tier
from saccade.execution.pass_timer import DeviceLap, now
from saccade.execution.pixels import new_pixels, warm_up_picture
from saccade.execution.state import DeviceState
from saccade.execution.vision_phase import vision_phase
from saccade.graphs import GraphRunner, lane_for
from saccade.inputs.text.chat_messages import MediaKind
from saccade.models.media import ImageSettings, VideoSettings
from saccade.scheduling.buckets import PART_UNITS, few_buckets
from saccade.scheduling.compose import VisionFacts
from saccade.scheduling.executing import ENCODE_FAILED, Encoded, problem
from saccade.scheduling.orders import Encode, EncodeMore, Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """`max_units` is the size of the largest pass with a graph; `images` and `videos` say how pixels become patches."""

    max_units: int
    page_rows: int
    images: ImageSettings | None
    videos: VideoSettings | None
    part_units: int = PART_UNITS  # at least, in each part of a pass that may be divided over several steps
    has_few_buckets: bool = False  # on a CPU, where graphs save no time
    has_shadow: bool = False  # shadow checks may rerun any pass eagerly

    def largest_frame(self, longest: int) -> int:
        """Rows of the largest image or frame, at most `longest`."""
        return min(largest_frame(self.images, self.videos), longest)


class Encoder:
    def __init__(self, state: DeviceState, settings: EncoderSettings, graphs: GraphSettings) -> None:
        model = state.model
        assert model.spec.vision is not None and model.tower is not None, f"{model.spec.architecture} sees no images"
        self._sharing = model.tower.sharing
        if self._sharing.size > 1:  # ranks encode different images, so they share a bucket but no exact layout
            graphs = replace(graphs, tiers=graphs.tiers and frozenset({Tier.CAPACITY}))
        self.settings, self._place, self.spec = settings, model.place, model.spec.vision
        phase = vision_phase(model, state, settings.max_units, settings.part_units)
        if settings.has_few_buckets:
            phase = replace(phase, buckets=few_buckets(phase.buckets, phase.rows))
        self.graphs = GraphRunner(phase, graphs, lane_for(model.place.device))
        kinds: dict[MediaKind, ImageSettings | VideoSettings | None]
        kinds = {"image": settings.images, "video": settings.videos}
        self.shapes = {kind: one.alone() for kind, one in kinds.items() if one is not None}
        self._pixels = new_pixels(model.place.device, self.shapes)
        assert state.vision_rows is not None, "a model with a tower has rows for its images"
        self._longest = min(state.max_keys, state.vision_rows.shape[1] - settings.page_rows)

    @property
    def facts(self) -> VisionFacts:
        frames = {kind: shape.temporal_patch for kind, shape in self.shapes.items()}
        return VisionFacts(
            spec=self.spec,
            temporal_patch=frames,
            images=self.settings.images,
            num_ranks=self._sharing.size,
            part_units=self.settings.part_units,
        )

    @torch.no_grad()
    def encode(self, orders: Encode | EncodeMore) -> Encoded:
        """Launches a pass or parts of it. A failed launch does not affect later ones."""
        rank = self._sharing.rank
        begin = now(self._place.device)
        try:
            if isinstance(orders, EncodeMore):
                self.graphs.advance(orders.decision.key, orders.end_part, orders.num_parts)
            else:
                one = orders.others[rank - 1] if orders.others and rank else orders.vision
                self.run(one, orders.end_part, orders.num_parts)
        except Exception as error:
            return Encoded(problem=problem(error, ENCODE_FAILED))
        return Encoded(lap=DeviceLap(begin, now(self._place.device)))

    def run(self, one: Pass, end_part: int = 1, num_parts: int = 1) -> None:
        is_whole = end_part == num_parts
        try:
            values = self.values(one)
        except Exception:
            # The other ranks wait for this one in a collective at the end of the pass.
            if self._sharing.size > 1 and one.is_padded and is_whole:
                self.graphs.obey(one.decision, self._nothing(one), lambda outputs: None)
            raise
        if is_whole:
            self.graphs.obey(one.decision, values, lambda outputs: None)
        else:
            self.graphs.begin(one.decision, values, lambda outputs: None)
            self.graphs.advance(one.decision.key, end_part, num_parts)

    def values(self, one: Pass) -> dict[str, Any]:
        """Launches a pass's patches, into the arena if they fit, and returns all its inputs."""
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
        """Compiles the kernels that turn pixels into patches outside the vision graph. Runs them twice, because the
        first launch after compilation takes a different path from later ones."""
        for kind, shape in (*self.shapes.items(),) * 2:
            picture = warm_up_picture(kind, shape)
            self._pixels.patchify([picture], self.graphs.phase.arena.rows("patches", picture.num_rows))

    def calibrate(self, num_rounds: int = 0) -> None:
        """Times eager runs and replays, where the faster one may be chosen."""
        if Tier.EXACT in self.graphs.settings.tiers and self.graphs.graphs and not self.graphs.settings.strict:
            self.graphs.calibrate(num_rounds)

    def time_replays(self) -> None:
        """Times replays, unless `calibrate` already did."""
        if self.graphs.catalogue.seconds is None:
            self.graphs.time_replays()

    @torch.no_grad()
    def reserve(self) -> int:
        """Runs the largest pass that may run eagerly, so that torch keeps its memory. Returns the bytes kept."""
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
        """Rows of the largest pass that may run without a graph. A frame over the budget always does. Any other pass
        may if graphs are off, if its layout may get an exact graph later, or if shadow checks rerun it."""
        tiers, is_strict = self.graphs.settings.tiers, self.graphs.settings.strict
        largest = self.settings.largest_frame(self._longest)
        if largest > self.settings.max_units and not is_strict:
            return largest
        is_eager = self.settings.has_shadow or Tier.EXACT in tiers or not (is_strict or tiers)
        return self.settings.max_units if is_eager else 0


def largest_frame(*media: ImageSettings | VideoSettings | None) -> int:
    """Rows of the largest image or frame that these settings allow."""
    found = [0]
    for one in media:
        if one is not None:
            height, width = getattr(one, "fixed_size", None) or (one.max_pixels, 1)
            found.append(height * width // (one.patch * one.merge) ** 2)
    return max(found)
