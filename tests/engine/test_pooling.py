"""Vectors of prompts match transformers, whatever else the engine does."""

from typing import Any

import numpy as np
import pytest
import torch

from saccade.config import Mode
from saccade.errors import RequestError
from saccade.inputs.placeholders import Prompt, text_prompt
from saccade.models.weights import load_model
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import PoolRows
from saccade.scheduling.warm_up import warm_up
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import NO_HIDDEN_NUMBERS, FinishReason
from tests.engine.rig import (
    Options,
    build,
    executor_of,
    finish,
    oracle_vectors,
    pooled_params,
    random_prompt,
    run,
    vector_of,
)
from tests.engine.test_engine import Load
from tests.models import tiny

CLOSE = 1e-4
TOKENS = (5, 9, 77)
POOLINGS = ("last", "mean", "logits")
ANSWER = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def make_prompts(made: tiny.Tiny, count: int = 5) -> dict[str, Prompt]:
    rng = np.random.default_rng()
    most = 3 if made.name in tiny.VISION else 1
    return {f"p{i}": random_prompt(made, rng, num_images=i % most) for i in range(count)}


def asked(prompts: dict[str, Prompt]) -> tuple[dict[str, Prompt], dict[str, SamplingParams]]:
    """Every prompt with every pooling, and with an answer."""
    ways = pooled_params(TOKENS) | {"answer": ANSWER}
    names = [(name, way) for name in prompts for way in ways]
    return {f"{n} {w}": prompts[n] for n, w in names}, {f"{n} {w}": ways[w] for n, w in names}


def assert_right(made: tiny.Tiny, prompts: dict[str, Prompt], engine: Engine) -> None:
    found = run(engine, *asked(prompts))
    for name, prompt in prompts.items():
        expected = oracle_vectors(made, prompt, TOKENS)
        for pooling in POOLINGS:
            answer = found[f"{name} {pooling}"]
            assert answer.token_ids == [] and answer.finish.reason is FinishReason.LENGTH
            vector = vector_of(answer)
            np.testing.assert_allclose(vector, expected[pooling], atol=CLOSE, err_msg=f"{name} {pooling}")
        tokens = found[f"{name} answer"]
        assert len(tokens.token_ids) == ANSWER.max_tokens and tokens.updates[-1].pooled is None


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "gemma3_vl"])
@pytest.mark.parametrize(
    "options",
    [
        Options(has_prefix_cache=True),
        Options(mode=Mode.FULL, prefill_chunk=7, max_num_seqs=4, strict=True),
        Options(mode=Mode.PIECEWISE, has_prefix_cache=True, num_blocks=40, max_num_seqs=5),
    ],
    ids=["eager", "full graphs, chunks", "piecewise graphs, few blocks"],
)
def test_vectors_match_transformers(loaded: Load, family: str, options: Options) -> None:
    """Also with chunks, graphs, a prefix cache, images, preempted requests, and answers in the same steps."""
    made, model = loaded(family)
    engine = build(model, made.folder, options)
    assert_right(made, make_prompts(made), engine)
    if options.mode is not None:
        assert sum(engine.phase_snapshots()["prefill"]["replays"].values()) > 0, "no graph was replayed"


def test_cached_rows_serve_last_rows_and_logits_but_not_means(loaded: Load) -> None:
    made, model = loaded("llama")
    engine = build(model, made.folder, Options(has_prefix_cache=True, block_size=8))
    prompts = {"long": text_prompt(np.random.default_rng().integers(3, 99, 50).tolist())}
    assert_right(made, prompts, engine)
    for pooling, params in pooled_params(TOKENS).items():
        [name] = engine.add("again", prompts["long"], params)
        request = engine.scheduler.live[name]
        found = vector_of(finish(engine, [name])[name])
        np.testing.assert_allclose(found, oracle_vectors(made, prompts["long"], TOKENS)[pooling], atol=CLOSE)
        assert request.num_cached_tokens == (0 if pooling == "mean" else 48)


def test_the_mean_of_a_preempted_request_counts_every_row_once(loaded: Load) -> None:
    """A growing answer uses up the blocks, so a request in the middle of its long prompt starts again."""
    made, model = loaded("llama")
    engine = build(model, made.folder, Options(prefill_chunk=4, num_blocks=11, max_num_seqs=3, max_tokens=12))
    rng = np.random.default_rng()
    prompts = {name: text_prompt(rng.integers(3, 99, length).tolist()) for name, length in (("a", 7), ("b", 60))}
    talk = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = run(engine, prompts, {"a": talk, "b": SamplingParams(max_tokens=0, pooling="mean")})
    assert engine.scheduler.num_preemptions > 0
    np.testing.assert_allclose(vector_of(found["b"]), oracle_vectors(made, prompts["b"], TOKENS)["mean"], atol=CLOSE)


