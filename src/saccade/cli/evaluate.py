"""`saccade eval`: measures a model's accuracy."""

from argparse import Namespace

from rich.console import Console

from saccade.cli.model import engine_parser, engine_settings
from saccade.cli.parser import Parser, settings_from
from saccade.eval.eval_settings import EvalSettings
from saccade.terminal import Output


def new_parser(name: str) -> Parser:
    about = (
        "Ask questions with known answers: accuracy with its confidence interval, and which answers get confused. "
        "Without MODEL, the model that comes with the package. --graphs-compare answers with graphs and without."
    )
    return engine_parser(name, about, EvalSettings)


def run(flags: Namespace) -> int:
    from saccade.eval.eval_report import print_eval
    from saccade.eval.evaluation import run_eval  # imports torch

    model, engine, limits = engine_settings(flags)
    asked = settings_from(flags, EvalSettings)
    report = run_eval(model, asked, engine=engine, limits=limits, console=Console(stderr=True))
    print_eval(report, Output())
    return 0
