"""`saccade bench ...`: benchmarks of model passes, all-reduce, servers and their startup, soaks, and simulations."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.passes.pass_settings import (
    AllReduceBenchSettings,
    GraphBenchSettings,
    OfflineBenchSettings,
    VisionBenchSettings,
)
from saccade.bench.scale.scale_settings import ScaleSettings
from saccade.bench.serving.serving_against_settings import AgainstSettings
from saccade.bench.serving.serving_loads_settings import LoadsSettings
from saccade.bench.serving.serving_settings import (
    OutputSettings,
    ServingPlan,
    StartupBenchSettings,
    VariantSettings,
    draw_seed,
)
from saccade.bench.soak.soak_settings import SoakSettings
from saccade.cli.aliases import add_bench_aliases
from saccade.cli.model import MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.cli.signals import ended_by_sigterm
from saccade.config import openai_api_key
from saccade.terminal import Output, check_file, check_plot, print_table, stages, write_json

SERVE = "bench serve"
ABOUT = {
    SERVE: (
        "Send requests to a server and measure time to first token, time between tokens, throughput and goodput. Flags "
        "and results are those of SGLang's and vLLM's benchmarks; any OpenAI-compatible server can be the target. "
        "With --against URL, several servers take turns with the same requests, and the report has ratios with "
        "confidence intervals. --loads usual does all this for six loads, in one table."
    ),
    "bench offline": (
        "Time a model's prefill and decode, eager and with graphs, against what the GPU's FLOPs and bandwidth allow."
    ),
    "bench vision": (
        "Time the vision tower on images of several sizes, eager and with graphs, against what the GPU's FLOPs allow."
    ),
    "bench graphs": (
        "Time the prefill of a synthetic model by number of tokens: eager, with piecewise graphs, with full graphs."
    ),
    "bench allreduce": "Time all-reduce by number of rows: every algorithm, inside a graph and outside.",
    "bench startup": (
        "Start a server several times: seconds in each stage until it is ready, and whether first requests are slower."
    ),
    "bench soak": (
        "Put mixed and hostile load on a server: images of many sizes, streams, clients that leave or read slowly, bad "
        "files, grammars, tools, timeouts. Every answer must be the expected one, and the use of memory, files, "
        "sockets and KV blocks must not grow."
    ),
    "bench scale": (
        "Simulate many replicas on one core, in virtual time: the real router, schedulers and caches, on devices with "
        "step times measured on an H200 with Qwen3-VL-8B. Requests ask about images; some images are more popular, "
        "and one is hot. Reports cache hits, time to first token and throughput by routing policy."
    ),
}
SETTINGS: dict[str, tuple[type[Any], ...]] = {
    SERVE: (
        *(TargetSettings, WorkloadSettings, LoadSettings, OutputSettings),
        *(VariantSettings, AgainstSettings, LoadsSettings),
    ),
    "bench offline": (OfflineBenchSettings,),
    "bench vision": (VisionBenchSettings,),
    "bench graphs": (GraphBenchSettings,),
    "bench allreduce": (AllReduceBenchSettings,),
    "bench startup": (StartupBenchSettings,),
    "bench soak": (SoakSettings,),
    "bench scale": (ScaleSettings,),
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {SERVE: {"seed": None}}  # drawn when the command runs
WITH_MODEL = ("bench offline", "bench vision", "bench startup", "bench soak")


def new_parser(name: str) -> Parser:
    has_model = name in WITH_MODEL
    parser = Parser(name, words=MODEL_WORD if has_model else "", max_words=int(has_model), about=ABOUT[name])
    for settings in SETTINGS[name]:
        parser.add_settings(settings, **OWN_DEFAULTS.get(name, {}))
    if name == SERVE:
        add_bench_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    runs = {
        SERVE: _serve,
        "bench offline": _offline,
        "bench vision": _vision,
        "bench graphs": _graphs,
        "bench allreduce": _allreduce,
        "bench startup": _startup,
        "bench soak": _soak,
        "bench scale": _scale,
    }
    return runs[flags.command](flags)


def _serve(flags: Namespace) -> int:
    from saccade.bench.serving.serving_command import bench_serve

    plan = ServingPlan(
        settings_from(flags, TargetSettings, {"api_key": openai_api_key()}),
        settings_from(flags, WorkloadSettings, {"seed": draw_seed()}),
        settings_from(flags, LoadSettings),
        settings_from(flags, OutputSettings),
    )
    plans = settings_from(flags, LoadsSettings).plans(plan)
    with ended_by_sigterm():
        return bench_serve(
            plans, Output(), settings_from(flags, VariantSettings), settings_from(flags, AgainstSettings)
        )


def _startup(flags: Namespace) -> int:
    from saccade.bench.serving.serving_command import bench_startup

    return bench_startup(chosen_model(flags.words), settings_from(flags, StartupBenchSettings), Output())


def _soak(flags: Namespace) -> int:
    from saccade.bench.soak.soak_command import bench_soak

    model = flags.words[0] if flags.words else ""  # the server then chooses the bundled one, with its limits
    return bench_soak(model, settings_from(flags, SoakSettings, {"api_key": openai_api_key()}), Output())


def _scale(flags: Namespace) -> int:
    from saccade.bench.scale.scale_command import bench_scale

    return bench_scale(settings_from(flags, ScaleSettings), Output())


def _offline(flags: Namespace) -> int:
    from saccade.bench.passes.offline_bench import run_offline_bench  # imports torch
    from saccade.bench.passes.offline_report import print_offline_bench

    settings = settings_from(flags, OfflineBenchSettings)
    print_offline_bench(_measured(run_offline_bench, chosen_model(flags.words), settings), Output())
    return 0


def _vision(flags: Namespace) -> int:
    from saccade.bench.passes.vision_bench import run_vision_bench  # imports torch
    from saccade.bench.passes.vision_report import plot_vision_bench, print_vision_bench

    settings = settings_from(flags, VisionBenchSettings)
    check_plot(settings.plot)
    bench = _measured(run_vision_bench, chosen_model(flags.words), settings)
    print_vision_bench(bench, Output())
    if settings.plot:
        plot_vision_bench(bench, settings.plot)
    return 0


def _graphs(flags: Namespace) -> int:
    from saccade.bench.passes.graph_bench import run_graph_bench  # imports torch

    bench, console = _measured(run_graph_bench, settings_from(flags, GraphBenchSettings)), Output()
    table = Table("tokens", "mode", "ms", "host ms", "capture s", "graph MiB", "equals eager")
    for line in bench.lines:
        figures = (f"{line.ms:.2f}", f"{line.cpu_ms:.2f}", f"{line.capture_s:.2f}", f"{line.graph_mib:.0f}")
        table.add_row(str(line.tokens), line.way, *figures, "yes" if line.equals_eager else "NO")
    print_table(console, table)
    for way, mib in bench.held_mib.items():
        console.print(f"{way}: {mib:.0f} MiB in use besides the weights (arena and all graphs)")
    console.print(" ".join(f"{key}={value}" for key, value in bench.environment.items()))
    return 0


def _allreduce(flags: Namespace) -> int:
    from saccade.bench.passes.allreduce import run_allreduce_bench  # imports torch

    bench, console = _measured(run_allreduce_bench, settings_from(flags, AllReduceBenchSettings)), Output()
    table = Table("rows", "KiB", "algorithm", "graph us", "eager us", "chosen", "correct")
    for line in bench.lines:
        figures = (f"{line.graph_us:.1f}", f"{line.eager_us:.1f}")
        marks = ("yes" if line.is_taken else "", "yes" if line.is_right else "NO")
        table.add_row(str(line.rows), f"{line.nbytes / 1024:g}", line.algorithm, *figures, *marks)
    print_table(console, table)
    if bench.is_shared:
        ranks = bench.environment["ranks"]
        console.print(f"{ranks} ranks shared one GPU, so the times mean nothing; only the sums were checked.")
    console.print(" ".join(f"{key}={value}" for key, value in bench.environment.items()))
    return 0 if all(line.is_right for line in bench.lines) else 1


def _measured(measure: Callable[..., Any], *given: Any) -> Any:
    """Runs a benchmark and writes its figures to the `json` file of its settings, its last argument."""
    path: str = given[-1].json
    check_file(path)
    with stages(Console(stderr=True), "starting") as say:
        bench = measure(*given, say)
    if path:
        write_json(path, asdict(bench))
    return bench
