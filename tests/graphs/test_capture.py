import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from saccade.config import Mode
from saccade.errors import AddressError, CaptureError, GraphError
from saccade.graphs import (
    Arena,
    Body,
    Capacity,
    Frame,
    GraphKey,
    GraphRunner,
    Phase,
    Watched,
    bridge,
    copy_out,
    lane_for,
    output,
    rows,
)
from saccade.graphs.capture import capture
from saccade.graphs.frame import run_body, store
from tests.graphs import toy

CAPACITY = Capacity.of(tokens=16, segments=4)


@pytest.mark.parametrize("mode", Mode)
def test_a_replay_is_bit_identical_to_an_eager_run_on_the_same_buffers(mode: Mode) -> None:
    phase = toy.make_phase()
    arena = phase.arena
    arena.fill(arena.admit(toy.batch(16)), CAPACITY)
    graph = capture(phase.body, GraphKey("toy", mode, CAPACITY), arena, lane_for(arena.device), state=phase.state)
    for seed, lengths in enumerate([(4, 6), (5, 5), (16,), (1,), (3, 3, 3)]):
        arena.fill(arena.admit(toy.batch(*lengths, seed=seed)), CAPACITY)
        graph.replay()
        replayed = arena.views(CAPACITY)["y"].clone()
        with torch.no_grad():
            run_body(phase.body, Frame(arena, CAPACITY))
        assert torch.equal(replayed, arena.views(CAPACITY)["y"])


def test_a_piecewise_graph_alternates_pieces_and_calls() -> None:
    phase = toy.make_phase()
    lane = lane_for(phase.arena.device)
    full = capture(phase.body, GraphKey("toy", Mode.FULL, CAPACITY), phase.arena, lane, state=phase.state)
    piecewise = capture(phase.body, GraphKey("toy", Mode.PIECEWISE, CAPACITY), phase.arena, lane, state=phase.state)
    assert len(full.steps) == 1
    assert len(piecewise.steps) == 2 * toy.LAYERS + 1


def test_outside_calls_read_live_host_values_and_pieces_do_not() -> None:
    factor = [2.0]

    def scaled(a: Tensor) -> Tensor:
        return a * factor[0]

    def body(frame: Frame) -> dict[str, Tensor]:
        return {"y": frame.outside(scaled, out="b", a=frame["x"] + factor[0])}

    replay, arena = captured(body, Mode.PIECEWISE)
    arena.rows("x", 4).fill_(1.0)
    factor[0] = 10.0
    replay()
    assert arena.views({"tokens": 4})["y"].unique().tolist() == [30.0], "(1 + 2 frozen) * 10 live"


def body_with_result(make: object) -> object:
    def body(frame: Frame) -> dict[str, Tensor]:
        return {"y": frame.outside(make, out="b", a=frame["x"] * 2) + 1}  # type: ignore[arg-type]

    return body


@pytest.mark.parametrize("mode", Mode)
def test_the_result_of_an_outside_call_may_have_another_layout(mode: Mode) -> None:
    def transposed_twice(a: Tensor) -> Tensor:
        return a.t().contiguous().t().reshape(4, 2, 3)

    replay, arena = captured(body_with_result(transposed_twice), mode)
    arena.rows("x", 4).copy_(torch.arange(24.0).view(4, 6))
    replay()
    assert torch.equal(arena.views({"tokens": 4})["y"], torch.arange(24.0).view(4, 6) * 2 + 1)


@pytest.mark.parametrize("mode", Mode)
def test_a_result_that_does_not_fit_its_buffer_is_an_error_with_both_shapes(mode: Mode) -> None:
    with pytest.raises(GraphError, match=r"\(3, 6\) torch.float32; its buffer is \(4, 6\) torch.float32"):
        captured(body_with_result(lambda a: a[:3]), mode)
    with pytest.raises(GraphError, match=r"\(4, 6\) torch.float64; its buffer is \(4, 6\) torch.float32"):
        captured(body_with_result(lambda a: a.double()), mode)


