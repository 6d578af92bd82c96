"""Composing orders from plans: which passes, in which graphs, with which arrays. Needs no tensors."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from saccade.choice.key import Reason
from saccade.config import Tier
from saccade.errors import GraphError
from saccade.inputs.placeholders import Media
from saccade.inputs.plans import MediaPlan
from saccade.scheduling.arrays import LiveRequest, begin
from saccade.scheduling.compose import Composer
from saccade.scheduling.engine import Engine
from saccade.scheduling.matcher import GrammarCompiler, Matcher
from saccade.scheduling.orders import Begin, Edit, Encode, Pass, Run, SampleTokens
from saccade.scheduling.step_plan import Chunk, EncodeItem, MediaRows, StepPlan
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.grammar import Grammar
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason, Update
from tests.engine.simulated import make_scheduler
from tests.scheduling.fakes import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    PAGE_ROWS,
    VOCABULARY,
    RecordingExecutor,
    make_composer,
    make_image,
    make_prompt,
    plain,
    running,
)

GREEDY = SamplingParams(temperature=0)
_NO_TORCH = """
import pkgutil, sys
from importlib import import_module
for name in ("choice", "wire", "scheduling", "client", "server"):
    package = import_module(f"saccade.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"saccade.{name}."):
        import_module(module.name)
assert "saccade.scheduling.compose" in sys.modules and "saccade.client.process" in sys.modules
sys.exit(" ".join({"torch", "triton"} & set(sys.modules)) or 0)
"""


def test_code_that_plans_composes_or_communicates_does_not_import_torch() -> None:
    """Import-linter checks our own imports, but does not notice a package that imports torch."""
    done = subprocess.run([sys.executable, "-c", _NO_TORCH], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"imported: {done.stderr}"


def assert_arrays(found: Mapping[str, Any], **expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def num_patches(one: Pass) -> int:
    return sum(picture.num_rows for picture in one.pictures)


def key_of(one: Pass) -> str:
    assert one.decision.tier is Tier.CAPACITY and one.decision.reason is Reason.FITS_BUCKET
    return str(one.decision.key)


def table(*blocks: int) -> list[int]:
    return [*blocks, *[0] * (MAX_BLOCKS - len(blocks))]


class TestPrefill:
    def test_a_prompt_with_an_image_is_a_prefill_and_a_head(self) -> None:
        rng = np.random.default_rng()
        image = make_image(2, 3, rng)
        owner = running(make_prompt([2, image, 3], rng), sequence=5)
        chunk = Chunk("r5", 0, 11, (3, 7, 5), (MediaRows(2, 6, 0, (6, 2)),), wants_logits=True)
        item = EncodeItem("r5", 0, image.digest, 6, (6, 2))
        orders, sampled = make_composer().run(StepPlan(4, (item,), (chunk,)), {"r5": owner})
        assert (orders.step, orders.num_sampled) == (4, 1)
        assert sampled == [chunk] and orders.prompt_scores == ()
        prefill, head = orders.passes
        assert key_of(prefill) == "prefill/full requests=9 tokens=16"
        assert key_of(head) == "head/full tokens=1"
        assert_arrays(
            prefill.values,
            ids=owner.prompt.token_ids,
            pending=[-1] * 11,
            positions=owner.prompt.positions_3T,
            slots=[12, 13, 14, 15, 28, 29, 30, 31, 20, 21, 22],
            sources=[-1, -1, 24, 25, 26, 27, 8, 9, -1, -1, -1],
            query_start=[0, 11],
            key_lengths=[11],
            block_tables=[table(3, 7, 5)],
        )
        assert_arrays(head.values, rows=[10], sequences=[5])

    def test_vectors_come_from_the_requested_rows(self) -> None:
        """All rows of one chunk, the last row of another. Rows for picked logits follow the sampled rows."""
        rng = np.random.default_rng()
        logits = SamplingParams(max_tokens=0, pooling="logits", pooled_token_ids=(7, 3))
        owners = {f"r{i}": running(make_prompt([6], rng), sequence=i) for i in (1, 2, 3)}
        owners["r4"] = running(make_prompt([4], rng), sequence=4, params=logits)
        chunks = (
            Chunk("r4", 0, 4, (1,), picks_logits=True),
            Chunk("r1", 2, 3, (2, 3), num_summed=3),
            Chunk("r2", 0, 6, (4, 5), wants_logits=True),
            Chunk("r3", 4, 2, (6, 7), num_summed=1),
        )
        orders, sampled = make_composer().run(StepPlan(1, (), chunks), owners)
        assert orders.num_sampled == 1 and sampled == [chunks[2]]
        assert_arrays(orders.passes[1].values, rows=[12, 3], sequences=[2, 4])
        assert orders.pool is not None and orders.pool.lengths == (3, 1)
        np.testing.assert_array_equal(orders.pool.rows, [4, 5, 6, 14])
        assert [(one.row, one.token_ids) for one in orders.picks] == [(1, (7, 3))]

    def test_a_chunk_starts_where_the_last_one_ended(self) -> None:
        """Also in the middle of an image. A chunk that does not reach the prompt's end needs no head."""
        rng = np.random.default_rng()
        owner = running(make_prompt([3, make_image(2, 3, rng), 8], rng), sequence=2)
        chunk = Chunk("r2", 5, 6, (9, 4, 1), (MediaRows(5, 4, 2, (3, 8)),))
        orders, sampled = make_composer().run(StepPlan(1, (), (chunk,)), {"r2": owner})
        [prefill] = orders.passes
        assert (sampled, orders.num_sampled) == ([], 0)
        assert key_of(prefill) == "prefill/full requests=9 tokens=8"
        assert_arrays(
            prefill.values,
            ids=owner.prompt.token_ids[5:11],
            pending=[-1] * 6,
            positions=owner.prompt.positions_3T[:, 5:11],
            slots=[17, 18, 19, 4, 5, 6],
            sources=[14, 15, 32, 33, -1, -1],
            query_start=[0, 6],
            key_lengths=[11],
            block_tables=[table(9, 4, 1)],
        )

    def test_outputs_share_a_prefill_with_prompts(self) -> None:
        """One output is known, the other is sampled by the previous step. Only sampled rows go through the head."""
        rng = np.random.default_rng()
        owners = {
            "r1": running(make_prompt([1, make_image(1, 2, rng)], rng), sequence=1, outputs=[11, 12]),
            "r2": running(make_prompt([9], rng), sequence=2),
            "r3": running(make_prompt([2], rng), sequence=3, outputs=[31]),
        }
        chunks = (
            Chunk("r1", 4, 1, (1, 2), wants_logits=True),
            Chunk("r2", 0, 6, (3, 4)),
            Chunk("r3", 3, 1, (5,), wants_logits=True, is_pending_input=True),
        )
        orders, sampled = make_composer().run(StepPlan(1, (), chunks), owners)
        prefill, head = orders.passes
        assert [one.request_id for one in sampled] == ["r1", "r3"] and orders.num_sampled == 2
        later = 4 + owners["r1"].prompt.rope_delta
        text = np.tile(np.arange(6), (3, 1))
        assert_arrays(
            prefill.values,
            ids=[12, *owners["r2"].prompt.token_ids[:6], 0],
            pending=[-1] * 7 + [3],
            positions=np.concatenate([[[later]] * 3, text, [[3]] * 3], axis=1),
            slots=[8, 12, 13, 14, 15, 16, 17, 23],
            sources=[-1] * 8,
            query_start=[0, 1, 7, 8],
            key_lengths=[5, 6, 4],
            block_tables=[table(1, 2), table(3, 4), table(5)],
        )
        assert_arrays(head.values, rows=[0, 7], sequences=[1, 3])
        assert key_of(head) == "head/full tokens=2"

    def test_prompt_scores_come_from_the_rows_before_the_scored_tokens(self) -> None:
        rng = np.random.default_rng()
        first, later = SamplingParams(prompt_logprobs=0), SamplingParams(prompt_logprobs=3, prompt_logprobs_start=7)
        owners = {
            "r1": running(make_prompt([6], rng), sequence=1, params=first),
            "r2": running(make_prompt([4], rng), sequence=2),
            "r3": running(make_prompt([12], rng), sequence=3, params=later),
        }
        chunks = (
            Chunk("r1", 0, 6, (1, 2), wants_logits=True, wants_all_logits=True),
            Chunk("r2", 0, 4, (3,), wants_logits=True),
            Chunk("r3", 4, 5, (4, 5, 6), wants_all_logits=True),
        )
        orders, _ = make_composer().run(StepPlan(1, (), chunks), owners)
        whole, part = orders.prompt_scores
        assert (whole.row, whole.num_top) == (0, 0)
        assert whole.next_ids.tolist() == owners["r1"].prompt.token_ids[1:].tolist(), (
            "no prompt token follows the last row"
        )
        assert (part.row, part.num_top) == (10 + 2, 3), "row 6 predicts token 7; the chunk starts at row 4"
        assert part.next_ids.tolist() == owners["r3"].prompt.token_ids[7:10].tolist()


class TestDecode:
    def test_newest_tokens_of_all_requests_are_one_decode_pass(self) -> None:
        rng = np.random.default_rng()
        owners = {
            "r4": running(make_prompt([2, make_image(2, 2, rng)], rng), sequence=4, outputs=[41]),
            "r1": running(make_prompt([3], rng), sequence=1, outputs=[11, 12]),
            "r6": running(make_prompt([7], rng), sequence=6, outputs=[61]),
        }
        chunks = (
            Chunk("r4", 7, 1, (8, 2), wants_logits=True, is_pending_input=True),
            Chunk("r1", 4, 1, (3, 5), wants_logits=True),
            Chunk("r6", 7, 1, (6, 1), wants_logits=True),
        )
        orders, sampled = make_composer().run(StepPlan(9, (), chunks), owners)
        [decode] = orders.passes
        assert sampled == list(chunks) and orders.num_sampled == 3
        assert key_of(decode) == "decode/full requests=4 tokens=4"
        assert_arrays(
            decode.values,
            ids=[0, 12, 61],
            pending=[4, -1, -1],
            positions=[[7 + owners["r4"].prompt.rope_delta, 4, 7]] * 3,
            slots=[11, 20, 7],
            sequences=[4, 1, 6],
            query_start=[0, 1, 2, 3],
            key_lengths=[8, 5, 8],
            block_tables=[table(8, 2), table(3, 5), table(6, 1)],
        )

    def test_the_last_row_of_a_prompt_is_not_an_output(self) -> None:
        """Its token is known, but it may belong to an image, which only a prefill can read."""
        rng = np.random.default_rng()
        owner = running(make_prompt([5], rng), sequence=1)
        orders, _ = make_composer().run(StepPlan(1, (), (Chunk("r1", 4, 1, (1, 2), wants_logits=True),)), {"r1": owner})
        assert [one.phase for one in orders.passes] == ["prefill", "head"]


class Words:
    """A vocabulary of printable ASCII."""

    special_ids = frozenset({2})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([29 + token_id]) if 3 <= token_id <= 97 else b""

    def encode_plain(self, text: str) -> list[int]:
        return [byte - 29 for byte in text.encode()]


def matcher_of(pattern: str, text: str = "") -> Matcher:
    compiler = GrammarCompiler(Words(), VOCABULARY, frozenset({2}))
    return Matcher(compiler.compile(Grammar("regex", pattern)).result(120), Words().encode_plain(text))


def tokens_of(words: Any) -> set[int]:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


class TestSample:
    def compose(self, *owners: LiveRequest) -> tuple[SampleTokens | None, dict[str, Matcher]]:
        chunks = [
            Chunk(o.request.id, len(o.prompt) + len(o.request.output_ids) - 1, 1, (1,), wants_logits=True)
            for o in owners
        ]
        return make_composer().sample(7, chunks, {owner.request.id: owner for owner in owners})

    def test_greedy_rows_need_no_sampler(self) -> None:
        assert self.compose(running([5, 6], 1), running([7], 2)) == (None, {})

    def test_scores_alone_need_no_sampler(self) -> None:
        orders, _ = self.compose(running([5], 3), running([5], 4, SamplingParams(temperature=0, logprobs=2)))
        assert orders is not None and plain(orders) == plain(SampleTokens(7, scores=orders.scores))
        [score] = orders.scores
        assert (score.row, score.sequence, score.num_top) == (1, 4, 2)

    def test_one_sampled_row_puts_all_rows_through_the_sampler(self) -> None:
        params = SamplingParams(temperature=0.75, top_k=7, top_p=0.5, min_p=0.25, presence_penalty=1.5, logprobs=0)
        found, matchers = self.compose(
            running([5, 6], 2, GREEDY), running([7, 8, 9], 3, params, outputs=[4, 4], seed=2**40 + 1)
        )
        assert found is not None and found.sampler is not None and not matchers
        assert key_of(found.sampler) == "sample/full tokens=2"
        assert found.edits == () and found.mask is None and [s.row for s in found.scores] == [1]
        assert_arrays(
            found.sampler.values,
            sequences=[2, 3],
            seeds=[0, 2**40 + 1],
            counters=[0, 2],
            top_k=[GREEDY.top_k, 7],
            temperature=[0, 0.75],
            top_p=[1, 0.5],
            min_p=[0, 0.25],
            repetition_penalty=[1, 1],
            presence_penalty=[0, 1.5],
            frequency_penalty=[0, 0],
        )

    def test_edits_name_their_rows_and_sequences(self) -> None:
        biased = SamplingParams(temperature=0, logit_bias={9: -2.5, 4: 1.0})
        early = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(8,), allowed_token_ids=(8, 40, 99))
        found, _ = self.compose(
            running([5], 1),
            running([5], 2, biased),
            running([5], 3, early, outputs=[40]),
            running([5], 4, early, outputs=[40, 40]),
        )
        assert found is not None
        assert found.edits == (Edit(1, 2, False), Edit(2, 3, True), Edit(3, 4, False)), (
            "the last one has reached min_tokens"
        )

    def test_rules_are_sent_once_when_a_request_begins(self) -> None:
        """An end token beyond the vocabulary has no logit that could be suppressed."""
        params = SamplingParams(
            temperature=0,
            min_tokens=2,
            stop_token_ids=(8, 5000),
            allowed_token_ids=(8, 40, 99),
            logit_bias={9: -2.5, 4: 1.0},
        )
        owner = running([5, 6], 3, params, eos=frozenset({2}))
        orders = begin(owner, VOCABULARY)
        assert orders is not None and orders.rules is not None
        rules = orders.rules
        assert orders.sequence == 3 and not len(orders.prompt_ids), "it has no penalties"
        assert dict(zip(rules.bias_ids.tolist(), rules.biases.tolist(), strict=True)) == {9: -2.5, 4: 1.0}
        assert rules.end_ids.tolist() == [2, 8]
        assert tokens_of(rules.allowed) == {8, 40, 99}
        assert owner.allowed_words(VOCABULARY) is rules.allowed, "the bit mask is made once"
        assert begin(running([5], 1, SamplingParams(temperature=1)), VOCABULARY) is None

    def test_a_mask_spans_the_rows_that_follow_grammars(self) -> None:
        """The mask covers rows from the first to the last of them. Rows in between may take any token."""
        grammar = SamplingParams(temperature=0, grammar=Grammar("regex", "x"))
        a, b, e = (Words().encode_plain(letter)[0] for letter in "abe")
        first, last = matcher_of("[ab]c"), matcher_of("de", "d")
        found, matchers = self.compose(
            running([5], 1),
            running([5], 2, grammar, matcher=first),
            running([5], 3, SamplingParams(temperature=1)),
            running([5], 4, grammar, matcher=last),
            running([5], 5),
        )
        assert found is not None and found.mask is not None and found.sampler is not None
        assert matchers == {"r2": first, "r4": last}
        assert found.mask.row == 1 and len(found.mask.words) == 3
        assert tokens_of(found.mask.words[0]) == {a, b}
        assert tokens_of(found.mask.words[1]) >= set(range(VOCABULARY))
        assert tokens_of(found.mask.words[2]) == {e}


