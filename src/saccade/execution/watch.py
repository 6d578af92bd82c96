"""Traces and profiles of an engine, on an operator's request and for a limited time."""

import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from os import getpid
from pathlib import Path
from time import monotonic

import torch
from torch.profiler import ProfilerActivity, profile

from saccade.config import writable_folder
from saccade.errors import ConfigError
from saccade.scheduling.engine import Engine
from saccade.wire import messages

Answer = messages.Traced | messages.Profiled
Question = messages.BeginTrace | messages.EndTrace | messages.StartProfile | messages.StopProfile

NO_PROFILE = messages.Profiled(0, problem="no profile is running; POST /start_profile starts one")


class Watch:
    """Takes one trace and one profile at a time. `check`, called between steps, ends them at their time limit."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._trace_until: float | None = None
        self._profile_until: float | None = None
        self._profiler: profile | None = None
        self._folder = Path()
        self._written = NO_PROFILE

    def answer(self, question: Question) -> Answer:
        match question:
            case messages.BeginTrace(serial=serial, limit_s=limit_s):
                self._trace_until = self._clock() + limit_s
                self._engine.begin_trace()
                return messages.Traced(serial)
            case messages.EndTrace(serial=serial):
                self._trace_until = None
                return messages.Traced(serial, self._engine.end_trace())
            case messages.StartProfile():
                return messages.Profiled(question.serial, problem=self._start(question))
            case messages.StopProfile(serial=serial):
                found = self._stop()
                return messages.Profiled(serial, found.file, found.problem)

    def check(self) -> None:
        if self._trace_until is None and self._profile_until is None:
            return
        now = self._clock()
        if self._trace_until is not None and now >= self._trace_until:
            self._trace_until = None
            self._engine.end_trace()
        if self._profile_until is not None and now >= self._profile_until:
            self._written = self._write()

    def seconds_left(self) -> float | None:
        """Until `check` has something to do; None if nothing is being recorded."""
        limits = [limit for limit in (self._trace_until, self._profile_until) if limit is not None]
        return max(0.0, min(limits) - self._clock()) if limits else None

    def _start(self, asked: messages.StartProfile) -> str:
        """Starts a profile. Returns why it could not, or an empty string."""
        if self._profiler is not None:
            return "a profile is already running; POST /stop_profile ends it"
        try:
            folder = writable_folder(asked.folder, "--profile-folder")
        except ConfigError as error:
            return str(error)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
        self._profiler, self._folder = profile(activities=kinds, acc_events=False), folder
        with warnings.catch_warnings():  # torch 2.11 says that it keeps no events of earlier cycles; there is one cycle
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profiler.start()
        self._profile_until = self._clock() + asked.limit_s
        return ""

    def _stop(self) -> messages.Profiled:
        """Ends the running profile. Returns its file, or once that of a profile that reached its time limit."""
        found = self._written if self._profiler is None else self._write()
        self._written = NO_PROFILE
        return found

    def _write(self) -> messages.Profiled:
        """Writes the profile, which blocks steps for about as long as the profile lasted."""
        assert self._profiler is not None, "a profile runs"
        profiler, self._profiler, self._profile_until = self._profiler, None, None
        profiler.stop()
        file = self._folder / f"saccade-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{getpid()}.pt.trace.json.gz"
        try:
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            return messages.Profiled(0, problem=f"the profile could not be written to {self._folder}: {error}")
        return messages.Profiled(0, file=str(file))