def double(a: Tensor) -> Tensor:
    return a + a


def test_a_temporary_cannot_cross_a_graph_break() -> None:
    def body(frame: Frame) -> dict[str, Tensor]:
        return {"y": frame.outside(double, frame["x"] * 2, out="b")}

    with pytest.raises(CaptureError, match=r"argument 0 of double, shape \(4, 6\), is neither a static buffer"):
        captured(body, Mode.PIECEWISE)
    captured(body, Mode.FULL)


def test_a_body_is_warmed_up_before_it_is_recorded_unless_it_just_ran() -> None:
    arena, runs = toy.make_arena(16, 4), list[bool]()

    def body(frame: Frame) -> None:
        runs.append(frame.is_warmup)

    for is_warm in (False, True):
        key = GraphKey("toy", Mode.FULL, CAPACITY)
        capture(body, key, arena, lane_for(arena.device), state={}, is_warm=is_warm)
    assert runs == [True, False, False]


def test_a_body_that_waits_for_the_device_cannot_be_captured() -> None:
    with pytest.raises(CaptureError, match="makes the host wait"):
        captured(lambda frame: {"y": frame["x"] * frame["x"].sum().item()}, Mode.FULL)


def test_an_undeclared_output_is_named() -> None:
    with pytest.raises(GraphError, match="body returned 'z'; declared outputs are y"):
        captured(lambda frame: {"z": frame["x"]}, Mode.FULL)


def test_the_error_for_a_regrown_buffer_names_it() -> None:
    replay, arena = captured(lambda frame: {"y": frame["x"] * 2}, Mode.FULL)
    replay()
    arena._storages["x"] = torch.zeros(999)
    with pytest.raises(AddressError, match=r"graph \[toy/full tokens=4\] .*: 'x' was at 0x\w+ and is now at"):
        replay()


@pytest.mark.parametrize("move", ["replace", "data", "remove"])
def test_the_error_for_a_moved_weight_names_it(move: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    replay, _ = captured(lambda frame: {"y": module(frame["x"])}, Mode.FULL, module)
    replay()
    if move == "replace":
        module[0].weight = nn.Parameter(torch.randn(6, 6))
    elif move == "data":
        module[0].weight.data = torch.randn(6, 6)
    else:
        del module[0].weight
    with pytest.raises(AddressError, match=r"'0.weight'"):
        replay()


def test_captured_memory_outlives_a_parameter_that_gets_other_memory() -> None:
    """The check for moved weights runs after the launch, so until then the old memory must not belong to others."""
    module = nn.Linear(6, 6)
    replay, _ = captured(lambda frame: {"y": frame["x"] + module.bias}, Mode.FULL, module)
    old = StorageWeakRef(module.bias.untyped_storage())
    module.bias.data = torch.randn(6)
    assert not old.expired()
    with pytest.raises(AddressError, match="'bias' was at"):
        replay()


CHANGES: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "a submodule is replaced": (lambda module: module.__setitem__(0, nn.Linear(6, 6)), "'0' was replaced"),
    "a bias that was None is set": (lambda module: setattr(module[0], "bias", _bias()), "'0.bias' was replaced"),
    "a parameter is added": (lambda module: module[0].register_parameter("more", _bias()), "'0._parameters' had 2"),
    "a hook is added": (
        lambda module: module[0].register_forward_hook(lambda *call: None),
        "'0._forward_hooks' had 0 entries and now has 1",
    ),
    "a pre-hook is added": (
        lambda module: module.register_forward_pre_hook(lambda *call: None),
        "'_forward_pre_hooks' had 0 entries",
    ),
    "training is switched on": (lambda module: module.train(), "'training' was replaced"),
}


def _bias() -> nn.Parameter:
    return nn.Parameter(torch.ones(6))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("declared", ["as a module", "as a dictionary", "not at all"])
