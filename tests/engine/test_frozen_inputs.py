"""Verification and audit find every input that a capture could freeze, in every pass."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.config import GraphSettings, Tier
from saccade.execution.executor import DeviceExecutor
from saccade.execution.verification import audit_graphs, verify_graphs
from saccade.graphs import Frame, GraphRunner
from saccade.graphs.buffers import Role
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, executor_of

Load = Callable[[str], Loaded]
SIZES = Options(mode=None, max_tokens=24, max_num_seqs=24, max_units=40, num_blocks=80, max_model_len=64)
# It is the same in every batch (one row per request), so no replay shows that it is frozen, but the audit does.
CONSTANT = {("decode", "query_start")}
NO_ROTARY = {("vision", "positions")}
# Phases whose inputs differ from those of the first family: windows, deepstack, limits.
PHASES = {
    "qwen3_vl": ("vision", "prefill", "decode", "head", "sample"),
    "qwen2_5_vl": ("vision",),
    "gemma3_vl": ("vision", "prefill"),
}


def new_executor(loaded: Loaded) -> DeviceExecutor:
    made, model = loaded
    executor = executor_of(build(model, made.folder, SIZES))
    state, prefill = executor.state, executor.prefill.phase.arena
    for cache in (tensor for pair in state.caches for tensor in pair):
        cache.normal_()
    if state.vision_rows is not None:
        state.vision_rows.normal_()
    prefill.views(prefill.limits)["trunk"].normal_()
    return executor


def captured(runner: GraphRunner, frame: type[Frame], monkeypatch: pytest.MonkeyPatch) -> GraphRunner:
    """Captures only the largest bucket."""
    largest = max(runner.phase.buckets, key=lambda bucket: (bucket[runner.phase.rows], sum(bucket.values())))
    thin = GraphRunner(replace(runner.phase, buckets=(largest,)), GraphSettings(tiers=frozenset({Tier.CAPACITY})))
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["saccade.graphs.capture"], "Frame", frame)
        thin.capture_buckets()
    return thin


def freezing(name: str) -> type[Frame]:
    """Frames that hand out a copy of one buffer, like a host value that is read at capture."""

    class Freezing(Frame):
        def __getitem__(self, asked: str) -> Tensor:
            view = super().__getitem__(asked)
            return _copied(view) if asked == name else view

        def get(self, asked: str, default: Any = None) -> Any:
            return Mapping.get(self, asked, default)

    return Freezing


def _copied(view: Tensor) -> Tensor:
    """Hidden from the recording, which would otherwise repeat the copy at every replay."""
    return torch.from_numpy(view.numpy().copy())


def install(executor: DeviceExecutor, runner: GraphRunner) -> None:
    """Replaces the phase's own runner. No other phase has graphs, so only this one is verified."""
    if runner.phase.name == "vision":
        assert executor.encoder is not None
        executor.encoder.graphs = runner
    else:
        setattr(executor, "sampler" if runner.phase.name == "sample" else runner.phase.name, runner)
    assert runner in executor.phases


@pytest.mark.parametrize("family", PHASES)
def test_every_frozen_input_is_found(loaded: Load, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = new_executor(loaded(family))
    unnoticed, unread = set(), set()
    for runner in [one for one in executor.phases if one.phase.name in PHASES[family]]:
        install(executor, captured(runner, Frame, monkeypatch))
        right, audited = verify_graphs(executor), audit_graphs(executor)
        assert right.is_right, f"\n{right}"
        assert audited.is_right, f"\n{audited}"
        for buffer in runner.phase.arena.buffers.values():
            if buffer.role in (Role.INPUT, Role.METADATA):
                install(executor, captured(runner, freezing(buffer.name), monkeypatch))
                if verify_graphs(executor).is_right:
                    unnoticed.add((runner.phase.name, buffer.name))
                if audit_graphs(executor).is_right:
                    unread.add((runner.phase.name, buffer.name))
        install(executor, runner)
    no_rotary = NO_ROTARY if family == "gemma3_vl" else set()
    assert unnoticed == {one for one in CONSTANT if one[0] in PHASES[family]} | no_rotary
    assert unread == no_rotary, "the audit finds every frozen input that a node reads"
