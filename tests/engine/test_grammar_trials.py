"""Grammars that take forever to compile end in a separate process, and others are compiled meanwhile."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from saccade.errors import CapacityError, RequestError
from saccade.jobs.packets import resident_bytes
from saccade.scheduling import matcher, trials
from saccade.scheduling.matcher import GrammarCompiler, MaskedRow, Masks, Matcher, refusal
from saccade.wire.grammar import Grammar
from tests.engine.test_grammar import EOS, WORDS

ENDLESS = Grammar("lark", "start: A\nA: /.*a.{16}.*/ & /.*b.{16}.*/ & ~/.*c.{16}.*/")
WAIT_S = 120.0


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(WORDS, 120, frozenset({EOS}), has_trials=True)
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless grammar does not exceed its limits before the test ends it."""
    monkeypatch.setattr(trials, "LIMITS", replace(trials.LIMITS, cpu_s=WAIT_S, memory_bytes=2**31))


def pids(compiler: GrammarCompiler) -> list[int]:
    assert compiler._trials is not None
    return compiler._trials.result(WAIT_S).pool.pids()


def wait_for(what: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def num_busy(compiler: GrammarCompiler) -> int:
    assert compiler._trials is not None
    return compiler._trials.result(WAIT_S).pool.num_busy


def compiled(compiler: GrammarCompiler, grammar: Grammar) -> Any:
    return compiler.compile(grammar).result(WAIT_S)


def test_grammars_that_pass_their_trial_are_compiled(compiler: GrammarCompiler) -> None:
    for grammar in (
        Grammar("regex", "ab*"),
        Grammar("json_object"),
        Grammar("choice", '["ab", "cd"]'),
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}'),
        Grammar("lark", 'start: "a" | B\nB: /[bc]+/ & /.{1,4}/'),
        Grammar("lark", 'root ::= "a" | "b"'),
    ):
        assert Matcher(compiled(compiler, grammar)).error is None
        assert compiler.compile(grammar).done()


def test_broken_grammars_are_refused_with_the_same_error_as_without_a_trial(compiler: GrammarCompiler) -> None:
    plain = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    for grammar in (Grammar("regex", "("), Grammar("json_schema", "{"), Grammar("lark", "start: nothing")):
        errors = [refused(made.compile(grammar)) for made in (plain, compiler)]
        assert str(errors[0]) == str(errors[1]) and errors[0].code == errors[1].code
        assert errors[0].param == errors[1].param == "response_format"


def refused(future: "Future[Any]") -> RequestError:
    with pytest.raises(RequestError) as error:
        future.result(WAIT_S)
    assert refusal(future) is error.value
    return error.value


def test_an_endless_grammar_is_refused_and_leaves_no_memory_behind(compiler: GrammarCompiler) -> None:
    """Two of them would take minutes and gigabytes each. Ordinary ones are compiled before they are refused."""
    compiled(compiler, Grammar("regex", "warm"))
    before, num_killed = resident_bytes(), compiler.jobs.killed
    endless = [compiler.compile(Grammar("lark", f"{ENDLESS.text}\nB{i}: /x/")) for i in range(2)]
    wait_for(lambda: num_busy(compiler))
    for i in range(10):
        assert compiled(compiler, Grammar("regex", f"a{{{i + 1}}}")) is not None
    assert not all(future.done() for future in endless), "ordinary ones do not wait for them"
    for future in endless:
        error = refused(future)
        assert error.status == 400 and "2 seconds of CPU time or 256 MiB" in str(error)
    assert resident_bytes() - before < 64 * 2**20
    assert compiler.jobs.killed == num_killed + 2 and compiler.jobs.waiting == 0


