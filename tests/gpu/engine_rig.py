"""Engines for a model with random weights, and traffic for them: texts and images of random sizes."""

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from saccade.cache.encoder import EncoderIndex
from saccade.choice.key import Decision
from saccade.config import Mode
from saccade.execution import assembly
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.state import StateSizes
from saccade.graphs import Capacity, GraphRunner, Phase
from saccade.inputs.media.images import digest_pixels
from saccade.inputs.media_settings import PlaceholderSettings
from saccade.inputs.placeholders import Media, Prompt, place_media, text_prompt
from saccade.inputs.plans import plan_image
from saccade.models.media import ImageSettings
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from saccade.scheduling.engine import Engine
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Finish, Update

Result = TypeVar("Result")
Rng = np.random.Generator

PAGE_ROWS = 16
PHASES = ("vision", "prefill", "decode", "head", "sampler")
FIRST_TEXT_ID, LAST_TEXT_ID = 10, 40000
MAX_STEPS = 20000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of an engine under test, small enough that few graphs have to be captured."""

    max_num_seqs: int = 48
    max_tokens: int = 2048
    max_model_len: int = 2048
    max_units: int = 1024
    encoder_rows: int = 4096
    kv_tokens: int = 65536
    block_size: int = 128
    bucket_stride: int = 3  # captures every third size of a real engine, and the largest


SERVING = Sizes(
    max_num_seqs=256, max_tokens=8192, max_model_len=8192, max_units=8192, encoder_rows=16384, bucket_stride=1
)
WAYS: dict[str, Mode | None] = {"full": Mode.FULL, "piecewise": Mode.PIECEWISE, "eager": None}


class PaddedEager(GraphRunner):
    """Runs every batch eagerly, padded to the bucket whose graph would be replayed.

    A matrix product of other shapes may add up in another order, so only a run of the same padded shapes can be
    expected to give the same bits as a replay.
    """

    def run(self, values: Mapping[str, Any], consume: Callable[[Mapping[str, torch.Tensor]], Result]) -> Result:
        return self.eager(values, consume)

    def obey(
        self,
        decision: Decision | None,
        values: Mapping[str, Any],
        consume: Callable[[Mapping[str, torch.Tensor]], Result],
    ) -> Result:
        return self.eager(values, consume)

    def eager(
        self,
        values: Mapping[str, Any],
        consume: Callable[[Mapping[str, torch.Tensor]], Result],
        *,
        at: Capacity | None = None,
        poison: bool = False,
    ) -> Result:
        bucket = at or self.catalogue.shape.bucket_for(self.phase.arena.admit(values).sizes)
        assert bucket is not None, f"no bucket of {self.phase.name} holds this batch"
        return super().eager(values, consume, at=bucket, poison=poison)


def dummy_model(config: Mapping[str, Any], folder: Path, *, device: str, dtype: torch.dtype) -> Model:
    """`SACCADE_TEST_LAYERS=n` keeps only n decoder layers."""
    text = dict(config["text_config"])
    text["num_hidden_layers"] = int(os.environ.get("SACCADE_TEST_LAYERS") or text["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
    return load_model(folder, device=device, dtype=dtype, load_format="dummy")


def used_bytes() -> int:
    """Memory in use on the GPU, by all processes."""
    torch.cuda.synchronize()
    free_bytes, total = torch.cuda.mem_get_info()
    return total - free_bytes


def image_settings(model: Model, *, max_pixels: int) -> ImageSettings:
    spec = model.spec.vision
    assert spec is not None
    half, side = (0.5, 0.5, 0.5), spec.grid_side * spec.patch
    return ImageSettings(
        patch=spec.patch,
        temporal_patch=spec.temporal_patch,
        merge=spec.merge,
        mean=half,
        std=half,
        resample="bicubic",
        min_pixels=4 * (spec.patch * spec.merge) ** 2,
        max_pixels=max_pixels,
        fixed_size=(side, side) if model.spec.sees_whole_image else None,
    )


def new_runner(model: Model, sizes: Sizes, way: str, *, num_blocks: int | None = None) -> DeviceExecutor:
    """An executor without captures. With graphs, a step that is not replayed is an error."""
    spec = model.spec.vision
    assert spec is not None
    state_sizes = StateSizes(
        num_blocks=num_blocks or sizes.kv_tokens // sizes.block_size + 1,
        block_size=sizes.block_size,
        max_blocks=-(-sizes.max_model_len // sizes.block_size),
        max_sequences=sizes.max_num_seqs,
        num_vision_rows=sizes.encoder_rows,
    )
    mode = WAYS[way]
    settings = ExecutorSettings(
        max_tokens=sizes.max_tokens,
        max_units=sizes.max_units,
        page_rows=PAGE_ROWS,
        images=image_settings(model, max_pixels=sizes.max_units * (spec.patch * spec.merge) ** 2),
        videos=None,
        modes={"vision": mode, "prefill": mode, "decode": mode},
        strict=mode is not None,
    )
    runner = assembly.new_executor(model, state_sizes, settings)
    for name in PHASES:
        found: GraphRunner = getattr(runner, name)
        phase = replace(found.phase, buckets=_thinned(found.phase, sizes.bucket_stride))
        thin = GraphRunner(phase, found.settings, found.lane)
        if name == "vision":
            assert runner.encoder is not None
            runner.encoder.graphs = thin
        else:
            setattr(runner, name, thin)
    return runner


def _thinned(phase: Phase, stride: int) -> tuple[Capacity, ...]:
    sizes = sorted({bucket[phase.rows] for bucket in phase.buckets})
    kept = {*sizes[::stride], sizes[-1]}
    return tuple(bucket for bucket in phase.buckets if bucket[phase.rows] in kept)


def new_engine(runner: DeviceExecutor, sizes: Sizes, *, has_prefix_cache: bool = False) -> Engine:
    limits = SchedulerSettings(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_tokens,
        max_model_len=sizes.max_model_len,
        encoder_budget_tokens=sizes.max_units,
    )
    encoder = EncoderIndex(sizes.encoder_rows, PAGE_ROWS)
    return assembly.new_engine(runner, limits, encoder, fingerprint=b"dummy" if has_prefix_cache else None)


def random_prompt(runner: DeviceExecutor, rng: Rng, num_tokens: int, num_images: int, longest_side: int) -> Prompt:
    """Text with images somewhere inside; the images' rows come on top of `num_tokens`."""
    model = runner.state.model
    image_id = model.spec.decoder.vocab_size - 1
    ids: list[int] = rng.integers(FIRST_TEXT_ID, min(LAST_TEXT_ID, image_id), num_tokens).tolist()
    if not num_images:
        return text_prompt(ids)
    images = runner.settings.images
    assert images is not None
    media = []
    for _ in range(num_images):
        height, width = (int(side) for side in rng.integers(images.patch, longest_side + 1, 2))
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        plan = plan_image(height, width, images)
        media.append(Media("image", pixels, plan, digest_pixels(pixels, images.fingerprint)))
    for place in sorted(rng.integers(0, num_tokens + 1, num_images).tolist(), reverse=True):
        ids.insert(place, image_id)
    return place_media(ids, media, _placeholders(model, image_id))