class TestVision:
    def test_images_share_a_pass_with_their_rows_one_after_the_other(self) -> None:
        rng = np.random.default_rng()
        composer = make_composer().vision
        assert composer is not None
        media = [make_image(2, 2, rng), make_image(2, 3, rng)]
        items = [EncodeItem("a", 0, b"", 4, (7,)), EncodeItem("b", 0, b"", 6, (2, 9))]
        [parts] = composer.packs(media)
        assert [(part.item, part.first, part.count, part.units) for part in parts] == [(1, 0, 1, 6), (0, 0, 1, 4)]
        one = composer.compose(parts, items, media)
        assert one.phase == "vision" and key_of(one) == "vision/full frames=5 patches=64 units=16"
        assert num_patches(one) == 40
        assert one.values["targets"].tolist() == [8, 9, 10, 11, 36, 37, 28, 29, 30, 31]
        assert one.values["cu_seqlens"].tolist() == [0, 24, 40]
        assert one.values.keys() == {"targets", "cu_seqlens", "positions"}
        alone = [composer.compose([part], items, media) for part in parts]
        np.testing.assert_array_equal(
            one.values["positions"], np.concatenate([part.values["positions"] for part in alone])
        )
        large, small = one.pictures
        assert (large.item, large.out_row, large.num_rows, large.size_hw) == (1, 0, 24, media[1].plan.size_hw)
        assert (small.item, small.out_row, small.num_rows, small.size_hw) == (0, 24, 16, media[0].plan.size_hw)
        assert large.pixels is media[1].pixels and small.pixels is media[0].pixels, "pixels are not copied"

    def test_a_long_video_is_divided_into_passes_between_frames(self) -> None:
        """Seven steps of two frames, six rows each: two steps fill a pass."""
        rng = np.random.default_rng()
        pixels = rng.integers(0, 256, (14, 9, 8, 3)).astype(np.uint8)
        plan = MediaPlan((32, 48), (7, 4, 6), 168, 42, tuple(range(14)), (0.0,) * 7, 1.0)
        media, pages = [Media("video", pixels, plan, b"")], tuple(range(11, 0, -1))
        composer = make_composer().vision
        assert composer is not None
        passes = [composer.compose(p, [EncodeItem("a", 0, b"", 42, pages)], media) for p in composer.packs(media)]
        assert sorted(num_patches(one) for one in passes) == [24, 48, 48, 48]
        cache_rows = [page * PAGE_ROWS + row for page in pages for row in range(PAGE_ROWS)][:42]
        seen: dict[int, Any] = {}
        for one in passes:
            [picture] = one.pictures
            steps = len(one.values["cu_seqlens"]) - 1
            assert len(picture.frames) == 2 * steps and picture.num_rows == steps * 24
            first = cache_rows.index(one.values["targets"][0]) // 6
            assert one.values["targets"].tolist() == cache_rows[first * 6 : (first + steps) * 6]
            seen |= {2 * first + i: frame for i, frame in enumerate(picture.frames)}
        assert sorted(seen) == list(range(14))
        assert all(np.array_equal(frame, pixels[i]) for i, frame in seen.items())

    def test_an_image_too_large_for_any_graph_gets_a_pass_without_one(self) -> None:
        rng = np.random.default_rng()
        composer = make_composer().vision
        assert composer is not None
        media = [make_image(3, 6, rng), make_image(1, 2, rng)]
        items = [EncodeItem("a", 0, b"", 18, (1, 2, 3, 4, 5)), EncodeItem("b", 0, b"", 2, (6,))]
        decisions = {p[0].item: composer.compose(p, items, media).decision for p in composer.packs(media)}
        assert decisions[0].reason is Reason.TOO_LARGE and decisions[0].key is None
        assert decisions[1].key is not None


