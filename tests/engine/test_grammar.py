"""Outputs that follow a grammar, from a model with random weights, which would never do so by itself."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import jsonschema_rs
import numpy as np
import pytest
import torch

from saccade.config import Mode
from saccade.errors import RequestError
from saccade.execution.logits import Logits
from saccade.execution.worker import Worker
from saccade.inputs.placeholders import Prompt
from saccade.kernels.dispatch import sampling_for
from saccade.scheduling.engine import Engine
from saccade.scheduling.matcher import GrammarCompiler, MaskedRow, Masks, Matcher, allowed_bits
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.grammar import Grammar, check_grammar
from saccade.wire.messages import Add, Close, Updates, encode, pack_prompt
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import NEXT
from saccade.wire.update import BROKEN, NO_TOKEN, FinishReason
from tests.engine.conftest import Loaded
from tests.engine.rig import Answer, Options, build, random_prompt, run
from tests.engine.simulated import make_request, make_scheduler

Load = Callable[[str], Loaded]
EOS = 2
SPECIAL = frozenset({0, 1, EOS, 100, 101, 102, 103})
LONGER = (b"\n", b'{"', b'": ', b'", "', b"12", b"tru", b"null", b"}]", b"]}", b"  ", b"\xc3", b"\xa9", b"ab")
OPTIONS = Options(max_model_len=200, num_blocks=200)


class Words:
    """A vocabulary of printable ASCII, a few longer tokens, halves of a character, and ids without text."""

    special_ids = SPECIAL

    def token_bytes(self, token_id: int) -> bytes:
        if 3 <= token_id <= 97:
            return bytes([32 + token_id - 3])
        return LONGER[token_id - 104] if 104 <= token_id < 104 + len(LONGER) else b""

    def encode_plain(self, text: str) -> list[int]:
        return [byte - 29 if 32 <= byte < 127 else 104 + LONGER.index(bytes([byte])) for byte in text.encode()]

    def text(self, answer: Answer) -> str:
        return b"".join(map(self.token_bytes, answer.token_ids)).decode()


WORDS = Words()


def make_engine(loaded: Load, options: Options = OPTIONS, eos: frozenset[int] = frozenset({EOS})) -> Engine:
    made, model = loaded("qwen3")
    bare = build(model, made.folder, options)
    grammars = GrammarCompiler(WORDS, bare.composer.vocab_size, eos)
    return Engine(bare.executor, bare.composer, bare.scheduler, eos_token_ids=eos, grammars=grammars)


def prompts_for(loaded: Load, names: list[str], seed: int = 0) -> dict[str, Prompt]:
    rng = np.random.default_rng(seed)
    return {name: random_prompt(loaded("qwen3")[0], rng) for name in names}


def ask(engine: Engine, loaded: Load, grammar: Grammar, **params: Any) -> Answer:
    wanted = SamplingParams(grammar=grammar, **({"max_tokens": 150, "seed": 1} | params))
    return run(engine, prompts_for(loaded, ["r"]), wanted)["r"]


def is_whole(answer: Answer) -> bool:
    assert answer.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), answer.finish
    return bool(answer.finish.reason is FinishReason.STOP)


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "number", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    match random.choice(kinds) if depth else "object":
        case "string":
            return {"type": "string", "maxLength": random.randint(0, 5)}
        case "integer":
            return {"type": "integer", "minimum": random.randint(-20, 0), "maximum": random.randint(1, 999)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": random.randint(1, 50)}
        case "pattern":
            return {"type": "string", "pattern": random.choice(["^[a-c]{2,4}$", "^x?y+z{1,2}$", "^(no|yes)$"])}
        case "enum":
            return {"enum": random.sample(["red", 'a"b', "", 7, -1.5, None, True, "é"], 3)}
        case "array":
            return {"type": "array", "items": random_schema(random, depth + 1), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(random, depth + 1) for _ in range(2)]}
        case _:
            names = random.sample(["a", "b", "key", "x y", "é", 'q"'], random.randint(1, 3))
            required = [name for name in names if random.random() < 0.7]
            return {
                "type": "object",
                "properties": {name: random_schema(random, depth + 1) for name in names},
                "required": required,
                "additionalProperties": False,
            }


@pytest.mark.parametrize("mode", [None, Mode.PIECEWISE, Mode.FULL])
def test_json_is_valid_and_other_requests_of_the_batch_are_unaffected(loaded: Load, mode: Mode | None) -> None:
    random = Random(11 if mode is None else len(mode))
    options = replace(OPTIONS, mode=mode, strict=mode is not None, max_num_seqs=10, max_tokens=48)
    engine = make_engine(loaded, options)
    schemas = {f"g{i}": random_schema(random) for i in range(6)}
    plain = {f"p{i}": SamplingParams(temperature=i % 2, seed=i, max_tokens=40) for i in range(4)}
    prompts = prompts_for(loaded, [*schemas, *plain])
    alone = run(engine, {name: prompts[name] for name in plain}, plain)
    params = plain | {
        name: SamplingParams(
            grammar=Grammar("json_schema", json.dumps(schema)), temperature=i % 3 / 2, seed=i, max_tokens=120
        )
        for i, (name, schema) in enumerate(schemas.items())
    }
    answers = run(engine, prompts, params)
    assert {name: answers[name].token_ids for name in plain} == {name: a.token_ids for name, a in alone.items()}
    whole = [name for name in schemas if is_whole(answers[name])]
    assert len(whole) >= 4
    for name in whole:
        text = WORDS.text(answers[name])
        assert jsonschema_rs.is_valid(schemas[name], json.loads(text)), (schemas[name], text)


@pytest.mark.parametrize("end", [40, 116], ids=["a letter", "two letters"])
def test_an_end_token_is_never_text(end: int) -> None:
    """Some checkpoints do not mark their end tokens as special. Taken for text, one would end an answer in a string."""
    compiler = GrammarCompiler(WORDS, 128, frozenset({end, EOS}))
    matcher = Matcher(compiler.compile(Grammar("json_schema", '{"type": "string"}')).result())
    row = np.full(128 // 32 + 1, -1, dtype=np.int32)

    def allowed() -> set[int]:
        matcher.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return {i for i in range(128) if row[i // 32] >> (i % 32) & 1}

    for text in ('"', "x", "y"):
        [token] = WORDS.encode_plain(text)
        matcher.take(token)
        assert {end, EOS}.isdisjoint(allowed()) and WORDS.encode_plain("z")[0] in allowed()
    [quote] = WORDS.encode_plain('"')
    matcher.take(quote)
    assert matcher.is_complete or {end, EOS} <= allowed()


def test_a_json_object_grammar_gives_json_objects(loaded: Load) -> None:
    engine = make_engine(loaded)
    prompts = prompts_for(loaded, [f"r{i}" for i in range(6)])
    params = {
        name: SamplingParams(grammar=Grammar("json_object"), temperature=1.5, seed=i, max_tokens=100)
        for i, name in enumerate(prompts)
    }
    whole = [answer for answer in run(engine, prompts, params).values() if is_whole(answer)]
    assert whole and all(isinstance(json.loads(WORDS.text(answer)), dict) for answer in whole)


PATTERNS = (r"[a-f]{3,8}", r"(\d{1,3}\.){3}\d{1,3}", r"(ab|ba)+c?", r"[A-Z][a-z]* (is|was) \d{2}", r"x{0,4}", r"é{2}")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_a_regular_expression(loaded: Load, pattern: str) -> None:
    engine = make_engine(loaded)
    for temperature in (0.0, 1.0):
        answer = ask(engine, loaded, Grammar("regex", pattern), temperature=temperature, max_tokens=60, n=3)
        if is_whole(answer):
            assert re.fullmatch(pattern, WORDS.text(answer)), WORDS.text(answer)


def test_answers_are_among_the_given_choices(loaded: Load) -> None:
    engine = make_engine(loaded)
    choices = ["yes", "no", "no more", 'say "é"\n', "12"]
    params = SamplingParams(grammar=Grammar("choice", json.dumps(choices)), n=16, seed=5, temperature=2, max_tokens=30)
    answers = run(engine, prompts_for(loaded, ["r"]), params)
    assert len(answers) == 16 and all(is_whole(answer) for answer in answers.values())
    texts = {WORDS.text(answer) for answer in answers.values()}
    assert texts <= set(choices) and len(texts) >= 3


def test_lark_grammars_may_contain_schemas(loaded: Load) -> None:
    engine = make_engine(loaded)
    lark = 'start: "<t>" body "</t>"\nbody: %json {"type": "object", "properties": {"a": {"type": "boolean"}},' + (
        ' "required": ["a"], "additionalProperties": false}'
    )
    text = WORDS.text(ask(engine, loaded, Grammar("lark", lark)))
    assert json.loads(text.removeprefix("<t>").removesuffix("</t>"))["a"] in (True, False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_chooses_like_a_list_of_allowed_tokens(loaded: Load, temperature: float) -> None:
    """The mask comes before sampling: same logits, same noise, same penalties, same tokens."""
    engine = make_engine(loaded)
    common: dict[str, Any] = {"temperature": temperature, "seed": 9, "max_tokens": 24, "frequency_penalty": 0.5}
    ids = tuple(range(70, 80))  # c to l
    common["logit_bias"] = {70: 1.5}
    prompts = prompts_for(loaded, ["r"], seed=4)
    expected = run(engine, prompts, SamplingParams(allowed_token_ids=ids, **common))["r"]
    found = run(engine, prompts, SamplingParams(grammar=Grammar("regex", "[c-l]{24}"), **common))["r"]
    assert found.token_ids == expected.token_ids


def test_scores_ignore_the_grammar(loaded: Load) -> None:
    engine = make_engine(loaded)
    prompts = prompts_for(loaded, ["r"], seed=6)
    params = SamplingParams(grammar=Grammar("regex", "[0-9]{8}"), temperature=1, seed=3, max_tokens=20, logprobs=2)
    answer = run(engine, prompts, params)["r"]
    scores = [float(u.scores.chosen[0]) for u in answer.updates if u.scores is not None]
    assert len(scores) == len(answer.token_ids)
    whole = random_prompt(loaded("qwen3")[0], np.random.default_rng(0), length=3)
    ids = np.concatenate([prompts["r"].token_ids, np.asarray(answer.token_ids, dtype=np.int32)])
    whole = replace(whole, token_ids=ids, positions_3T=np.tile(np.arange(len(ids), dtype=np.int32), (3, 1)))
    again = run(engine, {"w": whole}, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))["w"]
    chosen = np.concatenate([u.prompt_scores.scores.chosen for u in again.updates if u.prompt_scores is not None])
    np.testing.assert_allclose(scores, chosen[-len(scores) :], atol=1e-4)


class TestEnds:
    def test_a_complete_output_ends_without_another_pass(self, loaded: Load) -> None:
        engine = make_engine(loaded)
        answer = ask(engine, loaded, Grammar("regex", "a{5}"), temperature=0)
        assert WORDS.text(answer) == "aaaaa" and is_whole(answer)
        assert EOS not in answer.token_ids and answer.updates[-1].token_ids == ()

    def test_an_optional_end_is_the_end_token(self, loaded: Load) -> None:
        engine = make_engine(loaded)
        answer = ask(engine, loaded, Grammar("regex", "a{0,90}"), temperature=3, logit_bias={EOS: 5.0})
        assert is_whole(answer) and answer.token_ids[-1] == EOS

    @pytest.mark.parametrize("how", [{"min_tokens": 12}, {"ignore_eos": True}])
    def test_forbidden_end_tokens_are_avoided_while_other_tokens_are_allowed(
        self, loaded: Load, how: dict[str, Any]
    ) -> None:
        engine = make_engine(loaded)
        answer = ask(engine, loaded, Grammar("regex", "c{0,15}"), logit_bias={EOS: 100.0}, **how)
        assert is_whole(answer) and 12 <= len(WORDS.text(answer)) <= 15

    def test_a_complete_grammar_ends_an_answer_before_min_tokens(self, loaded: Load) -> None:
        answer = ask(make_engine(loaded), loaded, Grammar("choice", '["hi", "hello"]'), min_tokens=50)
        assert is_whole(answer) and WORDS.text(answer) in ("hi", "hello")

    def test_a_model_without_end_tokens_can_end(self, loaded: Load) -> None:
        engine = make_engine(loaded, eos=frozenset())
        answer = ask(engine, loaded, Grammar("json_schema", '{"type": "object", "additionalProperties": false}'))
        assert is_whole(answer) and json.loads(WORDS.text(answer)) == {}

    def test_stop_tokens_still_stop(self, loaded: Load) -> None:
        answer = ask(make_engine(loaded), loaded, Grammar("regex", "[a-z]{150}"), stop_token_ids=(90,), temperature=1)
        assert answer.finish.detail == 90 and answer.token_ids[-1] == 90


def test_matchers_are_rebuilt_after_preemption(loaded: Load) -> None:
    names = [f"r{i}" for i in range(6)]
    params = {
        name: SamplingParams(grammar=Grammar("regex", f"[{name[1]}a-e]{{30}}!"), temperature=1, seed=i, max_tokens=50)
        for i, name in enumerate(names)
    }
    params["r0"] = replace(params["r0"], n=3)
    roomy = run(make_engine(loaded), prompts_for(loaded, names), params)
    tight = make_engine(loaded, Options(max_model_len=120, num_blocks=24))
    answers = run(tight, prompts_for(loaded, names), params)
    assert tight.scheduler.num_preemptions > 0
    assert {name: answer.token_ids for name, answer in answers.items()} == {n: a.token_ids for n, a in roomy.items()}
    assert all(is_whole(answer) for answer in answers.values())


def test_a_request_without_allowed_tokens_ends_alone(loaded: Load) -> None:
    engine = make_engine(loaded)
    prompts = prompts_for(loaded, ["bad", "good", "plain"])
    good = SamplingParams(grammar=Grammar("regex", "[a-c]{20}"), seed=1, max_tokens=40)
    plain = SamplingParams(temperature=0, max_tokens=10)
    expected = run(engine, {"plain": prompts["plain"]}, plain)["plain"].token_ids
    bad = replace(good, grammar=Grammar("regex", "a+b"), allowed_token_ids=(68,), max_tokens=30, logit_bias={69: 9.0})
    bad = replace(bad, allowed_token_ids=(90,))
    answers = run(engine, prompts, {"bad": bad, "good": good, "plain": plain})
    assert answers["bad"].finish.reason is FinishReason.ERROR and answers["bad"].finish.detail == NO_TOKEN
    assert re.fullmatch("[a-c]{20}", WORDS.text(answers["good"])) and answers["plain"].token_ids == expected


def test_a_parser_panic_ends_only_its_requests(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*args: Any) -> None:
        raise Panic

    engine = make_engine(loaded)
    prompts = prompts_for(loaded, ["g", "plain"])
    plain = SamplingParams(temperature=0, max_tokens=10)
    expected = run(engine, {"plain": prompts["plain"]}, plain)["plain"].token_ids
    monkeypatch.setattr(engine.composer._masks, "_compute", panic)
    answers = run(engine, prompts, {"g": SamplingParams(grammar=Grammar("regex", "a")), "plain": plain})
    assert answers["g"].finish.reason is FinishReason.ERROR and answers["g"].finish.detail == BROKEN
    assert answers["g"].token_ids == [] and answers["plain"].token_ids == expected


def test_without_a_vocabulary_a_grammar_is_refused(loaded: Load) -> None:
    made, model = loaded("qwen3")
    engine = build(model, made.folder, OPTIONS)
    with pytest.raises(RequestError, match="no vocabulary"):
        engine.add("r", prompts_for(loaded, ["r"])["r"], SamplingParams(grammar=Grammar("regex", "a")))
    assert not engine.has_work


def test_compiled_grammars_are_cached_and_matchers_are_independent(loaded: Load) -> None:
    compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    first = compiler.compile(Grammar("regex", "ab*"))
    assert compiler.compile(Grammar("regex", "ab*")) is first
    assert compiler.compile(Grammar("regex", "ab+")) is not first
    one, two = Matcher(first.result()), Matcher(first.result())
    one.take(68)
    two.take(69)
    assert one.error is None and two.error == NO_TOKEN
    assert Matcher(first.result(), (68, 69, 69)).error is None


@contextmanager
def occupied(compiler: GrammarCompiler) -> Iterator[None]:
    """Keeps the compiler's thread busy, so that nothing is compiled inside."""
    started, release = Event(), Event()

    def occupy() -> None:
        started.set()
        release.wait(120)

    compiler._thread.submit(occupy)
    assert started.wait(120)
    try:
        yield
    finally:
        release.set()


