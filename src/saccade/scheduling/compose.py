"""Turns plans into orders: every decision about a step's device work is made here. Pure: no tensor, no device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from saccade.choice.catalogue import Catalogue
from saccade.choice.exact import ExactLayout
from saccade.choice.key import Capacity, Decision
from saccade.config import Tier
from saccade.errors import GraphError
from saccade.inputs.placeholders import Media
from saccade.inputs.plans import plan_image
from saccade.inputs.text.chat_messages import MediaKind
from saccade.models.media import ImageSettings
from saccade.models.model_spec import VisionSpec
from saccade.scheduling import arrays
from saccade.scheduling.arrays import AnyInts, CacheLayout, LiveRequest
from saccade.scheduling.buckets import PART_UNITS, vision_parts
from saccade.scheduling.geometries import Geometries
from saccade.scheduling.matcher import Masks, Matcher
from saccade.scheduling.orders import (
    Arrays,
    Encode,
    Pass,
    PatchSource,
    PickLogits,
    PoolRows,
    Run,
    SampleTokens,
    ScorePrompt,
    ScoreToken,
)
from saccade.scheduling.packing import Bins, MediaPart, Shares, default_cost, pack, share_out, split
from saccade.scheduling.step_plan import Chunk, EncodeItem, StepPlan

# Widths and heights of common images, and how many of them share a pass.
USUAL_SIZES = (
    *((side, side) for side in (224, 336, 448, 512, 560, 672, 768, 1024)),
    *((640, 480), (1024, 768), (1280, 720), (720, 1280)),
)
USUAL_COUNTS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFacts:
    spec: VisionSpec
    temporal_patch: Mapping[MediaKind, int]  # frames per patch, by kind of media
    images: ImageSettings | None = None
    num_ranks: int = 1  # more than one if ranks encode their own images
    part_units: int = PART_UNITS

    def num_parts(self, units: int) -> int:
        """How many parts a pass of so many rows has."""
        return vision_parts(units, self.spec.depth, self.part_units)


class Composer:
    """Knows the graphs of each phase from its catalogue."""

    def __init__(
        self,
        layout: CacheLayout,
        catalogues: Mapping[str, Catalogue],
        *,
        vocab_size: int,
        vision: VisionFacts | None = None,
        has_head: bool = True,
    ) -> None:
        self.layout, self.vocab_size, self.has_head = layout, vocab_size, has_head
        self.catalogues = dict(catalogues)
        self._masks = Masks(vocab_size)
        self.vision = None if vision is None else VisionComposer(vision, layout.page_rows, self.catalogues["vision"])

    def run(self, plan: StepPlan, live: Mapping[str, LiveRequest]) -> tuple[Run, list[Chunk]]:
        """The language passes of a plan, and the chunks whose last rows are sampled, in row order."""
        chunks = plan.chunks
        if arrays.is_decode(chunks, live):
            values = arrays.decode_values(chunks, live, self.layout)
            passes = [self._pass("decode", values, tokens=len(chunks), requests=len(chunks))]
            return Run(plan.step, tuple(passes), len(chunks)), list(chunks)
        values = arrays.mixed_values(chunks, live, self.layout)
        passes = [self._pass("prefill", values, tokens=len(values["ids"]), requests=len(chunks))]
        sampled = [chunk for chunk in chunks if chunk.wants_logits]
        picked = [chunk for chunk in chunks if chunk.picks_logits]
        if sampled or picked:
            ends = values["query_start"][1:].tolist()
            last = {chunk.request_id: end - 1 for end, chunk in zip(ends, chunks, strict=True)}
            sequences = [live[chunk.request_id].sequence for chunk in (*sampled, *picked)]
            head: Arrays = {
                "rows": np.asarray([last[chunk.request_id] for chunk in (*sampled, *picked)], dtype=np.int32),
                "sequences": np.asarray(sequences, dtype=np.int32),
            }
            passes.append(self._pass("head", head, tokens=len(sequences)))
        wanted = [live[chunk.request_id].request.params.pooled_token_ids for chunk in picked]
        picks = [PickLogits(row, tuple(ids)) for row, ids in enumerate(wanted, start=len(sampled))]
        run = Run(
            plan.step,
            tuple(passes),
            len(sampled),
            _prompt_scores(chunks, live),
            _pool_rows(chunks),
            tuple(picks),
        )
        return run, sampled

    def sample(
        self, step: int, chunks: Sequence[Chunk], live: Mapping[str, LiveRequest]
    ) -> tuple[SampleTokens | None, dict[str, Matcher]]:
        """The work after the passes, and the matchers that wait for its tokens. Composed while the passes run."""
        owners = [live[chunk.request_id] for chunk in chunks]
        scores = tuple(
            ScoreToken(row, owner.sequence, owner.request.params.logprobs)
            for row, owner in enumerate(owners)
            if owner.request.params.logprobs is not None
        )
        if not any(arrays.needs_sampler(owner.request.params) for owner in owners):
            return (SampleTokens(step, scores=scores) if scores else None), {}
        masked = arrays.masked_rows(chunks, owners, self.vocab_size)
        orders = SampleTokens(
            step,
            edits=arrays.edits(chunks, owners),
            mask=self._masks.compute(masked) if masked else None,
            sampler=self._pass("sample", arrays.sample_values(chunks, owners), tokens=len(chunks)),
            scores=scores,
        )
        return orders, {chunks[item.row].request_id: item.matcher for item in masked}

    def _pass(self, phase: str, values: Arrays, **sizes: int) -> Pass:
        catalogue = self.catalogues[phase]
        structure = {boundary.name: values[boundary.name] for boundary in catalogue.shape.boundaries}
        return Pass(phase, catalogue.choose(Capacity.of(**sizes), structure), values)


class VisionComposer:
    def __init__(self, facts: VisionFacts, page_rows: int, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.facts, self._page_rows, self._unit = facts, page_rows, facts.spec.unit
        self._geometries = Geometries(facts.spec)
        buckets = catalogue.shape.ordered
        self.bins = Bins(tuple(b["units"] for b in buckets), tuple(b["frames"] for b in buckets))

    def shares(self, media: Sequence[Media]) -> list[Shares]:
        """Which frames of which media go into each pass, by the rank that encodes them."""
        num_ranks, costs = self.facts.num_ranks, self.catalogue.costs
        cost = default_cost if costs is None else costs.graph.at
        parts: list[MediaPart] = []
        for item, one in enumerate(media):
            frames, down, across = one.plan.grid_thw
            parts += split(item, frames, down * across // self._unit, self.bins, num_ranks)
        if num_ranks == 1:
            return [[packed] for packed in pack(parts, self.bins, cost)]
        return share_out(parts, self.bins, num_ranks, cost)

    def packs(self, media: Sequence[Media]) -> list[list[MediaPart]]:
        """The parts of each pass, if there is one rank."""
        return [packed for [packed] in self.shares(media)]

    def encode(self, step: int, shares: Shares, items: Sequence[EncodeItem], media: Sequence[Media]) -> Encode:
        if self.facts.num_ranks == 1:
            return Encode(step, self.compose(shares[0], items, media))
        values = [self._geometry(share, media) for share in shares]
        rows = [sum(part.rows for part in share) for share in shares]
        bucket = self.catalogue.shape.bucket_for_all(
            [self._sizes(count, one)[0] for count, one in zip(rows, values, strict=True)]
        )
        if bucket is None:
            return Encode(step, self._compose_for_all([part for share in shares for part in share], items, media))
        decision = self.catalogue.choose(bucket, {})
        targets = np.zeros((len(shares), max(rows)), dtype=np.int64)
        for rank, share in enumerate(shares):
            if share:
                targets[rank, : rows[rank]] = self._targets(share, items)
        first, *others = (
            Pass("vision", decision, {"targets": targets, **one}, tuple(self._pictures(share, media)))
            for share, one in zip(shares, values, strict=True)
        )
        return Encode(step, first, tuple(others))

    def compose(self, parts: Sequence[MediaPart], items: Sequence[EncodeItem], media: Sequence[Media]) -> Pass:
        values: Arrays = {"targets": self._targets(parts, items), **self._geometry(parts, media)}
        sizes, structure = self._sizes(len(values["targets"]), values)
        decision = self.catalogue.choose(sizes, structure)
        return Pass("vision", decision, values, tuple(self._pictures(parts, media)))

    def num_parts(self, decision: Decision) -> int:
        """How many parts the graph of a pass has. An eager run has one."""
        return 1 if decision.key is None else self.facts.num_parts(decision.key.capacity["units"])

    def _compose_for_all(self, parts: Sequence[MediaPart], items: Sequence[EncodeItem], media: Sequence[Media]) -> Pass:
        """For a part that no bucket holds. Joins need equal row counts: all ranks encode it, rank 0's rows are used."""
        if len(parts) > 1:
            raise GraphError(f"no bucket holds the shares of {len(parts)} images or videos; each is encoded alone")
        one = self.compose(parts, items, media)
        targets = np.zeros((self.facts.num_ranks, parts[0].rows), dtype=np.int64)
        targets[0] = one.values["targets"]
        return replace(one, values={**one.values, "targets": targets})

    def _geometry(self, parts: Sequence[MediaPart], media: Sequence[Media]) -> dict[str, Any]:
        return self._geometries.packed([(part.count, *media[part.item].plan.grid_thw[1:]) for part in parts])

    def usual_layouts(self) -> Iterator[ExactLayout]:
        """Common layouts to fill the exact tier with, so that they are fast from the first request on. A layout that
        becomes frequent later replaces another one and reuses its memory."""
        images, catalogue = self.facts.images, self.catalogue
        if images is None or Tier.EXACT not in catalogue.settings.tiers:
            return
        for count in USUAL_COUNTS:
            for width, height in USUAL_SIZES:
                plan = plan_image(height, width, images)
                units = count * plan.num_tokens
                if catalogue.exact.is_full or units > catalogue.shape.limits["units"]:
                    continue
                sizes, structure = self._sizes(units, self._geometries.packed([plan.grid_thw] * count))
                if (layout := catalogue.layout(sizes, structure)) is not None:
                    yield layout

    def _sizes(self, units: int, values: Mapping[str, Any]) -> tuple[Capacity, dict[str, Any]]:
        boundaries = self.catalogue.shape.boundaries
        structure = {boundary.name: values[boundary.name] for boundary in boundaries}
        counts = {boundary.count: len(values[boundary.name]) - 1 for boundary in boundaries}
        return Capacity.of(units=units, patches=units * self._unit, **counts), structure

    def _pictures(self, parts: Sequence[MediaPart], media: Sequence[Media]) -> list[PatchSource]:
        pictures, row = [], 0
        for part in parts:
            one = media[part.item]
            pixels, num_patches = one.pixels, part.rows * self._unit
            if pixels.ndim == 4:
                step = self.facts.temporal_patch[one.kind]
                pixels = pixels[part.first * step : (part.first + part.count) * step]
            pictures.append(PatchSource(part.item, one.kind, pixels, one.plan.size_hw, row, num_patches))
            row += num_patches
        return pictures

    def _targets(self, parts: Sequence[MediaPart], items: Sequence[EncodeItem]) -> AnyInts:
        size = self._page_rows
        found = [arrays.places(part.first * part.units, part.rows, items[part.item].pages, size) for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)


def _prompt_scores(chunks: Sequence[Chunk], live: Mapping[str, LiveRequest]) -> tuple[ScorePrompt, ...]:
    """Orders to score the prompt tokens that follow the chunks' rows, from the first one wanted."""
    found, row = [], 0
    for chunk in chunks:
        if chunk.wants_all_logits:
            owner = live[chunk.request_id]
            first = max(chunk.start, owner.request.first_scored_row)
            next_ids = owner.prompt.token_ids[first + 1 : chunk.end + 1]
            num_top = owner.request.params.prompt_logprobs or 0
            found.append(ScorePrompt(row + first - chunk.start, np.asarray(next_ids, dtype=np.int64), num_top))
        row += chunk.count
    return tuple(found)


def _pool_rows(chunks: Sequence[Chunk]) -> PoolRows | None:
    """The rows of a step that are summed. Chunks are packed one after the other, with padding at the end."""
    parts, lengths, end = [], [], 0
    for chunk in chunks:
        end += chunk.count
        if chunk.num_summed:
            parts.append(np.arange(end - chunk.num_summed, end, dtype=np.int64))
            lengths.append(chunk.num_summed)
    return PoolRows(np.concatenate(parts), tuple(lengths)) if parts else None