class TestStrictness:
    def test_strict_composing_refuses_a_batch_too_large_for_any_graph(self) -> None:
        rng = np.random.default_rng()
        owner = running(make_prompt([40], rng), sequence=1)
        plan = StepPlan(1, (), (Chunk("r1", 0, 33, tuple(range(1, 10))),))
        orders, _ = make_composer().run(plan, {"r1": owner})
        assert orders.passes[0].decision.reason is Reason.TOO_LARGE
        with pytest.raises(GraphError, match=r"prefill batch of .*tokens=33 is not replayed.*--graphs-strict"):
            make_composer(strict=True).run(plan, {"r1": owner})

    def test_a_refused_batch_never_reaches_the_executor(self) -> None:
        engine, executor = make_engine(make_composer(strict=True), max_tokens=64)
        rng = np.random.default_rng()
        engine.add("long", make_prompt([40], rng), SamplingParams(temperature=0, max_tokens=1))
        ends = finish(engine)
        assert ends["long"].finish is not None and ends["long"].finish.reason is FinishReason.ERROR
        assert "--graphs-strict" in str(ends["long"].finish.detail) and executor.orders == []
        engine.add("short", make_prompt([20], rng), SamplingParams(temperature=0, max_tokens=2))
        ends = finish(engine)
        assert ends["short"].finish is not None and ends["short"].finish.reason is FinishReason.LENGTH
        assert [[one.phase for one in run.passes] for run in executor.of(Run)] == [["prefill", "head"], ["decode"]]


