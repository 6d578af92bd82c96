"""What an engine of several ranks reports about them, with real processes."""

import asyncio
from dataclasses import replace

from saccade.client.process import AsyncEngine
from saccade.dry_run.blueprint import draw
from saccade.dry_run.memory import plan_ranks, room_on
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.tensor_parallel import TensorParallel
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny

LIMITS = SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, encoder_budget_tokens=48)
SETTINGS = EngineSettings(device="cpu", kv_cache_tokens=512, enforce_eager=True, tensor_parallel_size=2)


def test_ranks_hold_what_was_planned_and_report_their_all_reduce(made: tiny.Tiny) -> None:
    async def ask(settings: EngineSettings) -> TensorParallel:
        async with await AsyncEngine.start(made.folder, settings, LIMITS) as engine:
            return engine.ready.ranks

    told = asyncio.run(ask(SETTINGS))
    alone = asyncio.run(ask(replace(SETTINGS, tensor_parallel_size=1)))
    plans = plan_ranks(draw(made.folder, SETTINGS, LIMITS, is_cuda=False))
    assert (told.size, told.backend, told.reason) == (2, "gloo", "the device is a CPU") and told.reserved_bytes
    assert [share.rank for share in told.held] == [0, 1]
    assert [share.weights_bytes for share in told.held] == [plan.weights for plan in plans]
    assert {share.num_blocks for share in told.held} == {room_on(plans[0], 2**32, 0.9).num_blocks}
    assert told.summary() == "2 ranks; all-reduce: gloo"
    assert (alone.size, alone.backend, len(alone.held)) == (1, "none", 1)
    assert alone.held[0].weights_bytes < sum(share.weights_bytes for share in told.held), "both ranks hold the norms"