def test_a_grammar_that_nobody_waits_for_is_not_compiled() -> None:
    compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    with occupied(compiler):
        kept, forgotten = (compiler.compile(Grammar("regex", letter)) for letter in "ab")
        compiler.forget(Grammar("regex", "b"), forgotten)
        compiler.forget(Grammar("regex", "never asked for"), forgotten)
    assert kept.result(120) is not None and forgotten.cancelled()
    again = compiler.compile(Grammar("regex", "b"))
    assert again.result(120) is not None, "it can be compiled later"
    compiler.forget(Grammar("regex", "b"), again)
    assert compiler.compile(Grammar("regex", "b")).done(), "compiled grammars are kept"


def test_pending_grammars_are_never_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.scheduling.matcher.MAX_COMPILED", 3)
    compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    grammars = [Grammar("regex", letter) for letter in "abcdefgh"]
    with occupied(compiler):
        waiting = [compiler.compile(grammar) for grammar in grammars]
        assert [compiler.compile(grammar) for grammar in grammars] == waiting
    assert all(future.result(120) is not None for future in waiting)
    compiler.compile(Grammar("regex", "i")).result(120)
    assert len(compiler._compiled) == 3 and compiler.compile(grammars[-1]) is waiting[-1]


def test_forgetting_an_evicted_grammar_keeps_a_newer_future_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forgotten future was compiled and evicted; another request waits for the same grammar."""
    monkeypatch.setattr("saccade.scheduling.matcher.MAX_COMPILED", 1)
    compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    old = compiler.compile(Grammar("regex", "a"))
    assert old.result(120) is not None
    compiler.compile(Grammar("regex", "b")).result(120)
    with occupied(compiler):
        wanted = compiler.compile(Grammar("regex", "a"))
        assert wanted is not old
        compiler.forget(Grammar("regex", "a"), old)
    assert wanted.result(120) is not None


class Commands:
    """A link that delivers these commands."""

    def __init__(self, commands: list[list[bytes]]) -> None:
        self._left = commands

    def wait(self, seconds: float | None) -> bool:
        return bool(self._left)

    def receive(self) -> list[memoryview] | None:
        return [memoryview(frame) for frame in self._left.pop(0)] if self._left else None


def test_a_deadline_can_pass_while_a_grammar_is_compiled(loaded: Load) -> None:
    engine, told = make_engine(loaded), list[Any]()
    assert engine.grammars is not None
    head, arrays = pack_prompt(prompts_for(loaded, ["r"])["r"])
    params = SamplingParams(grammar=Grammar("regex", "a{5}"), max_tokens=20, n=2)
    frames = [array.tobytes() for array in arrays]
    late, early = (
        encode(Add(serial, head, params, NEXT, time, None)) for serial, time in ((1, monotonic() - 1), (2, None))
    )

    def tell(reply: Any) -> None:
        told.append(reply)
        if isinstance(reply, Updates) and all(news.serial == 1 for news in reply.news):
            commands._left.append([encode(Close())])

    commands = Commands([[late, *frames], [early, *frames]])
    with occupied(engine.grammars):
        Worker(engine, cast(Any, commands), tell).run()
    news = [one for reply in told if isinstance(reply, Updates) for one in reply.news]
    ends = {(one.serial, one.index): one.finish.reason for one in news if one.finish is not None}
    assert ends == {
        **{(1, index): FinishReason.DEADLINE for index in range(2)},
        **{(2, index): FinishReason.ABORT for index in range(2)},
    }
    assert len(news) == 4 and not engine.has_work


class TestMasks:
    def allowed(self, rows: list[MaskedRow]) -> list[set[int]]:
        """Computes masks, applies them to logits, and returns the tokens that remain."""
        mask = Masks(120).compute(rows)
        state = SimpleNamespace(logits=torch.zeros(8, 120), edited=torch.ones(8, 120), sampling=sampling_for("cpu"))
        Logits(cast(Any, state), torch.zeros(0), num_turns=2).edit(8, (), mask, turn=1)
        return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in state.edited]

    def test_rows_between_masked_rows_are_left_alone(self) -> None:
        compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
        a, b = (Matcher(compiler.compile(Grammar("regex", letter)).result()) for letter in "ab")
        found = self.allowed([MaskedRow(5, a), MaskedRow(2, b)])
        assert found[5] == {68} and found[2] == {69}
        assert all(len(found[row]) == 120 for row in range(8) if row not in (2, 5))

    def test_forbidden_tokens_are_allowed_if_nothing_else_is(self) -> None:
        compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
        grammar = compiler.compile(Grammar("regex", "cd*")).result()
        first, second, third = Matcher(grammar), Matcher(grammar, (70,)), Matcher(grammar, (70,))
        found = self.allowed([MaskedRow(0, first, (70, 10**6)), MaskedRow(1, second, (EOS,)), MaskedRow(2, third)])
        assert found[:3] == [{70}, {71}, {71, EOS}]

    def test_tokens_outside_the_allowed_list_are_never_allowed(self) -> None:
        compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
        grammar = compiler.compile(Grammar("regex", "[a-d]x")).result()
        first, none = Matcher(grammar), Matcher(grammar)
        few, others = allowed_bits((69, 71, 90), 120), allowed_bits((90, 10**6), 120)
        found = self.allowed([MaskedRow(0, first, (), few), MaskedRow(1, none, (), others)])
        assert found[0] == {69, 71} and first.error is None
        assert none.error == NO_TOKEN

    def test_the_artificial_end_token_cannot_be_chosen(self) -> None:
        compiler = GrammarCompiler(WORDS, 120)
        matcher = Matcher(compiler.compile(Grammar("regex", "a*")).result(), (68,))
        assert self.allowed([MaskedRow(3, matcher, (68,))])[3] == {68}

    def test_a_matcher_with_an_error_leaves_its_row_alone(self) -> None:
        compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
        grammar = compiler.compile(Grammar("regex", "ab")).result()
        bad, good = Matcher(grammar, (99,)), Matcher(grammar)
        found = self.allowed([MaskedRow(3, bad), MaskedRow(4, good)])
        assert bad.error == NO_TOKEN and len(found[3]) == 120 and {68} <= found[4] <= {68, 116}


class TestPlans:
    """Which rows the scheduler plans for requests with a grammar."""

    GRAMMAR = SamplingParams(grammar=Grammar("regex", "a+"), max_tokens=6, seed=0)

    def test_no_output_is_planned_before_the_last_token_is_known(self) -> None:
        scheduler = make_scheduler(SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64))
        scheduler.add(make_request("g", [5, 6, 7], params=self.GRAMMAR))
        scheduler.add(make_request("p", [5, 6, 8], params=replace(self.GRAMMAR, grammar=None)))
        rows, flights = [], []
        for now in range(12):
            plan = scheduler.plan(float(now))
            scheduler.check()
            rows.append({chunk.request_id for chunk in plan.chunks})
            assert not any(chunk.is_pending_input for chunk in plan.chunks if chunk.request_id == "g")
            flights += [plan] if plan.chunks else []
            if flights and (len(flights) == 2 or not plan.chunks):
                done = flights.pop(0)
                scheduler.commit(done, {chunk.request_id: [9] for chunk in done.chunks})
        assert rows[:4] == [{"g", "p"}, {"p"}, {"g", "p"}, {"p"}]

    def test_an_end_token_allowed_by_the_grammar_ends_the_request(self) -> None:
        for how in ({"ignore_eos": True}, {"min_tokens": 5}, {}):
            request = make_request("g", [5], params=replace(self.GRAMMAR, **how))
            request.max_outputs = 6
            request.output_ids.append(next(iter(request.eos_token_ids)))
            finish = request.check_stop()
            assert finish is not None and finish.reason is FinishReason.STOP

    def test_prompt_chunks_do_not_wait_for_each_other(self) -> None:
        limits = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, prefill_chunk_tokens=4)
        scheduler = make_scheduler(limits)
        scheduler.add(make_request("g", list(range(5, 17)), params=self.GRAMMAR))
        first, second = scheduler.plan(0.0), scheduler.plan(0.0)
        assert [chunk.start for plan in (first, second) for chunk in plan.chunks] == [0, 4]


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


LETTERS = "abcdefghijklmnopqrstuvwxyz"
REFUSED = {
    "not JSON": schema("{"),
    "not an object": schema("[]"),
    "no such type": schema({"type": "foo"}),
    "unsatisfiable": schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
    "not supported": schema({"type": "array", "uniqueItems": True}),
    "remote reference": schema({"$ref": "http://127.0.0.1:1/schema.json"}),
    "missing reference": schema({"$ref": "#/$defs/x"}),
    "NaN": schema('{"const": NaN}'),
    "infinity": schema('{"type": "number", "minimum": -Infinity}'),
    "digits": schema('{"const": ' + "9" * 5000 + "}"),
    "deep": schema(nested(150)),
    "very deep": schema(nested(10_000)),
    "10 MB": schema('{"description": "' + "x" * 10_000_000 + '"}'),
    "many values": schema({"enum": list(range(30_000))}),
    "many properties": schema({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}),
    "many name patterns": schema({"patternProperties": {f"^{a}{b}.*$": {} for a in LETTERS for b in LETTERS}}),
    "large multiple": schema({"type": "integer", "multipleOf": 1_000_003}),
    "product of multiples": schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 91, 83)]}),
    "many patterns at once": schema({"allOf": [{"type": "string", "pattern": f".*{c}.*{c}.*"} for c in LETTERS]}),
    "hidden patterns at once": schema(
        {
            "$defs": {c: {"type": "string", "pattern": f".*{c}.*{c}.*"} for c in LETTERS},
            "allOf": [{"$ref": f"#/$defs/{c}"} for c in LETTERS],
        }
    ),
    "patterns at once in properties": schema(
        {"allOf": [{"properties": {"a": {"pattern": f".*{c}.*{c}.*"}}} for c in LETTERS]}
    ),
    "product of alternatives": schema(
        {"allOf": [{"anyOf": [{"type": "string", "pattern": f"{c}{i}"} for i in range(10)]} for c in "abcd"]}
    ),
    "chain of references": schema(
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}, "$ref": "#/$defs/d0"}
    ),
    "open group": Grammar("regex", "(a"),
    "look-ahead": Grammar("regex", "(?=a)b"),
    "back-reference": Grammar("regex", r"(a)\1"),
    "nested groups": Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    "long expression": Grammar("regex", "a" * 100_000),
    "half a character": Grammar("regex", "\ud800"),
    "no choice": Grammar("choice", "[]"),
    "empty choice": Grammar("choice", '[""]'),
    "choices that are no strings": Grammar("choice", "[1]"),
    "many choices": Grammar("choice", json.dumps([str(i) for i in range(10_000)])),
    "deep choices": Grammar("choice", "[" * 100_000),
    "no rule": Grammar("lark", ""),
    "no start": Grammar("lark", 'a: "b"'),
    "unknown rule": Grammar("lark", "start: nothing"),
    "doubling terminals": Grammar(
        "lark", "start: A\n" + "\n".join(f"{chr(65 + i)}: {chr(66 + i)} {chr(66 + i)}" for i in range(24)) + '\nY: "x"'
    ),
    "schema in lark": Grammar("lark", 'start: %json {"type": "integer", "multipleOf": 1000003}'),
    "broken schema in lark": Grammar("lark", "start: %json {"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_grammar_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_grammar(REFUSED[name])
    assert caught.value.status == 400 and caught.value.param == "response_format"
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


@pytest.mark.parametrize("grammar", [Grammar("regex", "(?=a)b"), schema({"type": "string", "pattern": "(?=a)b"})])
def test_what_is_wrong_with_a_pattern_is_said(grammar: Grammar) -> None:
    with pytest.raises(RequestError, match=r"regex parse error: look-around, .* is not supported$"):
        check_grammar(grammar)


BOMBS = {
    "nested repeats": Grammar("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "nested plus": Grammar("regex", "((a+)+)+b"),
    "counted": Grammar("regex", ".*a.{2000}c"),
    "counted twice": Grammar("regex", "(.{0,50}(a|b).{0,50}){20}"),
    "huge count": Grammar("regex", "a{0,1000000000}"),
    "long string": schema({"type": "string", "minLength": 10**9}),
    "many items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "options": Grammar("lark", "start: " + '"a"? ' * 2000),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | "a"'),
    "both at once": Grammar("lark", "start: A\nA: " + " & ".join(f"/.*{c}.*{c}.*/" for c in LETTERS)),
    "rules that double": Grammar(
        "lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(24)) + '\nr24: "x"'
    ),
    "loop": Grammar("lark", "start: start"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_a_refusal_an_error_or_an_answer(loaded: Load, name: str) -> None:
    engine = make_engine(loaded)
    try:
        answer = ask(engine, loaded, BOMBS[name], max_tokens=20)
    except RequestError:
        pass
    else:
        assert answer.finish.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
    assert is_whole(ask(engine, loaded, Grammar("regex", "ok"))), "the next request is not affected"


def test_schemas_of_common_libraries_are_accepted() -> None:
    """Schemas of the form that pydantic and similar libraries produce."""
    address = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}}
    person = {
        "$defs": {"Address": address, "Kind": {"enum": ["a", "b"], "type": "string"}},
        "type": "object",
        "title": "Person",
        "properties": {
            "name": {"type": "string", "description": "who", "minLength": 1},
            "age": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None},
            "kind": {"allOf": [{"$ref": "#/$defs/Kind"}], "default": "a"},
            "homes": {"type": "array", "items": {"$ref": "#/$defs/Address"}},
            "born": {"type": "string", "format": "date-time"},
            "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    check_grammar(schema(person))
    many = {f"f{i}": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Address"}]} for i in range(200)}
    check_grammar(schema({"$defs": {"Address": address}, "type": "object", "properties": many}))
    check_grammar(Grammar("json_object"))


def test_only_grammars_of_known_kinds_are_accepted() -> None:
    with pytest.raises(RequestError, match="kind"):
        Grammar("foo", "")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="grammar"):
        SamplingParams(grammar="a+")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["root", "other"])
def test_ebnf_is_accepted_as_well_as_lark(loaded: Load, name: str) -> None:
    """EBNF as clients of llama.cpp, vLLM and SGLang write it."""
    text = 'root ::= "a" digit{2} | list\nlist ::= "[" (digit ("," digit)*)? "]"\ndigit ::= [0-9] # one\n'
    if name == "other":
        text = text.replace("list", "my-List")
    check_grammar(Grammar("lark", text))
    engine = make_engine(loaded)
    for seed in range(4):
        answer = ask(engine, loaded, Grammar("lark", text), seed=seed, temperature=1.0, max_tokens=40)
        if is_whole(answer):
            assert re.fullmatch(r"a[0-9]{2}|\[([0-9](,[0-9])*)?\]", WORDS.text(answer)), WORDS.text(answer)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('root ::= "a" | missing', "invalid_grammar"),
        ('root ::= "a', "invalid_grammar"),
        ("root ::= [a", "invalid_grammar"),
        ('root ::= "a"{99999999999999999999999}', "invalid_grammar"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "grammar_too_large"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(300)), "grammar_too_large"),
    ],
)
def test_bad_ebnf_is_refused_under_the_name_of_its_field(text: str, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_grammar(Grammar("lark", text), param="ebnf")
    assert (refused.value.code, refused.value.param) == (code, "ebnf")


@pytest.mark.parametrize(
    ("pattern", "is_allowed"),
    [
        ("(a{1000}){1000}", True),
        ("(a{1000}){1000}{2}", False),
        ("((a|b{1,9}){1000}c){200}", False),
        (r"(a\{1000\}){1000}[{1000}]", True),
        ("a{1000}b{1000}c{1000}d{1000}", True),
        ("a{,5}{x}{", True),
    ],
)
def test_repetitions_multiply_up_to_a_limit(pattern: str, is_allowed: bool) -> None:
    try:
        check_grammar(Grammar("regex", pattern))
        code = None
    except RequestError as error:
        code = error.code
    assert (code != "grammar_too_large") is is_allowed
