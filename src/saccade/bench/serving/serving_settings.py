"""Settings of `saccade bench serve` and `saccade bench startup`, named as in SGLang's and vLLM's benchmarks. Imports no
torch, because the command line builds its flags from them."""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from saccade.bench.load.load_settings import (
    BACKENDS,
    DATASETS,
    LoadSettings,
    TargetSettings,
    WorkloadSettings,
    check_one_of,
    parse_sizes,
)
from saccade.config import check_above_zero, check_at_least, setting
from saccade.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
# The percentiles of SGLang's report are always included.
USUAL_PERCENTILES: dict[str, tuple[float, ...]] = {"ttft": (99,), "tpot": (99,), "itl": (95, 99), "e2el": (90, 99)}

WRITTEN = re.compile(r"(?:(?P<name>[^=/@:]+)=)?(?:(?P<backend>[\w-]+)@)?(?P<url>https?://.+)")
FORM = "[NAME=][BACKEND@]URL, such as http://127.0.0.1:8001 or vllm=http://127.0.0.1:8001"
USUAL = "usual"
FIVE_SIZES = "mix:224x224,448x336,640x480,720x1280,1024x1024"
USUAL_LOADS: Mapping[str, Mapping[str, Any]] = {
    "560x560, 1 out, 32 at a time": {},
    "five sizes, 1 out, 32 at a time": {"image-resolution": FIVE_SIZES},
    "560x560, 1 out, one at a time": {"num-prompts": 40, "max-concurrency": 1},
    "560x560, 128 out, 32 at a time": {"num-prompts": 128, "random-output-len": 128, "random-range-ratio": 1},
    "text 512, 128 out, 64 at a time": {
        "dataset-name": "random",
        "random-input-len": 512,
        "random-output-len": 128,
        "random-range-ratio": 1,
        "max-concurrency": 64,
    },
    "1920x1080, 32 out, 16 at a time": {
        "num-prompts": 96,
        "image-resolution": "1920x1080",
        "random-output-len": 32,
        "random-range-ratio": 1,
        "max-concurrency": 16,
    },
}
"""The first is the load of sglang#15320, which the defaults of the flags describe."""


def draw_seed() -> int:
    """Draws a seed for content that no server has seen, short enough to retype."""
    return secrets.randbelow(2**31)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """What to show and save."""

    percentile_metrics: str = setting("ttft,tpot,itl,e2el", "metrics to show, of ttft, tpot, itl, e2el")
    metric_percentiles: str = setting("90,99", "percentiles to show")
    goodput: str = setting("", "limits that a good request meets, in ms, such as 'ttft:500 e2el:2000'")
    save_result: bool = setting(False, "write the figures to a JSON file")
    save_detailed: bool = setting(False, "also write every request to that file")
    result_dir: str = setting("", "folder for the JSON file")
    result_filename: str = setting("", "name of the JSON file, also as --json; by default backend, rate and time")
    report: str = setting("", "HTML file to write: a single self-contained file")
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
    """All settings of `saccade bench serve`, except those of servers that it starts itself."""

    target: TargetSettings = field(default_factory=TargetSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    @property
    def is_file(self) -> bool:
        return DATASETS[self.workload.dataset_name] == "file"

    def as_data(self) -> dict[str, dict[str, Any]]:
        """Converts the settings to JSON, which lacks infinity, without the API key."""
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

    serve_model: str = setting("", "model to serve: starts `saccade serve` instead of using a running server")
    serve_args: str = setting("", "flags for every server that is started")
    variants: str = setting(
        "", "NAME:FLAGS;NAME:FLAGS to compare, such as 'graphs:;eager:--graphs vision=off,prefill=off,decode=off'"
    )
    start_timeout_s: float = setting(900.0, "seconds until a server must be ready")

    def __post_init__(self) -> None:
        check_above_zero(self, "start_timeout_s")
        self.flags_by_name()

    @property
    def is_used(self) -> bool:
        return bool(self.serve_model or self.serve_args or self.variants)

    def flags_by_name(self) -> dict[str, str]:
        """The flags of each server to start; there is a single unnamed one if no variants are given."""
        found: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in self.variants.split(";"))):
            name, colon, flags = part.partition(":")
            if not colon or not name.strip() or name.strip() in found:
                raise ConfigError(
                    f"variants has {part!r}; write NAME:FLAGS, with a different name for each (--variants)"
                )
            found[name.strip()] = f"{self.serve_args} {flags.strip()}".strip()
        return found or {"": self.serve_args}


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstSettings:
    """Other servers that get the same requests, in turn with the first."""

    against: tuple[str, ...] = setting((), f"server to compare with that of --base-url (or --host, --port): {FORM}")
    against_api_key: str = setting("", "key for the servers of --against; by default that of --api-key")
    rounds: int = setting(6, "with --against: number of rounds; each server gets one turn per round, with new content")
    settle_s: float = setting(1.0, "with --against: seconds of pause before each turn")

    def __post_init__(self) -> None:
        check_at_least(self, {"rounds": 2, "settle_s": 0})
        for text in self.against:
            _parse(text)

    def names(self) -> list[str]:
        """The names that the user gave, empty for servers without one."""
        return [_parse(text)[0] for text in self.against]

    def targets(self, first: TargetSettings) -> list[TargetSettings]:
        """The other servers, with the first one's settings otherwise."""
        found = [first]
        key = self.against_api_key or first.api_key
        for text in self.against:
            _, backend, url = _parse(text)
            target = replace(first, base_url=url, backend=backend or first.backend, model="", api_key=key)
            if target.url in [one.url for one in found]:
                raise ConfigError(
                    f"{target.url} is named twice; its second turn would find the content of the first in its caches "
                    "(--against, --base-url)"
                )
            found.append(target)
        return found[1:]


