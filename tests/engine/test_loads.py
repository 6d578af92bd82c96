"""Random loads: whatever requests share, and whatever is aborted, fails or is recomputed, each request gets the tokens,
scores and vectors that it would get alone."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from saccade.cache.encoder import EncoderIndex
from saccade.choice.costs import Curve
from saccade.config import Mode
from saccade.errors import RequestError
from saccade.inputs.placeholders import Prompt, append_text
from saccade.scheduling.engine import Engine
from saccade.scheduling.executing import Encoded
from saccade.scheduling.matcher import GrammarCompiler
from saccade.scheduling.orders import Encode, EncodeMore, Run
from saccade.scheduling.pace import Pace
from saccade.scheduling.scheduler import Scheduler
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Turn
from saccade.wire.update import Finish, FinishReason, Scores, Update
from tests.engine.conftest import Loaded
from tests.engine.rig import PAGE_ROWS, Options, build, random_prompt
from tests.engine.test_grammar import EOS, WORDS, random_schema

Load = Callable[[str], Loaded]
MAX_STEPS = 3000
NEAR = 1e-3  # of log-probabilities; summing in another order changes them by some 1e-6
FAULT = "made to fail"
PACE = Pace(Curve(((1, 0.01), (40, 0.4))), Curve(((1, 0.005), (20, 0.1))), 0.0, ((4, 20), (8, 30)), min_prompt_rows=1)
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "gemma3_vl")
ALONE = Options(max_num_seqs=4, max_tokens=128, num_blocks=64)
CROWDED = (
    Options(num_blocks=13, max_num_seqs=5, max_tokens=33, max_units=24, part_units=1, has_prefix_cache=True),
    Options(
        num_blocks=25,
        block_size=4,
        max_num_seqs=7,
        prefill_chunk=5,
        part_units=4,
        has_prefix_cache=True,
        mode=Mode.FULL,
    ),
    Options(num_blocks=96, block_size=1, max_num_seqs=4, max_tokens=20, max_units=16),
)


@dataclass
class Received:
    """The updates of a request so far."""

    prompt: Prompt
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    prompt_scores: dict[int, float] = field(default_factory=dict)
    finish: Finish | None = None
    vector: Any = None

    def take(self, update: Update) -> None:
        assert self.finish is None, f"{update} after the finish"
        self.tokens += update.token_ids
        self.scores += [] if update.scores is None else [update.scores]
        if (part := update.prompt_scores) is not None:
            self.prompt_scores |= {part.start + i: float(value) for i, value in enumerate(part.scores.chosen)}
        self.finish, self.vector = update.finish, update.pooled

    @property
    def was_cut(self) -> bool:
        assert self.finish is not None
        return self.finish.reason is FinishReason.ABORT or self.finish.detail in (FAULT, "stop")

    def assert_like(self, alone: "Received") -> None:
        count = len(self.tokens)
        assert self.tokens == alone.tokens[:count]
        for mine, other in zip(self.scores, alone.scores, strict=False):
            np.testing.assert_allclose(mine.chosen, other.chosen, atol=NEAR)
            np.testing.assert_allclose(mine.top_logprobs, other.top_logprobs, atol=NEAR)
        if self.was_cut:
            return
        assert (count, len(self.scores)) == (len(alone.tokens), len(alone.scores)) and self.finish == alone.finish
        assert self.prompt_scores == pytest.approx(alone.prompt_scores, abs=NEAR)
        assert (self.vector is None) == (alone.vector is None)
        if self.vector is not None:
            np.testing.assert_allclose(self.vector, alone.vector, atol=NEAR)


@dataclass
class SlowTicket:
    """The ticket of a device that works asynchronously."""

    done: Any
    looks: int

    @property
    def is_done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> Any:
        return self.done.wait()


class Unreliable:
    """An executor that fails to encode some images."""

    def __init__(self, inner: Any, random: Random) -> None:
        self._inner, self._random = inner, random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, orders: Any) -> Any:
        if isinstance(orders, Encode | EncodeMore) and self._random.random() < 0.3:
            return Encoded(FAULT)
        result = self._inner.execute(orders)
        return SlowTicket(result, self._random.randint(0, 3)) if isinstance(orders, Run) else result


def make_engine(loaded: Loaded, options: Options, random: Random | None = None) -> Engine:
    """An engine with random faults and limits, or a reliable one if `random` is None."""
    made, model = loaded
    bare = build(model, made.folder, options)
    executor, scheduler = bare.executor, bare.scheduler
    if random is not None:
        executor, resources = Unreliable(executor, random), scheduler.resources
        encoder = EncoderIndex(random.choice([48, 80]), PAGE_ROWS, keeps_idle=random.random() < 0.5)
        scheduler = Scheduler(scheduler.settings, pool=resources.pool, encoder=encoder, prefix=resources.prefix)
        assert bare.composer.vision is not None
        scheduler.pace = random.choice([None, PACE, replace(PACE, num_parts=bare.composer.vision.facts.num_parts)])
    grammars = GrammarCompiler(WORDS, bare.composer.vocab_size, frozenset({EOS}))
    return Engine(executor, bare.composer, scheduler, eos_token_ids=frozenset({EOS}), grammars=grammars)


def random_params(random: Random) -> SamplingParams:
    if random.random() < 0.1:
        return SamplingParams(max_tokens=0, pooling=random.choice(["last", "mean"]))
    most = random.choice([0, 1, 8, 40, 60])
    more: dict[str, Any] = {}
    if random.random() < 0.3:
        more |= {"repetition_penalty": 1.3, "frequency_penalty": 0.8}
    if random.random() < 0.3:
        more |= {"logit_bias": {random.randrange(3, 98): 5.0}, "allowed_token_ids": range(EOS, 118)}
    if random.random() < 0.3 and most:
        more |= {"grammar": Grammar("json_schema", json.dumps(random_schema(random)))}
    return SamplingParams(
        n=random.choice([1, 1, 1, 2]),
        temperature=random.choice([0.0, 1.0]),
        seed=random.randrange(9),
        max_tokens=most,
        ignore_eos=random.random() < 0.5,
        logprobs=random.choice([None, 0, 2, 5]),
        prompt_logprobs=random.choice([None, None, 0]),
        prompt_logprobs_start=random.choice([0, 9]),
        **more,
    )


class Crowd:
    """Requests with few different prompts that arrive, are aborted and are stopped at random."""

    def __init__(self, loaded: Loaded, options: Options, seed: int) -> None:
        self.random = Random(seed)
        self.engine = make_engine(loaded, options, self.random)
        numbers, made = np.random.default_rng(seed), loaded[0]
        has_images = loaded[1].spec.vision is not None
        self.prompts = [random_prompt(made, numbers, i % 3 if has_images else 0, length=8 * i + 3) for i in range(3)]
        self.received: dict[str, Received] = {}
        self.num_left = 15

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.num_left and not self.engine.has_work:
                break
            self.meddle()
            self.note(self.engine.step(self.meddle))
            self.engine.scheduler.check()
        stats = self.engine.scheduler.stats()
        assert not self.engine.has_work and stats.kv_usage == stats.encoder_usage == 0

    def meddle(self) -> bool:
        chance = self.random.random()
        if chance < 0.1:
            return sum(self.add() for _ in range(5)) > 0
        if chance < 0.14 and self.received:
            name = self.random.choice(list(self.received))
            self.note(self.engine.abort(name) if chance < 0.12 else self.engine.stop(name, "stop"))
        return False

    def add(self) -> bool:
        if not self.num_left:
            return False
        self.num_left -= 1
        prompt, params = self.random.choice(self.prompts), random_params(self.random)
        turn = Turn(self.random.choice([0, 0, 1]), self.random.choice("ab"))
        try:
            names = self.engine.add(f"r{self.num_left}", prompt, params, turn=turn)
        except RequestError:  # an image that never fits
            return False
        self.received |= {name: Received(prompt, params) for name in names}
        return True

    def note(self, updates: list[Update]) -> None:
        for update in updates:
            told = self.received[update.request_id]
            told.take(update)
            if update.finish is not None and not told.was_cut and 0 < len(told.tokens) < 30:
                self.prompts.append(append_text(told.prompt, [*told.tokens, 5, 6]))  # the next turn


@pytest.mark.parametrize("options", CROWDED, ids=["small blocks", "smaller blocks", "smallest blocks"])
def test_each_request_of_a_random_load_is_answered_as_if_it_ran_alone(loaded: Load, options: Options) -> None:
    num_preemptions = 0
    for seed, family in enumerate(FAMILIES, start=options.block_size):
        crowd, alone = Crowd(loaded(family), options, seed), make_engine(loaded(family), ALONE)
        crowd.run()
        for name, told in crowd.received.items():
            if "room" not in str(told.finish):  # else it filled the whole cache
                told.assert_like(answer_of(alone, name, told))
        num_preemptions += crowd.engine.scheduler.num_preemptions
    assert num_preemptions


def answer_of(engine: Engine, name: str, told: Received) -> Received:
    first = name.partition(":")[0]
    outputs = {member: Received(told.prompt, told.params) for member in engine.add(first, told.prompt, told.params)}
    while engine.has_work:
        for update in engine.step():
            outputs[update.request_id].take(update)
    return outputs[name]
