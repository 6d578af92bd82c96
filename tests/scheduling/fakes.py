"""A small composer, an executor that only records orders, and orders as values that can be compared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, cast

import numpy as np

from saccade.choice.catalogue import Catalogue
from saccade.choice.key import Capacity
from saccade.choice.shape import Boundary, PhaseShape
from saccade.config import GraphSettings, Tier
from saccade.inputs.placeholders import Media, Prompt, text_prompt
from saccade.inputs.plans import MediaPlan
from saccade.inputs.positions import FeatureRows, mrope_positions, rope_delta
from saccade.models.model_spec import VisionSpec
from saccade.scheduling.arrays import CacheLayout, LiveRequest
from saccade.scheduling.compose import Composer, VisionFacts
from saccade.scheduling.executing import Encoded, StepResult
from saccade.scheduling.matcher import Matcher
from saccade.scheduling.orders import Encode, Orders, Run
from saccade.scheduling.request import Request
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace_records import TracedPass
from saccade.wire.update import Scores

BLOCK_SIZE, MAX_BLOCKS, PAGE_ROWS, VOCABULARY = 4, 16, 4, 100
IMAGE = 99
LAYOUT = CacheLayout(
    block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS, page_rows=PAGE_ROWS, has_vision=True, has_limits=False
)
QUERIES = Boundary("query_start", "tokens", "requests")
FRAMES = Boundary("cu_seqlens", "patches", "frames")


@dataclass(frozen=True)
class Grid:
    """Four patches make a row of the language model."""

    merge: int = 2
    unit: int = 4
    window: int = 0
    grid_side: int = 0


def make_catalogue(
    name: str, rows: str, buckets: Sequence[Capacity], boundary: Boundary | None = None, *, strict: bool = False
) -> Catalogue:
    """A catalogue with a graph for each bucket."""
    boundaries = () if boundary is None else (boundary,)
    shape = PhaseShape(name=name, rows=rows, buckets=tuple(buckets), limits=buckets[-1], boundaries=boundaries)
    catalogue = Catalogue(shape, GraphSettings(tiers=frozenset({Tier.CAPACITY}), strict=strict))
    for bucket in buckets:
        catalogue.captured.add(catalogue.key(bucket))
    return catalogue


def make_composer(*, strict: bool = False) -> Composer:
    """Graphs for 8, 16 and 32 rows of up to 8 requests, and for 8 and 16 rows of images."""
    prompts = [Capacity.of(tokens=n, requests=9) for n in (8, 16, 32)]
    rows = [Capacity.of(tokens=n) for n in (1, 2, 4, 8)]
    decoding = [Capacity.of(tokens=n, requests=n) for n in (1, 2, 4, 8)]
    vision = [Capacity.of(units=n, patches=4 * n, frames=5) for n in (8, 16)]
    catalogues = {
        "vision": make_catalogue("vision", "units", vision, FRAMES, strict=strict),
        "prefill": make_catalogue("prefill", "tokens", prompts, QUERIES, strict=strict),
        "decode": make_catalogue("decode", "tokens", decoding, QUERIES, strict=strict),
        "head": make_catalogue("head", "tokens", rows, strict=strict),
        "sample": make_catalogue("sample", "tokens", rows, strict=strict),
    }
    facts = VisionFacts(spec=cast(VisionSpec, Grid()), temporal_patch={"image": 2, "video": 2})
    return Composer(LAYOUT, catalogues, vocab_size=VOCABULARY, vision=facts)


def make_image(height: int, width: int, rng: np.random.Generator) -> Media:
    """An image of `height` x `width` rows of the language model."""
    pixels = rng.integers(0, 256, (3 * height, 5 * width, 3)).astype(np.uint8)
    pixels.flags.writeable = False
    plan = MediaPlan((16 * height, 16 * width), (1, 2 * height, 2 * width), 4 * height * width, height * width)
    return Media("image", pixels, plan, rng.bytes(16))


def make_prompt(parts: Sequence[int | Media], rng: np.random.Generator) -> Prompt:
    """Random text of these lengths, with images in between."""
    ids: list[int] = []
    spans: list[FeatureRows] = []
    media = tuple(part for part in parts if isinstance(part, Media))
    for part in parts:
        if isinstance(part, Media):
            _, height, width = part.plan.grid_thw
            spans.append(FeatureRows(len(ids), (1, height // 2, width // 2), media_idx=len(spans)))
            ids += [IMAGE] * part.plan.num_tokens
        else:
            ids += rng.integers(3, IMAGE, part).tolist()
    positions = mrope_positions(len(ids), spans)
    prompt = Prompt(np.asarray(ids, dtype=np.int32), positions, rope_delta(positions), media=media, spans=tuple(spans))
    for array in (prompt.token_ids, prompt.positions_3T):
        array.flags.writeable = False
    return prompt


def running(
    prompt: Prompt | Sequence[int],
    sequence: int,
    params: SamplingParams | None = None,
    *,
    outputs: Iterable[int] = (),
    seed: int = 0,
    matcher: Matcher | None = None,
    eos: frozenset[int] = frozenset(),
) -> LiveRequest:
    prompt = prompt if isinstance(prompt, Prompt) else text_prompt(prompt)
    params = params or SamplingParams(temperature=0)
    ids = tuple(prompt.token_ids.tolist())
    request = Request(id=f"r{sequence}", prompt_ids=ids, params=params, eos_token_ids=eos)
    request.output_ids += outputs
    return LiveRequest(request, prompt, sequence, seed, matcher)


def plain(value: Any) -> Any:
    """Turns orders, and whatever they contain, into values that can be compared: arrays by type, shape and content."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


@dataclass
class Ticket:
    result: StepResult
    is_done: bool = True

    def wait(self) -> StepResult:
        return self.result


@dataclass
class RecordingExecutor:
    """Records orders. Tokens are drawn at random; `problem` returns the error of a vision pass."""

    rng: np.random.Generator
    problem: Callable[[Encode], str | None] = lambda orders: None
    orders: list[Orders] = field(default_factory=list)
    ticket: Ticket = field(default_factory=lambda: Ticket(StepResult()))

    def execute(self, orders: Orders) -> Any:
        self.orders.append(orders)
        match orders:
            case Encode():
                return Encoded(self.problem(orders))
            case Run():
                ids = self.rng.integers(3, IMAGE, orders.num_sampled).tolist()
                scores = [self._scores(len(one.next_ids)) for one in orders.prompt_scores]
                sums = [np.full(2, n, np.float32) for n in (orders.pool.lengths if orders.pool else ())]
                picked = [np.zeros(len(one.token_ids), np.float32) for one in orders.picks]
                result = StepResult(ids, [False] * len(ids), prompt_scores=scores, sums=sums, picked=picked)
                self.ticket = Ticket(result)
                return self.ticket
        return None

    def _scores(self, count: int) -> Scores:
        empty = np.zeros((count, 0))
        return Scores(np.zeros(count), np.ones(count), empty, empty)

    def snapshots(self) -> dict[str, dict[str, Any]]:
        return {}

    def time_passes(self) -> None: ...

    def take_passes(self) -> tuple[list[TracedPass], int]:
        return [], 0

    def require_device(self) -> None: ...

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.orders if isinstance(one, kind)]
