"""Settings of `saccade bench serve` and `saccade bench startup`, named as in SGLang's and vLLM's benchmarks. No torch
here: the command line reads it for its flags."""

import json
import math
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from saccade.config import setting
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
METRICS = ("ttft", "tpot", "itl", "e2el")
# Percentiles in SGLang's report, always included.
USUAL_PERCENTILES: dict[str, tuple[float, ...]] = {"ttft": (99,), "tpot": (99,), "itl": (95, 99), "e2el": (90, 99)}


def check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(allowed)} (--{name.replace('_', '-')})")


def check_at_least(settings: Any, lowest: dict[str, float]) -> None:
    for name, low in lowest.items():
        value = getattr(settings, name)
        if not value >= low:
            raise ConfigError(f"{name} is {value}; it must be at least {low} (--{name.replace('_', '-')})")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSettings:
    """Which server is asked, and how."""

    backend: str = setting("openai-chat", f"shape of the requests: {', '.join(BACKENDS)}")
    base_url: str = setting("", "address of the server, such as http://127.0.0.1:8000; overrules host and port")
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
        if not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout_s is {self.request_timeout_s}; it must be above 0")
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
        """Shape of requests and replies, determined by the path."""
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
    """What is asked. The same settings make the same requests, byte for byte."""

    dataset_name: str = setting("image", f"kind of requests: {', '.join(DATASETS)}")
    dataset_path: str = setting("", "file of custom or sharegpt: JSON lines, or one JSON list")
    num_prompts: int = setting(256, "number of requests")
    random_input_len: int = setting(128, "most text tokens of a prompt")
    random_output_len: int = setting(1, "most tokens of an answer")
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
    ignore_eos: bool = setting(True, "answers have the length that was asked for")
    seed: int = setting(0, "seed of texts, sizes, pixels and arrivals; drawn anew for every run unless given")

    def __post_init__(self) -> None:
        check_one_of("dataset_name", self.dataset_name, tuple(DATASETS))
        check_one_of("image_format", self.image_format, ("jpeg", "png"))
        check_one_of("image_content", self.image_content, ("random", "blank"))
        names = ("num_prompts", "random_input_len", "random_output_len", "image_count", "image_quality", "video_frames")
        check_at_least(self, {**dict.fromkeys(names, 1), "seed": 0})
        for name in ("random_range_ratio", "image_repeat_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed are 0..1 (--{name.replace('_', '-')})")
        if self.image_quality > 100:
            raise ConfigError(f"image_quality is {self.image_quality}; allowed are 1..100 (--image-quality)")
        if DATASETS[self.dataset_name] == "file" and not self.dataset_path:
            raise ConfigError(f"dataset {self.dataset_name} is a file; say which (--dataset-path)")


