"""Every family on two ranks, in separate processes and with graphs: the same answers as on one rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from saccade.inputs.placeholders import Prompt, text_prompt
from saccade.scheduling.engine import Engine
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason, Update
from tests.engine.rig import (
    Answer,
    finish,
    image_settings,
    oracle_vectors,
    pooled_params,
    random_prompt,
    run,
    vector_of,
)
from tests.engine.test_divided_passes import ask_beside, prompts_of, watch
from tests.execution.alike import assert_alike
from tests.execution.engine_ranks import Build, Ranks, build, engine_of, started
from tests.execution.test_rank_processes import behind, wait_until
from tests.models import tiny

VERIFIED = {"qwen3_vl": "short"}  # only one, because that takes longest
NUM_STEPS = 4  # before one request is aborted
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_two_ranks_answer_like_one(two: Ranks, name: str, tmp_path: Path) -> None:
    """With prompts of several chunks, images, requests that wait for room, cached prompts, sampling and penalties. The
    graphs of some families are verified first, which all ranks must do in lockstep."""
    made = tiny.make(name, tmp_path)
    if name in tiny.VISION:
        image_settings(tmp_path)
    rng = np.random.default_rng(3)  # with fresh rows, rounding might decide between two experts
    prompts = {f"r{i}": random_prompt(made, rng, num_images=i % 3 if name in tiny.VISION else 0) for i in range(5)}
    prompts["long"] = text_prompt(rng.integers(3, 99, 60).tolist())
    ours, alone = two.engine(tmp_path, VERIFIED.get(name, "off")), engine_of(*build(Build(str(tmp_path), "off")))
    found, expected = (ask(engine, prompts) for engine in (ours, alone))
    for key, right in expected.items():
        assert_alike(found[key], right)
    assert_pooled(ours, made, prompts)
    for phase, snapshot in ours.phase_snapshots().items():
        assert sum(snapshot["replays"].values()) > 0, f"no {phase} pass was replayed: {snapshot}"
    wait_until(lambda: not behind(two.processes), "both are done")


@pytest.mark.parametrize("encoder_mode", ["weights", "data"])
def test_ranks_encode_images_in_parts(two: Ranks, encoder_mode: str, tmp_path: Path) -> None:
    """They stop and go on together, with language passes in between."""
    made = tiny.make("qwen3_vl", tmp_path)
    image_settings(tmp_path)
    prompts = prompts_of(made)
    engine, watched = watch(two.engine(tmp_path, part_units=2, encoder_mode=encoder_mode))
    found, expected = (ask_beside(one, prompts) for one in (engine, engine_of(*build(Build(str(tmp_path), "off")))))
    for name, right in expected.items():
        assert_alike(found[name], right)
    assert watched.kinds.count("EncodeMore") >= 2
    wait_until(lambda: not behind(two.processes), "both are done")


def assert_pooled(engine: Engine, made: tiny.Tiny, prompts: dict[str, Prompt]) -> None:
    """Pools prompts of several chunks (last and mean hidden states, logits) while another request generates."""
    asked = {
        (name, pooling): params for name in ("r0", "r2", "long") for pooling, params in pooled_params((7, 40)).items()
    }
    names = {f"{name} {pooling}": (prompts[name], params) for (name, pooling), params in asked.items()}
    names["answer"] = (prompts["r1"], GREEDY)
    found = run(
        engine, {k: prompt for k, (prompt, _) in names.items()}, {k: params for k, (_, params) in names.items()}
    )
    assert len(found["answer"].token_ids) == GREEDY.max_tokens
    for name, pooling in asked:
        expected = oracle_vectors(made, prompts[name], (7, 40))[pooling]
        np.testing.assert_allclose(vector_of(found[f"{name} {pooling}"]), expected, atol=1e-4)


def ask(engine: Engine, prompts: dict[str, Prompt]) -> dict[str, Answer]:
    """Asks twice. The second time parameters differ, and prompts are found in the cache."""
    params = {name: replace(GREEDY, max_tokens=30) if name == "long" else GREEDY for name in prompts}
    answers = run(engine, prompts, params)
    other = {
        "again": (prompts["r2"], GREEDY),
        "sampled": (prompts["r1"], replace(GREEDY, temperature=0.8, top_k=12, top_p=0.9, seed=7)),
        "penalties": (prompts["long"], replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.4)),
        "biased": (prompts["r0"], replace(GREEDY, logit_bias={5: 3.0}, allowed_token_ids=(5, 6, 7))),
        "aborted": (prompts["r2"], replace(GREEDY, max_tokens=40)),
    }
    for name, (prompt, wanted) in other.items():
        engine.add(name, prompt, wanted)
    return answers | finish_but_abort(engine, list(other), "aborted")


def finish_but_abort(engine: Engine, names: list[str], aborted: str) -> dict[str, Answer]:
    """Aborts one request while it runs. Returns the answers of the others."""
    early: dict[str, list[Update]] = {name: [] for name in names}
    for _ in range(NUM_STEPS):
        for update in engine.step():
            early[update.request_id].append(update)
    [told] = engine.abort(aborted)
    assert told.finish is not None and told.finish.reason is FinishReason.ABORT
    left = [name for name, updates in early.items() if name != aborted and not (updates and updates[-1].finish)]
    late = finish(engine, left)
    whole = {name: early[name] + (late[name].updates if name in late else []) for name in names if name != aborted}
    return {
        name: Answer([token for update in updates for token in update.token_ids], updates)
        for name, updates in whole.items()
    }
