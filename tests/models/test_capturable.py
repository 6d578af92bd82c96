"""Bodies use only operations that can be captured, and replaying these with other data gives the right result."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.layers.step import Step, VisionStep
from tests.models import tiny
from tests.models.conftest import Loaded
from tests.models.packing import Engine
from tests.models.prompts import oracle_inputs, positions, request, write
from tests.models.steps import vision_step
from tests.models.test_families import parts_of

Load = Callable[[str], Loaded]

# Operations that copy data to the host, or whose result's shape depends on data.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "bincount")


class Recorder(TorchDispatchMode):
    """Records every operation with its arguments, as a capture would, and refuses those that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in FORBIDDEN, f"{func} cannot be captured"
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean index makes a shape of data"
        if name == "repeat_interleave":
            assert not isinstance(args[0], Tensor) or "self_int" in func.name(), f"{func} makes a shape of data"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Repeats the operations on the same tensors and overwrites the recorded results."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            pairs = zip(_tensors(result), _tensors(again), strict=True)
            for old, new in pairs:
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _overwrite(step: Any, other: Any) -> None:
    for field in fields(step):
        old, new = getattr(step, field.name), getattr(other, field.name)
        if isinstance(old, Tensor):
            old.copy_(new)


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_the_decoder_can_be_replayed_with_other_boundaries(loaded: Load, name: str) -> None:
    """Equal totals, but other lengths and tables: a graph with a frozen boundary would get this wrong."""
    made, model = loaded(name)
    media = [] if name in tiny.TEXT else parts_of(name, "one image")[1:2]

    def packed(seed: int, lengths: tuple[int, int]) -> tuple[Engine, Step]:
        prompts = [write(model, [lengths[0], *media], seed=seed), write(model, [lengths[1], *media], seed=seed + 1)]
        asked = [request(model, p, positions(oracle_inputs(made.oracle, p))) for p in prompts]
        engine = Engine(model, seed=seed)
        step = engine.pack([(one, one.length) for one in asked], padding=3)
        tables = torch.zeros(3, 16, dtype=torch.int32)
        tables[:, : step.block_tables_RM.shape[1]] = step.block_tables_RM
        return engine, replace(step, block_tables_RM=tables, max_query=40, max_keys=40)

    _, first = packed(1, (4, 11))
    _, second = packed(3, (9, 6))
    with Recorder() as recorder:
        hidden_TD = model.decoder.body(first)
    num_rows = int(second.query_start_R1[-2])
    expected = model.decoder.body(second)[:num_rows].clone()
    assert not torch.allclose(hidden_TD[:num_rows], expected, atol=1e-3)
    for keys, values in first.caches:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    _overwrite(first, second)
    recorder.replay()
    torch.testing.assert_close(hidden_TD[:num_rows], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", tiny.VISION)
def test_the_tower_can_be_replayed_with_other_boundaries(loaded: Load, name: str) -> None:
    _, model = loaded(name)
    assert model.spec.vision is not None
    spec = model.spec.vision
    pairs = {"gemma3_vl": [[(1, 8, 8), (1, 8, 8)], [(1, 8, 8)]]}
    grids = pairs.get(name, [[(1, 4, 8), (1, 4, 4), (1, 6, 8)], [(1, 4, 4), (1, 6, 8), (1, 4, 8)]])
    first, second = (_vision_step(spec, some, 128, seed) for seed, some in enumerate(grids))
    with Recorder() as recorder:
        rows_LUD = model.encode(first)
    num_units = sum(t * h * w for t, h, w in grids[1]) // spec.unit
    expected = model.encode(second)[:, :num_units].clone()
    _overwrite(first, second)
    recorder.replay()
    torch.testing.assert_close(rows_LUD[:, :num_units], expected, atol=1e-5, rtol=1e-5)


def _vision_step(spec: Any, grids: Any, num_rows: int, seed: int) -> VisionStep:
    """Boundaries padded with empty segments to a fixed number, as in a buffer."""
    patches = torch.full((num_rows, spec.patch_values), float("nan"))
    real = tiny.pixels(grids, spec.patch_values, seed)
    patches[: len(real)] = real
    step = vision_step(spec, grids, patches)
    grown: dict[str, Any] = {
        name: torch.cat([value, value[-1:].expand(24 - len(value))])
        for name in ("cu_seqlens_S1", "window_cu_seqlens_W1")
        if (value := getattr(step, name)) is not None
    }
    return replace(step, **grown, max_segment=num_rows)


def test_attention_runs_outside_once_per_layer_and_may_return_another_shape(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    prompt = write(model, [9], seed=0)
    asked = request(model, prompt, positions(oracle_inputs(made.oracle, prompt)))
    engine = Engine(model)
    step = engine.pack([(asked, asked.length)], padding=3)
    expected = model.decoder.body(step)[:9]
    calls: list[tuple[str, tuple[str, ...]]] = []

    def outside(fn: Callable[..., Tensor], /, *args: Any, out: str, **bridged: Tensor) -> Tensor:
        calls.append((out, tuple(bridged)))
        return fn(*args, **{name: tensor.clone() for name, tensor in bridged.items()}).flatten()

    assert torch.equal(model.decoder.body(replace(step, outside=outside))[:9], expected)
    assert calls == [("attn", ("q",))] * len(model.spec.decoder.layers)