@pytest.mark.parametrize("mode", [None, Mode.FULL])
def test_padding_never_gets_into_a_vector(loaded: Load, mode: Mode | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = loaded("qwen3_vl")
    engine = build(model, made.folder, Options(mode=mode))
    executor = executor_of(engine)
    trunk_TD = executor.prefill.phase.arena.views(executor.prefill.phase.arena.limits)["trunk"]
    sum_rows, counts = executor._pooling.sum_rows, list[int]()

    def poisoned(orders: PoolRows) -> Any:
        num_real = int(orders.rows.max()) + 1
        counts.append(trunk_TD.shape[0] - num_real)
        trunk_TD[num_real:] = float("nan")
        return sum_rows(orders)

    monkeypatch.setattr(executor._pooling, "sum_rows", poisoned)
    rng = np.random.default_rng()
    prompts = {f"p{i}": random_prompt(made, rng, num_images=i, length=9) for i in range(3)}  # less than a full pass
    for pooling in ("last", "mean"):
        found = run(engine, prompts, SamplingParams(max_tokens=0, pooling=pooling))
        for name, prompt in prompts.items():
            expected = oracle_vectors(made, prompt, TOKENS)[pooling]
            np.testing.assert_allclose(vector_of(found[name]), expected, atol=CLOSE)
    assert max(counts) > 0, "nothing was padded"


def test_nan_hidden_states_end_only_their_request(loaded: Load) -> None:
    made, model = loaded("llama")
    prompts = {f"p{i}": text_prompt(np.random.default_rng(i).integers(3, 90, 9).tolist()) for i in range(3)}
    kept = model.decoder.embedding.weight.data[98].clone()
    engine = build(model, made.folder, Options())
    try:
        model.decoder.embedding.weight.data[98] = float("nan")
        mean = SamplingParams(max_tokens=0, pooling="mean")
        found = run(engine, {**prompts, "bad": text_prompt([4, 98, 5])}, mean)
    finally:
        model.decoder.embedding.weight.data[98] = kept
    assert (found["bad"].finish.reason, found["bad"].finish.detail) == (FinishReason.ERROR, NO_HIDDEN_NUMBERS)
    assert found["bad"].updates[-1].pooled is None
    for name, prompt in prompts.items():
        np.testing.assert_allclose(vector_of(found[name]), oracle_vectors(made, prompt, TOKENS)["mean"], atol=CLOSE)


def test_an_aborted_request_has_no_vector(loaded: Load) -> None:
    made, model = loaded("llama")
    engine = build(model, made.folder, Options(prefill_chunk=4))
    engine.add("gone", text_prompt([5] * 40), SamplingParams(max_tokens=0, pooling="mean"))
    engine.step()
    [told] = engine.abort("gone")
    assert told.finish is not None and told.finish.reason is FinishReason.ABORT and told.pooled is None
    while engine.has_work:
        assert engine.step() == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pooling": "max", "max_tokens": 0}, "pooling"),
        ({"pooling": "last"}, "max_tokens"),
        ({"pooling": "last", "max_tokens": 0, "n": 2}, "n"),
        ({"pooling": "logits", "max_tokens": 0}, "pooled_token_ids"),
        ({"pooling": "mean", "max_tokens": 0, "pooled_token_ids": (1,)}, "pooled_token_ids"),
        ({"pooled_token_ids": (1,), "max_tokens": 0}, "pooling"),
    ],
)
def test_contradictory_pooling_parameters_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_tokens_outside_the_vocabulary_are_refused(loaded: Load) -> None:
    made, model = loaded("llama")
    engine = build(model, made.folder, Options())
    params = SamplingParams(max_tokens=0, pooling="logits", pooled_token_ids=(1, 10**6))
    with pytest.raises(RequestError, match="pooled_token_ids names token 1000000"):
        engine.add("r", text_prompt([5]), params)


def test_many_rows_are_computed_in_slices(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices end inside a request's rows and between requests."""
    monkeypatch.setattr("saccade.execution.pooled_rows.MAX_POOLED_ROWS", 4)
    made, model = loaded("llama")
    assert_right(made, make_prompts(made), build(model, made.folder, Options()))


def test_a_checkpoint_without_a_head_embeds_and_does_nothing_else(loaded: Load) -> None:
    made, _ = loaded("qwen3")
    model = load_model(made.folder, dtype=torch.float32)
    model.drop_head()
    engine = build(model, made.folder, Options(mode=Mode.FULL))
    warm_up(engine)
    prompt = make_prompts(made, 1)["p0"]
    for pooling in ("last", "mean"):
        found = run(engine, {"p": prompt}, SamplingParams(max_tokens=0, pooling=pooling))
        np.testing.assert_allclose(vector_of(found["p"]), oracle_vectors(made, prompt, TOKENS)[pooling], atol=CLOSE)
    for params in (ANSWER, pooled_params(TOKENS)["logits"]):
        with pytest.raises(RequestError, match="makes embeddings only"):
            engine.add("r", prompt, params)