def _placeholders(model: Model, image_id: int) -> PlaceholderSettings:
    assert model.spec.vision is not None
    return PlaceholderSettings(
        image_marker="<|image_pad|>",
        image_text="<|image_pad|>",
        image_token_id=image_id,
        video_marker=None,
        video_text=None,
        video_token_id=None,
        has_timestamps=True,
        is_mrope=not model.spec.sees_whole_image,
        is_bidirectional=model.spec.sees_whole_image,
        merge=model.spec.vision.merge,
        tokens_per_second=None,
    )


@dataclass(frozen=True)
class Job:
    """A request that arrives after `step` steps of the engine."""

    step: int
    name: str
    prompt: Prompt
    params: SamplingParams


@dataclass
class Answer:
    """The tokens of a request, and for each position the likeliest tokens with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, update: Update) -> None:
        assert self.finish is None, "an update after the end"
        self.tokens += update.token_ids
        if update.scores is not None:
            ids, logprobs = update.scores.top_ids[0].tolist(), update.scores.top_logprobs[0].tolist()
            self.likeliest.append(dict(zip(ids, logprobs, strict=True)))
        self.finish = update.finish


def drive(engine: Engine, jobs: Sequence[Job]) -> dict[str, Answer]:
    """Run all jobs to the end. Steps depend on lengths and arrivals only, so all modes get the same batches."""
    waiting = sorted(jobs, key=lambda job: job.step)
    answers = {job.name: Answer() for job in jobs}
    for step in range(MAX_STEPS):
        while waiting and waiting[0].step <= step:
            job = waiting.pop(0)
            engine.add(job.name, job.prompt, job.params)
        for update in engine.step():
            answers[update.request_id].take(update)
        if not waiting and not engine.has_work:
            return answers
    raise AssertionError(f"not done after {MAX_STEPS} steps")


def greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def few_buckets(runner: GraphRunner, count: int) -> tuple[Capacity, ...]:
    """The smallest bucket, the largest, and some in between."""
    buckets = sorted(runner.phase.buckets, key=lambda bucket: bucket[runner.phase.rows])
    last = len(buckets) - 1
    return tuple(buckets[i] for i in sorted({round(i * last / max(count - 1, 1)) for i in range(count)}))


def with_buckets(runner: GraphRunner, *buckets: Capacity, kind: type[GraphRunner] = GraphRunner) -> GraphRunner:
    """The same phase with only these buckets, in its own pool."""
    return kind(replace(runner.phase, buckets=buckets), runner.settings)
