"""`saccade bench serve`: load on a server, ours or any other that speaks OpenAI's protocol."""

from argparse import Namespace

from saccade.bench.serving_settings import (
    LoadSettings,
    OutputSettings,
    ServingPlan,
    TargetSettings,
    VariantSettings,
    WorkloadSettings,
)
from saccade.cli.aliases import add_bench_aliases
from saccade.cli.parser import Parser, settings_from
from saccade.config import openai_api_key
from saccade.terminal import Output


def new_parser(name: str) -> Parser:
    about = (
        "Send requests to a server and measure time to first token, time between tokens, throughput and goodput. Flags "
        "and results are those of SGLang's and vLLM's benchmarks; any OpenAI server can be the target."
    )
    parser = Parser(name, about=about)
    for settings in (TargetSettings, WorkloadSettings, LoadSettings, OutputSettings, VariantSettings):
        parser.add_settings(settings)
    add_bench_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    from saccade.bench.serving_command import bench_serve

    plan = ServingPlan(
        settings_from(flags, TargetSettings, {"api_key": openai_api_key()}),
        settings_from(flags, WorkloadSettings),
        settings_from(flags, LoadSettings),
        settings_from(flags, OutputSettings),
    )
    return bench_serve(plan, settings_from(flags, VariantSettings), Output())
