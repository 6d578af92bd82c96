"""`saccade explain`: shows how a request would run, as decided by the code that would run it."""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from saccade.cli.model import engine_parser, engine_settings
from saccade.cli.parser import Parser, settings_from
from saccade.cli.plan import settings_folder
from saccade.config import Word, check_at_least, setting
from saccade.errors import ConfigError, RequestError
from saccade.terminal import Output, print_json, print_table

if TYPE_CHECKING:
    from saccade.dry_run.blueprint import Blueprint
    from saccade.dry_run.steps import ExplainedPass
    from saccade.inputs.plans import MediaPlan
    from saccade.models.media import ImageSettings, VideoSettings

MAX_STEPS_SHOWN = 12
_NUMBER = r"([1-9]\d{0,14})"
_SIZE = re.compile(f"{_NUMBER}x{_NUMBER}")
_VIDEO_SIZE = re.compile(rf"{_NUMBER}x{_NUMBER}x{_NUMBER}(?:@(\d{{1,9}}(?:\.\d{{1,9}})?))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainSettings:
    """The request to explain."""

    image: tuple[str, ...] = setting((), "an image: WIDTHxHEIGHT in pixels, such as 1280x720, or a file")
    video: tuple[Word, ...] = setting(
        (), "a video: FRAMESxWIDTHxHEIGHT, such as 8x640x480, or with a frame rate, 60x640x480@30"
    )
    prompt_tokens: int = setting(200, "text tokens of the prompt, including its chat template")
    batch: int = setting(1, "number of such requests that arrive together, each with different images")
    json: bool = setting(False, "print JSON")

    def __post_init__(self) -> None:
        check_at_least(self, {"prompt_tokens": 1, "batch": 1})
        self.videos()
        for text in self.image:
            if not _SIZE.fullmatch(text) and not Path(text).expanduser().is_file():
                raise ConfigError(f"image is {text!r}; write WIDTHxHEIGHT, or name an existing file (--image)")

    def videos(self) -> list[tuple[int, int, int, float | None]]:
        """(frames, width, height, frames per second or None) of each video."""
        found = [_VIDEO_SIZE.fullmatch(text) for text in self.video]
        if None in found:
            raise ConfigError(f"video is {self.video[found.index(None)]!r}; write FRAMESxWIDTHxHEIGHT (--video)")
        sizes = [(int(m[1]), int(m[2]), int(m[3]), float(m[4]) if m[4] else None) for m in found if m]
        if any(rate == 0 for *_, rate in sizes):
            raise ConfigError("a video has 0 frames per second; the number after @ must be above 0 (--video)")
        return sizes


def new_parser(name: str) -> Parser:
    about = (
        "Show how a request would run: the tokens of its images, buckets, padding, and for every pass whether a graph "
        "is replayed and why. Needs neither a GPU nor weights: the engine's own scheduler decides. Assumes the "
        "default limits of a GPU, or of a CPU with --device cpu; without MODEL, those of `saccade serve` on this "
        "machine."
    )
    return engine_parser(name, about, ExplainSettings)


def run(flags: Namespace) -> int:
    asked = settings_from(flags, ExplainSettings)
    model, engine, limits = engine_settings(flags)
    from saccade.dry_run.blueprint import draw  # imports torch
    from saccade.dry_run.steps import dry_run, synthetic_prompt
    from saccade.inputs.media_settings import read_placeholder_settings
    from saccade.kernels.dispatch import device_named

    folder = settings_folder(model, engine)
    is_cuda = engine.device != "cpu" if flags.words else device_named(engine.device).type == "cuda"
    blueprint = draw(folder, engine, limits, is_cuda=is_cuda)
    plans = _plans(asked, blueprint.executor.settings.images, blueprint.executor.settings.videos)
    placeholders = read_placeholder_settings(folder)
    names = [str(index) for index in range(asked.batch)]
    prompts = [synthetic_prompt(plans, asked.prompt_tokens, placeholders, name) for name in names]
    steps = dry_run(blueprint, prompts)
    media = list(zip([*asked.image, *asked.video], plans, strict=True))
    if asked.json:
        print_json({"model": model, **as_data(blueprint, media, len(prompts[0]), steps)})
    else:
        console = Output()
        console.print(_assumed(blueprint))
        _show(console, media, len(prompts[0]), steps)
    return 0


def as_data(
    blueprint: "Blueprint", media: "Sequence[tuple[str, Any]]", num_tokens: int, steps: "list[list[ExplainedPass]]"
) -> dict[str, Any]:
    """What was assumed (kind of device, engine limits) and what was decided."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "encoder_budget_tokens")
    return {
        "device": "cuda" if blueprint.is_cuda else "cpu",
        "limits": {name: getattr(blueprint.resolved.limits, name) for name in names},
        "media": [
            {"given": text, "resized": plan.size_hw[::-1], "grid_thw": plan.grid_thw, "tokens": plan.num_tokens}
            for text, plan in media
        ],
        "prompt_tokens": num_tokens,
        "steps": [[{**asdict(one), "padding": one.padding} for one in step] for step in steps],
    }


def _assumed(blueprint: "Blueprint") -> str:
    limits = blueprint.resolved.limits
    device = "a GPU (--device cpu for a CPU)" if blueprint.is_cuda else "a CPU (--device cuda for a GPU)"
    return (
        f"on {device}: {limits.max_model_len:,} tokens per request, {limits.max_num_seqs:,} requests at a time, "
        f"{limits.max_num_batched_tokens:,} rows per step, {limits.encoder_budget_tokens:,} image rows per step"
    )


def _image_size(text: str) -> tuple[int, int]:
    """(width, height) as written, or of the image in a file after EXIF orientation."""
    from saccade.inputs.media.images import ImageLimits, check_size, load_image

    try:
        if match := _SIZE.fullmatch(text):
            check_size(int(match[2]), int(match[1]), ImageLimits())
            return int(match[1]), int(match[2])
        height, width, _ = load_image(Path(text).expanduser(), ImageLimits()).shape
    except RequestError as error:
        raise ConfigError(f"{text}: {error} (--image)") from None
    return width, height


def _plans(asked: ExplainSettings, images: "ImageSettings | None", videos: "VideoSettings | None") -> "list[MediaPlan]":
    from saccade.inputs.plans import plan_image, plan_video

    if asked.image and images is None:
        raise ConfigError("this model takes no images (--image)")
    if asked.video and videos is None:
        raise ConfigError("this model takes no videos (--video)")
    found: list[MediaPlan] = []
    if images is not None:
        found += [plan_image(height, width, images) for width, height in map(_image_size, asked.image)]
    if videos is not None:
        found += [plan_video(frames, high, wide, fps, videos) for frames, wide, high, fps in asked.videos()]
    return found


def _show(
    console: Console, media: "Sequence[tuple[str, Any]]", num_tokens: int, steps: "list[list[ExplainedPass]]"
) -> None:
    for text, plan in media:
        width, height = plan.size_hw[1], plan.size_hw[0]
        frames = f", {plan.grid_thw[0]} temporal patches" if plan.grid_thw[0] > 1 else ""
        console.print(
            f"{text}: resized to {width}x{height}, {plan.num_patches} patches{frames}, {plan.num_tokens} tokens"
        )
    console.print(f"each prompt has {num_tokens} tokens")
    table = Table("step", "phase", "content", "rows", "bucket", "padding", "tier", "why")
    for number, step in enumerate(steps[:MAX_STEPS_SHOWN], start=1):
        for one in step:
            padding = f"{one.padding:.1%}" if one.graph else "-"
            figures = (f"{one.rows:,}", f"{one.bucket_rows:,}" if one.graph else "-", padding)
            table.add_row(str(number), one.phase, one.content, *figures, one.tier.value, one.reason)
    print_table(console, table)
    left = len(steps) - MAX_STEPS_SHOWN
    if left > 0:
        console.print(f"and {left} more steps (--json shows all)")
