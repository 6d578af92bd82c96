"""Where start-up spends its time: stages, what each compiles, and Python's time in captures.

Run by hand on a GPU, first with empty caches (`rm -rf ~/.cache/saccade ~/.triton`), then again:

python -m tests.gpu.profile_start FOLDER                 a checkpoint or a config.json, random weights
python -m tests.gpu.profile_start FOLDER --alone         without compile processes
python -m tests.gpu.profile_start FOLDER --share 0/12    the work of the first of twelve compile processes
"""

import cProfile
import importlib
import pstats
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

from saccade.dry_run.compile_process import compile_share
from saccade.execution.build import build_engine
from saccade.execution.compilers import CompileJob, start_compiling
from saccade.execution.spare_compilers import SpareCompilers
from saccade.inputs.processor import Processor
from saccade.kernels.dispatch import device_named
from saccade.kernels.packages import import_packages
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Stage, StartEngine

NUM_SHOWN = 45
NUM_FUNCTIONS = 40


class Stages:
    """The seconds of each stage, and what it compiled. The stage named `profiled` is profiled."""

    def __init__(self, profiled: str) -> None:
        self.name, self._since, self._profiled = "imports", perf_counter(), profiled
        self.seconds: dict[str, float] = {}
        self.compiled: list[tuple[str, float, str]] = []
        self.profile = cProfile.Profile()

    def report(self, stage: Stage) -> None:
        if stage.name == self.name:
            return
        now = perf_counter()
        self.profile.disable()
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self._since
        self.name, self._since = stage.name, now
        if stage.name == self._profiled:
            self.profile.enable()

    def note(self, seconds: float, what: str) -> None:
        self.compiled.append((self.name, seconds, what))


def watch_compilers(stages: Stages) -> None:
    triton = importlib.import_module("triton")

    def heard(*, src: Any, times: Any, cache_hit: bool, **details: Any) -> None:
        if not cache_hit:
            stages.note(times.total / 1e6, f"triton {src.fn.fn.__name__} {src.constants}")

    triton.knobs.compilation.listener = heard
    with suppress(ImportError):
        compiler: Any = importlib.import_module("cutlass.base_dsl.compiler").CompileCallable
        compiler._compile = _timed(compiler._compile, stages)


def _timed(compile_: Callable[..., Any], stages: Stages) -> Callable[..., Any]:
    def call(self: Any, function: Any, *args: Any, **how: Any) -> Any:
        begun = perf_counter()
        try:
            return compile_(self, function, *args, **how)
        finally:
            stages.note(perf_counter() - begun, f"cute {getattr(function, '__name__', type(function).__name__)}")

    return call


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--share", default="")
    parser.add_argument("--stage", default="capturing graphs", help="the stage to profile")
    given = parser.parse_args()
    stages = Stages(given.stage)
    settings, limits = EngineSettings(load_format="dummy"), SchedulerSettings()
    start = StartEngine(str(given.folder), settings, limits)
    if given.share:
        index, count = map(int, given.share.split("/"))
        import_packages()
        stages.report(Stage("share"))
        watch_compilers(stages)
        compile_share(CompileJob(start, index, count))
        show(stages)
        return
    compiling = None if given.alone else start_compiling(start, device_named("auto"), SpareCompilers())
    sys.stdout.write(f"compile processes: {compiling is not None}\n")
    import_packages()
    watch_compilers(stages)
    built = build_engine(
        given.folder,
        settings,
        limits,
        processor=Processor.from_folder(given.folder),
        report=stages.report,
        compiling=compiling,
    )
    if compiling is not None:
        compiling.note_started()
    show(stages)
    built.close()


def show(stages: Stages) -> None:
    stages.report(Stage(""))
    for name, seconds in stages.seconds.items():
        own = [each for each in stages.compiled if each[0] == name]
        sys.stdout.write(f"{name:24} {seconds:7.2f} s; {len(own)} compiled in {sum(s for _, s, _ in own):.2f} s\n")
    for name, seconds, what in sorted(stages.compiled, key=lambda each: -each[1])[:NUM_SHOWN]:
        sys.stdout.write(f"{seconds:7.2f} s  {name:20} {what[:140]}\n")
    if not stages.profile.getstats():
        return
    text = StringIO()
    pstats.Stats(stages.profile, stream=text).sort_stats("tottime").print_stats(NUM_FUNCTIONS)
    pstats.Stats(stages.profile, stream=text).sort_stats("cumulative").print_stats(NUM_FUNCTIONS)
    sys.stdout.write(text.getvalue())


if __name__ == "__main__":
    main()