def _parse(text: str) -> tuple[str, str, str]:
    """Returns name, backend and URL; the first two may be empty."""
    match = WRITTEN.fullmatch(text.strip())
    if match is None or not _is_address(match["url"]):
        raise ConfigError(f"against is {text!r}; write {FORM} (--against)")
    backend = match["backend"] or ""
    if backend and backend not in BACKENDS:
        raise ConfigError(f"against has the backend {backend!r}; allowed are {', '.join(BACKENDS)} (--against)")
    return (match["name"] or "").strip(), backend, match["url"]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsSettings:
    """Several loads, one after the other, in one table."""

    loads: str = setting(
        "",
        "usual (single images, mixed sizes, one at a time, long answers, text, large images), or a YAML file of names, "
        "each with its flags; other flags apply to all loads",
    )

    def plans(self, plan: ServingPlan) -> dict[str, ServingPlan]:
        """The plan of each load, by name. The only one has no name if no loads were asked for. A malformed file is
        refused before anything runs."""
        if not self.loads:
            return {"": plan}
        found = USUAL_LOADS if self.loads == USUAL else _read(Path(self.loads))
        return {name: _with_flags(plan, name, flags) for name, flags in found.items()}


def _read(path: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a YAML file, or {USUAL} (--loads)") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path} is not YAML (--loads)") from None
    named = found if isinstance(found, dict) else {}
    if not named or not all(
        name and isinstance(name, str) and isinstance(own, dict | None) for name, own in named.items()
    ):
        raise ConfigError(f"{path} must map the name of each load to its flags (--loads)")
    return {name: own or {} for name, own in named.items()}


def _with_flags(plan: ServingPlan, name: str, flags: Mapping[str, Any]) -> ServingPlan:
    kinds = {
        one.name: (part, type(one.default)) for part in ("workload", "load") for one in fields(getattr(plan, part))
    }
    changes: dict[str, dict[str, Any]] = {"workload": {}, "load": {}}
    for flag, value in flags.items():
        key = str(flag).replace("-", "_")
        if key not in kinds or key == "seed":
            raise ConfigError(f"the load {name!r} has {flag}, which is not a flag of a workload or load (--loads)")
        part, kind = kinds[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(
                f"the load {name!r} has {flag}: {value!r}; the value must be of type {kind.__name__} (--loads)"
            )
        changes[part][key] = value
    try:
        return replace(plan, **{part: replace(getattr(plan, part), **own) for part, own in changes.items()})
    except ConfigError as error:
        raise ConfigError(f"the load {name!r}: {error}") from None


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
        check_above_zero(self, "start_timeout_s", "request_timeout_s")
        if self.image_resolution:
            parse_sizes(self.image_resolution)
