"""The engine against transformers' generate: the same tokens with any options, and nothing left behind."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from saccade.config import Mode, Tier
from saccade.errors import CapacityError, EngineDeadError, GraphError, RequestError
from saccade.execution.executor import DeviceTicket
from saccade.execution.pass_timer import DeviceLap, now
from saccade.inputs.placeholders import Prompt, text_prompt
from saccade.inputs.positions import rope_delta, text_positions
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import Run
from saccade.scheduling.warm_up import warm_up
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import NO_NUMBERS, FinishReason
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, executor_of, finish, oracle_inputs, oracle_tokens, random_prompt, run
from tests.models import tiny

Load = Callable[[str], Loaded]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def make_prompts(made: tiny.Tiny, count: int, seed: int) -> dict[str, Prompt]:
    """Prompts of many lengths. Two share a prefix, two are equal, and some have images if the family supports them."""
    rng = np.random.default_rng(seed)
    has_images = made.name in tiny.VISION
    prompts = [random_prompt(made, rng, i % 3 if has_images else 0) for i in range(count)]
    if count > 3:
        prompts[2] = text_prompt([*prompts[1].token_ids[:1], *range(10, 40)]) if not prompts[1].media else prompts[1]
        prompts[3] = prompts[1]
    return {f"r{i}": prompt for i, prompt in enumerate(prompts)}


def expect(made: tiny.Tiny, prompts: dict[str, Prompt], max_tokens: int = 8) -> dict[str, list[int]]:
    return {name: oracle_tokens(made, prompt, max_tokens) for name, prompt in prompts.items()}


def tokens(engine: Engine, prompts: dict[str, Prompt], params: SamplingParams = GREEDY) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in run(engine, prompts, params).items()}


def can_capture(engine: Engine) -> bool:
    """A function, because mypy would take the property for constant."""
    return engine.idle.can_capture


MATRIX = [
    Options(),
    Options(prefill_chunk=7),
    Options(prefill_chunk=64, has_prefix_cache=True),
    Options(has_prefix_cache=True, prefill_chunk=7, num_blocks=34),
    Options(mode=Mode.PIECEWISE, prefill_chunk=7, strict=True),
    Options(mode=Mode.FULL, prefill_chunk=64, has_prefix_cache=True, strict=True),
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_tokens_match_transformers_with_any_options(loaded: Load, family: str) -> None:
    made, model = loaded(family)
    prompts = make_prompts(made, 9, seed=1)
    expected = expect(made, prompts)
    for options in MATRIX:
        engine = build(model, made.folder, options)
        assert tokens(engine, prompts) == expected, options
        if options.has_prefix_cache:
            assert tokens(engine, prompts) == expected, f"from the prefix cache: {options}"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 17])
def test_batches_of_any_size_give_the_same_tokens(loaded: Load, count: int) -> None:
    made, model = loaded("qwen3_vl")
    prompts = make_prompts(made, count, seed=count)
    engine = build(model, made.folder, Options(max_tokens=80))
    assert tokens(engine, prompts) == expect(made, prompts)


def test_preemption_changes_nothing(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    prompts = make_prompts(made, 8, seed=4)
    long = replace(GREEDY, max_tokens=40)
    engine = build(model, made.folder, Options(num_blocks=20))
    assert tokens(engine, prompts, long) == expect(made, prompts, 40)
    assert engine.scheduler.stats().preemptions > 0


def test_a_prefix_is_found_again_with_its_images(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    rng = np.random.default_rng(9)
    prompt = random_prompt(made, rng, num_images=2, length=30)
    other = random_prompt(made, rng, num_images=2, length=30)
    engine = build(model, made.folder, Options(has_prefix_cache=True))
    first = tokens(engine, {"a": prompt})
    assert tokens(engine, {"b": prompt})["b"] == first["a"]
    assert engine.scheduler.stats().prefix_hit_tokens > 0
    hits = engine.scheduler.stats().prefix_hit_tokens
    assert tokens(engine, {"c": other}) == {"c": oracle_tokens(made, other, 8)}
    assert engine.scheduler.stats().prefix_hit_tokens == hits, "the placeholder tokens are equal, but not the pixels"


def test_an_answer_is_reused_only_at_its_own_positions(loaded: Load) -> None:
    """Outputs get positions after a video's last time step, text in a prompt does not. So an answer has other positions
    in the prompt of the next turn, where its cached rows would be wrong."""
    made, model = loaded("qwen2_5_vl")
    rng = np.random.default_rng(21)
    question, later = rng.integers(3, 99, 21).tolist(), rng.integers(3, 99, 5).tolist()

    def prompt(ids: list[int], steps: int) -> Prompt:
        positions = text_positions(len(ids))
        positions[0, 4:8] += np.arange(4) * steps  # like a video with four frames
        return Prompt(np.asarray(ids, np.int32), positions, rope_delta(positions))

    params = replace(GREEDY, max_tokens=20, ignore_eos=True, logprobs=0)
    for steps, finds_answer in ((30, False), (1, True)):
        found: dict[bool, Any] = {}
        for has_cache in (False, True):
            engine = build(model, made.folder, Options(has_prefix_cache=has_cache))
            answer = run(engine, {"1": prompt(question, steps)}, params)["1"].token_ids
            second = run(engine, {"2": prompt([*question, *answer, *later], steps)}, params)["2"]
            chosen = np.concatenate([update.scores.chosen for update in second.updates if update.scores is not None])
            found[has_cache] = second.token_ids, chosen
        assert found[True][0] == found[False][0]
        np.testing.assert_allclose(found[True][1], found[False][1], rtol=0, atol=1e-4)
        hits = engine.scheduler.stats().prefix_hit_tokens
        assert (hits > len(question)) == finds_answer, f"{hits} of {len(question)} + {len(answer)} tokens"


def test_pixels_of_a_prompt_shared_by_two_requests_are_released(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    prompt = random_prompt(made, np.random.default_rng(5), num_images=1)
    engine = build(model, made.folder, Options())
    answers = tokens(engine, {"a": prompt, "b": prompt})
    assert answers["a"] == answers["b"] and engine._pixels.nbytes == 0


def prompt_scores(answer: Any) -> dict[int, float]:
    """Log-probabilities by position of their token."""
    parts = [update.prompt_scores for update in answer.updates if update.prompt_scores is not None]
    return {part.start + i: float(score) for part in parts for i, score in enumerate(part.scores.chosen)}


class TestLogprobs:
    @pytest.mark.parametrize("mode", [None, Mode.FULL])
    @pytest.mark.parametrize("family", ["qwen3_vl", "llama", "gemma3_vl"])
    def test_prompt_and_output_logprobs_match_transformers(self, loaded: Load, family: str, mode: Mode | None) -> None:
        made, model = loaded(family)
        rng = np.random.default_rng(3)
        prompts = {f"r{i}": random_prompt(made, rng, i % 2 if made.name in tiny.VISION else 0) for i in range(4)}
        params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
        options = Options(mode=mode, prefill_chunk=7, has_prefix_cache=True, strict=mode is not None)
        engine = build(model, made.folder, options)
        for attempt in range(2):  # the second time, the prompt is in the prefix cache
            answers = run(engine, prompts, params)
            for name, prompt in prompts.items():
                self.check(made, prompt, answers[name], f"{name} attempt {attempt}")

    def test_each_request_of_a_batch_gets_as_many_tokens_as_it_asked_for(self, loaded: Load) -> None:
        made, model = loaded("llama")
        counts = {"one": 1, "none": 0, "five": 5, "unscored": None, "two": 2}
        params = {name: replace(GREEDY, logprobs=n, prompt_logprobs=n) for name, n in counts.items()}
        prompts = {name: text_prompt([5 + i, 6, 7]) for i, name in enumerate(counts)}
        for name, answer in run(build(model, made.folder, Options()), prompts, params).items():
            outputs = [update.scores for update in answer.updates if update.scores is not None]
            scored = outputs + [u.prompt_scores.scores for u in answer.updates if u.prompt_scores is not None]
            assert {part.top_ids.shape[1] for part in scored} == ({counts[name]} - {None}), name
            assert {part.top_logprobs.shape[1] for part in scored} == ({counts[name]} - {None}), name

    def check(self, made: tiny.Tiny, prompt: Prompt, answer: Any, what: str) -> None:
        inputs = oracle_inputs(made, prompt)
        whole = torch.cat([inputs["input_ids"], torch.tensor([answer.token_ids])], dim=1)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(answer.token_ids)))
        with torch.no_grad():
            logits = made.oracle(**{**inputs, "input_ids": whole, "attention_mask": torch.ones_like(whole)}).logits[0]
        right = logits.float().log_softmax(-1)
        outputs = [u.scores for u in answer.updates if u.scores is not None]
        assert len(outputs) == 5
        for i, scores in enumerate(outputs):
            row = right[len(prompt) - 1 + i]
            assert abs(scores.chosen[0] - float(row[answer.token_ids[i]])) < 1e-4, what
            np.testing.assert_allclose(scores.top_logprobs[0], row.topk(3).values.numpy(), atol=1e-4)
        parts = [u.prompt_scores for u in answer.updates if u.prompt_scores is not None]
        chosen = np.full(len(prompt), np.nan)
        for part in parts:
            chosen[part.start : part.start + len(part.scores.chosen)] = part.scores.chosen
        expected = right[: len(prompt) - 1].gather(1, whole[0, 1 : len(prompt), None])[:, 0].numpy()
        np.testing.assert_allclose(chosen[1:], expected, atol=1e-4, err_msg=what)

    @pytest.mark.parametrize("chunk", [0, 7])
    @pytest.mark.parametrize("start", [0, 1, 2, 9, 17, 29, 30, 99])
    def test_prompt_scores_may_start_later(self, loaded: Load, chunk: int, start: int) -> None:
        """They equal those of the whole prompt, and earlier rows may come from the prefix cache."""
        made, model = loaded("llama")
        prompt = text_prompt(np.random.default_rng(5).integers(10, 90, 30).tolist())
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        whole = prompt_scores(run(build(model, made.folder, Options()), {"r": prompt}, params)["r"])
        engine = build(model, made.folder, Options(prefill_chunk=chunk, has_prefix_cache=True))
        for attempt in range(2):
            answer = run(engine, {"r": prompt}, replace(params, prompt_logprobs_start=start))["r"]
            found = prompt_scores(answer)
            assert sorted(found) == [place for place in range(1, 30) if place >= start]
            assert found == pytest.approx({place: whole[place] for place in found}, abs=1e-4)
            assert engine.scheduler.stats().prefix_hit_tokens == attempt * (min(max(start - 1, 0), 29) // 8 * 8)


class TestSampling:
    def test_a_seed_gives_the_same_tokens_in_any_batch(self, loaded: Load) -> None:
        made, model = loaded("llama")
        prompts = make_prompts(made, 9, seed=2)
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=30, seed=7, max_tokens=10)
        alone = {
            name: tokens(build(model, made.folder, Options()), {name: p}, params)[name] for name, p in prompts.items()
        }
        for options in (Options(), Options(mode=Mode.FULL, prefill_chunk=7), Options(num_blocks=30)):
            assert tokens(build(model, made.folder, options), prompts, params) == alone
        other = tokens(build(model, made.folder, Options()), prompts, replace(params, seed=8))
        assert other != alone

    def test_n_outputs_share_a_prompt_and_differ(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        prompt = random_prompt(made, np.random.default_rng(0), num_images=1, length=20)
        engine = build(model, made.folder, Options(has_prefix_cache=True))
        params = SamplingParams(temperature=1.5, n=4, seed=1, max_tokens=8)
        answers = run(engine, {"r": prompt}, params)
        assert len(answers) == 4
        assert len({tuple(answer.token_ids) for answer in answers.values()}) > 1
        greedy = run(engine, {"g": prompt}, replace(params, temperature=0))
        assert {tuple(a.token_ids) for a in greedy.values()} == {tuple(oracle_tokens(made, prompt, 8))}

    def test_penalties_bias_and_allowed_tokens_change_the_choice(self, loaded: Load) -> None:
        made, model = loaded("llama")
        prompt = text_prompt([5, 6, 7, 8])
        engine = build(model, made.folder, Options(mode=Mode.FULL))
        plain = tokens(engine, {"a": prompt})["a"]
        biased = tokens(engine, {"b": prompt}, replace(GREEDY, logit_bias={42: 100.0}))["b"]
        assert biased == [42] * 8
        assert tokens(engine, {"c": prompt}, replace(GREEDY, allowed_token_ids=[3, 4]))["c"][0] in (3, 4)
        forbidden = tokens(engine, {"d": prompt}, replace(GREEDY, logit_bias={plain[0]: -100.0}))["d"]
        assert forbidden[0] != plain[0]
        repeated = tokens(
            engine, {"e": prompt}, replace(GREEDY, logit_bias={42: 20.0}, frequency_penalty=2.0, max_tokens=40)
        )
        assert 42 in repeated["e"] and len(set(repeated["e"])) > 1, "a frequent token becomes unlikely"

    def test_penalties_survive_recomputation_in_single_rows(self, loaded: Load) -> None:
        made, model = loaded("llama")
        prompts = make_prompts(made, 4, seed=3)
        params = SamplingParams(
            temperature=1.0, seed=5, frequency_penalty=1.5, repetition_penalty=1.3, max_tokens=30, ignore_eos=True
        )
        roomy = tokens(build(model, made.folder, Options()), prompts, params)
        engine = build(model, made.folder, Options(num_blocks=12, prefill_chunk=1))
        assert tokens(engine, prompts, params) == roomy
        assert engine.scheduler.stats().preemptions > 0

    def test_stop_tokens_and_min_tokens(self, loaded: Load) -> None:
        made, model = loaded("llama")
        prompt = text_prompt([5, 6, 7, 8])
        engine = build(model, made.folder, Options())
        plain = tokens(engine, {"a": prompt})["a"]
        stopped = run(engine, {"b": prompt}, replace(GREEDY, stop_token_ids=(plain[0],)))["b"]
        assert stopped.token_ids == plain[:1]
        assert (stopped.finish.reason, stopped.finish.detail) == (FinishReason.STOP, plain[0])
        delayed = run(engine, {"c": prompt}, replace(GREEDY, stop_token_ids=(plain[0],), min_tokens=3))["c"]
        assert plain[0] not in delayed.token_ids[:3]
        pressed = replace(GREEDY, stop_token_ids=(plain[0],), min_tokens=3, logit_bias={plain[0]: 100.0})
        ended = run(engine, {"d": prompt}, pressed)["d"]
        assert ended.token_ids.index(plain[0]) == 3 and ended.finish.reason is FinishReason.STOP, "it may end then"


def test_pixels_on_the_host_are_bounded(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    engine = build(model, made.folder, Options())
    rng = np.random.default_rng(4)
    first, second = (random_prompt(made, rng, num_images=1, length=12) for _ in range(2))
    nbytes = first.media[0].pixels.nbytes
    engine.scheduler.settings = replace(engine.scheduler.settings, max_media_bytes=nbytes)
    names = list(engine.add("a", first, replace(GREEDY, n=2)))
    with pytest.raises(CapacityError, match=r"hold \d+ bytes of pixels .*\(--max-media-bytes\)"):
        engine.add("b", second, GREEDY)
    engine.stop(names[1], "one of two outputs has ended")
    with pytest.raises(CapacityError):
        engine.add("b", second, GREEDY)
    names += engine.add("text", text_prompt([5, 6]), GREEDY)
    answers = finish(engine, [names[0], "text"])
    assert answers["text"].token_ids == oracle_tokens(made, text_prompt([5, 6]), 8)
    assert engine._pixels.nbytes == 0
    assert tokens(engine, {"b": second}) == expect(made, {"b": second})
    assert engine._pixels.nbytes == 0


class TestSurvival:
    def test_nan_logits_end_only_their_request(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        made, model = loaded("llama")
        prompts = make_prompts(made, 5, seed=6)
        expected = expect(made, prompts)
        poisoned = text_prompt([98, 98, 98])
        embedding = model.decoder.embedding.weight.data[98].clone()
        try:
            assert not any(98 in [*p.token_ids, *expected[name]] for name, p in prompts.items())
            model.decoder.embedding.weight.data[98] = float("nan")
            # the head is tied: its NaN row must not spoil every row of logits
            logits = model.decoder.logits
            monkeypatch.setattr(
                model.decoder, "logits", lambda hidden, out: out.copy_(_without_column(logits(hidden), hidden))
            )
            engine = build(model, made.folder, Options())
            answers = run(engine, {**prompts, "bad": poisoned}, GREEDY)
        finally:
            model.decoder.embedding.weight.data[98] = embedding
        assert answers["bad"].finish.reason is FinishReason.ERROR
        assert answers["bad"].finish.detail == NO_NUMBERS
        assert {name: answers[name].token_ids for name in prompts} == expected

    def test_a_step_that_raises_ends_its_requests_and_no_others(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options(max_num_seqs=3))
        prompts = make_prompts(made, 6, seed=8)
        names = [name for p in prompts.items() for name in engine.add(p[0], p[1], GREEDY)]
        execute, failures = executor_of(engine).run, iter([True])

        def fail_once(orders: Run) -> Any:
            if next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return execute(orders)

        monkeypatch.setattr(executor_of(engine), "run", fail_once)
        answers = finish(engine, names)
        failed = {name for name, answer in answers.items() if answer.finish.reason is FinishReason.ERROR}
        assert 0 < len(failed) <= 3
        assert all("OutOfMemoryError" in answers[name].finish.detail for name in failed)
        expected = expect(made, prompts)
        assert all(answers[name].token_ids == expected[name] for name in names if name not in failed)

    def test_a_lost_device_ends_the_engine(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        """Failing every later request one by one would be no use: the engine must end, so that its watchers notice."""
        made, model = loaded("llama")
        engine = build(model, made.folder, Options())
        monkeypatch.setattr(executor_of(engine), "run", _raise(RuntimeError("an illegal memory access")))
        monkeypatch.setattr(executor_of(engine), "_is_cuda", True)
        monkeypatch.setattr(torch.cuda, "synchronize", _raise(RuntimeError("CUDA error: lost\nand more words")))
        engine.add("r", text_prompt([5, 6]), GREEDY)
        with pytest.raises(EngineDeadError, match=r"the GPU cannot continue: CUDA error: lost$"):
            engine.step()

    def test_a_failed_idle_capture_is_reported_and_harms_nothing(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("saccade.execution.executor.EXACT_VISION_AFTER", 1)
        made, model = loaded("qwen3_vl")
        both = frozenset({Tier.CAPACITY, Tier.EXACT})
        engine = build(model, made.folder, Options(mode=Mode.FULL, max_units=32, vision_tiers=both))
        assert not can_capture(engine) and engine.idle.capture_next() is None
        prompts = make_prompts(made, 2, seed=3)
        assert tokens(engine, prompts) == expect(made, prompts)
        assert can_capture(engine)
        monkeypatch.setattr(executor_of(engine), "capture_layout", _raise(torch.OutOfMemoryError("no memory")))
        assert isinstance(engine.idle.capture_next(), torch.OutOfMemoryError)
        assert tokens(engine, prompts) == expect(made, prompts)
        assert not can_capture(engine), "the capture is not tried again"

    def test_a_replaced_weight_is_noticed(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options(mode=Mode.FULL, strict=True))
        prompts = make_prompts(made, 2, seed=3)
        assert tokens(engine, prompts) == expect(made, prompts)
        mlp: Any = model.decoder.layers[1].mlp
        monkeypatch.setattr(mlp.down, "weight", replace(mlp.down.weight, data=mlp.down.weight.data.clone()))
        answers = run(engine, prompts, GREEDY)
        assert all("layers.1.mlp.down.weight" in answer.finish.detail for answer in answers.values())

    def test_stop_tokens_beyond_the_vocabulary_are_harmless(self, loaded: Load) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options())
        prompts = make_prompts(made, 3, seed=5)
        odd = replace(GREEDY, min_tokens=2, stop_token_ids=(5000,))
        answers = run(engine, prompts, {"r0": odd, "r1": GREEDY, "r2": GREEDY})
        assert {name: answer.token_ids for name, answer in answers.items()} == expect(made, prompts)

    @pytest.mark.parametrize("num_steps", [0, 1, 2])
    @pytest.mark.parametrize("place", ["compose", "run", "sample", "wait"])
    def test_an_interrupted_step_is_still_committed(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch, place: str, num_steps: int
    ) -> None:
        """Ctrl-C at any step, with or without a plan in flight, leaves no plan uncommitted."""
        made, model = loaded("llama")
        engine = build(model, made.folder, Options())
        prompts = make_prompts(made, 3, seed=8)
        scored = replace(GREEDY, logprobs=1)
        names = [name for p in prompts.items() for name in engine.add(p[0], p[1], scored)]
        for _ in range(num_steps):
            engine.step()
        with monkeypatch.context() as patched:
            owner: Any = {"compose": engine.composer, "wait": DeviceTicket}.get(place, executor_of(engine))
            patched.setattr(owner, "run" if place == "compose" else place, _raise(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                for _ in range(2):  # the first step has nothing to wait for
                    engine.step()
        for name in names:
            engine.abort(name)
        for _ in range(10):
            engine.step()
        assert not engine.has_work
        assert tokens(engine, prompts) == expect(made, prompts)

    def test_a_device_error_that_shows_only_when_waiting_fails_its_step(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options())
        prompts = make_prompts(made, 3, seed=8)
        names = [name for p in prompts.items() for name in engine.add(p[0], p[1], GREEDY)]
        with monkeypatch.context() as patched:
            patched.setattr(DeviceTicket, "wait", _raise(RuntimeError("no luck")))
            answers = finish(engine, names)
        assert all(answer.finish.reason is FinishReason.ERROR for answer in answers.values())
        assert tokens(engine, prompts) == expect(made, prompts)

    @pytest.mark.parametrize("error", [RuntimeError("no luck"), KeyboardInterrupt()])
    @pytest.mark.parametrize("place", ["composer", "executor"])
    def test_passes_of_a_partly_launched_step_end_before_it_is_committed(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
    ) -> None:
        """They may still read pages of images that a later plan gives to other requests."""
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options())
        log: list[str] = []
        monkeypatch.setattr(DeviceTicket, "wait", _noted(log, "over", DeviceTicket.wait))
        monkeypatch.setattr(engine.scheduler, "commit", _noted(log, "commit", engine.scheduler.commit))
        prompt = random_prompt(made, np.random.default_rng(4), num_images=1, length=12)
        names = list(engine.add("a", prompt, replace(GREEDY, max_tokens=1, logprobs=1)))
        with monkeypatch.context() as patched:
            patched.setattr(getattr(engine, place), "sample", _raise(error))
            if isinstance(error, KeyboardInterrupt):
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            else:
                engine.step()
        answers = finish(engine, names)
        assert answers["a"].finish.reason is FinishReason.ERROR and answers["a"].token_ids == []
        assert log[:2] == ["over", "commit"]

    def test_an_image_that_failed_for_one_request_is_encoded_again_for_others(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options(max_num_seqs=2))
        prompt = random_prompt(made, np.random.default_rng(4), num_images=1, length=12)
        execute, failures = executor_of(engine).run, iter([True])

        def fail_once(orders: Run) -> Any:
            if next(failures, False):
                raise RuntimeError("no luck")
            return execute(orders)

        executor_of(engine).run = fail_once  # type: ignore[method-assign]
        engine.add("a", prompt, GREEDY)
        early = engine.step()
        names = list(engine.add("b", prompt, GREEDY))
        early += engine.step()
        assert {u.request_id: u.finish.reason for u in early if u.finish} == {"a": FinishReason.ERROR}
        names += [*engine.add("c", text_prompt([5, 6]), GREEDY), *engine.add("d", text_prompt([7]), GREEDY)]
        answers = finish(engine, names)
        assert {answers[name].finish.reason for name in names} == {FinishReason.LENGTH}
        assert answers["b"].token_ids == oracle_tokens(made, prompt, 8)
        assert len(engine._free_sequences) == 2

    def test_more_images_than_a_pass_has_frames_take_several_passes(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        options = Options(mode=Mode.FULL, max_units=256, max_tokens=256, max_model_len=400, num_blocks=200, strict=True)
        engine = build(model, made.folder, replace(options, max_num_seqs=3))
        rng = np.random.default_rng(2)
        prompts = {name: random_prompt(made, rng, num_images=34, length=4) for name in ("a", "b")}
        small = {name: answer.finish.reason for name, answer in run(engine, prompts, GREEDY).items()}
        assert set(small.values()) == {FinishReason.LENGTH}

    def test_warming_up_fails_loudly_and_fits_small_settings(self, loaded: Load) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options(max_model_len=4))
        warm_up(engine)
        assert not engine.has_work
        executor_of(engine).run = _raise(RuntimeError("broken"))  # type: ignore[method-assign]
        with pytest.raises(GraphError, match="a warm-up request failed"):
            warm_up(engine)

    def test_an_abort_storm_leaves_nothing_behind(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options(has_prefix_cache=True, num_blocks=60))
        rng = np.random.default_rng(12)
        prompts = [random_prompt(made, rng, int(rng.integers(0, 3))) for _ in range(25)]
        ended: dict[str, int] = {}
        live: list[str] = []

        def note(updates: Any) -> None:
            for update in updates:
                if update.finish is not None:
                    ended[update.request_id] = ended.get(update.request_id, 0) + 1

        for i in range(1000):
            live += engine.add(f"r{i}", prompts[i % 25], replace(GREEDY, max_tokens=int(rng.integers(1, 12))))
            if rng.random() < 0.15:
                note(engine.step())
            while len(live) > 12 or (live and rng.random() < 0.4):
                note(engine.abort(live.pop(int(rng.integers(0, len(live))))))
        for _ in range(2000):
            if not engine.has_work:
                break
            note(engine.step())
        assert not engine.has_work
        engine.scheduler.check()
        assert engine.scheduler.stats().kv_usage == 0
        assert engine.scheduler.stats().encoder_usage == 0
        assert ended == {f"r{i}": 1 for i in range(1000)}
        assert len(engine._free_sequences) == executor_of(engine).state.max_sequences
        assert not engine._pixels.nbytes and not engine._live

    def test_bad_requests_are_refused_and_leave_nothing_behind(self, loaded: Load) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options(max_model_len=64))
        with pytest.raises(
            RequestError, match="prompt has 70 tokens; this model's maximum context length is 64 tokens"
        ):
            engine.add("long", text_prompt([5] * 70), GREEDY)
        with pytest.raises(RequestError, match=r"token ids outside 0\.\.119"):
            engine.add("ids", text_prompt([5, 120]), GREEDY)
        with pytest.raises(RequestError, match="logit_bias names token 500"):
            engine.add("bias", text_prompt([5]), replace(GREEDY, logit_bias={500: 1.0}))
        assert not engine.has_work
        assert tokens(engine, {"good": text_prompt([5, 6])})["good"]

    def test_a_full_queue_says_when_to_retry(self, loaded: Load) -> None:
        made, model = loaded("llama")
        engine = build(model, made.folder, Options(max_num_seqs=2))
        engine.scheduler.settings = replace(engine.scheduler.settings, max_queued_requests=3)
        for i in range(5):  # two of them start with the next step
            engine.add(f"r{i}", text_prompt([5, 6]), GREEDY)
        with pytest.raises(CapacityError) as refused:
            engine.add("r5", text_prompt([5, 6]), GREEDY)
        assert refused.value.retry_after_s > 0
        finish(engine, [f"r{i}" for i in range(5)])


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


def _noted(log: list[str], word: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, logged before it is made."""

    def noted(*args: Any) -> Any:
        log.append(word)
        return call(*args)

    return noted


