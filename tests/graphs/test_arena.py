from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import ConfigError, GraphError
from saccade.graphs import Arena, Capacity, Fill, OwnIndex, boundaries, metadata, output, rows
from saccade.graphs.staging import NUM_STAGING_SLABS, Staging

LIMITS = {"tokens": 16, "segments": 5}


def make_arena() -> Arena:
    buffers = [
        rows("x", ("tokens", 3), torch.float32),
        rows("weights", ("tokens",), torch.float32, padding=Fill(0.5)),
        rows("three", (3, "tokens"), torch.int64, padding=Fill(-1)),
        metadata("slots", ("tokens",), torch.int64, padding=Fill(7)),
        metadata("positions", (3, "tokens"), padding=Fill(2)),
        metadata("order", ("tokens",), padding=OwnIndex()),
        metadata("scale", (), torch.float32),
        rows("bias", (2,), torch.float32),
        boundaries("cu", of="tokens", count="segments"),
        output("y", ("tokens", 2), torch.float32),
    ]
    return Arena(buffers, LIMITS, "cpu")


def values(*lengths: int) -> dict[str, Any]:
    n = sum(lengths)
    return {
        "x": torch.randn(n, 3),
        "weights": torch.arange(1.0, n + 1),
        "three": torch.randint(1, 9, (3, n)),
        "slots": torch.arange(n),
        "positions": np.arange(3 * n).reshape(3, n),
        "order": np.arange(n)[::-1],
        "scale": 0.5,
        "bias": torch.tensor([1.5, 2.5]),
        "cu": [0, *np.cumsum(lengths).tolist()],
    }


def test_a_batch_and_its_padding_land_in_the_views() -> None:
    arena, given_values = make_arena(), values(2, 3)
    capacity = Capacity.of(tokens=8, segments=4)
    arena.fill(arena.admit(given_values), capacity)
    views = arena.views(capacity)
    assert torch.equal(views["x"][:5], given_values["x"])
    assert views["x"][5:].eq(0).all()
    assert views["weights"].tolist() == [1, 2, 3, 4, 5, 0.5, 0.5, 0.5]
    assert torch.equal(views["three"][:, :5], given_values["three"])
    assert views["three"][:, 5:].eq(-1).all()
    assert views["slots"].tolist() == [0, 1, 2, 3, 4, 7, 7, 7]
    assert views["positions"][2].tolist() == [10, 11, 12, 13, 14, 2, 2, 2]
    assert views["order"].tolist() == [4, 3, 2, 1, 0, 5, 6, 7]
    assert views["scale"].item() == 0.5
    assert views["bias"].tolist() == [1.5, 2.5]
    assert views["cu"].tolist() == [0, 2, 5, 8, 8]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 2))
def test_padded_rows_form_their_own_segment(lengths: list[int], more_rows: int, more_segments: int) -> None:
    total = sum(lengths)
    buffers = [rows("x", ("tokens",), torch.float32), boundaries("cu", of="tokens", count="segments")]
    arena = Arena(buffers, {"tokens": 40, "segments": 9}, "cpu")
    capacity = Capacity.of(tokens=total + more_rows, segments=len(lengths) + 1 + more_segments)
    arena.fill(arena.admit({"x": torch.randn(total), "cu": [0, *np.cumsum(lengths).tolist()]}), capacity)
    cu = arena.views(capacity)["cu"].tolist()
    assert cu[: len(lengths) + 1] == [0, *np.cumsum(lengths).tolist()]
    assert cu == sorted(cu)
    assert set(cu[len(lengths) + 1 :]) == {capacity["tokens"]}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 15))
