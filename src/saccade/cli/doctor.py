"""`saccade doctor`: checks everything that serving needs, and says how to fix problems."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from saccade import __version__
from saccade.cli.checks import Finding, Level, check_machine
from saccade.cli.model import MODEL_WORD, chosen_model
from saccade.cli.parser import Parser, settings_from
from saccade.config import setting
from saccade.terminal import Output, print_json

EXIT_BROKEN = 1
MARKS = {Level.OK: ("✓", "green"), Level.NOTE: ("•", "yellow"), Level.BROKEN: ("✗", "red")}


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorSettings:
    """What `saccade doctor` checks."""

    host: str = setting("127.0.0.1", "address that a server would listen on")
    port: int = setting(8000, "port that a server would listen on")
    sample: bool = setting(True, "ask the model one question, on the CPU")
    json: bool = setting(False, "print JSON, for bug reports")


def new_parser(name: str) -> Parser:
    about = "Check this machine and a model (by default the one that comes with the package), and say what to fix."
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    parser.add_settings(DoctorSettings)
    return parser


def run(flags: Namespace) -> int:
    settings = settings_from(flags, DoctorSettings)
    console = Output(stderr=settings.json)
    findings = []
    with console.status("checking") as status:
        for finding in _findings(flags.words, settings):
            findings.append(finding)
            status.update(f"checked {finding.check}")
            if not settings.json:
                _show(console, finding)
    broken = [finding for finding in findings if finding.level is Level.BROKEN]
    if settings.json:
        data = {"saccade": __version__, "ok": not broken, "findings": [asdict(finding) for finding in findings]}
        print_json(data)
    else:
        console.print("all checks passed" if not broken else f"{len(broken)} of {len(findings)} checks failed")
    return EXIT_BROKEN if broken else 0


def _findings(words: list[str], settings: DoctorSettings) -> Iterator[Finding]:
    from saccade.cli.checks_model import check_model

    yield from check_machine(settings.host, settings.port)
    yield from check_model(chosen_model(words), sample=settings.sample)


def _show(console: Console, finding: Finding) -> None:
    mark, colour = MARKS[finding.level]
    line = Text(f"{mark} ", style=colour)
    line.append(f"{finding.check:<11}", style="bold").append(finding.found, style="default")
    console.print(line, soft_wrap=True)
    if finding.fix and finding.level is not Level.OK:
        console.print(Text(f"  → {finding.fix}", style=colour), soft_wrap=True)