def test_a_changed_module_is_refused_however_it_was_declared(change: str, declared: str) -> None:
    """A dictionary of parameters does not see replacements, but the module that the body closes over does."""
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Dropout()).eval()
    states: dict[str, Mapping[str, Tensor]] = {
        "as a module": Watched.of_module(module),
        "as a dictionary": dict(module.named_parameters()),
        "not at all": {},
    }
    runner = plain_runner(lambda frame: {"y": module(frame["x"])}, states[declared])
    values = {"x": torch.randn(4, 6)}
    runner.run(values, copy_out)
    act, sentence = CHANGES[change]
    act(module)
    with pytest.raises(AddressError, match=re.escape(sentence)):
        runner.run(values, copy_out)


def test_a_parameter_replaced_behind_a_dictionary_is_refused() -> None:
    module = nn.Linear(6, 6)
    runner = plain_runner(lambda frame: {"y": module(frame["x"])}, dict(module.named_parameters()))
    module.weight = nn.Parameter(torch.randn(6, 6))
    with pytest.raises(AddressError, match="'weight' was at"):
        runner.run({"x": torch.randn(4, 6)}, copy_out)


def test_a_transposed_buffer_is_not_taken_for_the_buffer() -> None:
    buffer = torch.arange(9.0).view(3, 3)
    store(buffer, buffer, "itself")
    with pytest.raises(RuntimeError, match="single memory location"):
        store(buffer, buffer.t(), "itself, transposed")


def test_a_declared_tensor_outside_any_module_is_watched_too() -> None:
    state = {"table": torch.randn(4, 6)}
    runner = plain_runner(lambda frame: {"y": frame["x"] + state["table"]}, state)
    state["table"] = state["table"].clone()
    with pytest.raises(AddressError, match="'table' was at"):
        runner.run({"x": torch.randn(4, 6)}, copy_out)


def test_modules_are_found_in_partials_and_closures() -> None:
    one, other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def body(*given: Any, **named: Any) -> Tensor:
        found: Tensor = other(late(*given, **named))
        return found

    def found(body: Any) -> list[int]:
        return sorted(tensor.data_ptr() for tensor in Watched.of_body(body).values())

    both = sorted(each.weight.data_ptr() for each in (one, other))
    assert found(partial(body, one)) == found(partial(body, more=one)) == both
    assert found(body) == [other.weight.data_ptr()], "the other cell is empty"
    late = one
    assert found(body) == both


def test_the_error_for_a_deleted_weight_names_it() -> None:
    module = nn.Linear(6, 6)
    watched = Watched.of_module(module)
    del module.weight
    with pytest.raises(AddressError, match="'weight' is gone"):
        watched["weight"]


def plain_runner(body: Body, state: Mapping[str, Tensor]) -> GraphRunner:
    arena = Arena(
        [rows("x", ("tokens", 6), torch.float32), output("y", ("tokens", 6), torch.float32)], {"tokens": 4}, "cpu"
    )
    phase = Phase(
        name="plain",
        body=body,
        arena=arena,
        rows="tokens",
        buckets=(Capacity.of(tokens=4),),
        example=lambda lengths, rng: {"x": torch.randn(sum(lengths), 6, generator=rng)},
        state=state,
    )
    runner = GraphRunner(phase)
    runner.capture_buckets()
    return runner


def captured(body: object, mode: Mode, module: nn.Module | None = None) -> tuple[partial[None], Arena]:
    buffers = [
        rows("x", ("tokens", 6), torch.float32),
        bridge("a", ("tokens", 6), torch.float32),
        bridge("b", ("tokens", 6), torch.float32),
        output("y", ("tokens", 6), torch.float32),
    ]
    arena = Arena(buffers, {"tokens": 4}, "cpu")
    key = GraphKey("toy", mode, Capacity.of(tokens=4))
    state = Watched.of_module(module or nn.Module())
    graph = capture(body, key, arena, lane_for(arena.device), state=state)  # type: ignore[arg-type]
    return partial(graph.replay), arena