def test_slow_grammars_do_not_delay_others_however_many_there_are(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty grammars of one caller take 20 seconds of CPU time in turn. A grammar of another caller that may also take
    long waits for one or two of them."""
    monkeypatch.setattr(trials, "LIMITS", replace(trials.LIMITS, cpu_s=0.5))
    many = [Grammar("lark", f"{ENDLESS.text}\nC{i}: /x/") for i in range(40)]
    endless = [compiler.compile(grammar, "flood") for grammar in many]
    wait_for(lambda: num_busy(compiler))
    other = compiler.compile(Grammar("lark", "start: B\nB: /[bc]+/ & /.{1,5}/"), "another")
    for grammar in (
        Grammar("regex", "not behind them"),
        Grammar("choice", '["not", "behind"]'),
        Grammar("json_schema", '{"type": "integer", "minimum": 7}'),
        Grammar("lark", 'start: "behind"'),
    ):
        assert compiled(compiler, grammar) is not None
    assert other.result(WAIT_S) is not None
    assert sum(not future.done() for future in endless) > 20
    for grammar, future in zip(many, endless, strict=True):
        compiler.forget(grammar, future)
    wait_for(lambda: all(future.done() for future in endless) and not num_busy(compiler))


@pytest.mark.usefixtures("patient")
def test_an_abandoned_trial_is_ended(compiler: GrammarCompiler) -> None:
    before = set(pids(compiler))
    future = compiler.compile(ENDLESS)
    wait_for(lambda: num_busy(compiler))
    compiler.forget(ENDLESS, future)
    with pytest.raises(CancelledError):
        future.result(WAIT_S)
    wait_for(lambda: not num_busy(compiler) and set(pids(compiler)) != before)
    again = compiler.compile(ENDLESS)
    assert again is not future, "it can be compiled again"
    compiler.forget(ENDLESS, again)
    with pytest.raises(CancelledError):
        again.result(WAIT_S)  # it may have begun; then its process is busy until now


@pytest.mark.usefixtures("patient")
def test_a_grammar_whose_trial_process_was_killed_can_be_tried_again(compiler: GrammarCompiler) -> None:
    future = compiler.compile(ENDLESS)
    wait_for(lambda: num_busy(compiler))
    for pid in pids(compiler):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(CapacityError, match="try again"):
        future.result(WAIT_S)
    assert isinstance(refusal(future), CapacityError)
    again = compiler.compile(ENDLESS)
    assert again is not future
    compiler.forget(ENDLESS, again)
    assert compiled(compiler, Grammar("regex", "after"))


def test_a_grammar_that_grows_while_it_is_followed_stays_within_bounds() -> None:
    """Compiling it takes a millisecond; its states unfold with the tokens. llguidance's fuel bounds CPU time and memory
    of every mask, and an error ends only that output."""
    compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    grammar = Grammar("lark", 'start: "a" A\nA: ~/.*a.{12}.*/ & ~/.*b.{12}.*/')
    state, random, before = compiled(compiler, grammar), Random(0), resident_bytes()
    letters = [id_ for id_ in range(120) if WORDS.token_bytes(id_) in (b"a", b"b", b"c")]
    masks, worst_s = Masks(120), 0.0
    for _ in range(2):
        following = Matcher(state)
        for _ in range(300):
            begun = time.thread_time()
            mask = masks.compute([MaskedRow(0, following)])
            worst_s = max(worst_s, time.thread_time() - begun)
            bits = np.unpackbits(mask.words.view(np.uint8), bitorder="little")
            allowed = [id_ for id_ in letters if bits[id_]]
            if following.error is not None or not allowed:
                break
            following.take(random.choice(allowed))
    assert worst_s < 2.0 and resident_bytes() - before < 256 * 2**20


def test_grammars_that_have_grown_too_much_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(WORDS, 120, frozenset({EOS}))
    sizes = iter([100, 150, 1000, 1000, 1000])
    monkeypatch.setattr(matcher, "resident_bytes", lambda: next(sizes) * 2**20)
    for letter in "ab":
        assert compiled(compiler, Grammar("regex", letter))
    assert len(compiler._compiled) == 2
    for count, letter in enumerate("cd", 1):
        assert compiled(compiler, Grammar("regex", letter))
        assert len(compiler._compiled) == count


@pytest.mark.usefixtures("patient")
def test_trial_processes_end_with_their_compiler() -> None:
    made = GrammarCompiler(WORDS, 120, frozenset({EOS}), has_trials=True)
    endless = made.compile(ENDLESS)
    wait_for(lambda: num_busy(made))
    found = pids(made)
    made.close()
    assert found and not any(Path(f"/proc/{pid}").exists() for pid in found)
    with pytest.raises(CapacityError):
        endless.result(WAIT_S)