def _without_column(logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    column = torch.where(hidden.isnan().any(dim=1), torch.nan, -30.0)
    return torch.cat([logits[:, :98], column[:, None].to(logits.dtype), logits[:, 99:]], dim=1)


class TestVisionTimes:
    def test_vision_time_is_within_the_prefill_time(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        rng = np.random.default_rng(21)
        engine = build(model, made.folder, Options(has_prefix_cache=True))
        prompts = {"seen": random_prompt(made, rng, num_images=2), "text": random_prompt(made, rng)}
        found = {name: answer.updates[-1].timings for name, answer in run(engine, prompts, GREEDY).items()}
        assert found["seen"] is not None and found["text"] is not None
        assert 0 < found["seen"]["vision"] <= found["seen"]["prefill"] and "vision" not in found["text"]
        again = run(engine, {"again": prompts["seen"]}, GREEDY)["again"].updates[-1].timings
        assert again is not None and "vision" not in again, "cached images are not encoded again"

    def test_vision_times_of_several_steps_are_summed(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options(prefill_chunk=7, max_units=4))
        prompt = random_prompt(made, np.random.default_rng(22), num_images=3, length=20)
        [answer, fork] = run(engine, {"r": prompt}, replace(GREEDY, n=2)).values()
        timings, forked = answer.updates[-1].timings, fork.updates[-1].timings
        assert timings is not None and 0 < timings["vision"] <= timings["prefill"]
        assert forked is not None and "vision" not in forked, "its images were encoded for its parent"

    def test_an_aborted_request_reports_its_vision_time(self, loaded: Load) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options())
        engine.add("r", random_prompt(made, np.random.default_rng(23), num_images=1), GREEDY)
        engine.step()
        [update] = engine.abort("r")
        assert update.timings is not None and update.timings["vision"] > 0
        finish(engine, [])

    def test_a_failed_vision_pass_has_no_time(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options())
        monkeypatch.setattr(executor_of(engine).encoder, "run", lambda one: 1 / 0)
        answers = run(engine, {"r": random_prompt(made, np.random.default_rng(24), num_images=1)}, GREEDY)
        assert answers["r"].finish.reason is FinishReason.ERROR
        timings = answers["r"].updates[-1].timings
        assert timings is not None and "vision" not in timings

    def test_images_encoded_for_a_failed_step_have_a_time(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options())
        monkeypatch.setattr(executor_of(engine), "run", _raise(RuntimeError("no luck")))
        answers = run(engine, {"r": random_prompt(made, np.random.default_rng(24), num_images=1)}, GREEDY)
        assert answers["r"].finish.reason is FinishReason.ERROR
        timings = answers["r"].updates[-1].timings
        assert timings is not None and timings["vision"] > 0


class TestLap:
    """On a GPU: events on the stream of the passes, which the host never waits for."""

    def test_events_are_recorded_and_only_queried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        num_recorded = 0

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.is_done = False

            def record(self) -> None:
                nonlocal num_recorded
                num_recorded += 1

            def query(self) -> bool:
                return self.is_done

            def elapsed_time(self, other: "Event") -> float:
                assert self.is_done and other.is_done, "would fail or wait"
                return 12.5

        monkeypatch.setattr(torch.cuda, "Event", Event)
        device = torch.device("cuda")
        lap = DeviceLap(now(device), now(device))
        assert num_recorded == 2 and lap.seconds() is None, "still running"
        lap.begin.is_done = lap.end.is_done = True
        assert lap.seconds() == 0.0125

    def test_a_lap_times_the_vision_pass_alone(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        """Language steps run on the same stream, before it begins and after it ends."""
        log: list[str] = []
        made, model = loaded("qwen3_vl")
        engine = build(model, made.folder, Options())
        executor = executor_of(engine)
        encoder = executor.encoder
        assert encoder is not None
        monkeypatch.setattr(encoder, "run", _noted(log, "pass", encoder.run))
        monkeypatch.setattr(executor.prefill, "obey", _noted(log, "prefill", executor.prefill.obey))
        monkeypatch.setattr("saccade.execution.vision_encoder.now", _noted(log, "now", lambda device: 0.0))
        engine.add("r", random_prompt(made, np.random.default_rng(25), num_images=1), GREEDY)
        engine.step()
        assert log == ["now", "pass", "now", "prefill"]
        finish(engine, ["r"])