class Twice:
    """A composer that composes everything twice and asserts that both results are equal."""

    def __init__(self, composer: Composer) -> None:
        self._composer, self.num_compared = composer, 0
        self.vision, self.layout, self.vocab_size = composer.vision, composer.layout, composer.vocab_size
        self.has_head = composer.has_head
        self.catalogues = composer.catalogues

    def run(self, *of: Any) -> Any:
        return self._compare(self._composer.run(*of), self._composer.run(*of))

    def sample(self, *of: Any) -> Any:
        return self._compare(self._composer.sample(*of), self._composer.sample(*of))

    def _compare(self, first: Any, second: Any) -> Any:
        assert plain(first) == plain(second)
        self.num_compared += 1
        return first


def make_engine(composer: Any, max_tokens: int = 32, **options: Any) -> tuple[Engine, RecordingExecutor]:
    limits = SchedulerSettings(
        max_num_seqs=6,
        max_num_batched_tokens=max_tokens,
        max_model_len=MAX_BLOCKS * BLOCK_SIZE,
        encoder_budget_tokens=16,
    )
    scheduler = make_scheduler(limits, num_blocks=48, block_size=BLOCK_SIZE, encoder_rows=64, page_rows=PAGE_ROWS)
    executor = RecordingExecutor(np.random.default_rng(), **options)
    return Engine(executor, composer, scheduler), executor


