"""Settings of `saccade bench serve` and `saccade bench startup`, named as in SGLang's and vLLM's benchmarks. Imports no
torch, because the command line builds its flags from them."""

import math
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from saccade.bench.load.load_settings import (
    DATASETS,
    LoadSettings,
    TargetSettings,
    WorkloadSettings,
    check_one_of,
)
from saccade.config import check_above_zero, check_at_least, setting
from saccade.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
# The percentiles of SGLang's report are always included.
USUAL_PERCENTILES: dict[str, tuple[float, ...]] = {"ttft": (99,), "tpot": (99,), "itl": (95, 99), "e2el": (90, 99)}


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
