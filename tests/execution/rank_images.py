"""Compares engines of several ranks, which each encode their own images, with an engine of one rank.

Here every rank schedules and composes for itself, with the same outcome. Tested is what the ranks execute together.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from saccade.choice.key import Reason
from saccade.config import Tier
from saccade.errors import GraphError
from saccade.execution.assembly import new_engine
from saccade.execution.build import build_executor
from saccade.execution.ranks import check_ranks
from saccade.execution.sizes import encoder_index_for
from saccade.inputs.media.images import digest_pixels
from saccade.inputs.media_settings import read_image_settings, read_placeholder_settings
from saccade.inputs.placeholders import Media, Prompt, place_media
from saccade.inputs.plans import MediaPlan, plan_image
from saccade.layers.parallel import Groups
from saccade.scheduling.compose import VisionComposer
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import Encode
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import StartEngine
from saccade.wire.sampling_params import SamplingParams
from tests.engine.rig import executor_of, run
from tests.models.markers import END, IMAGE, START, VIDEO
from tests.models.rank_families import CONFIGS, written

CPU = torch.device("cpu")
MODEL_TYPES = {"gemma3_vl": "gemma3"}
TOWERS = ("gemma3_vl", "qwen2_5_vl", "qwen3_vl")  # qwen3_vl_moe has the tower of qwen3_vl
HOW = {"qwen3_vl": "short"}  # only one is verified, because that takes longest
LIMITS = SchedulerSettings(
    max_num_seqs=6, max_num_batched_tokens=128, max_model_len=192, encoder_budget_tokens=96, prefill_chunk_tokens=50
)
SETTINGS = EngineSettings(
    device="cpu",
    load_format="dummy",
    mm_encoder_tp_mode="data",
    kv_cache_tokens=2048,
    encoder_cache_tokens=512,
    enable_prefix_caching=False,
)
ALONE = Groups()
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=20)
CLOSE = 1e-4

Answers = dict[str, tuple[list[int], list[dict[int, float]]]]


@contextmanager
def checkpoint(name: str) -> Iterator[Path]:
    with written(name) as folder:
        config = CONFIGS[name] | {"model_type": MODEL_TYPES.get(name, name)}
        (folder / "config.json").write_text(json.dumps(config))
        raw: dict[str, Any] = {"patch_size": 4, "min_pixels": 64, "max_pixels": 2400, "image_mean": [0.5] * 3}
        if name == "gemma3_vl":
            raw["size"] = {"height": 32, "width": 32}
        (folder / "preprocessor_config.json").write_text(json.dumps(raw | {"image_std": [0.5] * 3}))
        yield folder


def engine_of(folder: Path, settings: EngineSettings, groups: Groups) -> Engine:
    settings = replace(settings, tensor_parallel_size=groups.language.size)
    executor, resolved = build_executor(StartEngine(str(folder), settings, LIMITS), CPU, groups)
    return new_engine(executor, resolved.limits, encoder_index_for(resolved.settings, resolved.limits))


def image(folder: Path, rng: np.random.Generator, height: int = 0, width: int = 0) -> Media:
    settings = read_image_settings(folder)
    assert settings is not None
    high, wide = height or int(rng.integers(8, 60)), width or int(rng.integers(8, 40))
    pixels = rng.integers(0, 256, (high, wide, 3)).astype(np.uint8)
    return Media("image", pixels, plan_image(high, wide, settings), digest_pixels(pixels, settings.fingerprint))


def video(rng: np.random.Generator, steps: int, down: int, across: int) -> Media:
    pixels = rng.integers(0, 256, (2 * steps, 8 * down, 8 * across, 3)).astype(np.uint8)
    grid, tokens = (steps, 2 * down, 2 * across), steps * down * across
    plan = MediaPlan((8 * down, 8 * across), grid, 4 * tokens, tokens, second_per_grid=1.0)
    return Media("video", pixels, plan, digest_pixels(pixels, b"video"))


def prompt(folder: Path, rng: np.random.Generator, *media: Media) -> Prompt:
    settings = read_placeholder_settings(folder)
    assert settings is not None
    ids: list[int] = rng.integers(3, 99, 5).tolist()
    for one in media:
        count = one.plan.grid_thw[0] if one.kind == "video" and settings.has_timestamps else 1
        ids += [START, *[IMAGE if one.kind == "image" else VIDEO] * count, END, *rng.integers(3, 99, 3).tolist()]
    return place_media(ids, media, settings)


def waves(folder: Path, seed: int) -> list[dict[str, Prompt]]:
    """One image; images of different sizes from several requests; a video with images, some of them seen before."""
    rng = np.random.default_rng(seed)
    has_videos = "gemma" not in json.loads((folder / "config.json").read_text())["model_type"]
    first = image(folder, rng)
    counts = {"a": 1, "b": 2, "c": 1}
    several = {name: prompt(folder, rng, *(image(folder, rng) for _ in range(n))) for name, n in counts.items()}
    moving = [video(rng, 5, 2, 3)] if has_videos else [image(folder, rng)]
    return [
        {"one": prompt(folder, rng, first)},
        several | {"text": prompt(folder, rng)},
        {"moving": prompt(folder, rng, *moving), "again": prompt(folder, rng, first, image(folder, rng))},
    ]


def answers(engine: Engine, asked: list[dict[str, Prompt]]) -> Answers:
    found: Answers = {}
    for prompts in asked:
        for name, answer in run(engine, prompts, GREEDY).items():
            assert answer.finish.reason == "length", answer.finish
            scores = [update.scores for update in answer.updates if update.scores is not None]
            tops = [
                dict(zip(ids.tolist(), values.tolist(), strict=True))
                for one in scores
                for ids, values in zip(np.asarray(one.top_ids), np.asarray(one.top_logprobs), strict=True)
            ]
            found[name] = answer.token_ids, tops
    return found


def difference(actual: Answers, expected: Answers) -> float:
    """The largest difference of log-probabilities; infinite if tokens differ by more than rounding explains."""
    worst = 0.0
    for name, (tokens, tops) in expected.items():
        found, scores = actual[name]
        for token, right, ours, theirs in zip(found, tokens, scores, tops, strict=True):
            both = ours.keys() & theirs.keys()
            assert len(both) >= 19, "the least likely of twenty may change places with the next"
            worst = max(worst, *(abs(ours[one] - theirs[one]) for one in both))
            if token != right:
                if theirs[right] - theirs.get(token, -math.inf) >= CLOSE:
                    return math.inf
                break  # from here on the answers differ
    return worst


@contextmanager
def changed(change: Callable[[Encode], None]) -> Iterator[None]:
    """Passes every `Encode` order through `change`."""
    compose = VisionComposer.encode

    def call(self: VisionComposer, *args: Any) -> Encode:
        orders = compose(self, *args)
        change(orders)
        return orders

    with patch.object(VisionComposer, "encode", call):
        yield


def check_family(groups: Groups, name: str, verify: str = "off") -> None:
    """Compares answers with graphs and without."""
    with checkpoint(name) as folder:
        asked, orders = waves(folder, seed=len(name)), list[Encode]()
        expected = answers(engine_of(folder, SETTINGS, ALONE), asked)
        assert all(len(tops) == 5 and len(tops[0]) >= 20 for _, tops in expected.values())
        for is_eager in (False, True):
            engine = engine_of(folder, replace(SETTINGS, enforce_eager=is_eager, verify=verify), groups)
            graphs = executor_of(engine).vision
            assert graphs is not None
            with changed(orders.append):
                found = answers(engine, asked)
            assert difference(found, expected) < CLOSE, (difference(found, expected), found, expected)
            assert bool(graphs.stats.replays[Tier.CAPACITY]) is not is_eager
            assert graphs.selfcheck == (0 if verify == "short" and not is_eager else None)
            assert set(graphs.stats.fallbacks) == ({Reason.GRAPHS_OFF} if is_eager else set())
        busy = [[bool(one.pictures) for one in (each.vision, *each.others)] for each in orders]
        assert any(map(all, busy)) and not all(map(all, busy)), "all ranks at work, and one without images"


def check_large(groups: Groups) -> None:
    """A frame too large for any bucket, together with images that share one."""
    with checkpoint("qwen3_vl") as folder:
        rng = np.random.default_rng(1)
        large = image(folder, rng, 40, 56)
        asked = [{"a": prompt(folder, rng, large, image(folder, rng, 8, 16)), "b": prompt(folder, rng, large)}]
        settings = replace(SETTINGS, graphs="vision=capacity")
        limits = replace(LIMITS, encoder_budget_tokens=24)
        found = []
        for ranks in (ALONE, groups):
            own = replace(settings, tensor_parallel_size=ranks.language.size)
            executor, resolved = build_executor(StartEngine(str(folder), own, limits), CPU, ranks)
            engine = new_engine(executor, resolved.limits, encoder_index_for(resolved.settings, resolved.limits))
            found.append(answers(engine, asked))
            assert executor.vision is not None
            assert Reason.TOO_LARGE in executor.vision.stats.fallbacks
        assert difference(found[1], found[0]) < CLOSE


def check_mutations(groups: Groups) -> None:
    """Rows that go to the wrong place, and ranks with different rows, are noticed."""
    with checkpoint("qwen3_vl") as folder:
        asked = waves(folder, seed=3)
        expected = answers(engine_of(folder, SETTINGS, ALONE), asked)
        engine = engine_of(folder, SETTINGS, groups)

        def shift(orders: Encode) -> None:
            targets = orders.vision.values["targets"]
            targets[1] = np.roll(targets[1], 1)

        with changed(shift):
            assert difference(answers(engine, asked), expected) > 100 * CLOSE
        executor = executor_of(engine)
        assert executor.encoder is not None
        check_ranks(executor, groups)
        if groups.language.rank == 1:
            phase = executor.encoder.graphs.phase
            executor.encoder.graphs.phase = replace(phase, written=lambda values: {"other rows": torch.ones(1)})
        try:
            check_ranks(executor, groups)
        except GraphError as error:
            assert "from the same vision pass" in str(error)
        else:
            raise AssertionError("ranks that have different rows were let through")


CASES = {f"images of {name}": partial(check_family, name=name, verify=HOW.get(name, "off")) for name in TOWERS} | {
    "a frame that no bucket holds": check_large,
    "mutations": check_mutations,
}
