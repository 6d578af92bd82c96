"""`saccade bench vision`: the vision tower of a model, without requests."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from saccade.bench.pass_settings import VisionBenchSettings
from saccade.cli.model import MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.terminal import Output, stages


def new_parser(name: str) -> Parser:
    about = "Images of several sizes through the vision tower: eager and with graphs, beside what FLOPs allow."
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    parser.add_settings(VisionBenchSettings)
    return parser


def run(flags: Namespace) -> int:
    from saccade.bench.vision_bench import run_vision_bench  # imports torch
    from saccade.bench.vision_report import plot_vision_bench, print_vision_bench

    settings = settings_from(flags, VisionBenchSettings)
    with stages(Console(stderr=True), "starting") as say:
        bench = run_vision_bench(chosen_model(flags.words), settings, say)
    print_vision_bench(bench, Output())
    if settings.json:
        Path(settings.json).write_text(json.dumps(asdict(bench), indent=1))
    if settings.plot:
        plot_vision_bench(bench, settings.plot)
    return 0