def test_padded_rows_are_split_into_segments_within_the_limit(lengths: list[int], padded: int) -> None:
    total = sum(lengths)
    buffers = [rows("x", ("tokens",), torch.float32), boundaries("cu", of="tokens", count="windows", longest=4)]
    arena = Arena(buffers, {"tokens": 40, "windows": 9}, "cpu")
    batch = arena.admit({"x": torch.randn(total), "cu": [0, *np.cumsum(lengths).tolist()]})
    exact = Capacity.of(tokens=total + padded, windows=len(lengths) + -(-padded // 4))
    roomy = Capacity.of(tokens=total + padded, windows=len(lengths) + 5)
    assert arena.misfit(batch.sizes, exact) is None
    for capacity in (exact, roomy):
        arena.fill(batch, capacity)
        cu = arena.views(capacity)["cu"].tolist()
        assert cu[-1] == total + padded
        assert all(0 <= high - low <= 4 for low, high in pairwise(cu))
    if padded:
        too_few = Capacity.of(tokens=total + padded, windows=exact["windows"] - 1)
        assert arena.misfit(batch.sizes, too_few) == f"windows: {exact['windows']} > {exact['windows'] - 1}"


def test_old_content_of_a_slab_never_shows() -> None:
    """All capacities share the ring of host slabs: every fill overwrites old content with its own padding."""
    arena, rng = make_arena(), np.random.default_rng(5)
    capacities = [Capacity.of(tokens=t, segments=s) for t in (6, 11, 16) for s in (3, 5)]
    for _ in range(60):
        lengths = rng.integers(0, 3, int(rng.integers(1, 3))).tolist()
        given_values, capacity, total = values(*lengths), capacities[rng.integers(len(capacities))], sum(lengths)
        arena.fill(arena.admit(given_values), capacity)
        views, padded = arena.views(capacity), capacity["tokens"] - total
        positions = np.concatenate([given_values["positions"], np.full((3, padded), 2)], axis=1)
        assert views["slots"].tolist() == [*range(total), *[7] * padded]
        assert views["positions"].tolist() == positions.tolist()
        assert views["order"].tolist() == [*reversed(range(total)), *range(total, capacity["tokens"])]
        assert views["cu"].tolist() == given_values["cu"] + [capacity["tokens"]] * (capacity["segments"] - len(lengths))


def test_the_host_can_write_ahead_of_pending_copies() -> None:
    staging = Staging(4, torch.device("cpu"))
    turns = [staging.next_slab() for _ in range(2 * NUM_STAGING_SLABS)]
    assert len({turn for turn, _ in turns[:NUM_STAGING_SLABS]}) == NUM_STAGING_SLABS
    assert len({slab.ctypes.data for _, slab in turns}) == NUM_STAGING_SLABS


def test_a_replaced_storage_is_filled_and_has_a_new_address() -> None:
    """No cache may hide that a buffer moved."""
    arena, capacity = make_arena(), Capacity.of(tokens=8, segments=2)
    arena.fill(arena.admit(values(3)), capacity)
    before, old = arena.pointers(), arena._storages["x"]
    arena._storages["x"] = new = torch.zeros_like(old)
    kept = old.clone()
    given_values = values(4)
    arena.fill(arena.admit(given_values), capacity)
    assert torch.equal(arena.views(capacity)["x"][:4], given_values["x"]) and torch.equal(old, kept)
    assert arena.pointers() != before and arena.addresses()["x"] == new.data_ptr()
    assert arena.owns(arena.views(capacity)["x"]) and not arena.owns(old)


def test_decreasing_boundaries_are_found_in_unsigned_arrays_too() -> None:
    with pytest.raises(GraphError, match="fall from 3 to 2 at 2"):
        make_arena().admit({**values(2, 3), "cu": np.asarray([0, 3, 2, 5], dtype=np.uint32)})


def test_a_segment_longer_than_its_limit_is_refused() -> None:
    buffers = [rows("x", ("tokens",), torch.float32), boundaries("cu", of="tokens", count="windows", longest=4)]
    with pytest.raises(GraphError, match="boundaries 'cu' have a segment of 5 tokens; the limit is 4"):
        Arena(buffers, {"tokens": 9, "windows": 9}, "cpu").admit({"x": torch.randn(7), "cu": [0, 2, 7]})


def test_views_never_move() -> None:
    arena = make_arena()
    capacity = Capacity.of(tokens=8, segments=3)
    before = {name: view.data_ptr() for name, view in arena.views(capacity).items()}
    addresses = arena.addresses()
    for lengths in ((1,), (4, 4, 8), (2, 2)):
        batch = arena.admit(values(*lengths))
        arena.fill(batch, batch.sizes)
    assert {name: view.data_ptr() for name, view in arena.views(capacity).items()} == before
    assert arena.addresses() == addresses


def test_views_are_contiguous_and_do_not_overlap() -> None:
    arena = make_arena()
    views = arena.views(Capacity.of(tokens=7, segments=3))
    spans = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in views.values())
    assert all(view.is_contiguous() for view in views.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(arena.owns(view) for view in views.values())
    assert not arena.owns(torch.zeros(3))


def test_rows_written_in_place_are_not_copied() -> None:
    arena = make_arena()
    ready = values(3)
    ready["x"] = arena.rows("x", 3)
    ready["x"].fill_(4.0)
    arena.fill(arena.admit(ready), Capacity.of(tokens=8, segments=2))
    view = arena.views(Capacity.of(tokens=8, segments=2))["x"]
    assert view[:3].eq(4).all()
    assert view[3:].eq(0).all()
    with pytest.raises(GraphError, match=r"'three' of shape \(3, 'tokens'\) has no rows"):
        arena.rows("three", 2)


def test_a_view_that_has_other_strides_in_a_larger_bucket_is_refused() -> None:
    """Columns of a smaller bucket are packed more densely, so they are not the first columns of a larger one."""
    arena = make_arena()
    ready = {**values(3), "three": arena.views(Capacity.of(tokens=3, segments=2))["three"]}
    with pytest.raises(GraphError, match=r"input 'three' of strides .* is a view of the arena"):
        arena.admit(ready)


def test_poison_reaches_padding_only() -> None:
    arena = make_arena()
    batch, capacity = arena.admit(values(5)), Capacity.of(tokens=8, segments=2)
    arena.fill(batch, capacity)
    arena.poison(capacity, batch.sizes)
    views = arena.views(capacity)
    assert views["x"][:5].isfinite().all()
    assert views["x"][5:].isnan().all()
    assert views["bias"].tolist() == [1.5, 2.5], "it has no padding"
    assert views["cu"].tolist() == [0, 5, 8]
    arena.poison(capacity)
    assert arena.views(capacity)["y"].isnan().all()


BAD_BATCHES = [
    ({"x": None}, "input 'x' is a NoneType; pass a tensor"),
    ({"x": torch.zeros(5, 3, dtype=torch.float64)}, "'x' is torch.float64; the buffer is torch.float32"),
    ({"x": torch.zeros(5, 4)}, r"'x' has shape \(5, 4\); the buffer is \('tokens', 3\)"),
    ({"three": torch.zeros(5, dtype=torch.int64)}, r"'three' has shape \(5,\); the buffer is \(3, 'tokens'\)"),
    ({"x": torch.zeros(4, 3)}, "inputs disagree on 'tokens': 'x' has 4, 'weights' has 5"),
    ({"slots": [0.5] * 5}, "metadata 'slots' is float64; the buffer holds integers"),
    ({"cu": [0, 3, 2, 5]}, "boundaries 'cu' fall from 3 to 2 at 2; they must not decrease"),
    ({"cu": [1, 5]}, r"boundaries 'cu' start with \[1\]; they must start with 0"),
    ({"cu": []}, "boundaries 'cu' start with"),
    ({"cu": [0, 4]}, "boundaries 'cu' end at 4; the batch has 5 tokens"),
    ({"extra": torch.zeros(1)}, "unexpected input 'extra'; the arena takes x, weights, three"),
    ({"x": torch.zeros(5, 3, device="meta")}, r"input 'x' is on meta; the buffer is on cpu \(or pin it\)"),
    ({"slots": torch.arange(5, device="meta")}, r"metadata 'slots' is on meta; pass the host's copy"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BATCHES)
def test_the_error_for_a_bad_batch_names_the_input(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make_arena().admit({**values(2, 3), **change})


def test_a_missing_input_is_named() -> None:
    incomplete = values(2)
    del incomplete["slots"]
    with pytest.raises(GraphError, match="missing input 'slots'"):
        make_arena().admit(incomplete)


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    arena = make_arena()
    batch = arena.admit(values(2, 3, 4))
    assert arena.misfit(batch.sizes, Capacity.of(tokens=9, segments=3)) is None
    assert arena.misfit(batch.sizes, Capacity.of(tokens=8, segments=3)) == "tokens: 9 > 8"
    # a row of padding needs a segment of its own
    assert arena.misfit(batch.sizes, Capacity.of(tokens=10, segments=3)) == "segments: 4 > 3"
    with pytest.raises(GraphError, match="does not fit segments=3 tokens=10: segments: 4 > 3"):
        arena.fill(batch, Capacity.of(tokens=10, segments=3))


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (lambda: [rows("x", ("tokens", "segments"), torch.float32)], "varies in several axes"),
        ([rows("x", ("patches",), torch.float32)], "varies in 'patches'; limits are set for"),
        ([boundaries("cu", of="patches", count="segments")], "'cu' varies in 'patches'; limits are set for"),
        ([rows("x", ("tokens",), torch.float32), output("x", ("tokens",), torch.float32)], r"declared twice: \['x'\]"),
        ([metadata("m", ("tokens",), torch.bfloat16)], "metadata 'm' is torch.bfloat16"),
    ],
)
def test_a_bad_declaration_is_refused(buffers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arena(buffers() if callable(buffers) else buffers, LIMITS, "cpu")


@pytest.mark.parametrize("number", [2**31, 2**32 + 7, -(2**31) - 1])
def test_numbers_outside_the_range_of_their_buffer_are_refused(number: int) -> None:
    """As an int32, 2**32 + 7 would be 7."""
    arena = Arena([metadata("slots", ("tokens",)), output("y", ("tokens",), torch.float32)], {"tokens": 4}, "cpu")
    for values in ([0, number], np.asarray([0, number]), torch.tensor([0, number])):
        with pytest.raises(
            GraphError, match=rf"metadata 'slots' has {number}; its buffer is int32 and holds -2147483648"
        ):
            arena.admit({"slots": values})
    assert arena.admit({"slots": [2**31 - 1, -(2**31)]}).arrays["slots"].tolist() == [2**31 - 1, -(2**31)]
