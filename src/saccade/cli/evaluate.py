"""`saccade eval`: how often a model is right."""

from argparse import Namespace

from rich.console import Console

from saccade.cli.aliases import add_aliases
from saccade.cli.model import BUNDLED_LIMITS, MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.eval.eval_settings import EvalSettings
from saccade.terminal import Output
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings


def new_parser(name: str) -> Parser:
    about = (
        "Ask questions with known answers: accuracy with its confidence interval, and what was taken for what. Without "
        "MODEL, the model that comes with the package; --graphs-compare answers with graphs on and off."
    )
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    for settings in (EvalSettings, EngineSettings, SchedulerSettings):
        parser.add_settings(settings)
    add_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    from saccade.eval.eval_report import print_eval
    from saccade.eval.evaluation import run_eval  # imports torch

    own = {} if flags.words else BUNDLED_LIMITS
    report = run_eval(
        chosen_model(flags.words),
        settings_from(flags, EvalSettings),
        engine=settings_from(flags, EngineSettings, own),
        limits=settings_from(flags, SchedulerSettings, own),
        console=Console(stderr=True),
    )
    print_eval(report, Output())
    return 0
