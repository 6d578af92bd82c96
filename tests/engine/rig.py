"""Builds an engine for a tiny checkpoint, and gets the same answers from transformers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from saccade.cache.encoder import EncoderIndex
from saccade.config import Mode, Tier
from saccade.execution.assembly import new_engine, new_executor
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.state import StateSizes
from saccade.inputs.media.images import digest_pixels
from saccade.inputs.media_settings import read_image_settings, read_placeholder_settings
from saccade.inputs.placeholders import Media, Prompt, place_media, text_prompt
from saccade.inputs.plans import plan_image
from saccade.kernels.reference_images import resize_patchify
from saccade.models.media import ImageSettings
from saccade.models.vlm import Model
from saccade.scheduling.buckets import PART_UNITS
from saccade.scheduling.engine import Engine
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Update
from tests.models.markers import END, IMAGE, START

if TYPE_CHECKING:
    from tests.models.tiny import Tiny

MAX_STEPS = 3000
MARGIN = 1e-5  # of logits; summing float32 in another order changes those of tiny models by a few 1e-6
PAGE_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    mode: Mode | None = None
    prefill_chunk: int = 0
    has_prefix_cache: bool = False
    num_blocks: int = 120
    block_size: int = 8
    max_num_seqs: int = 20
    max_tokens: int = 96
    max_model_len: int = 256
    max_units: int = 64
    part_units: int = PART_UNITS
    strict: bool = False
    has_few_buckets: bool = True  # the default on a CPU, where capturing takes longer than running
    vision_tiers: frozenset[Tier] = frozenset({Tier.CAPACITY})


def build(model: Model, folder: Path, options: Options) -> Engine:
    images = image_settings(folder) if model.spec.vision is not None else None
    sizes = StateSizes(
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_blocks=-(-options.max_model_len // options.block_size),
        max_sequences=options.max_num_seqs,
        num_vision_rows=512,
    )
    modes = {"prefill": options.mode, "decode": options.mode, "vision": options.mode}
    settings = ExecutorSettings(
        max_tokens=options.max_tokens,
        max_units=options.max_units,
        part_units=options.part_units,
        page_rows=PAGE_ROWS,
        images=images,
        videos=None,
        modes=modes,
        strict=options.strict,
        has_few_buckets=options.has_few_buckets,
        vision_tiers=options.vision_tiers,
    )
    executor = new_executor(model, sizes, settings)
    executor.capture()
    limits = SchedulerSettings(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_tokens,
        max_model_len=options.max_model_len,
        prefill_chunk_tokens=options.prefill_chunk,
        encoder_budget_tokens=options.max_units,
    )
    fingerprint = b"tiny" if options.has_prefix_cache else None
    return new_engine(executor, limits, EncoderIndex(512, PAGE_ROWS), fingerprint=fingerprint)


def executor_of(engine: Engine) -> DeviceExecutor:
    assert isinstance(engine.executor, DeviceExecutor), "its executor is not a DeviceExecutor"
    return engine.executor


@dataclass
class Answer:
    token_ids: list[int]
    updates: list[Update]

    @property
    def finish(self) -> Any:
        return self.updates[-1].finish


def run(
    engine: Engine, prompts: dict[str, Prompt], params: SamplingParams | dict[str, SamplingParams]
) -> dict[str, Answer]:
    """Runs all prompts at once. Each must end exactly once, and nothing may be left over."""
    names: list[str] = []
    for name, prompt in prompts.items():
        names += engine.add(name, prompt, params[name] if isinstance(params, dict) else params)
    return finish(engine, names)


def finish(engine: Engine, names: list[str]) -> dict[str, Answer]:
    answers = {name: Answer([], []) for name in names}
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        for update in engine.step():
            assert not answers[update.request_id].updates or answers[update.request_id].finish is None
            answers[update.request_id].updates.append(update)
            answers[update.request_id].token_ids += update.token_ids
    assert not engine.has_work
    engine.scheduler.check()
    assert engine.scheduler.stats().kv_usage == 0
    assert all(answer.finish is not None for answer in answers.values())
    return answers


def image_settings(folder: Path) -> ImageSettings:
    config = json.loads((folder / "config.json").read_text())
    patch = config["vision_config"]["patch_size"]
    size = {"shortest_edge": 64, "longest_edge": 1200}
    raw = {"patch_size": patch, "size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if config["model_type"] == "gemma3":
        side = config["vision_config"]["image_size"]
        raw["size"] = {"height": side, "width": side}
    (folder / "preprocessor_config.json").write_text(json.dumps(raw))
    settings = read_image_settings(folder)
    assert settings is not None
    return settings


def random_prompt(tiny: "Tiny", rng: np.random.Generator, num_images: int = 0, length: int = 0) -> Prompt:
    """Random text with images at random places."""
    length = length or int(rng.integers(1, 40))
    ids = rng.integers(3, 99, length).tolist()
    if not num_images:
        return text_prompt(ids)
    images, placeholders = image_settings(tiny.folder), read_placeholder_settings(tiny.folder)
    assert placeholders is not None
    media = []
    for _ in range(num_images):
        height, width = (int(side) for side in rng.integers(8, 40, 2))
        pixels = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
        media.append(
            Media("image", pixels, plan_image(height, width, images), digest_pixels(pixels, images.fingerprint))
        )
    places = sorted(rng.integers(0, length + 1, num_images).tolist(), reverse=True)
    for place in places:
        ids[place:place] = [START, IMAGE, END]
    return place_media(ids, media, placeholders)


def oracle_inputs(tiny: "Tiny", prompt: Prompt) -> dict[str, Any]:
    """The inputs of transformers for a prompt."""
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(prompt.token_ids.astype(np.int64))[None]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if not prompt.media:
        return inputs
    is_gemma = "gemma" in tiny.name
    settings = image_settings(tiny.folder)
    settings = replace(settings, merge=1) if is_gemma else settings
    patches = [
        resize_patchify(torch.from_numpy(media.pixels.copy()), media.plan.size_hw, settings) for media in prompt.media
    ]
    types = torch.from_numpy((prompt.token_ids == IMAGE).astype(np.int64))[None]
    if is_gemma:
        assert settings.fixed_size is not None
        height, width = settings.fixed_size
        cells = (height // settings.patch, width // settings.patch, 3, settings.patch, settings.patch)
        images = [p.view(cells).permute(2, 0, 3, 1, 4).reshape(3, height, width) for p in patches]
        return {**inputs, "pixel_values": torch.stack(images), "token_type_ids": types}
    grids = torch.tensor([media.plan.grid_thw for media in prompt.media])
    return {**inputs, "pixel_values": torch.cat(patches), "image_grid_thw": grids, "mm_token_type_ids": types}


@torch.no_grad()
def oracle_vectors(tiny: "Tiny", prompt: Prompt, token_ids: Sequence[int]) -> dict[str, Any]:
    """The vectors of transformers by pooling: hidden states after the final norm, and logits of the last token."""
    hidden_TD = tiny.oracle.model(**oracle_inputs(tiny, prompt)).last_hidden_state[0]
    logits_TV = tiny.oracle(**oracle_inputs(tiny, prompt)).logits[0]
    found = {"last": hidden_TD[-1], "mean": hidden_TD.mean(dim=0), "logits": logits_TV[-1, list(token_ids)]}
    return {name: vector.numpy() for name, vector in found.items()}


def pooled_params(token_ids: Sequence[int]) -> dict[str, SamplingParams]:
    """Parameters that ask for those vectors, by pooling."""
    logits = SamplingParams(max_tokens=0, pooling="logits", pooled_token_ids=token_ids)
    return {"logits": logits} | {name: SamplingParams(max_tokens=0, pooling=name) for name in ("last", "mean")}


def vector_of(answer: Answer) -> Any:
    vector = answer.updates[-1].pooled
    assert vector is not None and vector.dtype == np.float32
    return vector


def oracle_tokens(tiny: "Tiny", prompt: Prompt, max_tokens: int) -> list[int]:
    """The greedy tokens of transformers. Each must win by more than rounding may differ between CPUs and shapes; a test
    whose prompt has a closer race must draw another one."""
    inputs = oracle_inputs(tiny, prompt)
    with torch.no_grad():
        out = tiny.oracle.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(out.logits).topk(2).values
    margin = float((best[:, 0] - best[:, 1]).min())
    assert margin > MARGIN, f"the likeliest two tokens of a step differ by {margin:.1e}; use another seed"
    found: list[int] = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return found
