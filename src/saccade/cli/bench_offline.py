"""`saccade bench offline`: the passes of a model without a server."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from saccade.bench.pass_settings import OfflineBenchSettings
from saccade.cli.model import MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.terminal import Output, stages


def new_parser(name: str) -> Parser:
    about = "Prefill and decode of a model: eager and with graphs, beside what FLOPs and bytes allow."
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    parser.add_settings(OfflineBenchSettings)
    return parser


def run(flags: Namespace) -> int:
    from saccade.bench.offline_bench import run_offline_bench  # imports torch
    from saccade.bench.offline_report import print_offline_bench

    settings = settings_from(flags, OfflineBenchSettings)
    with stages(Console(stderr=True), "starting") as say:
        bench = run_offline_bench(chosen_model(flags.words), settings, say)
    print_offline_bench(bench, Output())
    if settings.json:
        Path(settings.json).write_text(json.dumps(asdict(bench), indent=1))
    return 0
