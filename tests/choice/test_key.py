import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.choice.key import Capacity, GraphKey, structure_digest
from saccade.config import Mode


def test_different_boundaries_with_equal_totals_have_different_digests() -> None:
    assert structure_digest({"cu": [0, 4, 10, 18]}) != structure_digest({"cu": [0, 5, 10, 18]})


def test_a_digest_covers_every_boundary_and_its_name() -> None:
    one = structure_digest({"cu": [0, 8], "windows": [0, 4, 8]})
    assert one != structure_digest({"cu": [0, 8], "windows": [0, 3, 8]})
    assert one != structure_digest({"cu": [0, 4, 8], "windows": [0, 8]})
    assert one == structure_digest({"windows": np.array([0, 4, 8], dtype=np.int32), "cu": (0, 8)})


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=2, unique_by=tuple))
def test_different_structures_have_different_digests(pair: list[list[int]]) -> None:
    assert structure_digest({"a": pair[0]}) != structure_digest({"a": pair[1]})


def test_a_key_prints_in_one_line() -> None:
    capacity = Capacity.of(tokens=1024, segments=17)
    assert str(GraphKey("vision", Mode.FULL, capacity)) == "vision/full segments=17 tokens=1024"
    exact = GraphKey("vision", Mode.PIECEWISE, capacity, structure_digest({"cu": [0, 1024]}))
    assert str(exact).startswith("vision/piecewise segments=17 tokens=1024 exact=")


def test_capacities_ignore_the_order_of_dimensions() -> None:
    assert Capacity.of(tokens=8, segments=2) == Capacity.of({"segments": 2, "tokens": 8})
    assert dict(Capacity.of(tokens=8)) == {"tokens": 8}
    assert Capacity.of(Capacity.of(tokens=8, segments=2), tokens=9) == Capacity.of(tokens=9, segments=2)
    with pytest.raises(KeyError):
        Capacity.of(tokens=8)["segments"]
