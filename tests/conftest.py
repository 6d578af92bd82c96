"""For all tests: no time limits that depend on the machine, and what makes the tests fast."""

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ROOT = Path(__file__).parent
LONG = (
    *("kernels/test_interpreted.py", "kernels/test_compiled.py", "ray/test_cluster.py"),
    *("execution/test_faulty_ranks.py", "layers/test_collectives.py", "engine/test_engine.py", "engine/test_shadow.py"),
    *("engine/test_process.py", "clients/test_clients.py"),
    *("execution/test_rank_processes.py", "execution/test_rank_engines.py", "execution/test_rank_images.py"),
    *("models/test_parallel.py", "models/test_smollm2.py", "eval/test_bundled.py", "training/test_recipe.py"),
    *("e2e/test_ranks.py", "e2e/test_rank_deaths.py", "e2e/test_lifecycle.py", "e2e/test_hostile.py"),
    *("e2e/test_replicas.py",),
    *("cli/test_plan.py", "engine/test_frozen_inputs.py", "engine/test_verify.py", "engine/test_vision.py"),
    *("engine/test_scheduler_machine.py", "engine/test_grammar.py", "bench/test_real.py", "bench/test_vision.py"),
    *("inputs/test_vocabularies.py", "e2e/test_fuzz.py", "e2e/test_hostile_media.py", "models/test_odd_configs.py"),
    *("e2e/test_hostile_grammars.py", "execution/test_rank_quantized.py", "eval/test_real_weights.py"),
    *("engine/test_loads.py", "execution/test_rank_shadow.py", "bench/test_soak.py", "test_cli.py"),
    *("engine/test_divided_passes.py", "e2e/test_commands.py", "scheduling/test_backlog.py", "server/test_http11.py"),
    *("engine/test_grammar_trials.py", "e2e/test_hostile_callers.py", "e2e/test_page_served.py"),
    *("e2e/test_watching.py", "server/test_fuzz_texts.py"),
)

gc.disable()  # until tests are collected: imports leave little garbage, and collecting it takes a fifth of their time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first: one started last would leave the other worker idle."""
    places = {ROOT / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def pytest_collection_finish() -> None:
    """Every engine collects garbage before it captures. Modules and tests are half a million objects; frozen, they cost
    nothing."""
    gc.enable()
    gc.collect()
    gc.freeze()
