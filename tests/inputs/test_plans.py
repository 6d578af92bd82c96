import ast
import inspect
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as reference_video_resize

from saccade.errors import ConfigError, RequestError
from saccade.inputs.media.sampling import sample_frames
from saccade.inputs.media_settings import read_image_settings, read_placeholder_settings, read_video_settings
from saccade.inputs.plans import plan_image, plan_video, smart_resize, smart_resize_video
from saccade.models.media import ImageSettings, VideoSettings
from tests.inputs import oracles


def random_sizes(seed: int, count: int) -> list[tuple[int, int]]:
    """Sizes from 1:20 to 20:1, small and large."""
    rng = np.random.default_rng(seed)
    sizes = []
    for _ in range(count):
        area = 10 ** rng.uniform(2, 7)
        ratio = 20 ** rng.uniform(-1, 1)
        sizes.append((max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))))
    return sizes


@pytest.mark.parametrize("factor", [28, 32])
def test_image_sizes_equal_transformers(factor: int) -> None:
    bounds = [(56 * 56, 28 * 28 * 1280), (65536, 16777216), (3136, 12845056), (4096, 65536)]
    for height, width in [*random_sizes(factor, 500), (1, 1), (1, 200), (200, 1), (factor, factor), (14, 14), (48, 80)]:
        for low, high in bounds:
            expected = reference_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
            assert smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high) == expected


def test_halves_round_to_even() -> None:
    size = smart_resize(28 * 10 + 14, 28 * 11 + 14, factor=28, min_pixels=1, max_pixels=10**9)
    assert size == (280, 336)


def test_narrow_images_are_refused() -> None:
    with pytest.raises(RequestError, match="200 times"):
        smart_resize(1, 201, factor=28, min_pixels=1, max_pixels=10**9)
    with pytest.raises(RequestError, match="200 times"):
        smart_resize_video(4, 10000, 49, temporal=2, factor=28, min_pixels=1, max_pixels=10**9)


def test_video_sizes_equal_transformers() -> None:
    rng = np.random.default_rng(3)
    for height, width in random_sizes(4, 400):
        frames = int(rng.integers(2, 200))
        bounds = {"min_pixels": int(rng.integers(1, 2**20)), "max_pixels": int(rng.integers(2**20, 2**26))}
        expected = reference_video_resize(frames, height, width, temporal_factor=2, factor=32, **bounds)
        assert smart_resize_video(frames, height, width, temporal=2, factor=32, **bounds) == expected


def test_qwen3_sampling_equals_transformers(folders: dict[str, Path]) -> None:
    settings = read_video_settings(folders["qwen3_vl"])
    assert settings is not None
    reference = oracles.video_class("qwen3_vl").sample_frames
    rng = np.random.default_rng(5)
    for _ in range(300):
        total, fps = int(rng.integers(1, 3000)), float(rng.choice([1, 2, 3.3, 23.976, 24, 30, 60]))
        bounds: dict[str, Any] = {"min_frames": int(rng.integers(1, 6)), "max_frames": int(rng.integers(6, 800))}
        stand_in = SimpleNamespace(fps=2, num_frames=None, **bounds)
        expected = reference(stand_in, SimpleNamespace(total_num_frames=total, fps=fps), fps=2)
        assert sample_frames(total, fps, replace(settings, **bounds)) == tuple(expected.tolist())


