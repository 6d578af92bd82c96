"""Whole prompts against transformers' processors: ids, grids, pixels, positions."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from saccade.errors import ConfigError, RequestError
from saccade.inputs.media.images import ImageLimits, load_image
from saccade.inputs.media.videos import Video
from saccade.inputs.placeholders import Media, Prompt, place_media
from saccade.inputs.processor import Processor
from saccade.kernels.reference_images import resize_patchify
from saccade.models.media import ImageSettings, VideoSettings
from tests.inputs import oracles
from tests.inputs.folders import write_qwen
from tests.inputs.test_images import photo
from tests.inputs.test_plans import random_sizes

QWEN_VL = ["qwen2_5_vl", "qwen3_vl", "qwen2_vl"]
VISION = [*QWEN_VL, "gemma3"]


def noise(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.uint8]:
    return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)


def random_chat(rng: np.random.Generator, *, has_videos: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    messages: list[dict[str, Any]] = []
    media: list[Any] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    for turn in range(int(rng.integers(1, 4))):
        content: list[dict[str, Any]] = []
        for _ in range(int(rng.integers(1, 5))):
            kind = rng.choice(["text", "image", "video"] if has_videos else ["text", "image"])
            if kind == "text":
                content.append(
                    {"type": "text", "text": str(rng.choice(["What is this?", "\n\n a <b> ", "> 1\n", "图片 🙂"]))}
                )
                continue
            content.append({"type": str(kind)})
            height, width = (int(n) for n in rng.integers(20, 120, 2))
            if kind == "image":
                media.append(noise(rng, height, width))
            else:
                media.append(Video(noise(rng, int(rng.integers(2, 12)), height, width), float(rng.choice([1.0, 2.0]))))
        messages.append({"role": "user", "content": content})
        if turn % 2:
            messages[-1]["content"] = "And now?"
            media = media[: len(media) - sum(part["type"] != "text" for part in content)]
        messages.append({"role": "assistant", "content": "It is a fox."})
    return messages[:-1], media


def reference(folder: Path, messages: Any, media: list[Any]) -> Any:
    images = [item for item in media if not isinstance(item, Video)]
    videos = [item for item in media if isinstance(item, Video)]
    with oracles.without_torchvision():
        processor = oracles.processor(folder)
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        options: dict[str, Any] = {"images": images} if images else {}
        if videos:
            options |= {
                "videos": [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos],
                "video_metadata": [{"fps": v.fps, "total_num_frames": len(v.frames)} for v in videos],
            }
        return processor(text=text, add_special_tokens=False, return_tensors="pt", **options)


@pytest.mark.parametrize("family", VISION)
def test_prompts_equal_transformers(folders: dict[str, Path], family: str) -> None:
    rng = np.random.default_rng(VISION.index(family))
    processor = Processor.from_folder(folders[family])
    for _ in range(12):
        messages, media = random_chat(rng, has_videos=family != "gemma3")
        prompt = processor.chat(messages, media=media)
        expected = reference(folders[family], messages, media)
        assert prompt.token_ids.tolist() == expected["input_ids"][0].tolist()
        check_spans(prompt, processor)
        for kind in ("image", "video"):
            grids = [list(item.plan.grid_thw) for item in prompt.media if item.kind == kind]
            if family != "gemma3" and grids:
                assert grids == expected[f"{kind}_grid_thw"].tolist()
        if family != "gemma3":
            check_positions(prompt, expected, family)
        else:
            assert (prompt.positions_3T == np.arange(len(prompt))).all() and prompt.rope_delta == 0
            assert (prompt.limits_T is None) is (not prompt.media)


def check_spans(prompt: Prompt, processor: Processor) -> None:
    """Every placeholder token is in one span, and the spans of an image or video cover its features in order."""
    settings = processor.placeholders
    assert settings is not None
    covered = np.zeros(len(prompt), dtype=int)
    rows = [0] * len(prompt.media)
    for span in prompt.spans:
        covered[span.offset : span.offset + span.length] += 1
        assert span.feature_offset == rows[span.media_idx]
        rows[span.media_idx] += span.length
    assert rows == [item.plan.num_tokens for item in prompt.media]
    assert (covered == np.isin(prompt.token_ids, [settings.image_token_id, settings.video_token_id or -1])).all()
    if prompt.limits_T is not None:
        expected = np.zeros(len(prompt), dtype=int)
        for span in prompt.spans:
            expected[span.offset : span.offset + span.length] = span.offset + span.length
        assert (prompt.limits_T == expected).all()


def check_positions(prompt: Prompt, expected: Any, family: str) -> None:
    inputs = {
        name: expected.get(name)
        for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    }
    seconds = inputs["second_per_grid_ts"]
    if seconds is not None:  # test_positions covers fractions of a second
        assert all(float(second).is_integer() for second in seconds)
    config = {"spatial_merge_size": 2, "tokens_per_second": 2}
    positions, delta = oracles.rope_index(family, config, **inputs)
    assert (prompt.positions_3T == positions[:, 0].numpy()).all()
    assert prompt.rope_delta == int(delta[0, 0])


def patches_of(media: Media, settings: ImageSettings | VideoSettings) -> torch.Tensor:
    return resize_patchify(torch.from_numpy(media.pixels.copy()), media.plan.size_hw, settings)


def pixel_levels(found: torch.Tensor, expected: torch.Tensor, std: tuple[float, float, float]) -> float:
    """The largest difference in units of one uint8 step, channel by channel."""
    assert found.shape == expected.shape
    per_channel = (found - expected).abs().reshape(len(found), 3, -1) * torch.tensor(std)[:, None] * 255
    return float(per_channel.max())


@pytest.mark.parametrize("family", VISION)
def test_pixels_are_within_one_level_for_200_sizes(folders: dict[str, Path], family: str) -> None:
    processor = Processor.from_folder(folders[family])
    settings = processor.images
    assert settings is not None
    oracle = oracles.fast_image_processor(folders[family])
    rng = np.random.default_rng(3)
    for height, width in random_sizes(11, 200):
        shrink = max(
            1.0, max(height, width) / 700
        )  # only shapes matter, from 1:20 to 20:1; large images just take longer
        height, width = max(1, round(height / shrink)), max(1, round(width / shrink))
        part = {"type": "image"}
        prompt = processor.chat([{"role": "user", "content": [part]}], media=[noise(rng, height, width)])
        (media,) = prompt.media
        found = patches_of(media, settings)
        expected = oracle(media.pixels)
        assert pixel_levels(found, expected, settings.std) <= 1.001
        assert sum(span.length for span in prompt.spans) == media.plan.num_tokens
        assert len(found) == media.plan.num_patches


@pytest.mark.parametrize("family", VISION)
def test_pixels_of_photographs_are_within_one_level_of_pillow(folders: dict[str, Path], family: str) -> None:
    processor = Processor.from_folder(folders[family])
    settings = processor.images
    assert settings is not None
    oracle = oracles.image_processor(folders[family])
    rng = np.random.default_rng(4)
    for height, width in [(50, 90), (300, 200), (512, 384), (31, 400), (64, 64)]:
        picture = photo(rng, height, width).resize((width, height), reducing_gap=None)
        pixels = np.asarray(picture.resize((max(1, width // 6), max(1, height // 6))).resize((width, height)))
        (media,) = processor.chat([{"role": "user", "content": [{"type": "image"}]}], media=[pixels]).media
        found = patches_of(media, settings)
        values = oracle(pixels, return_tensors="pt")["pixel_values"]
        expected = values if family != "gemma3" else oracles.cut_patches(values[0], settings.patch, settings.merge)
        assert pixel_levels(found, expected, settings.std) <= 1.001


@pytest.mark.parametrize("family", QWEN_VL)
def test_video_pixels_are_within_one_level(folders: dict[str, Path], family: str) -> None:
    processor = Processor.from_folder(folders[family])
    settings = processor.videos
    assert settings is not None
    rng = np.random.default_rng(5)
    for frames, height, width in [(2, 40, 60), (7, 90, 50), (12, 64, 64)]:
        video = Video(noise(rng, frames, height, width), 2.0)
        messages = [{"role": "user", "content": [{"type": "video"}]}]
        (media,) = processor.chat(messages, media=[video]).media
        found = patches_of(media, settings)
        expected = reference(folders[family], messages, [video])["pixel_values_videos"]
        assert pixel_levels(found, expected, settings.std) <= 1.001


def data_url(rng: np.random.Generator, height: int = 40, width: int = 30) -> str:
    buffer = io.BytesIO()
    Image.fromarray(noise(rng, height, width)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_all_forms_of_an_image_part_are_equivalent(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    url = data_url(np.random.default_rng(6))
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"image_url": {"url": url}},
        {"image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": url},
        {"type": "image", "image": base64.b64decode(url.partition(",")[2])},
        {"type": "image", "image": load_image(url, ImageLimits())},
        {"type": "image", "image": Image.fromarray(load_image(url, ImageLimits()))},
    ]
    prompts = [processor.chat([{"role": "user", "content": [part]}]) for part in parts]
    assert {len(prompt.media) for prompt in prompts} == {1}
    digests = [prompt.media[0].digest for prompt in prompts]  # files by their bytes, pixels by their values
    assert len(set(digests)) == len(set(digests[:-2])) + len(set(digests[-2:])) == 2
    assert len({prompt.token_ids.tobytes() for prompt in prompts}) == 1


def test_videos_may_be_frames_or_a_data_url(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    rng = np.random.default_rng(7)
    urls = [data_url(rng) for _ in range(3)]
    joined = "data:video/jpeg;base64," + ",".join(url.partition(",")[2] for url in urls)
    a = processor.chat([{"role": "user", "content": [{"type": "video"}]}], media=[Video(urls)])
    b = processor.chat([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": joined}}]}])
    assert a.media[0].digest == b.media[0].digest and a.token_ids.tolist() == b.token_ids.tolist()
    assert a.media[0].pixels.shape == (4, 40, 30, 3)
    timed = [
        {"type": "video_url", "video_url": {"url": joined, "fps": 2}},
        {"type": "video", "video": urls, "fps": 2.0},
    ]
    given = processor.chat([{"role": "user", "content": [{"type": "video"}]}], media=[Video(urls, 2)])
    for part in timed:
        assert processor.chat([{"role": "user", "content": [part]}]).token_ids.tolist() == given.token_ids.tolist()
    assert "<0.2 seconds>" in processor.tokenizer.decode(given.token_ids.tolist())


def test_the_same_pixels_with_other_settings_have_another_digest(folders: dict[str, Path]) -> None:
    pixels = noise(np.random.default_rng(8), 40, 30)
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    families = ("qwen2_5_vl", "qwen3_vl", "gemma3")
    digests = {Processor.from_folder(folders[f]).chat(messages, media=[pixels]).media[0].digest for f in families}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("messages", "media", "code"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], [], "media_mismatch"),
        ([{"role": "user", "content": "hi"}], ["x"], "media_mismatch"),
        ([{"role": "user", "content": [{"type": "image"}]}], ["data:image/png;base64,AAAA"], "image_unsupported"),
        ([{"role": "user", "content": [{"type": "video"}]}], ["https://example.com/a.mp4"], "video_unsupported"),
        ([{"role": "user", "content": [{"type": "video"}]}], [5], "video_invalid"),
        ([{"role": "user", "content": [{"type": "video"}]}], [[]], "video_invalid"),
        ([{"role": "user", "content": [{"type": "video"}]}], [np.zeros((2, 4, 4), np.uint8)], "video_invalid"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], [], "invalid_messages"),
    ],
)
def test_wrong_media_are_refused(folders: dict[str, Path], messages: Any, media: Any, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        Processor.from_folder(folders["qwen3_vl"]).chat(messages, media=media)
    assert caught.value.code == code


def test_video_limits(folders: dict[str, Path]) -> None:
    limits = ImageLimits(max_frames=5, max_video_pixels=5000)
    processor = Processor.from_folder(folders["qwen3_vl"], limits=limits)
    rng = np.random.default_rng(9)
    messages = [{"role": "user", "content": [{"type": "video"}]}]

    def code(video: Any) -> str | None:
        with pytest.raises(RequestError) as caught:
            processor.chat(messages, media=[video])
        return caught.value.code

    assert code(noise(rng, 6, 20, 20)) == "video_too_long"
    assert code(["not an image"] * 6) == "video_too_long", "counted before any frame is decoded"
    assert code("data:video/jpeg;base64," + ",".join(["AAAA"] * 6)) == "video_too_long"
    assert code(noise(rng, 5, 40, 30)) == "video_too_large"
    assert code([noise(rng, 20, 20), noise(rng, 20, 21)]) == "video_invalid"
    assert code(Video(noise(rng, 2, 20, 20), float("nan"))) == "video_invalid"
    assert code(Video(noise(rng, 2, 20, 20), 0)) == "video_invalid"
    assert processor.chat(messages, media=[noise(rng, 5, 20, 20)]).media


def test_media_are_counted_before_they_are_decoded(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"], limits=ImageLimits(max_images=2, max_videos=1))
    for kind, limit in (("image", 2), ("video", 1)):
        parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": "broken"}}] * (limit + 1)
        with pytest.raises(RequestError, match=f"{limit + 1} {kind}s; the limit is {limit}") as caught:
            processor.chat([{"role": "user", "content": parts}])
        assert caught.value.param == f"messages[0].content[{limit}].{kind}_url"


def test_threads_share_a_processor(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    rng = np.random.default_rng(14)
    requests = [(f"question {i} <|im_end|>", data_url(rng, 20 + i, 30)) for i in range(24)]

    def run(request: tuple[str, str]) -> list[int]:
        parts = [{"type": "text", "text": request[0]}, {"image_url": request[1]}]
        return [int(token) for token in processor.chat([{"role": "user", "content": parts}]).token_ids]

    expected = [run(request) for request in requests]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            assert list(pool.map(run, requests)) == expected


def test_models_without_vision_refuse_media(folders: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RequestError, match="takes no images"):
        Processor.from_folder(folders["qwen3"]).chat(messages, media=[b""])
    with pytest.raises(RequestError, match="takes no images"):
        Processor.from_folder(folders["qwen3"]).text("hi", media=[("image", b"")])
    with pytest.raises(RequestError, match="takes no videos"):
        gemma = Processor.from_folder(folders["gemma3"])
        gemma.text("<start_of_image>", media=[("video", b"")])


def test_placeholders_are_counted_before_anything_is_decoded(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    for text, media in [(pad * 2, 1), (pad, 2), ("none", 1), ("<|video_pad|>", 1)]:
        with pytest.raises(RequestError, match="each must have its placeholder") as caught:
            processor.text(text, media=[("image", b"broken")] * media)
        assert caught.value.code == "media_mismatch"


def test_expanded_placeholders_must_match_the_features(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    settings = processor.placeholders
    assert settings is not None
    prompt = processor.text("<|image_pad|>", media=[("image", noise(np.random.default_rng(10), 40, 30))])
    for ids in ([1, 2], [settings.image_token_id] * 2, [settings.video_token_id]):
        with pytest.raises(RequestError, match="placeholder tokens"):
            place_media([token for token in ids if token is not None], prompt.media, settings)


def test_placeholder_ids_without_media_are_an_error_of_the_prompt(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    assert processor.placeholders is not None
    with pytest.raises(RequestError, match="but no media") as refused:
        processor.tokens([1, processor.placeholders.image_token_id])
    assert refused.value.param == "prompt"


def test_raw_text_may_use_special_tokens(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert processor.text(turn).token_ids.tolist() == processor.tokenizer.encode(turn)
    pixels = noise(np.random.default_rng(11), 40, 30)
    prompt = processor.text("a <|image_pad|> b", media=[("image", pixels)])
    assert len(prompt.spans) == 1 and prompt.spans[0].length == prompt.media[0].plan.num_tokens


@pytest.mark.parametrize("family", VISION)
def test_placeholders_in_raw_text_without_media_are_text(folders: dict[str, Path], family: str) -> None:
    processor = Processor.from_folder(folders[family])
    text = "see <|image_pad|><|video_pad|><start_of_image><image_soft_token> <|im_end|>"
    prompt = processor.text(text)
    settings = processor.placeholders
    assert settings is not None and not prompt.spans
    assert settings.image_token_id not in prompt.token_ids and settings.video_token_id not in prompt.token_ids
    assert processor.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False).endswith(text)


def test_raw_text_gets_one_bos(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["gemma3"])
    bos = processor.tokenizer.token_id("<bos>")
    for text in ("hi", "<bos>hi"):
        assert processor.text(text).token_ids.tolist().count(bos) == 1
    chat = processor.chat([{"role": "user", "content": "hi"}])
    assert chat.token_ids.tolist().count(bos) == 1 and chat.limits_T is None


def test_token_prompts(folders: dict[str, Path]) -> None:
    processor = Processor.from_folder(folders["qwen3_vl"])
    assert processor.tokens([5, 6, 7]).token_ids.tolist() == [5, 6, 7]
    settings = processor.placeholders
    assert settings is not None
    with pytest.raises(RequestError, match="no media"):
        processor.tokens([5, settings.image_token_id])


def test_prompt_arrays_are_read_only(folders: dict[str, Path]) -> None:
    prompt = Processor.from_folder(folders["gemma3"]).chat(
        [{"role": "user", "content": [{"type": "image"}]}], media=[noise(np.random.default_rng(12), 9, 9)]
    )
    for array in (prompt.token_ids, prompt.positions_3T, prompt.limits_T, prompt.media[0].pixels):
        assert array is not None and not array.flags.writeable


def test_a_folder_without_a_template(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["qwen3"] / name).read_bytes())
    processor = Processor.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        processor.chat([{"role": "user", "content": "hi"}])
    assert len(processor.text("hi"))


@pytest.mark.parametrize("family", [*VISION, "llama"])
def test_a_warm_up_makes_prompts_like_a_request(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor.from_folder(folders[family])
    chat, made = processor.chat, []
    monkeypatch.setattr(processor, "chat", lambda *given, **how: made.append(chat(*given, **how)))
    processor.warm_up()
    assert [len(prompt.media) for prompt in made] == ([0, 1] if family in VISION else [0])
    processor.template = None
    processor.warm_up()
    monkeypatch.setattr(processor, "chat", lambda *given, **how: 1 // 0)
    processor.warm_up()


def test_an_end_token_that_is_not_marked_special_stays_text_in_a_chat(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path)
    end = Processor.from_folder(folder).tokenizer.token_id("<tool_response>")
    messages = [
        {"role": "system", "content": "<tool_response> and </tool_response>"},
        {"role": "user", "content": "hi"},
    ]
    assert end in Processor.from_folder(folder).chat(messages).token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    guarded = Processor.from_folder(folder)
    assert end not in guarded.chat(messages).token_ids
    assert end in guarded.text("a<tool_response>").token_ids, "who writes a prompt may use it"
