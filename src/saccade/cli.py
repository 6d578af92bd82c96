"""The command line. Flags are generated from the fields of the settings, so that none is spelled twice."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table

from saccade import __version__
from saccade.bench.settings import OfflineBenchSettings
from saccade.config import AnswerSettings, GraphBenchSettings, ServerSettings
from saccade.engine.settings import EngineSettings, SchedulerSettings
from saccade.errors import ConfigError, SaccadeError

Settings = TypeVar("Settings")

EXIT_BAD_SETTING = 2
DESCRIPTION = (
    """Serve vision-language models: every forward pass is a CUDA-graph replay, and every replay is the right one."""
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    flags = parser.parse_args(argv)
    if flags.run is None:
        parser.print_help()
        return 0
    try:
        flags.run(flags)
    except SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        return EXIT_BAD_SETTING
    return 0


def make_parser() -> ArgumentParser:
    parser = ArgumentParser("saccade", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"saccade {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model behind the OpenAI API", description="Serve a model.")
    serve.add_argument("model", nargs="?", help="checkpoint folder or hub id; without one, the bundled model")
    add_flags(serve, ServerSettings)
    serve.set_defaults(run=_serve)

    run = commands.add_parser("run", help="ask a model once", description="Ask a model once, with images.")
    run.add_argument("model", help="checkpoint folder or hub id")
    run.add_argument("prompt", help="the question")
    run.add_argument("--image", action="append", default=[], type=Path, metavar="FILE", help="an image; repeatable")
    for settings in (AnswerSettings, EngineSettings, SchedulerSettings):
        add_flags(run, settings)
    run.set_defaults(run=_run)

    bench = commands.add_parser("bench", help="measure", description="Measure.")
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    graphs = benches.add_parser("graphs", help="a decoder body: eager, piecewise and full graphs, by tokens")
    add_flags(graphs, GraphBenchSettings)
    graphs.set_defaults(run=_bench_graphs)
    offline = benches.add_parser("offline", help="prefill and decode of a model: eager and graphs, beside their limits")
    offline.add_argument("model", help="checkpoint folder or hub id")
    add_flags(offline, OfflineBenchSettings)
    offline.set_defaults(run=_bench_offline)
    return parser


def add_flags(parser: ArgumentParser, settings: type[Any]) -> None:
    """One flag a field: `--max-model-len` for `max_model_len`, with the field's type, default and help."""
    types = get_type_hints(settings)
    for field in fields(settings):
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        shown = f" (default: {default})" if default not in ("", None) else ""
        flag, explained = f"--{field.name.replace('_', '-')}", f"{field.metadata['help']}{shown}"
        if types[field.name] is bool:
            parser.add_argument(flag, action=BooleanOptionalAction, default=field.default, help=explained)
            continue
        reader = _reader(types[field.name])
        parser.add_argument(flag, type=reader, default=field.default, metavar=field.name.upper(), help=explained)


def settings_from(flags: Namespace, settings: type[Settings]) -> Settings:
    names = [field.name for field in fields(settings)]  # type: ignore[arg-type]
    return settings(**{name: getattr(flags, name) for name in names})


def human_int(text: str) -> int:
    """An integer, with k, m or g for powers of 1000 and K, M or G for powers of 1024."""
    scales = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
    number, scale = (text[:-1], scales[text[-1]]) if text[-1:] in scales else (text, 1)
    try:
        value = float(number) * scale if "." in number else int(number) * scale
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not an integer such as 8192, 8k (8000) or 8K (8192)") from None
    if value != int(value):
        raise ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def _reader(kind: Any) -> Callable[[str], Any]:
    if get_origin(kind) is tuple:
        one = _reader(get_args(kind)[0])
        return lambda text: tuple(one(part) for part in text.split(","))
    return human_int if kind is int else kind


def _serve(flags: Namespace) -> None:
    settings_from(flags, ServerSettings)
    raise ConfigError(f"saccade {__version__} has no server yet; `saccade bench graphs` shows the graph core at work")


def _run(flags: Namespace) -> None:
    from saccade import LLM, SamplingParams  # imports torch

    answer = settings_from(flags, AnswerSettings)
    chosen = {**asdict(settings_from(flags, EngineSettings)), **asdict(settings_from(flags, SchedulerSettings))}
    content: list[dict[str, Any]] = [{"type": "image", "image": path} for path in flags.image]
    content.append({"type": "text", "text": flags.prompt})
    with Console(stderr=True).status(f"loading {flags.model}"):
        llm = LLM(flags.model, **chosen)
    params = SamplingParams(max_tokens=answer.max_tokens, temperature=answer.temperature)
    with llm:
        [output] = llm.chat([{"role": "user", "content": content}], params, progress=False)
    print(output.outputs[0].text)


def _bench_graphs(flags: Namespace) -> None:
    from saccade.bench.graphs import run_graph_bench  # imports torch

    settings = settings_from(flags, GraphBenchSettings)
    console = Console()
    with Console(stderr=True).status("starting") as status:
        bench = run_graph_bench(settings, status.update)
    table = Table("tokens", "way", "ms", "host ms", "capture s", "graph MiB", "equals eager")
    for line in bench.lines:
        figures = (f"{line.ms:.2f}", f"{line.cpu_ms:.2f}", f"{line.capture_s:.2f}", f"{line.graph_mib:.0f}")
        table.add_row(str(line.tokens), line.way, *figures, "yes" if line.equals_eager else "NO")
    console.print(table)
    for way, mib in bench.held_mib.items():
        console.print(f"{way}: {mib:.0f} MiB held beyond the weights (arena and all graphs)")
    console.print(" ".join(f"{key}={value}" for key, value in bench.environment.items()))
    if settings.json:
        Path(settings.json).write_text(json.dumps(asdict(bench), indent=1))


def _bench_offline(flags: Namespace) -> None:
    from saccade.bench.offline import run_offline_bench  # imports torch
    from saccade.bench.offline_report import print_offline_bench

    settings = settings_from(flags, OfflineBenchSettings)
    with Console(stderr=True).status("starting") as status:
        bench = run_offline_bench(flags.model, settings, status.update)
    print_offline_bench(bench, Console())
    if settings.json:
        Path(settings.json).write_text(json.dumps(asdict(bench), indent=1))
