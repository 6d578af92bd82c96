"""Image sizes that a request asks for stay within the checkpoint's bounds and are part of the digest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.errors import RequestError
from saccade.inputs.placeholders import Prompt
from saccade.inputs.plans import plan_image
from saccade.inputs.processor import Processor
from saccade.inputs.sizing import LOW_DETAIL_PIXELS, at_details, capped, read_sizing
from saccade.inputs.text.chat_messages import find_sources
from saccade.models.media import ImageSettings
from tests.e2e.pictures import data_url, encoded, picture

KEY = "mm_processor_kwargs"


@pytest.fixture
def processor(folders: dict[str, Path]) -> Processor:
    """Bounds of 64 * 64 and 256 * 256 pixels; a token is 32 * 32."""
    return Processor.from_folder(folders["qwen3_vl"])


def asked(*urls: Any) -> list[Any]:
    parts = [{"type": "image_url", "image_url": url} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}]


def sizes(prompt: Prompt) -> list[tuple[int, int]]:
    return [media.plan.size_hw for media in prompt.media]


def settings_of(processor: Processor) -> ImageSettings:
    assert processor.images is not None
    return processor.images


def test_both_names_change_the_bounds(processor: Processor) -> None:
    checkpoint = settings_of(processor)
    expected = replace(checkpoint, min_pixels=5000, max_pixels=20000)
    for kwargs in (
        {"min_pixels": 5000, "max_pixels": 20000},
        {"size": {"shortest_edge": 5000, "longest_edge": 20000}},
        {"min_pixels": 5000.0, "size": {"longest_edge": 20000}},
        {"min_pixels": 5000, "max_pixels": 20000, "size": {"longest_edge": 20000, "shortest_edge": None}},
    ):
        assert read_sizing(kwargs, checkpoint) == expected
    assert read_sizing(None, checkpoint) is read_sizing({}, checkpoint) is checkpoint
    assert read_sizing({"size": None, "min_pixels": None, "do_resize": None}, checkpoint) == checkpoint
    assert read_sizing({"min_pixels": 5000, "max_pixels": 5000}, checkpoint) is not None


def test_images_stay_within_the_requested_bounds(processor: Processor) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        low, high = sorted(int(n) for n in rng.integers(32 * 32, 256 * 256, 2))
        wanted = read_sizing({"min_pixels": low, "max_pixels": high}, settings_of(processor))
        assert wanted is not None
        height, width = (int(n) for n in rng.integers(10, 900, 2))
        high_side, wide_side = plan_image(height, width, wanted).size_hw
        is_least = min(high_side, wide_side) == 32 or (high_side - 32) * (wide_side - 32) < low
        assert high_side * wide_side <= high or is_least, "sides are whole tokens, and a lower bound is rounded up"


def test_a_cap_below_the_lower_bound_lowers_it(processor: Processor) -> None:
    small = read_sizing({"max_pixels": 1024}, settings_of(processor))
    assert small is not None and (small.min_pixels, small.max_pixels) == (1024, 1024)
    assert plan_image(300, 300, small).num_tokens == 1


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"max_pixels": 0}, "max_pixels"),
        ({"max_pixels": -5}, "max_pixels"),
        ({"min_pixels": True}, "min_pixels"),
        ({"min_pixels": "4096"}, "min_pixels"),
        ({"max_pixels": 4096.5}, "max_pixels"),
        ({"max_pixels": [4096]}, "max_pixels"),
        ({"max_pixels": 256 * 256 + 1}, "max_pixels"),
        ({"min_pixels": 256 * 256 + 1}, "min_pixels"),
        ({"min_pixels": 5000, "max_pixels": 4999}, "min_pixels"),
        ({"size": {"longest_edge": 2**64}}, "size.longest_edge"),
        ({"size": {"shortest_edge": 0}}, "size.shortest_edge"),
        ({"size": {"height": 32, "width": 32}}, "size.height"),
        ({"size": 4096}, "size"),
        ({"max_pixels": 4096, "size": {"longest_edge": 8192}}, "size.longest_edge"),
        ({"num_frames": 4}, "num_frames"),
        ({"do_resize": False}, "do_resize"),
        ({"a b\n": 4}, ""),
        ([], ""),
        ("x", ""),
    ],
    ids=str,
)
def test_all_other_options_are_refused_by_name(processor: Processor, kwargs: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_sizing(kwargs, settings_of(processor))
    assert refused.value.param == (f"{KEY}.{param}" if param else KEY) and refused.value.status == 400


def test_the_encoder_limits_the_bounds(processor: Processor) -> None:
    assert read_sizing({"max_pixels": 9 * 1024}, settings_of(processor), max_tokens=9) is not None
    with pytest.raises(RequestError, match="encoder-budget-tokens"):
        read_sizing({"max_pixels": 9 * 1024 + 1}, settings_of(processor), max_tokens=9)


def test_rounding_up_does_not_exceed_the_checkpoints_bound(processor: Processor) -> None:
    """Memory is reserved for an image of that many pixels."""
    checkpoint = settings_of(processor)
    fullest = read_sizing({"min_pixels": checkpoint.max_pixels}, checkpoint)
    for size, is_taken in (((64, 64), True), ((300, 300), True), ((100, 61), False)):
        messages = asked(data_url(encoded(picture(1, size))))
        if is_taken:
            assert sizes(processor.chat(messages, images=fullest)) == [(256, 256)]
            continue
        with pytest.raises(RequestError, match="min_pixels") as refused:
            processor.chat(messages, images=fullest)
        assert refused.value.param == "messages[0].content[1].image_url"


def test_models_without_bounds_refuse_them(folders: dict[str, Path]) -> None:
    gemma = Processor.from_folder(folders["gemma3"])
    with pytest.raises(RequestError, match="every image at 56x56") as refused:
        read_sizing({"max_pixels": 1000}, gemma.images)
    assert refused.value.param == KEY
    with pytest.raises(RequestError, match="takes no images"):
        read_sizing({"max_pixels": 1000}, Processor.from_folder(folders["llama"]).images)
    assert read_sizing({}, None) is None and read_sizing({}, gemma.images) is gemma.images


def test_an_image_at_another_size_is_another_image(processor: Processor) -> None:
    """Its features and their number differ, so the two sizes must not share a digest."""
    messages = asked(data_url(encoded(picture(1, (200, 180)))))
    checkpoint = settings_of(processor)
    plain = processor.chat(messages)
    small = processor.chat(messages, images=read_sizing({"max_pixels": 12000}, checkpoint))
    assert sizes(plain) != sizes(small) and len(plain) > len(small)
    assert plain.media[0].digest != small.media[0].digest


def test_bounds_that_give_the_same_size_give_the_same_image(processor: Processor) -> None:
    messages = asked(data_url(encoded(picture(1, (100, 90)))))
    checkpoint = settings_of(processor)
    plain = processor.chat(messages)
    for kwargs in ({"max_pixels": 50000}, {"min_pixels": 4100}, {"min_pixels": 6000, "max_pixels": 20000}):
        other = processor.chat(messages, images=read_sizing(kwargs, checkpoint))
        assert sizes(other) == sizes(plain) and other.media[0].digest == plain.media[0].digest


def test_other_settings_are_another_image_at_the_same_size(processor: Processor) -> None:
    messages = asked(data_url(encoded(picture(1, (100, 90)))))
    brighter = replace(settings_of(processor), mean=(0.4, 0.4, 0.4))
    one, other = processor.chat(messages), processor.chat(messages, images=brighter)
    assert sizes(one) == sizes(other) and one.media[0].digest != other.media[0].digest


def test_low_detail_caps_only_large_images(processor: Processor) -> None:
    processor.images = replace(settings_of(processor), max_pixels=1024 * 1024)
    large, small = (data_url(encoded(picture(2, size))) for size in ((900, 700), (100, 90)))
    urls: list[Any] = [large, small]
    plain = processor.chat(asked(*urls))
    for detail in ("auto", "high", None):
        found = processor.chat(asked(*({"url": url, "detail": detail} for url in urls)))
        assert [media.digest for media in found.media] == [media.digest for media in plain.media]
    low = processor.chat(asked(*({"url": url, "detail": "low"} for url in urls)))
    areas = [height * width for height, width in sizes(low)]
    assert sizes(plain)[0] == (704, 896) and 0.8 * LOW_DETAIL_PIXELS < areas[0] <= LOW_DETAIL_PIXELS
    assert low.media[0].digest != plain.media[0].digest
    assert low.media[1].plan == plain.media[1].plan and low.media[1].digest == plain.media[1].digest


def test_each_image_has_its_own_detail(processor: Processor) -> None:
    processor.images = replace(settings_of(processor), max_pixels=1024 * 1024)
    url = data_url(encoded(picture(2, (900, 700))))
    low = {"url": url, "detail": "low"}
    found = sizes(processor.chat([*asked(url, low), *asked(low, {"url": url, "detail": "high"}, url)]))
    assert found[0] == found[3] == found[4] == (704, 896) and found[1] == found[2] != found[0]
    beside = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}]}]
    assert sizes(processor.chat(beside)) == [found[1]]


def test_detail_does_not_lift_the_requests_bounds(processor: Processor) -> None:
    processor.images = replace(settings_of(processor), max_pixels=1024 * 1024)
    tight = capped(processor.images, 20000)
    url = data_url(encoded(picture(2, (900, 700))))
    plain = processor.chat(asked(url), images=tight)
    for detail in ("low", "high"):
        assert sizes(processor.chat(asked({"url": url, "detail": detail}), images=tight)) == sizes(plain)


@pytest.mark.parametrize("detail", ["LOW", "original", "", 5, ["low"], {}])
def test_unknown_details_are_refused_by_name(processor: Processor, detail: Any) -> None:
    url = data_url(encoded(picture(2, (64, 64))))
    with pytest.raises(RequestError) as refused:
        processor.chat(asked(url, {"url": url, "detail": detail}))
    assert refused.value.param == "messages[0].content[2].image_url.detail"
    with pytest.raises(RequestError) as refused:
        processor.chat([{"role": "user", "content": [{"type": "image_url", "image_url": url, "detail": detail}]}])
    assert refused.value.param == "messages[0].content[0].detail"


def test_videos_have_no_detail() -> None:
    part = {"type": "video_url", "video_url": {"url": "data:,", "detail": "any"}}
    assert at_details(None, [ref for _, _, ref in find_sources([{"role": "user", "content": [part]}])]) == {}


def test_detail_has_no_effect_on_a_fixed_size(folders: dict[str, Path]) -> None:
    gemma = Processor.from_folder(folders["gemma3"])
    url = data_url(encoded(picture(2, (90, 70))))
    plain, low = gemma.chat(asked(url)), gemma.chat(asked({"url": url, "detail": "low"}))
    assert plain.media[0].digest == low.media[0].digest
    with pytest.raises(RequestError):
        gemma.chat(asked({"url": url, "detail": "tiny"}))
