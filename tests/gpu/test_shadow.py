"""Shadow checks on the GPU: replays of live traffic have the bits of eager runs, and a graph that goes wrong is found.
`SACCADE_TEST_LAYERS=n` keeps n decoder layers."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.execution.shadow import Shadow
from saccade.execution.shadow_file import Origin
from saccade.execution.shadow_verdict import Mismatch
from saccade.execution.sizes import GPU_SHADOW_BYTES
from saccade.models.vlm import Model
from saccade.scheduling.engine import Engine
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from tests.engine.rig import executor_of
from tests.gpu.engine_rig import Sizes, drive, new_engine, new_runner
from tests.gpu.test_engine import mixed_jobs

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("clean")]

SIZES = Sizes()
MIB = 2**20
MAX_CHECKS = 2000


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Engine:
    runner = new_runner(model, SIZES, "full")
    runner.capture()
    engine = new_engine(runner, SIZES)
    origin = Origin(model="", settings=EngineSettings(), limits=SchedulerSettings(), folder=tmp_path / "files")
    engine.idle.shadow = Shadow(runner, 1.0, origin, slab_bytes=GPU_SHADOW_BYTES)
    return engine


def checked(engine: Engine) -> list[Mismatch]:
    found: list[Mismatch] = []
    for _ in range(MAX_CHECKS):
        if not engine.idle.can_check:
            break
        one = engine.idle.check()
        if isinstance(one, Exception):
            raise one
        assert one is None or isinstance(one, Mismatch)
        found += [one] if one is not None else []
    return found


def test_right_graphs_pass_and_memory_stays_flat(engine: Engine) -> None:
    taken = []
    for seed in range(3):
        drive(engine, mixed_jobs(executor_of(engine), 12, seed=seed))
        assert checked(engine) == []
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    counts = {name: phase["shadow"] for name, phase in engine.phase_snapshots().items()}
    for name in ("vision", "prefill", "decode", "head"):
        assert counts[name].get("equal", 0) > 0 and not {"different", "unsteady", "failed"} & counts[name].keys(), (
            counts
        )
    assert max(taken) - taken[0] < MIB


def test_a_graph_that_goes_wrong_is_found(engine: Engine) -> None:
    drive(engine, mixed_jobs(executor_of(engine), 8, seed=1))
    assert checked(engine) == []
    runner = executor_of(engine).decode
    for graph in runner.graphs:
        spoil: Any = partial(graph.frame["next_ids"][:1].bitwise_xor_, 1)
        graph.steps = (*graph.steps, spoil)
    drive(engine, mixed_jobs(executor_of(engine), 8, seed=2))
    found = checked(engine)
    assert found and {mismatch.key.phase for mismatch in found} == {"decode"}


def test_an_interrupted_check_does_no_harm(engine: Engine) -> None:
    drive(engine, mixed_jobs(executor_of(engine), 8, seed=1))
    for patience in np.linspace(1, 400, 20).astype(int).tolist():
        if engine.idle.can_check:
            stops = iter([False] * patience + [True])
            assert engine.idle.check(partial(next, stops)) is None
    assert checked(engine) == []