def draw_seed() -> int:
    """A seed for content that no server has seen. Short enough to type again."""
    return secrets.randbelow(2**31)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """When requests are sent."""

    request_rate: float = setting(math.inf, "requests a second; inf sends as soon as concurrency allows")
    burstiness: float = setting(1.0, "shape of the arrivals: 1 is Poisson, below it bursts, above it more even")
    max_concurrency: int = setting(32, "requests under way at the same time; 0 sets no limit")
    warmup_requests: int = setting(5, "requests sent before the clock starts")
    flush_cache: bool = setting(False, "have the server empty its caches before the clock starts: POST /flush_cache")

    def __post_init__(self) -> None:
        check_at_least(self, {"max_concurrency": 0, "warmup_requests": 0})
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 (--{name.replace('_', '-')})")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """What is shown and kept."""

    percentile_metrics: str = setting("ttft,tpot,itl,e2el", "metrics to show, of ttft, tpot, itl, e2el")
    metric_percentiles: str = setting("90,99", "percentiles to show")
    goodput: str = setting("", "what a good request keeps to, in ms, such as 'ttft:500 e2el:2000'")
    save_result: bool = setting(False, "write the figures to a JSON file")
    save_detailed: bool = setting(False, "with them, every request")
    result_dir: str = setting("", "folder for the JSON file")
    result_filename: str = setting("", "name of the JSON file; by default backend, rate and time")
    report: str = setting("", "HTML file to write: one file, nothing is loaded from elsewhere")
    compare: str = setting("", "JSON file of an earlier run to compare with")
    label: str = setting("", "name of this run in reports")

    def __post_init__(self) -> None:
        for metric in self.metrics():
            check_one_of("percentile_metrics", metric, METRICS)
        self.percentiles()
        self.limits_ms()

    @property
    def is_saving(self) -> bool:
        return bool(self.save_result or self.save_detailed or self.result_filename)

    def metrics(self) -> list[str]:
        return [part.strip() for part in self.percentile_metrics.split(",") if part.strip()]

    def percentiles(self) -> list[float]:
        try:
            found = [float(part) for part in self.metric_percentiles.split(",") if part.strip()]
        except ValueError:
            found = [math.nan]
        if not all(0 <= value <= 100 for value in found):
            raise ConfigError(
                f"metric_percentiles is {self.metric_percentiles!r}; give numbers of 0..100, such as 90,99"
            )
        return found

    def limits_ms(self) -> dict[str, float]:
        """The limit in ms of each metric that goodput names."""
        limits = {}
        for part in self.goodput.replace(",", " ").split():
            metric, _, number = part.partition(":")
            check_one_of("goodput", metric, METRICS)
            try:
                limits[metric] = float(number)
            except ValueError:
                raise ConfigError(f"goodput has {part!r}; write METRIC:MILLISECONDS, such as ttft:500") from None
        return limits


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """All that `saccade bench serve` needs except the servers that it starts itself."""

    target: TargetSettings = field(default_factory=TargetSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    @property
    def is_file(self) -> bool:
        return DATASETS[self.workload.dataset_name] == "file"

    def as_data(self) -> dict[str, dict[str, Any]]:
        """For a JSON file: without the API key, and with a word for infinity, which JSON lacks."""
        values = asdict(self)
        if self.target.api_key:
            values["target"]["api_key"] = "(set)"
        return {
            part: {name: "inf" if value == math.inf else value for name, value in own.items()}
            for part, own in values.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSettings:
    """Servers that the benchmark starts itself, one after the other, for the same requests."""

    serve_model: str = setting("", "model to serve: starts `saccade serve` instead of asking a server that runs")
    serve_args: str = setting("", "flags of every server that is started")
    variants: str = setting(
        "", "NAME:FLAGS;NAME:FLAGS to compare, such as 'graphs:;eager:--graphs vision=off,prefill=off,decode=off'"
    )
    start_timeout_s: float = setting(900.0, "seconds until a server must be ready")

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s is {self.start_timeout_s}; it must be above 0 (--start-timeout-s)")
        self.flags_by_name()

    @property
    def is_used(self) -> bool:
        return bool(self.serve_model or self.serve_args or self.variants)

    def flags_by_name(self) -> dict[str, str]:
        """The flags of every server to start; a single unnamed one if no variants are given."""
        found: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in self.variants.split(";"))):
            name, colon, flags = part.partition(":")
            if not colon or not name.strip() or name.strip() in found:
                raise ConfigError(f"variants has {part!r}; write NAME:FLAGS, each with a name of its own (--variants)")
            found[name.strip()] = f"{self.serve_args} {flags.strip()}".strip()
        return found or {"": self.serve_args}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupBenchSettings:
    """What `saccade bench startup` measures."""

    serve_args: str = setting("", "flags of the server, as for `saccade serve`")
    starts: int = setting(2, "how often the server is started")
    requests: int = setting(10, "requests sent to each, one after the other")
    image_resolution: str = setting("560x560", "WIDTHxHEIGHT of their images; empty sends text only")
    random_input_len: int = setting(128, "text tokens of their prompts")
    random_output_len: int = setting(1, "tokens of their answers")
    start_timeout_s: float = setting(900.0, "seconds until a server must be ready")
    request_timeout_s: float = setting(600.0, "seconds after which a request counts as failed")
    json: str = setting("", "file to write the figures to")

    def __post_init__(self) -> None:
        names = ("starts", "requests", "random_input_len", "random_output_len")
        check_at_least(self, dict.fromkeys(names, 1))
