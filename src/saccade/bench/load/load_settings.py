"""Settings of benchmarks that send requests, named as in SGLang's and vLLM's benchmarks. Imports no torch, because the
command line builds its flags from them."""

import json
import math
from dataclasses import dataclass
from operator import le
from typing import Any

from saccade.config import check_above_zero, check_at_least, check_sent_key, refused, setting
from saccade.errors import ConfigError

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BACKENDS = {
    **dict.fromkeys(("openai-chat", "sglang-oai-chat", "vllm-chat", "lmdeploy-chat", "saccade"), CHAT),
    **dict.fromkeys(("openai", "sglang-oai", "vllm", "lmdeploy"), COMPLETIONS),
    **dict.fromkeys(("sglang", "sglang-native"), GENERATE),
}
DATASETS = {
    **dict.fromkeys(("image", "random-mm", "random-image"), "image"),
    **dict.fromkeys(("random", "random-ids"), "text"),
    "video": "video",
    **dict.fromkeys(("custom", "sharegpt"), "file"),
}
Size = tuple[int, int]  # width, height
NAMED: dict[str, Size] = {"360p": (640, 360), "720p": (1280, 720), "1080p": (1920, 1080), "4k": (3840, 2160)}
MAX_SIDE = 16384


def check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise refused(name, repr(value), f"allowed are {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Width and height are drawn independently."""

    low: Size
    high: Size
    weight: float = 1.0


def parse_sizes(text: str) -> list[SizeRange]:
    """Parses WIDTHxHEIGHT, a name such as 720p, `random:LOW-HIGH`, or `mix:SIZE,SIZE:WEIGHT`."""
    kind, colon, rest = text.strip().partition(":")
    try:
        if kind == "random" and colon:
            low, _, high = rest.partition("-")
            found = [SizeRange(_size(low), _size(high))]
        elif kind == "mix" and colon:
            pairs = [part.partition(":")[::2] for part in rest.split(",")]
            found = [SizeRange(_size(name), _size(name), float(weight or 1)) for name, weight in pairs]
        else:
            found = [SizeRange(_size(text), _size(text))]
        is_right = all(0 < each.weight < math.inf and all(map(le, each.low, each.high)) for each in found)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"image_resolution is {text!r}; write WIDTHxHEIGHT (sides of 1..{MAX_SIDE}), {', '.join(NAMED)}, "
            "random:224x224-1280x720 or mix:224x224,448x336:2 (--image-resolution)"
        )
    return found


def _size(text: str) -> Size:
    name = text.strip().lower()
    if name in NAMED:
        return NAMED[name]
    width, height = (int(side) if side.isascii() and side.isdigit() else 0 for side in name.split("x"))
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise ValueError(text)
    return width, height


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSettings:
    """The server to send requests to."""

    backend: str = setting("openai-chat", f"shape of the requests: {', '.join(BACKENDS)}")
    base_url: str = setting("", "address of the server, such as http://127.0.0.1:8000; overrides host and port")
    host: str = setting("127.0.0.1", "host of the server")
    port: int = setting(8000, "port of the server")
    endpoint: str = setting("", "path to send to; by default that of the backend")
    model: str = setting("", "model to ask for; by default the first of /v1/models")
    api_key: str = setting("", "key for the server, sent as Authorization: Bearer; by default OPENAI_API_KEY")
    extra_request_body: str = setting("", "JSON object added to every request, such as '{\"temperature\": 0}'")
    disable_stream: bool = setting(False, "ask for whole replies; the first token is then the reply's end")
    request_timeout_s: float = setting(600.0, "seconds after which a request counts as failed")
    request_timings: bool = setting(True, "ask a Saccade server where each request's time went")

    def __post_init__(self) -> None:
        check_one_of("backend", self.backend, tuple(BACKENDS))
        check_at_least(self, {"port": 1})
        check_above_zero(self, "request_timeout_s")
        check_sent_key(self.api_key, "--api-key")
        self.extra_fields()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return self.endpoint or BACKENDS[self.backend]

    @property
    def kind(self) -> str:
        """The API of the backend, named by its usual path."""
        return BACKENDS[self.backend]

    def extra_fields(self) -> dict[str, Any]:
        try:
            extra = json.loads(self.extra_request_body or "{}")
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError(f"extra_request_body is {self.extra_request_body!r}; give a JSON object")
        return extra


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSettings:
    """The requests to send. The same settings make the same requests, byte for byte."""

    dataset_name: str = setting("image", f"kind of requests: {', '.join(DATASETS)}")
    dataset_path: str = setting("", "file of custom or sharegpt: JSON lines, or one JSON list")
    num_prompts: int = setting(256, "number of requests")
    random_input_len: int = setting(128, "maximum number of text tokens of a prompt")
    random_output_len: int = setting(1, "maximum number of tokens of an answer")
    random_range_ratio: float = setting(0.1, "shortest length as a share of the longest; 1 gives all the same")
    image_count: int = setting(1, "images, or videos, of a request")
    image_resolution: str = setting(
        "560x560",
        "WIDTHxHEIGHT (sglang.bench_serving has the height first), 360p, 720p, 1080p, 4k, random:224x224-1280x720 or "
        "mix:224x224,448x336:2,720p (with weights)",
    )
    image_format: str = setting("jpeg", "jpeg or png")
    image_content: str = setting("random", "random (noise) or blank")
    image_quality: int = setting(85, "quality of a jpeg")
    image_repeat_ratio: float = setting(0.0, "share of images that are copies of earlier ones")
    video_frames: int = setting(8, "frames of a video")
    ignore_eos: bool = setting(True, "generate exactly the requested number of tokens")
    seed: int = setting(0, "seed of texts, sizes, pixels and arrivals; new for every run unless given")

    def __post_init__(self) -> None:
        check_one_of("dataset_name", self.dataset_name, tuple(DATASETS))
        check_one_of("image_format", self.image_format, ("jpeg", "png"))
        check_one_of("image_content", self.image_content, ("random", "blank"))
        names = ("num_prompts", "random_input_len", "random_output_len", "image_count", "image_quality", "video_frames")
        check_at_least(self, {**dict.fromkeys(names, 1), "seed": 0})
        for name in ("random_range_ratio", "image_repeat_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise refused(name, getattr(self, name), "allowed are 0..1")
        parse_sizes(self.image_resolution)
        if self.image_quality > 100:
            raise refused("image_quality", self.image_quality, "allowed are 1..100")
        if DATASETS[self.dataset_name] == "file" and not self.dataset_path:
            raise ConfigError(f"dataset {self.dataset_name} needs a file (--dataset-path)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """When to send requests."""

    request_rate: float = setting(math.inf, "requests per second; inf sends as soon as concurrency allows")
    burstiness: float = setting(1.0, "shape of the arrivals: 1 is Poisson, below it bursts, above it more even")
    max_concurrency: int = setting(32, "maximum number of concurrent requests; 0 sets no limit")
    warmup_requests: int = setting(5, "requests sent before the clock starts")
    flush_cache: bool = setting(False, "have the server empty its caches before the clock starts: POST /flush_cache")

    def __post_init__(self) -> None:
        check_at_least(self, {"max_concurrency": 0, "warmup_requests": 0})
        check_above_zero(self, "request_rate", "burstiness")
