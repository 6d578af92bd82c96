"""`saccade bench ...`: benchmarks of model passes, all-reduce, servers and their startup, soaks, and simulations."""

from argparse import Namespace
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.passes.pass_settings import (
    AllReduceBenchSettings,
    GraphBenchSettings,
    OfflineBenchSettings,
    VisionBenchSettings,
)
from saccade.bench.scale.scale_settings import ScaleSettings
from saccade.bench.serving.serving_settings import (
    AgainstSettings,
    LoadsSettings,
    OutputSettings,
    ServingPlan,
    StartupBenchSettings,
    VariantSettings,
    draw_seed,
)
from saccade.bench.soak.soak_settings import SoakSettings
from saccade.cli.aliases import add_bench_aliases
from saccade.cli.model import MODEL_WORD
from saccade.cli.parser import Parser, settings_from
from saccade.cli.signals import ended_by_sigterm
from saccade.config import openai_api_key
from saccade.terminal import Output

SERVE = "bench serve"


@dataclass(frozen=True, slots=True)
class Bench:
    """`command` is the module and the function that runs it, with a model if it `has_model`, settings and a console."""

    about: str
    command: str
    settings: type[Any]
    has_model: bool = False


BENCHES = {
    "bench offline": Bench(
        "Time a model's prefill and decode, eager and with graphs, against what the GPU's FLOPs and bandwidth allow.",
        "passes.passes_command:bench_offline",
        OfflineBenchSettings,
        has_model=True,
    ),
    "bench vision": Bench(
        "Time the vision tower on images of several sizes, eager and with graphs, against what the GPU's FLOPs allow.",
        "passes.passes_command:bench_vision",
        VisionBenchSettings,
        has_model=True,
    ),
    "bench graphs": Bench(
        "Time the prefill of a synthetic model by number of tokens: eager, with piecewise graphs, with full graphs.",
        "passes.passes_command:bench_graphs",
        GraphBenchSettings,
    ),
    "bench allreduce": Bench(
        "Time all-reduce by number of rows: every algorithm, inside a graph and outside.",
        "passes.passes_command:bench_allreduce",
        AllReduceBenchSettings,
    ),
    "bench startup": Bench(
        "Start a server several times: seconds in each stage until it is ready, and whether first requests are slower.",
        "serving.serving_command:bench_startup",
        StartupBenchSettings,
        has_model=True,
    ),
    "bench soak": Bench(
        "Put mixed and hostile load on a server: images of many sizes, streams, clients that leave or read slowly, bad "
        "files, grammars, tools, timeouts. Every answer must be the expected one, and the use of memory, files, "
        "sockets and KV blocks must not grow.",
        "soak.soak_command:bench_soak",
        SoakSettings,
        has_model=True,
    ),
    "bench scale": Bench(
        "Simulate many replicas on one core, in virtual time: the real router, schedulers and caches, on devices with "
        "step times measured on an H200 with Qwen3-VL-8B. Requests ask about images; some images are more popular, "
        "and one is hot. Reports cache hits, time to first token and throughput by routing policy.",
        "scale.scale_command:bench_scale",
        ScaleSettings,
    ),
}
ABOUT_SERVE = (
    "Send requests to a server and measure time to first token, time between tokens, throughput and goodput. Flags "
    "and results are those of SGLang's and vLLM's benchmarks; any OpenAI-compatible server can be the target. "
    "With --against URL, several servers take turns with the same requests, and the report has ratios with "
    "confidence intervals. --loads usual does all this for six loads, in one table."
)


def new_parser(name: str) -> Parser:
    if name == SERVE:
        return _serve_parser()
    bench = BENCHES[name]
    parser = Parser(
        name, words=MODEL_WORD if bench.has_model else "", max_words=int(bench.has_model), about=bench.about
    )
    parser.add_settings(bench.settings)
    return parser


def _serve_parser() -> Parser:
    parser = Parser(SERVE, about=ABOUT_SERVE)
    parser.add_settings(TargetSettings)
    parser.add_settings(WorkloadSettings, seed=None)  # drawn when the command runs
    for settings in (LoadSettings, OutputSettings, VariantSettings, AgainstSettings, LoadsSettings):
        parser.add_settings(settings)
    add_bench_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    """Without a model's name, the benchmark chooses the bundled model."""
    with ended_by_sigterm():
        if flags.command == SERVE:
            return _serve(flags)
        bench = BENCHES[flags.command]
        module, _, name = bench.command.partition(":")
        settings = settings_from(flags, bench.settings, {"api_key": openai_api_key()})
        model = ["".join(flags.words)] if bench.has_model else []
        status: int = getattr(import_module(f"saccade.bench.{module}"), name)(*model, settings, Output())
        return status


def _serve(flags: Namespace) -> int:
    from saccade.bench.serving.serving_command import bench_serve

    plan = ServingPlan(
        settings_from(flags, TargetSettings, {"api_key": openai_api_key()}),
        settings_from(flags, WorkloadSettings, {"seed": draw_seed()}),
        settings_from(flags, LoadSettings),
        settings_from(flags, OutputSettings),
    )
    plans = settings_from(flags, LoadsSettings).plans(plan)
    return bench_serve(plans, Output(), settings_from(flags, VariantSettings), settings_from(flags, AgainstSettings))
