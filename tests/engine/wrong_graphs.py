"""Graphs that become wrong after their capture."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.graphs import GraphRunner
from saccade.graphs.capture import CapturedGraph


def spoil(graph: CapturedGraph, step: Any) -> None:
    """Makes replays of this graph do something wrong at the end."""
    graph.steps = (*graph.steps, step)


def spoil_outputs(runner: GraphRunner) -> None:
    """Makes all graphs of a phase change one output value, as little as possible."""
    name = {"vision": "rows", "prefill": "trunk"}.get(runner.phase.name, "next_ids")
    for graph in runner.graphs:
        spoil(graph, partial(_change, graph.frame[name].view(-1)[:1]))


def _change(value: Tensor) -> None:
    if value.is_floating_point():
        value.copy_(torch.nextafter(value, torch.full_like(value, torch.inf)))
    else:
        value.copy_((value + 1) % 3)
