"""`saccade bench startup`: the stages of a start, and the first requests after it."""

from argparse import Namespace

from saccade.bench.serving_settings import StartupBenchSettings
from saccade.cli.model import MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.terminal import Output


def new_parser(name: str) -> Parser:
    about = "Start a server several times: seconds of every stage until ready, and whether first requests are slower."
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    parser.add_settings(StartupBenchSettings)
    return parser


def run(flags: Namespace) -> int:
    from saccade.bench.serving_command import bench_startup

    return bench_startup(chosen_model(flags.words), settings_from(flags, StartupBenchSettings), Output())
