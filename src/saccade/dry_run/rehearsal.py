"""A rehearsal: the engine, its scheduler and its choice of graphs as they are, with nothing launched.

Requests are made up from sizes; every step is planned, packed and decided by the code that serves real ones, on a
blueprint. So `saccade explain` can say how a batch would be run, without a GPU and without weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from saccade.cache.blocks import BlockPool
from saccade.config import Tier
from saccade.dry_run.blueprint import Blueprint
from saccade.execution.executor import Runner, Ticket
from saccade.execution.sizes import encoder_index_for
from saccade.execution.vision import vision_values
from saccade.graphs import GraphRunner, lane_for
from saccade.graphs.arena import Arena
from saccade.graphs.buffers import Role
from saccade.inputs.placeholders import Media, Prompt, place_media, text_prompt
from saccade.inputs.plans import ImagePlan, VideoPlan
from saccade.inputs.settings import PlaceholderSettings
from saccade.scheduling.arrays import Running, decode_values, is_decode, last_rows, mixed_values, sequences
from saccade.scheduling.engine import Engine
from saccade.scheduling.plan import Plan
from saccade.scheduling.scheduler import Scheduler
from saccade.wire.sampling_params import SamplingParams

MAX_STEPS = 10_000
NUM_OUTPUTS = 2  # the first token comes from the prompt's pass, the second from a decode pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a step: what it holds, how it would be run, and why."""

    phase: str
    content: str
    rows: int
    bucket_rows: int  # the same where nothing is padded
    tier: Tier
    reason: str
    graph: str = ""

    @property
    def padding(self) -> float:
        """Padded rows as a share of real ones."""
        return (self.bucket_rows - self.rows) / self.rows if self.rows else 0.0


@dataclass(slots=True)
class Rehearsed:
    """The passes of every step, in order."""

    steps: list[list[Pass]] = field(default_factory=list)


