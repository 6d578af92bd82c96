"""Executors obey: orders are executed bit for bit, and impossible ones are refused before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from saccade.choice.key import Capacity, Decision, GraphKey, Reason
from saccade.config import Mode, Tier
from saccade.errors import GraphError
from saccade.execution.codec import Codec
from saccade.execution.executor import DeviceExecutor, DeviceTicket
from saccade.graphs.staging import numpy_dtype
from saccade.scheduling.engine import Engine
from saccade.scheduling.executing import Encoded, StepResult
from saccade.scheduling.orders import ORDER_TYPES, Capture, Drop, Encode, Orders, Pass, Run, SampleTokens
from saccade.scheduling.step_plan import EncodeItem
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, executor_of, finish, random_prompt, run

Load = Callable[[str], Loaded]
# The longest random prompt with two images has 93 tokens.
SIZES = Options(mode=Mode.FULL, max_tokens=48, max_num_seqs=6, max_units=32, num_blocks=60, max_model_len=104)
BOTH = frozenset({Tier.CAPACITY, Tier.EXACT})


@dataclass
class Recording:
    """Passes orders on to an executor, and records them with the results of the steps."""

    executor: DeviceExecutor
    orders: list[Orders] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def execute(self, orders: Orders) -> Any:
        self.orders.append(orders)
        done = self.executor.execute(orders)
        return _Noted(done, self.results) if isinstance(orders, Run) else done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)


@dataclass
class _Noted:
    ticket: DeviceTicket
    results: list[StepResult]

    @property
    def is_done(self) -> bool:
        return self.ticket.is_done

    def wait(self) -> StepResult:
        self.results.append(self.ticket.wait())
        return self.results[-1]


def recorded(loaded: Loaded, options: Options = SIZES) -> Recording:
    """Records the orders of an engine that answers requests of every kind."""
    made, model = loaded
    rng = np.random.default_rng()
    built = build(model, made.folder, options)
    recording = Recording(executor_of(built))
    engine = Engine(recording, built.composer, built.scheduler)
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1, max_tokens=7, top_k=20, seed=5, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=5, logit_bias={7: 3.0}, allowed_token_ids=(5, 7, 9, 40)),
        SamplingParams(temperature=0.7, max_tokens=4),
    ]
    prompts = {f"r{i}": random_prompt(made, rng, num_images=i % 3) for i in range(8)}
    run(engine, prompts, {f"r{i}": params[i % 4] for i in range(8)})
    return recording


def repeat(executor: DeviceExecutor, orders: list[Orders]) -> list[StepResult]:
    """Gives the same orders to another executor, one step after the other."""
    results: list[StepResult] = []
    ticket: DeviceTicket | None = None
    for one in orders:
        if ticket is not None and not isinstance(one, SampleTokens):
            results.append(ticket.wait())
            ticket = None
        done = executor.execute(one)
        ticket = done if isinstance(done, DeviceTicket) else ticket
        assert not isinstance(done, Encoded) or done.problem is None
    return [*results, ticket.wait()] if ticket is not None else results


def sent(orders: Orders) -> Any:
    """The orders as they arrive at another rank."""
    codec = Codec(*ORDER_TYPES)
    packed = codec.pack(orders)
    room = np.zeros(packed.num_bytes + 64, dtype=np.uint8)
    room = room[-room.ctypes.data % 64 :][: packed.num_bytes]
    packed.write(room)
    room.flags.writeable = False
    return codec.unpack(room)


def state_of(executor: DeviceExecutor) -> dict[str, torch.Tensor]:
    """Copies of all tensors that passes write to."""
    state = executor.state
    found = {f"cache {i}.{j}": cache for i, pair in enumerate(state.caches) for j, cache in enumerate(pair)}
    found |= {"logits": state.logits, "edited": state.edited, "newest": state.newest_ids}
    found |= {"vision rows": state.vision_rows} if state.vision_rows is not None else {}
    return {name: tensor.clone() for name, tensor in found.items()}


def replays(executor: DeviceExecutor) -> int:
    return sum(graph.num_replays for runner in executor.phases for graph in runner.graphs)


def assert_same(mine: StepResult, other: StepResult) -> None:
    assert mine.token_ids == other.token_ids and mine.is_bad == other.is_bad
    assert mine.scores.keys() == other.scores.keys()
    pairs = [(mine.scores[row], other.scores[row]) for row in mine.scores]
    for one, two in [*pairs, *zip(mine.prompt_scores, other.prompt_scores, strict=True)]:
        for name in one.__struct_fields__:
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3_vl"])
@pytest.mark.parametrize("way", [lambda orders: orders, sent], ids=["given", "sent"])
def test_equal_executors_give_equal_bits(loaded: Load, family: str, way: Callable[[Orders], Orders]) -> None:
    """Orders are complete: another executor needs no scheduler, prompts or requests."""
    made, model = loaded(family)
    recording = recorded(loaded(family))
    other = executor_of(build(model, made.folder, SIZES))
    results = repeat(other, [way(one) for one in recording.orders])
    assert len(results) == len(recording.results) > 5
    for mine, theirs in zip(results, recording.results, strict=True):
        assert_same(mine, theirs)
    first, second = state_of(recording.executor), state_of(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert replays(other) == replays(recording.executor) > 0
    stats = [[runner.stats.snapshot() for runner in one.phases] for one in (recording.executor, other)]
    assert [s["replays"] for s in stats[0]] == [s["replays"] for s in stats[1]]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3_vl"])
def test_arrays_have_the_dtypes_of_their_buffers(loaded: Load, family: str) -> None:
    """So that no pass is held up by checks of every number."""
    recording = recorded(loaded(family))
    arenas = {runner.phase.name: runner.phase.arena for runner in recording.executor.phases}
    passes = [one for orders in recording.orders for one in _passes(orders)]
    assert {one.phase for one in passes} == arenas.keys()
    for one in passes:
        buffers = {name: arenas[one.phase].buffers[name] for name in one.values}
        assert {name: array.dtype for name, array in one.values.items()} == {
            name: numpy_dtype(buffer) for name, buffer in buffers.items()
        }


def _passes(orders: Orders) -> list[Pass]:
    match orders:
        case Encode(vision=vision):
            return [vision]
        case Run(passes=passes):
            return [*passes]
        case SampleTokens(sampler=Pass() as sampler):
            return [sampler]
    return []


def decide(one: Pass, key: GraphKey) -> Pass:
    tier = Tier.EXACT if key.digest else Tier.CAPACITY
    return replace(one, decision=Decision(tier, Reason.FITS_BUCKET, key))


@pytest.fixture(scope="module")
def recording(loaded: Load) -> Recording:
    return recorded(loaded("qwen3_vl"))


class TestRefusals:
    """A refused order replays nothing, writes nothing, and does not affect later orders."""

    @pytest.fixture
    def executor(self, loaded: Load) -> DeviceExecutor:
        made, model = loaded("qwen3_vl")
        return executor_of(build(model, made.folder, SIZES))

    def assert_refused(
        self, executor: DeviceExecutor, recording: Recording, orders: Run, wrong: Run, match: str
    ) -> None:
        """Gives `wrong` right before the orders that it was made from."""
        at = recording.orders.index(orders)
        results = repeat(executor, recording.orders[:at])
        before, num_before = state_of(executor), replays(executor)
        with pytest.raises(GraphError, match=match):
            executor.execute(wrong)
        after = state_of(executor)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert replays(executor) == num_before
        results += repeat(executor, recording.orders[at:])
        for mine, other in zip(results, recording.results, strict=True):
            assert_same(mine, other)

    def test_a_key_that_is_not_captured(self, executor: DeviceExecutor, recording: Recording) -> None:
        orders = self.run_of(recording, "decode")
        key = orders.passes[0].decision.key
        assert key is not None
        strange = structs.replace(key, capacity=Capacity.of(key.capacity, tokens=777))
        self.assert_refused(
            executor, recording, orders, self.first_in(orders, strange), r"no graph is captured for \[decode/full .*777"
        )

    def test_a_key_of_another_mode(self, executor: DeviceExecutor, recording: Recording) -> None:
        orders = self.run_of(recording, "decode")
        key = orders.passes[0].decision.key
        assert key is not None
        piecewise = structs.replace(key, mode=Mode.PIECEWISE)
        self.assert_refused(
            executor,
            recording,
            orders,
            self.first_in(orders, piecewise),
            r"no graph is captured for \[decode/piecewise",
        )

    def test_a_key_of_another_phase(self, executor: DeviceExecutor, recording: Recording) -> None:
        """It is captured, but the inputs are of another phase."""
        key = self.run_of(recording, "prefill").passes[0].decision.key
        assert key is not None
        orders = self.run_of(recording, "decode")
        self.assert_refused(
            executor, recording, orders, self.first_in(orders, key), r"no graph is captured for \[prefill/full"
        )

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_batch_that_does_not_fit_its_key(
        self, executor: DeviceExecutor, recording: Recording, phase: str
    ) -> None:
        """The graph would read rows that were never filled."""
        runs = [one for one in recording.orders if isinstance(one, Run) and one.passes[0].phase == phase]
        orders = max(runs, key=lambda one: len(one.passes[0].values["ids"]))
        runner = {"prefill": executor.prefill, "decode": executor.decode}[phase]
        smallest = min((graph.key for graph in runner.graphs), key=lambda key: key.capacity["tokens"])
        assert smallest.capacity["tokens"] < len(orders.passes[0].values["ids"])
        self.assert_refused(
            executor, recording, orders, self.first_in(orders, smallest), r"batch of .* does not fit .*: \d+ > \d+"
        )

    def test_an_eager_pass_that_does_not_fit_what_it_is_padded_to(
        self, executor: DeviceExecutor, recording: Recording
    ) -> None:
        runs = [one for one in recording.orders if isinstance(one, Run) and one.passes[0].phase == "prefill"]
        orders = max(runs, key=lambda one: len(one.passes[0].values["ids"]))
        smallest = executor.prefill.catalogue.shape.ordered[0]
        eager = replace(orders.passes[0], decision=Decision(Tier.EAGER, Reason.GRAPHS_OFF, padded_to=smallest))
        self.assert_refused(
            executor, recording, orders, replace(orders, passes=(eager, *orders.passes[1:])), "does not fit"
        )

    def test_inputs_of_another_phase(self, executor: DeviceExecutor, recording: Recording) -> None:
        orders, other = self.run_of(recording, "decode"), self.run_of(recording, "prefill")
        mixed = replace(orders.passes[0], values=other.passes[0].values)
        self.assert_refused(executor, recording, orders, replace(orders, passes=(mixed,)), "input '")

    @staticmethod
    def run_of(recording: Recording, phase: str) -> Run:
        return next(one for one in recording.orders if isinstance(one, Run) and one.passes[0].phase == phase)

    @staticmethod
    def first_in(orders: Run, key: GraphKey) -> Run:
        return replace(orders, passes=(decide(orders.passes[0], key), *orders.passes[1:]))


class TestLayouts:
    """Exact graphs: each is for one layout of images."""

    def orders(self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceExecutor, Encode, Encode, Capture]:
        """An executor, two passes with equal rows and different boundaries, and the order to capture the first."""
        monkeypatch.setattr("saccade.execution.executor.EXACT_VISION_AFTER", 1)
        made, model = loaded
        engine = build(model, made.folder, replace(SIZES, vision_tiers=BOTH))
        executor, vision = executor_of(engine), engine.composer.vision
        assert vision is not None
        rng = np.random.default_rng()
        for _ in range(1000):  # until two pairs of images have equal row totals
            media = [random_prompt(made, rng, num_images=1).media[0] for _ in range(4)]
            counts = [one.plan.num_tokens for one in media]
            if counts[0] + counts[1] == counts[2] + counts[3] <= 32 and {*counts[:2]} != {*counts[2:]}:
                break
        items = [EncodeItem("r", i, b"", n, tuple(range(8 * i + 1, 8 * i + 9))) for i, n in enumerate(counts)]
        parts = [pack for one in media for pack in vision.packs([one])]
        passes = []
        for pair in ((0, 1), (2, 3)):
            chosen = [replace(parts[i][0], item=i) for i in pair]
            passes.append(vision.compose(chosen, items, media))
        layout = vision.catalogue.exact.next_pending()
        first, second = (Encode(1, one) for one in passes)
        assert layout is not None
        if layout.structure["cu_seqlens"].tolist() != passes[0].values["cu_seqlens"].tolist():
            first, second = second, first
        return executor, first, second, Capture(layout)

    def test_a_graph_of_another_layout_is_refused(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sizes are equal, so every buffer would fit (sglang#16902)."""
        executor, mine, other, capture = self.orders(loaded("qwen3_vl"), monkeypatch)
        assert executor.execute(capture) is not None and executor.encoder is not None
        key = capture.layout.key
        assert mine.vision.values["targets"].shape == other.vision.values["targets"].shape
        wrong = Encode(2, decide(other.vision, key))
        before, num_before = state_of(executor), replays(executor)
        done = executor.execute(wrong)
        assert isinstance(done, Encoded) and done.lap is None
        assert f"graph [{key}] has a different structure" in str(done.problem)
        with pytest.raises(GraphError, match="has a different structure"):
            executor.encoder.run(wrong.vision)
        after = state_of(executor)
        assert all(torch.equal(before[name], after[name]) for name in before) and replays(executor) == num_before
        right = executor.execute(Encode(3, decide(mine.vision, key)))
        assert isinstance(right, Encoded) and right.problem is None and replays(executor) == num_before + 1

    def test_an_exact_graph_gives_the_same_rows_as_a_bucket(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        executor, mine, _, capture = self.orders(loaded("qwen3_vl"), monkeypatch)
        assert mine.vision.decision.tier is Tier.CAPACITY
        executor.execute(mine)
        vision_rows = executor.state.vision_rows
        assert vision_rows is not None
        targets = torch.from_numpy(np.asarray(mine.vision.values["targets"], dtype=np.int64))
        expected = vision_rows[:, targets].clone()
        vision_rows.zero_()
        executor.execute(capture)
        executor.execute(Encode(2, decide(mine.vision, capture.layout.key)))
        torch.testing.assert_close(vision_rows[:, targets], expected, rtol=0, atol=1e-4)

    def test_a_graph_that_was_dropped_is_refused(self, loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        executor, mine, _, capture = self.orders(loaded("qwen3_vl"), monkeypatch)
        executor.execute(capture)
        executor.execute(Drop((capture.layout.key,)))
        done = executor.execute(Encode(2, decide(mine.vision, capture.layout.key)))
        assert isinstance(done, Encoded) and "no graph is captured" in str(done.problem)


def test_the_trace_that_ranks_compare_covers_only_the_newest_order(recording: Recording) -> None:
    """If nobody takes the trace, as with one rank, it does not pile up."""
    last = next(one for one in reversed(recording.orders) if isinstance(one, Run | SampleTokens))
    passes = last.passes if isinstance(last, Run) else (last.sampler,) if last.sampler is not None else ()
    expected = "; ".join(str(one.decision.key) for one in passes)
    assert recording.executor.take_trace() == expected
    assert recording.executor.take_trace() == ""


def test_a_corrupted_key_fails_only_its_step(loaded: Load) -> None:
    """Requests of that step get the reason, later ones their answers."""
    made, model = loaded("llama")
    engine = build(model, made.folder, SIZES)
    execute, steps = executor_of(engine).run, iter([False, True])

    def garbled(orders: Run) -> DeviceTicket:
        if next(steps, False):
            key = orders.passes[0].decision.key
            assert key is not None
            wrong = structs.replace(key, capacity=Capacity.of(key.capacity, tokens=777))
            orders = replace(orders, passes=(decide(orders.passes[0], wrong), *orders.passes[1:]))
        return execute(orders)

    executor_of(engine).run = garbled  # type: ignore[method-assign]
    rng, params = np.random.default_rng(), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    names = list(engine.add("early", random_prompt(made, rng), params))
    for _ in range(2):
        engine.step()
    names += engine.add("late", random_prompt(made, rng), params)
    answers = finish(engine, names)
    assert answers["early"].finish.reason is FinishReason.ERROR
    assert "no graph is captured" in answers["early"].finish.detail
    assert answers["late"].finish.reason is FinishReason.LENGTH and len(answers["late"].token_ids) == 5
