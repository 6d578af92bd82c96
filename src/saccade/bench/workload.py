"""The requests of a serving benchmark, complete to the last byte before the first of them is sent."""

from collections.abc import Sequence

import numpy as np

from saccade.bench.serving_settings import CHAT, DATASETS, WorkloadSettings
from saccade.bench.workload_file import read_entries, sample_of
from saccade.bench.workload_images import ImageStyle, Picture, make_pictures
from saccade.bench.workload_sizes import Size, parse_sizes
from saccade.bench.workload_text import WordList
from saccade.bench.workload_wording import Part, Sample, Wording
from saccade.errors import ConfigError


def make_workload(settings: WorkloadSettings, wording: Wording, words: WordList) -> list[Sample]:
    """All requests, the same for the same settings, wording and words."""
    kind = DATASETS[settings.dataset_name]
    if kind == "file":
        return [sample_of(entry, settings, wording) for entry in read_entries(settings)]
    if kind != "text" and wording.kind != CHAT:
        raise ConfigError(f"dataset {settings.dataset_name} needs a chat backend, such as openai-chat (--backend)")
    rng = np.random.default_rng(settings.seed)
    inputs = draw_lengths(settings.random_input_len, settings, rng)
    outputs = draw_lengths(settings.random_output_len, settings, rng)
    texts = [words.text(length, rng) for length in inputs]
    counts = inputs if words.is_counted else [None] * len(inputs)
    if kind == "text":
        return [
            Sample(wording.body(text, most), most, count)
            for text, most, count in zip(texts, outputs, counts, strict=True)
        ]
    media = draw_media(settings, rng)
    return [
        _media_sample(pictures, text, count, most, settings, wording)
        for pictures, text, count, most in zip(media, texts, counts, outputs, strict=True)
    ]


def draw_lengths(longest: int, settings: WorkloadSettings, rng: np.random.Generator) -> list[int]:
    """Uniform from the range ratio's share of the longest up to the longest, at least 1."""
    low = max(int(longest * settings.random_range_ratio), 1)
    return [int(length) for length in rng.integers(low, longest + 1, settings.num_prompts)]


def draw_media(settings: WorkloadSettings, rng: np.random.Generator) -> list[list[Picture]]:
    """The pictures of every request: of its images, or all frames of its videos, one video after the other."""
    is_video = DATASETS[settings.dataset_name] == "video"
    sizes, frames = parse_sizes(settings.image_resolution), settings.video_frames if is_video else 1
    units: list[int] = []  # a unit is an image, or all frames of a video
    made: list[Size] = []
    for _ in range(settings.num_prompts * settings.image_count):
        if made and rng.random() < settings.image_repeat_ratio:
            units.append(int(rng.integers(len(made))))
        else:
            units.append(len(made))
            made.append(sizes.draw(rng))
    style = ImageStyle(settings.image_format, settings.image_content, settings.image_quality)
    pictures = make_pictures([size for size in made for _ in range(frames)], style, settings.seed)
    groups = [units[i : i + settings.image_count] for i in range(0, len(units), settings.image_count)]
    return [
        [picture for unit in group for picture in pictures[unit * frames : (unit + 1) * frames]] for group in groups
    ]


def _media_sample(
    pictures: Sequence[Picture], text: str, count: int | None, most: int, settings: WorkloadSettings, wording: Wording
) -> Sample:
    kind = f"image/{settings.image_format}"
    if DATASETS[settings.dataset_name] == "video":
        step = settings.video_frames
        videos = [",".join(picture.base64 for picture in pictures[i : i + step]) for i in range(0, len(pictures), step)]
        mime = f"video/{settings.image_format}"
        parts: list[Part] = [
            {"type": "video_url", "video_url": {"url": f"data:{mime};base64,{frames}"}} for frames in videos
        ]
    else:
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{picture.base64}"}} for picture in pictures
        ]
    body = wording.body([*parts, {"type": "text", "text": text}], most)
    sizes, num_bytes = tuple(picture.size for picture in pictures), sum(picture.num_bytes for picture in pictures)
    return Sample(body, most, count, sizes, num_bytes)
