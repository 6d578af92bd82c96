"""Engines that encode large images in parts give the answers of engines that encode them at once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.choice.costs import Curve
from saccade.config import Mode
from saccade.inputs.placeholders import Prompt
from saccade.scheduling.engine import Engine
from saccade.scheduling.executing import Encoded
from saccade.scheduling.media_encoder import DividedMedia
from saccade.scheduling.orders import Encode, EncodeMore
from saccade.scheduling.pace import Pace
from saccade.scheduling.step_plan import EncodeItem
from saccade.wire.sampling_params import SamplingParams
from tests.engine.conftest import Loaded
from tests.engine.rig import Answer, Options, build, finish, random_prompt
from tests.execution.alike import assert_alike
from tests.models.tiny import Tiny

Load = Callable[[str], Loaded]
ANSWER = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
SHORT = replace(ANSWER, max_tokens=3, reports_passes=True)
OPTIONS = Options(mode=Mode.FULL, has_few_buckets=False, part_units=2)
# Any image is too long for a step with an output, so each step encodes one part.
PACE = Pace(Curve(((1, 0.001), (100, 0.1))), Curve(((1, 1.0), (100, 100.0))), 0.01)
FAULT = "made to fail"


@dataclass
class Watching:
    """Passes orders on, and notes them. Some may fail."""

    inner: Any
    fails: Callable[[Any], bool] = lambda orders: False
    seen: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, orders: Any) -> Any:
        self.seen.append(orders)
        return Encoded(FAULT) if self.fails(orders) else self.inner.execute(orders)

    @property
    def kinds(self) -> list[str]:
        return [type(one).__name__ for one in self.seen]


def watch(bare: Engine, **watching: Any) -> tuple[Engine, Watching]:
    """The same engine, but it divides images, and its orders are noted."""
    watched = Watching(bare.executor, **watching)
    engine = Engine(watched, bare.composer, bare.scheduler)
    assert engine.composer.vision is not None
    engine.scheduler.pace = replace(PACE, num_parts=engine.composer.vision.facts.num_parts)
    return engine, watched


def make_engine(loaded: Loaded, options: Options = OPTIONS, **watching: Any) -> tuple[Engine, Watching]:
    return watch(build(loaded[1], loaded[0].folder, options), **watching)


def prompts_of(made: Tiny, seed: int = 0) -> dict[str, Prompt]:
    rng = np.random.default_rng(seed)
    return {"answer": random_prompt(made, rng)} | {
        f"image{i}": random_prompt(made, rng, num_images=1 + i) for i in range(2)
    }


def ask_beside(engine: Engine, prompts: dict[str, Prompt]) -> dict[str, Answer]:
    """The answer is being generated when images arrive."""
    names = list(engine.add("answer", prompts["answer"], ANSWER))
    first = engine.step() + engine.step()
    for name in list(prompts)[1:]:
        names += engine.add(name, prompts[name], SHORT)
    answers = finish(engine, names)
    answers["answer"].token_ids[:0] = [token for update in first for token in update.token_ids]
    answers["answer"].updates[:0] = first
    return answers


@pytest.mark.parametrize("mode", [Mode.FULL, None], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3_vl"])
def test_answers_are_those_of_images_encoded_at_once(loaded: Load, family: str, mode: Mode | None) -> None:
    made, prompts = loaded(family), prompts_of(loaded(family)[0])
    divided, watched = make_engine(made, replace(OPTIONS, mode=mode))
    whole, _ = make_engine(made, replace(OPTIONS, mode=mode))
    whole.scheduler.pace = None
    found, expected = ask_beside(divided, prompts), ask_beside(whole, prompts)
    for name, right in expected.items():
        assert_alike(found[name], right)
    assert ("EncodeMore" in watched.kinds) == (mode is Mode.FULL), "an eager pass has one part"


def test_language_passes_run_between_the_parts_of_an_image(loaded: Load) -> None:
    engine, watched = make_engine(loaded("qwen3_vl"))
    ask_beside(engine, prompts_of(loaded("qwen3_vl")[0]))
    kinds = [kind for kind in watched.kinds if kind in ("Encode", "EncodeMore", "Run")]
    ends = [i for i, kind in enumerate(kinds) if kind == "EncodeMore"]
    assert ends and all(kinds[i - 1] == "Run" for i in ends)


def test_a_divided_pass_counts_once_and_is_seen_in_parts(loaded: Load) -> None:
    engine, watched = make_engine(loaded("qwen3_vl"))
    found = ask_beside(engine, prompts_of(loaded("qwen3_vl")[0]))
    [count] = [one for one in found["image0"].updates[-1].passes or () if one.phase == "vision"]
    assert count.passes == 1
    records = [record for record in engine.passes.records(0) if record.stream == "vision"]
    assert len(records) == sum(kind in ("Encode", "EncodeMore") for kind in watched.kinds)
    replays = engine.phase_snapshots()["vision"]["replays"]
    assert sum(replays.values()) == sum(kind == "Encode" for kind in watched.kinds)


@pytest.mark.parametrize("kind", [Encode, EncodeMore])
def test_a_part_that_fails_ends_its_request_alone(loaded: Load, kind: type) -> None:
    """Later parts of it are not executed, and later images are right."""
    made, prompts = loaded("qwen3_vl"), prompts_of(loaded("qwen3_vl")[0])
    broken: list[Any] = []

    def fails(orders: Any) -> bool:
        is_first = isinstance(orders, kind) and not broken
        broken.extend([orders] if is_first else [])
        return is_first

    engine, _ = make_engine(made, fails=fails)
    whole, _ = make_engine(made)
    found, expected = ask_beside(engine, prompts), ask_beside(whole, prompts)
    assert str(found["image0"].finish.detail) == FAULT and found["image0"].token_ids == []
    for name in ("answer", "image1"):
        assert_alike(found[name], expected[name])
    again = finish(engine, list(engine.add("again", prompts["image0"], SHORT)))
    assert_alike(again["again"], expected["image0"])


def begin_beside(engine: Engine, prompts: dict[str, Prompt]) -> None:
    """Steps until the first part of an image was encoded beside an answer."""
    engine.add("answer", prompts["answer"], ANSWER)
    engine.step()
    engine.add("image0", prompts["image0"], SHORT)
    for _ in range(20):
        engine.step()
        if engine.scheduler.resources.unfinished is not None:
            return
    raise AssertionError("no image was begun")


def test_an_image_whose_request_is_aborted_halfway_is_dropped(loaded: Load) -> None:
    made, prompts = loaded("qwen3_vl"), prompts_of(loaded("qwen3_vl")[0])
    engine, watched = make_engine(made)
    begin_beside(engine, prompts)
    engine.abort("image0")
    assert engine._encoder._divided == DividedMedia(), "its pixels are not kept"
    found = finish(engine, ["answer", *engine.add("again", prompts["image0"], SHORT)])
    alone, _ = make_engine(made)
    assert_alike(found["again"], finish(alone, list(alone.add("image0", prompts["image0"], SHORT)))["image0"])
    assert "EncodeMore" in watched.kinds


def test_an_image_that_is_encoded_at_once_waits_for_the_last_parts_of_another(loaded: Load) -> None:
    """Both are in one step, but the buffers hold the first image until it is complete."""
    made, prompts = loaded("qwen3_vl"), prompts_of(loaded("qwen3_vl")[0])
    engine, watched = make_engine(made)
    begin_beside(engine, prompts)
    engine.abort("answer")  # so the next step may take any time
    engine.add("image1", prompts["image1"], SHORT)
    found = finish(engine, ["image0", "image1"])
    whole, _ = make_engine(made)
    expected = finish(whole, [*whole.add("image0", prompts["image0"], SHORT)])
    expected |= finish(whole, [*whole.add("image1", prompts["image1"], SHORT)])
    for name, right in expected.items():
        assert_alike(found[name], right)
    encodes = [one for one in watched.seen if isinstance(one, Encode | EncodeMore)]
    assert [one.step for one in encodes[1:]] == [encodes[1].step] * 2, "the test needs both in one step"


def test_a_step_that_fails_before_the_first_part_of_an_image_does_not_fail_the_next(loaded: Load) -> None:
    """The next one was planned already, with the next part of that image and with another request."""
    made, prompts = loaded("qwen3_vl"), prompts_of(loaded("qwen3_vl")[0])
    engine, _ = make_engine(made)
    encode, plans = engine._encoder.encode, list[Any]()

    def fail_once(plan: Any, live: Any) -> dict[str, str]:
        plans.append(plan)
        if len(plans) == 1:
            raise RuntimeError(FAULT)
        return encode(plan, live)

    engine._encoder.encode = fail_once  # type: ignore[method-assign]
    begin_beside(engine, prompts)
    engine.add("other", prompts["answer"], SHORT)
    found = finish(engine, ["answer", "image0", "other"])
    assert [item.first_part for plan in plans[:2] for item in plan.encode] == [0, 1]
    assert found["other"].finish.detail is None and len(found["other"].token_ids) == 3


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), num_parts=st.integers(1, 12), data=st.data())
def test_every_part_of_every_pass_is_run_once_and_in_order(
    counts: list[int], num_parts: int, data: st.DataObject
) -> None:
    """A video may take several passes, each with parts of its own."""
    passes = [(Encode(0, _FakePass(i)), count) for i, count in enumerate(counts)]  # type: ignore[arg-type]
    divided, done = DividedMedia("r", passes), [0] * len(counts)
    ends = sorted({*data.draw(st.sets(st.integers(1, num_parts))), num_parts})
    for first, end in zip((0, *ends), ends, strict=False):
        for one, orders in divided.take(7, EncodeItem("r", 0, b"", 9, (1,), first, end, num_parts)):
            at = one.vision.number  # type: ignore[attr-defined]
            assert all(other == count for other, count in zip(done[:at], counts, strict=False)), "not in order"
            assert isinstance(orders, EncodeMore if done[at] else Encode)
            assert done[at] < orders.end_part <= orders.num_parts == counts[at] and orders.step == 7
            done[at] = orders.end_part
    assert done == counts


@dataclass
class _FakePass:
    number: int
    decision: Any = None
