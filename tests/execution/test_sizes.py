"""Sizes from settings alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.execution import sizes
from saccade.models.families.qwen3_vl import IMAGE, VIDEO
from saccade.models.media import ImageSettings, VideoSettings
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

LIMITS = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, encoder_budget_tokens=40)


@pytest.mark.parametrize(
    ("asked", "is_cuda", "found"), [(0, True, 128), (0, False, 16), (32, True, 32), (32, False, 32)]
)
def test_the_block_size_is_as_configured(asked: int, is_cuda: bool, found: int) -> None:
    made = sizes.state_sizes_for(EngineSettings(block_size=asked), LIMITS, is_cuda=is_cuda)
    assert (made.block_size, made.max_blocks) == (found, -(-100 // found)), "the last block of a request may be cut"


def test_there_are_blocks_for_the_configured_tokens_or_the_longest_request() -> None:
    assert sizes.wanted_blocks(EngineSettings(kv_cache_tokens=33), LIMITS, 16) == 4
    assert sizes.wanted_blocks(EngineSettings(), LIMITS, 16) == sizes.CPU_KV_TOKENS // 16 + 1
    assert sizes.wanted_blocks(EngineSettings(), replace(LIMITS, max_model_len=10**6), 16) == 10**6 // 16 + 1
    assert sizes.blocks_that_fit(sizes.HEADROOM_BYTES + 100, 9, 30) == 3


def test_without_an_encoder_cache_there_is_room_for_the_images_of_two_steps() -> None:
    kept, none = EngineSettings(encoder_cache_tokens=48), EngineSettings(encoder_cache_tokens=0)
    assert sizes.encoder_rows_for(kept, LIMITS) == 48
    assert sizes.encoder_rows_for(none, LIMITS) == 2 * 40 + sizes.PAGE_ROWS


@pytest.mark.parametrize("media", [IMAGE, VIDEO])
@pytest.mark.parametrize("name", ["patch", "temporal_patch", "merge"])
def test_patches_that_the_tower_would_misread_are_refused(media: ImageSettings | VideoSettings, name: str) -> None:
    shape = {each: getattr(media, each) for each in ("patch", "temporal_patch", "merge")}
    check(media, SimpleNamespace(**shape, grid_side=4))
    with pytest.raises(ConfigError, match=f"{name}_size of {shape[name]}, but .* {shape[name] + 1}: take both"):
        check(media, SimpleNamespace(**{**shape, name: shape[name] + 1}, grid_side=4))


def test_images_of_the_wrong_size_for_the_tower_are_refused() -> None:
    tower = SimpleNamespace(patch=IMAGE.patch, temporal_patch=IMAGE.temporal_patch, merge=IMAGE.merge, grid_side=4)
    side = 4 * IMAGE.patch
    check(replace(IMAGE, fixed_size=(side, side)), tower)
    with pytest.raises(ConfigError, match=f"resize images to {side}x{side + 1} pixels, but .* takes {side}x{side}"):
        check(replace(IMAGE, fixed_size=(side, side + 1)), tower)


def check(media: ImageSettings | VideoSettings, tower: Any) -> None:
    images = media if isinstance(media, ImageSettings) else None
    videos = media if isinstance(media, VideoSettings) else None
    sizes.executor_settings_for(EngineSettings(), LIMITS, images, videos, tower, is_cuda=False)
