"""A dry run: the real scheduler, composer and graph choice plan steps that are never executed. Requests are made up
from sizes, so `saccade explain` can say how a batch would run without a GPU or weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.config import Tier
from saccade.dry_run.blueprint import Blueprint
from saccade.execution.assembly import new_engine
from saccade.execution.sizes import encoder_index_for
from saccade.inputs.media_settings import PlaceholderSettings
from saccade.inputs.placeholders import Media, Prompt, place_media, text_prompt
from saccade.inputs.plans import MediaPlan
from saccade.scheduling.compose import VisionComposer
from saccade.scheduling.executing import Encoded, StepResult, Ticket
from saccade.scheduling.orders import Encode, Orders, Pass, Run
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace_records import TracedPass

MAX_STEPS = 10_000
NUM_OUTPUTS = 2  # the first token comes from the prompt's pass, the second from a decode pass
ROWS = {"vision": "units"}  # the dimension that counts a phase's rows; tokens for all others


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPass:
    """One pass of a step: what is in it, how it would run, and why."""

    phase: str
    content: str
    rows: int
    bucket_rows: int  # the same as `rows` without padding
    tier: Tier
    reason: str
    graph: str = ""

    @property
    def padding(self) -> float:
        """Padded rows relative to real ones."""
        return (self.bucket_rows - self.rows) / self.rows if self.rows else 0.0


def dry_run(blueprint: Blueprint, prompts: Sequence[Prompt]) -> list[list[ExplainedPass]]:
    """The passes of every step when these requests arrive together, until each has its second token."""
    limits, sizes = blueprint.resolved.limits, blueprint.resolved.sizes
    blocks = sum(-(-(len(prompt) + NUM_OUTPUTS) // sizes.block_size) + 1 for prompt in prompts)
    explainer = _Explainer()
    engine = new_engine(
        blueprint.executor,
        limits,
        encoder_index_for(blueprint.resolved.settings, limits),
        num_blocks=max(blocks, -(-limits.max_model_len // sizes.block_size)) + 1,
        ordered=explainer,
    )
    _pretend_captured(blueprint, engine.composer.vision)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True))
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        for update in engine.step():
            assert update.finish is None or update.finish.reason == "length", f"a request of a dry run failed: {update}"
    return explainer.steps


def synthetic_prompt(
    plans: Sequence[MediaPlan], num_text_tokens: int, settings: PlaceholderSettings | None, name: str
) -> Prompt:
    """A prompt of new media followed by text. Its `name` makes the media differ from those of other prompts."""
    if settings is None:
        return text_prompt([0] * num_text_tokens)
    reserved = {settings.image_token_id, settings.video_token_id}
    plain = next(token for token in range(3) if token not in reserved)
    ids: list[int] = []
    media = []
    for index, plan in enumerate(plans):
        is_image = not plan.frames
        digest = f"{name}/{index}".encode().ljust(16, b".")
        media.append(Media("image" if is_image else "video", np.zeros((0, 0, 3), np.uint8), plan, digest))
        token = settings.image_token_id if is_image else settings.video_token_id
        assert token is not None, "a video was planned for a model that takes none"
        ids += [token] * (plan.grid_thw[0] if not is_image and settings.has_timestamps else 1)
    return place_media([*ids, *[plain] * num_text_tokens], media, settings)


def _pretend_captured(blueprint: Blueprint, vision: VisionComposer | None) -> None:
    """Marks as captured every graph that a real engine captures at start-up."""
    for catalogue in blueprint.executor.catalogues.values():
        if Tier.CAPACITY in catalogue.settings.tiers:
            for bucket in catalogue.shape.buckets:
                catalogue.captured.add(catalogue.key(bucket))
    if vision is not None and blueprint.is_cuda:
        for layout in vision.usual_layouts():
            vision.catalogue.exact.add(layout.key, 0)


class _Explainer:
    """An executor that explains its orders and answers every request with token 0."""

    def __init__(self) -> None:
        self.steps: list[list[ExplainedPass]] = []
        self._vision: list[ExplainedPass] = []

    def execute(self, orders: Orders) -> Any:
        match orders:
            case Encode():
                return self._encode(orders)
            case Run():
                return self._run(orders)
        return None

    def _encode(self, orders: Encode) -> Encoded:
        passes = (orders.vision, *orders.others)
        media = {picture.item for one in passes for picture in one.pictures}
        content = _counted(len(media), "image or video")
        ranks = f" on {len(passes)} ranks" if orders.others else ""
        self._vision.append(_explained(orders.vision, content + ranks))
        return Encoded()

    def _run(self, orders: Run) -> Ticket:
        passes = [_explained(one, _content(one)) for one in orders.passes]
        self.steps.append([*self._vision, *passes])
        self._vision = []
        count = orders.num_sampled
        return _DoneTicket(StepResult([0] * count, [False] * count))

    def snapshots(self) -> dict[str, dict[str, Any]]:
        return {}

    def time_passes(self) -> None: ...

    def take_passes(self) -> tuple[list[TracedPass], int]:
        return [], 0

    def require_device(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _DoneTicket:
    result: StepResult
    is_done: bool = True

    def wait(self) -> StepResult:
        return self.result


def _content(one: Pass) -> str:
    if one.phase == "head":
        return _counted(len(one.values["rows"]), "sampled token")
    return _counted(len(one.values["key_lengths"]), "request")


def _explained(one: Pass, content: str) -> ExplainedPass:
    decision, name = one.decision, ROWS.get(one.phase, "tokens")
    rows = one.values[{"vision": "targets", "head": "rows"}.get(one.phase, "ids")].shape[-1]  # of the largest share
    return ExplainedPass(
        phase=one.phase,
        content=content,
        rows=rows,
        bucket_rows=decision.key.capacity[name] if decision.key else rows,
        tier=decision.tier,
        reason=decision.why,
        graph=str(decision.key) if decision.key else "",
    )


def _counted(count: int, what: str) -> str:
    plural = what.replace(" or ", "s or ") + "s"
    return f"{count} {what if count == 1 else plural}"