def rehearse(blueprint: Blueprint, prompts: Sequence[Prompt]) -> Rehearsed:
    """What happens when these requests arrive together, until each has answered with a second token."""
    limits, sizes = blueprint.limits, blueprint.sizes
    runner = _Understudy(blueprint)
    blocks = sum(-(-(len(prompt) + NUM_OUTPUTS) // sizes.block_size) + 1 for prompt in prompts)
    pool = BlockPool(max(blocks, -(-limits.max_model_len // sizes.block_size)) + 1, sizes.block_size)
    scheduler = Scheduler(limits, pool=pool, encoder=encoder_index_for(blueprint.settings, limits))
    engine = Engine(runner, scheduler)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True))
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        for update in engine.step():
            assert update.finish is None or update.finish.reason == "length", f"a rehearsed request failed: {update}"
    return runner.seen


def made_up_prompt(
    plans: Sequence[ImagePlan | VideoPlan], num_text_tokens: int, settings: PlaceholderSettings | None, name: str
) -> Prompt:
    """A prompt with these media, none of them seen before, and this much text behind them."""
    if settings is None:
        return text_prompt([0] * num_text_tokens)
    reserved = {settings.image_token_id, settings.video_token_id}
    plain = next(token for token in range(3) if token not in reserved)
    ids: list[int] = []
    media = []
    for index, plan in enumerate(plans):
        is_image = isinstance(plan, ImagePlan)
        digest = f"{name}/{index}".encode().ljust(16, b".")
        media.append(Media("image" if is_image else "video", np.zeros((0, 0, 3), np.uint8), plan, digest))
        token = settings.image_token_id if is_image else settings.video_token_id
        assert token is not None, "a video was planned for a model that takes none"
        ids += [token] * (plan.grid_thw[0] if not is_image and settings.has_timestamps else 1)
    return place_media([*ids, *[plain] * num_text_tokens], media, settings)


class _Understudy(Runner):
    """Decides like the runner whose part it takes, notes what was decided, and answers with token 0."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint.state, blueprint.runner.settings)
        self.seen = Rehearsed()
        self._deciders = {runner.phase.name: _decider(runner) for runner in self.phases}
        if blueprint.is_cuda and self.encoder is not None:
            vision = self._deciders["vision"]
            for values in self.encoder.usual(vision):
                vision.capture_exact(values)

    def prepare(self, owner: Running) -> None:
        """There is nothing to prepare."""

    def launch(self, plan: Plan, running: Mapping[str, Running]) -> Ticket:
        passes = list(self._vision_passes(plan, running))
        if is_decode(plan.chunks, running):
            sampled = list(plan.chunks)
            values = decode_values(plan.chunks, running, self.layout)
            passes.append(self._decide("decode", values, _counted(len(sampled), "request")))
        else:
            passes += self._mixed_passes(plan, running)
            sampled = last_rows(plan.chunks)[0]
        self.seen.steps.append(passes)
        count = len(sampled)
        none = torch.zeros(count, dtype=torch.bool)
        return Ticket(plan, sampled=sampled, ids=torch.zeros(count, dtype=torch.int64), is_bad=none)

    def _mixed_passes(self, plan: Plan, running: Mapping[str, Running]) -> Iterator[Pass]:
        content = _counted(len(plan.chunks), "request")
        yield self._decide("prefill", mixed_values(plan.chunks, running, self.layout), content)
        sampled, rows = last_rows(plan.chunks)
        if sampled:
            values = {"rows": rows, "sequences": sequences(sampled, running)}
            yield self._decide("head", values, _counted(len(sampled), "sampled token"))

    def _vision_passes(self, plan: Plan, running: Mapping[str, Running]) -> Iterator[Pass]:
        media = [running[item.request_id].prompt.media[item.media_idx] for item in plan.encode]
        if not media:
            return
        assert self.encoder is not None
        spec = self.encoder.spec
        for parts in self.encoder.packs(media):
            grids = [(part.count, *media[part.item].plan.grid_thw[1:]) for part in parts]
            count = sum(part.rows for part in parts)
            patches = self.state.model.place.parameter(count * spec.unit, spec.patch_values)
            values = vision_values(spec, grids, patches, np.zeros(count, dtype=np.int64))
            yield self._decide("vision", values, _counted(len({part.item for part in parts}), "image or video"))

    def _decide(self, phase: str, values: Mapping[str, Any], content: str) -> Pass:
        runner = self._deciders[phase]
        batch = runner.phase.arena.admit(values)
        decision = runner.decide(batch)
        rows = batch.sizes[runner.phase.rows]
        reason = decision.reason.value + (f" ({decision.detail})" if decision.detail else "")
        return Pass(
            phase=phase,
            content=content,
            rows=rows,
            bucket_rows=decision.key.capacity[runner.phase.rows] if decision.key else rows,
            tier=decision.tier,
            reason=reason,
            graph=str(decision.key) if decision.key else "",
        )


def _counted(count: int, what: str) -> str:
    plural = what.replace(" or ", "s or ") + "s"
    return f"{count} {what if count == 1 else plural}"


def _decider(runner: GraphRunner) -> GraphRunner:
    """The same phase with every bucket captured, over a body that does nothing."""
    phase = runner.phase
    empty = _empty_values(phase.arena)
    idle = replace(phase, body=lambda frame: None, example=lambda lengths, rng: empty, state={})
    decider = GraphRunner(idle, runner.settings, lane_for(torch.device("cpu")))
    decider.capture_buckets()
    return decider


def _empty_values(arena: Arena) -> dict[str, Any]:
    """A batch of no rows, which any bucket holds."""
    none = dict.fromkeys(arena.limits, 0)
    inputs = {name: buffer for name, buffer in arena.buffers.items() if buffer.role in (Role.INPUT, Role.METADATA)}
    return {
        name: torch.zeros(buffer.sized(none), dtype=buffer.dtype, device=arena.device)
        if buffer.role is Role.INPUT
        else np.zeros(buffer.sized(none), dtype=np.int64)
        for name, buffer in inputs.items()
    }