def finish(engine: Engine) -> dict[str, Update]:
    """Runs the engine until it is idle and returns the last update of each request."""
    ends: dict[str, Update] = {}
    for _ in range(500):
        if not engine.has_work:
            break
        ends |= {update.request_id: update for update in engine.step() if update.finish is not None}
    assert not engine.has_work
    return ends


def random_params(rng: np.random.Generator) -> SamplingParams:
    if rng.random() < 0.2:
        pooling = str(rng.choice(["last", "mean", "logits"]))
        return SamplingParams(max_tokens=0, pooling=pooling, pooled_token_ids=(5, 6) if pooling == "logits" else ())
    return SamplingParams(
        temperature=float(rng.integers(0, 2)),
        max_tokens=int(rng.integers(1, 9)),
        logprobs=2 if rng.random() < 0.3 else None,
        prompt_logprobs=1 if rng.random() < 0.3 else None,
        presence_penalty=0.5 if rng.random() < 0.3 else 0.0,
        logit_bias={5: 1.0} if rng.random() < 0.3 else None,
        ignore_eos=True,
    )


def test_composing_any_plan_twice_gives_the_same_orders() -> None:
    """Composing does not change what it reads: many requests with images, chunked, preempted and sampled."""
    composer = Twice(make_composer())
    engine, executor = make_engine(composer)
    rng = np.random.default_rng()
    for i in range(40):
        image = make_image(int(rng.integers(1, 4)), int(rng.integers(1, 4)), rng)
        parts: list[int | Media] = [
            int(rng.integers(1, 12)),
            *([image] if rng.random() < 0.6 else []),
            int(rng.integers(1, 12)),
        ]
        engine.add(f"r{i}", make_prompt(parts, rng), random_params(rng))
    ends = finish(engine)
    assert len(ends) == 40 and all(end.finish and end.finish.reason is FinishReason.LENGTH for end in ends.values())
    assert composer.num_compared == 2 * len(executor.of(Run))
    assert {phase.phase for run in executor.of(Run) for phase in run.passes} == {"prefill", "decode", "head"}
    assert executor.of(Encode) and executor.of(SampleTokens) and executor.of(Begin)
    steps = [one.step for one in executor.orders if isinstance(one, Encode | Run | SampleTokens)]
    assert steps == sorted(steps), "orders come in the sequence of the plans"