def test_qwen2_5_sampling_equals_transformers(folders: dict[str, Path]) -> None:
    settings = read_video_settings(folders["qwen2_5_vl"])
    assert settings is not None
    reference = oracles.video_class("qwen2_5_vl").sample_frames
    rng = np.random.default_rng(6)
    for _ in range(300):
        total, fps = int(rng.integers(4, 3000)), float(rng.choice([1, 2, 3.3, 23.976, 24, 30]))
        wanted: dict[str, Any] = {"fps": float(rng.choice([0.5, 1, 2, 3])), "num_frames": None}
        if rng.random() < 0.3:
            wanted = {"fps": None, "num_frames": int(rng.integers(2, max(3, total // 2)))}
        bounds: dict[str, Any] = {"min_frames": 4, "max_frames": int(rng.integers(6, 800))}
        if wanted["num_frames"] is not None:
            bounds["max_frames"] = 10**6  # transformers does not bound a given count; Saccade does
        stand_in = SimpleNamespace(fps=None, num_frames=None, temporal_patch_size=2, **bounds)
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        expected = reference(stand_in, metadata, **wanted).tolist()
        found = sample_frames(total, fps, replace(settings, is_sampled=True, **wanted, **bounds))
        assert found == tuple(min(index, total - 1) for index in expected)


def test_unsampled_videos_are_capped(folders: dict[str, Path]) -> None:
    settings = read_video_settings(folders["qwen2_5_vl"])
    assert settings is not None and not settings.is_sampled
    assert sample_frames(768, 24.0, settings) == tuple(range(768))
    with pytest.raises(RequestError, match="769 frames; the limit is 768"):
        sample_frames(769, 24.0, settings)


def test_short_videos_are_padded_to_a_temporal_patch(folders: dict[str, Path]) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        settings = read_video_settings(folders[family])
        assert settings is not None
        plan = plan_video(1, 60, 80, 2.0, settings)
        assert plan.frames == (0, 0) and plan.grid_thw[0] == 1 and len(plan.timestamps) == 1
        plan = plan_video(5, 60, 80, 2.0, settings)
        assert plan.frames == (0, 1, 2, 3, 4, 4) and plan.grid_thw[0] == 3
        assert plan.timestamps == (0.25, 1.25, 2.0)


def test_a_single_frame_gets_no_more_pixels_than_two(folders: dict[str, Path]) -> None:
    """Because it is padded to two."""
    settings = read_video_settings(folders["qwen3_vl"])
    assert settings is not None and settings.budget == "video"
    for is_capped in (False, True):
        one, two = (plan_video(n, 3000, 4000, 2.0, replace(settings, is_capped=is_capped)) for n in (1, 2))
        assert one.size_hw == two.size_hw and one.num_tokens == two.num_tokens


def test_videos_shorter_than_a_temporal_patch_keep_all_frames(folders: dict[str, Path]) -> None:
    settings = read_video_settings(folders["qwen2_5_vl"])
    assert settings is not None
    sampled = replace(settings, is_sampled=True)
    assert sample_frames(1, 24.0, sampled) == (0,)
    assert sample_frames(3, 24.0, replace(sampled, fps=None, num_frames=1)) == (0, 1, 2)
    assert sample_frames(9, 24.0, replace(sampled, max_frames=1)) == (0,)


def test_without_a_rate_all_frames_are_used(folders: dict[str, Path]) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        settings = read_video_settings(folders[family])
        assert settings is not None
        every = replace(settings, is_sampled=True, fps=None, num_frames=None, max_frames=8)
        assert sample_frames(8, 24.0, every) == tuple(range(8)) and len(sample_frames(100, 24.0, every)) == 8


def test_frame_cap_equals_transformers(folders: dict[str, Path]) -> None:
    """Checkpoints may turn on cap_pixels_per_frame."""
    rng = np.random.default_rng(7)
    for family in ("qwen2_5_vl", "qwen3_vl"):
        settings = read_video_settings(folders[family])
        assert settings is not None
        settings = replace(settings, is_capped=True, is_sampled=False, max_video_tokens=40, max_frames=10**4)
        for height, width in random_sizes(8, 100):
            frames = int(rng.integers(2, 100))
            expected = _reference_capped(settings, frames, height, width)
            assert plan_video(frames, height, width, 2.0, settings).size_hw == expected


def _reference_capped(settings: VideoSettings, frames: int, height: int, width: int) -> tuple[int, int]:
    """The size that transformers' `resize` asks its base class for."""
    from transformers.video_processing_utils import BaseVideoProcessor

    kind = oracles.video_class("qwen2_5_vl" if settings.budget == "frame" else "qwen3_vl")
    asked: list[Any] = []
    instance = kind()
    instance.max_video_tokens = settings.max_video_tokens
    with mock.patch.object(BaseVideoProcessor, "resize", lambda self, image, size, **_: asked.append(size)):
        instance.resize(
            np.broadcast_to(np.uint8(0), (1, frames, 3, height, width)),
            SimpleNamespace(shortest_edge=settings.min_pixels, longest_edge=settings.max_pixels),
            3,
            factor=settings.patch * settings.merge,
            temporal_factor=2,
            cap_pixels_per_frame=True,
        )
    return asked[0].height, asked[0].width


def test_image_plan_counts(folders: dict[str, Path]) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        settings = read_image_settings(folders[family])
        assert settings is not None
        reference = oracles.image_processor(folders[family])
        for height, width in random_sizes(9, 200):
            plan = plan_image(height, width, settings)
            assert plan.num_patches == reference.get_number_of_image_patches(height, width)
            assert plan.num_tokens * 4 == plan.num_patches == math.prod(plan.grid_thw)
            assert (plan.grid_thw[1] * settings.patch, plan.grid_thw[2] * settings.patch) == plan.size_hw


def test_fixed_size_plan(folders: dict[str, Path]) -> None:
    settings = read_image_settings(folders["gemma3"])
    assert settings is not None and settings.resample == "bilinear"
    plan = plan_image(1000, 30, settings)
    assert (plan.size_hw, plan.grid_thw, plan.num_patches, plan.num_tokens) == ((56, 56), (1, 4, 4), 16, 4)


def test_defaults_equal_transformers(tmp_path: Path) -> None:
    for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        (tmp_path / "preprocessor_config.json").write_text("{}")
        image = read_image_settings(tmp_path)
        video = read_video_settings(tmp_path)
        assert image is not None and video is not None
        _compare_defaults(Qwen2VLImageProcessorPil, image)
        kind = oracles.video_class(model_type)
        _compare_defaults(kind, video)
        assert (video.min_frames, video.max_frames) == (kind.min_frames, kind.max_frames)
        assert (video.is_sampled, video.max_video_tokens) == (kind.do_sample_frames, kind.max_video_tokens)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_a_config_without_a_model_type_is_read_as_its_architecture_says(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    readers: Any = (read_image_settings, read_video_settings, read_placeholder_settings)
    expected = [read(folder) for read in readers]
    assert expected[0] is not None and expected[2] is not None
    for other in ({}, {"model_type": "qwen3"}):
        kept = {key: value for key, value in config.items() if key != "model_type"} | other
        (folder / "config.json").write_text(json.dumps(kept))
        assert [read(folder) for read in readers] == expected


def _compare_defaults(kind: Any, settings: ImageSettings | VideoSettings) -> None:
    sizes = _class_size(kind)
    assert (settings.min_pixels, settings.max_pixels) == (sizes["shortest_edge"], sizes["longest_edge"])
    assert (settings.patch, settings.merge, settings.temporal_patch) == (
        kind.patch_size,
        kind.merge_size,
        kind.temporal_patch_size,
    )
    assert settings.mean == pytest.approx(kind.image_mean) and settings.std == pytest.approx(kind.image_std)


def _class_size(kind: Any) -> dict[str, int]:
    """The `size` in the class's source, because instances with other settings change the shared dictionary."""
    tree = ast.parse(inspect.getsource(kind))
    value = next(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") == "size"
        and isinstance(node.value, ast.Dict)
    )
    found: dict[str, int] = eval(compile(ast.Expression(value), "size", "eval"), {})
    return found


def test_settings_from_a_nested_processor_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 99}')
    (tmp_path / "processor_config.json").write_text(
        '{"image_processor": {"patch_size": 16, "size": {"shortest_edge": 7, "longest_edge": 9999}},'
        ' "video_processor": {"patch_size": 18, "fps": 1, "max_frames": 10}}'
    )
    image, video = read_image_settings(tmp_path), read_video_settings(tmp_path)
    assert image is not None and (image.patch, image.min_pixels, image.max_pixels) == (16, 7, 9999)
    assert video is not None and (video.patch, video.fps, video.max_frames) == (18, 1, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"resample": 5}', "resample 5 is not supported"),
        ('{"rescale_factor": 1}', "rescale_factor 1 is not supported"),
        ('{"image_mean": [1, 2]}', "must be three numbers"),
        ('{"do_pan_and_scan": true}', "do_pan_and_scan is on"),
        ('{"do_normalize": false}', "do_normalize is off"),
        ('{"do_rescale": null}', "do_rescale is off"),
        ('{"do_resize": false}', "do_resize is off"),
        ('{"size": {"shortest_edge": 896}}', "size {'shortest_edge': 896} is not supported; height and width are"),
        ('{"size": {"height": 896, "width": null}}', "height and width are"),
        ('{"size": "896"}', "size '896' is not supported"),
        ("[1]", "a JSON object was expected"),
        ("{", "not valid JSON"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_image_settings(tmp_path)


@pytest.mark.parametrize("size", ["{}", "448", '{"height": 448, "width": 448}', '{"longest_edge": 9999}'])
def test_a_size_without_pixel_bounds_is_refused_as_in_transformers(tmp_path: Path, size: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "preprocessor_config.json").write_text(f'{{"size": {size}}}')
    for read in (read_image_settings, read_video_settings):
        with pytest.raises(ConfigError, match="shortest_edge and longest_edge are"):
            read(tmp_path)
    with pytest.raises(ValueError, match="shortest_edge"):
        oracles.image_processor(tmp_path)(images=[np.zeros((64, 64, 3), np.uint8)])


@pytest.mark.parametrize("raw", [{"size": 28}, {}, {"size": {"height": 28, "width": 42}}])
def test_fixed_sizes_equal_transformers(tmp_path: Path, raw: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {"image_size": 56}}')
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw))
    settings = read_image_settings(tmp_path)
    made = oracles.image_processor(tmp_path)(images=[np.zeros((9, 9, 3), np.uint8)], return_tensors="np")
    assert settings is not None and settings.fixed_size == made["pixel_values"].shape[-2:]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_vision_model_without_its_processor_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json; .* or processor_config\.json"):
        read_image_settings(tmp_path)


def test_text_models_take_no_images(folders: dict[str, Path], tmp_path: Path) -> None:
    assert read_image_settings(folders["qwen3"]) is None
    assert read_video_settings(folders["gemma3"]) is None
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_image_settings(tmp_path)


SIZE = {"shortest_edge": 70_000, "longest_edge": 900_000}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("bounds", [{"size": SIZE}, {"size": SIZE, "min_pixels": 5000, "max_pixels": 50_000}])
def test_bounds_of_videos_match_transformers(
    folders: dict[str, Path], tmp_path: Path, family: str, bounds: dict[str, Any]
) -> None:
    """Qwen3-VL's processor reads only `size`, Qwen2.5-VL's prefers min_pixels and max_pixels."""
    shutil.copytree(folders[family], tmp_path, dirs_exist_ok=True)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(bounds))
    settings = read_video_settings(tmp_path)
    with oracles.without_torchvision():
        theirs = oracles.video_class(family)(**json.loads(json.dumps(bounds))).size
    assert settings is not None
    assert (settings.min_pixels, settings.max_pixels) == (theirs["shortest_edge"], theirs["longest_edge"])
