"""Accuracy on questions with known answers: `run_eval` measures, `print_eval` shows, `EvalSettings` says what."""

from saccade.eval.report import print_eval
from saccade.eval.results import EvalReport, TaskResult
from saccade.eval.run import run_eval
from saccade.eval.settings import EvalSettings

__all__ = ["EvalReport", "EvalSettings", "TaskResult", "print_eval", "run_eval"]