def test_a_failed_pass_fails_only_the_request_with_the_bad_image() -> None:
    """The pass is run again part by part, so requests with good images are not affected."""
    rng = np.random.default_rng()
    images = {name: make_image(1, 3, rng) for name in ("a", "bad", "c")}

    def problem(orders: Encode) -> str | None:
        is_bad = any(picture.pixels is images["bad"].pixels for picture in orders.vision.pictures)
        return "no luck with this one" if is_bad else None

    engine, executor = make_engine(make_composer(), problem=problem)
    for name, image in images.items():
        engine.add(name, make_prompt([2, image, 1], rng), SamplingParams(temperature=0, max_tokens=3))
    ends = finish(engine)
    encoded = [[picture.item for picture in one.vision.pictures] for one in executor.of(Encode)]
    assert sorted(encoded[0]) == [0, 1, 2] and sorted(encoded[1:]) == [[0], [1], [2]]
    alone = {one.vision.pictures[0].item: one.vision for one in executor.of(Encode)[1:]}
    assert all(one.pictures[0].out_row == 0 and one.values["cu_seqlens"].tolist() == [0, 12] for one in alone.values())
    found = {name: end.finish for name, end in ends.items() if end.finish is not None}
    assert {name: end.reason for name, end in found.items()} == {
        "a": FinishReason.LENGTH,
        "bad": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
    }
    assert found["bad"].detail == "no luck with this one"


def test_a_part_that_cannot_be_composed_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng()
    images = {name: make_image(1, 3, rng) for name in ("a", "bad")}
    composer = make_composer()
    assert composer.vision is not None
    compose = composer.vision.compose

    def fail(parts: Any, items: Any, media: Any) -> Pass:
        if any(items[part.item].request_id == "bad" for part in parts):
            raise GraphError("it does not fit")
        return compose(parts, items, media)

    monkeypatch.setattr(composer.vision, "compose", fail)
    engine, executor = make_engine(composer)
    for name, image in images.items():
        engine.add(name, make_prompt([2, image, 1], rng), SamplingParams(temperature=0, max_tokens=3))
    ends = finish(engine)
    assert [num_patches(one.vision) for one in executor.of(Encode)] == [12]
    assert {name: end.finish.detail for name, end in ends.items() if end.finish and end.finish.detail} == {
        "bad": "it does not fit"
    }
