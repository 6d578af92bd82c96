"""Decisions about graphs, without graphs: shapes, catalogues, and which layouts deserve an exact graph."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.choice.catalogue import Catalogue
from saccade.choice.costs import Curve, TierCosts
from saccade.choice.exact import MAX_CANDIDATES, MAX_PENDING, ExactIndex, ExactLayout
from saccade.choice.key import Capacity, Decision, GraphKey, Reason
from saccade.choice.shape import Boundary, PhaseShape, misfit
from saccade.config import GraphSettings, Mode, Tier
from saccade.errors import GraphError

BOTH = frozenset({Tier.CAPACITY, Tier.EXACT})
SEGMENTS = Boundary("cu", "tokens", "segments")
WINDOWS = Boundary("windows_cu", "tokens", "windows", longest=4)


def sizes_of(*lengths: int) -> Capacity:
    return Capacity.of(tokens=sum(lengths), segments=len(lengths))


def structure_of(*lengths: int) -> dict[str, np.ndarray]:
    return {"cu": np.cumsum([0, *lengths])}


def make_catalogue(
    buckets: tuple[tuple[int, int], ...] = ((8, 3), (16, 6)), *, captured: bool = True, **settings: object
) -> Catalogue:
    capacities = tuple(Capacity.of(tokens=n, segments=s) for n, s in buckets)
    shape = PhaseShape(
        name="toy", rows="tokens", buckets=capacities, limits=Capacity.of(tokens=32, segments=8), boundaries=(SEGMENTS,)
    )
    catalogue = Catalogue(shape, GraphSettings(**({"tiers": BOTH, "exact_after": 1} | settings)))  # type: ignore[arg-type]
    for bucket in capacities if captured else ():
        catalogue.captured.add(catalogue.key(bucket))
    return catalogue


def choose(catalogue: Catalogue, *lengths: int) -> Decision:
    return catalogue.choose(sizes_of(*lengths), structure_of(*lengths))


class TestShape:
    @given(st.data())
    def test_the_smallest_bucket_that_fits_is_found(self, data: st.DataObject) -> None:
        """Compared with a search of all buckets: padded rows need segments of their own, within the length limit."""
        numbers = st.integers(1, 40)
        buckets = tuple(
            Capacity.of(tokens=n, segments=s, windows=w)
            for n, s, w in data.draw(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8))
        )
        limits = Capacity.of(tokens=40, segments=40, windows=40)
        shape = PhaseShape(name="any", rows="tokens", buckets=buckets, limits=limits, boundaries=(SEGMENTS, WINDOWS))
        tokens, segments, windows = data.draw(st.tuples(numbers, numbers, numbers))
        sizes = Capacity.of(tokens=tokens, segments=segments, windows=windows)

        def holds(bucket: Capacity) -> bool:
            padding = bucket["tokens"] - tokens
            own = 1 if padding > 0 else 0
            return (
                padding >= 0
                and segments + own <= bucket["segments"]
                and windows + -(-padding // 4) <= bucket["windows"]
            )

        for _ in range(2):  # computed, then cached
            found = shape.bucket_for(sizes)
            fitting = [bucket for bucket in buckets if holds(bucket)]
            assert (found is None) == (not fitting)
            if found is not None:
                assert holds(found) and found["tokens"] == min(bucket["tokens"] for bucket in fitting)
            else:
                assert shape.misfit_in_largest(sizes) or not holds(shape.ordered[-1])

    def test_padded_rows_need_segments_within_the_limit(self) -> None:
        sizes, room = Capacity.of(tokens=3, windows=1), Capacity.of(tokens=12, windows=3)
        assert misfit(sizes, room, [WINDOWS]) == "windows: 4 > 3", "nine rows, four in a window"
        assert misfit(sizes, Capacity.of(tokens=11, windows=3), [WINDOWS]) is None

    def test_a_bucket_for_several_batches_holds_each(self) -> None:
        shape = make_catalogue().shape
        for batches in ([sizes_of(8), sizes_of(9)], [sizes_of(9), sizes_of(8)], [sizes_of(8), sizes_of(1, 1, 1)]):
            assert shape.bucket_for_all(batches) == Capacity.of(tokens=16, segments=6)


class TestCatalogue:
    def test_only_captured_graphs_are_chosen(self) -> None:
        catalogue = make_catalogue(captured=False, tiers=frozenset({Tier.CAPACITY}))
        assert choose(catalogue, 3, 4).reason is Reason.NOT_CAPTURED
        bucket = catalogue.shape.bucket_for(sizes_of(3, 4))
        assert bucket is not None
        catalogue.captured.add(catalogue.key(bucket))
        assert choose(catalogue, 3, 4).key == catalogue.key(bucket)
        assert choose(catalogue, 9).reason is Reason.NOT_CAPTURED, "its bucket is not captured"

    def test_deciding_counts_nothing_and_choosing_does(self) -> None:
        catalogue = make_catalogue()
        for _ in range(5):
            assert catalogue.decide(sizes_of(3, 4), structure_of(3, 4)).tier is Tier.CAPACITY
        assert not catalogue.exact.has_pending
        choose(catalogue, 3, 4)
        layout = catalogue.exact.next_pending()
        assert layout is not None and layout.key == catalogue.key(sizes_of(3, 4), structure_of(3, 4))
        assert layout.structure["cu"].tolist() == [0, 3, 7] and layout.dropped == ()

    @pytest.mark.parametrize(("lengths", "fits"), [((20, 12), True), ((20, 13), False), ((1,) * 9, False)])
    def test_only_layouts_that_fit_the_buffers_get_an_exact_graph(self, lengths: tuple[int, ...], fits: bool) -> None:
        catalogue = make_catalogue()
        choose(catalogue, *lengths)
        assert catalogue.exact.has_pending == fits
        assert (catalogue.layout(sizes_of(*lengths), structure_of(*lengths)) is not None) == fits

    def test_a_pending_layout_has_its_own_copy_of_the_boundaries(self) -> None:
        catalogue, structure = make_catalogue(), structure_of(3, 4)
        catalogue.choose(sizes_of(3, 4), structure)
        structure["cu"][:] = 0
        layout = catalogue.exact.next_pending()
        assert layout is not None and layout.structure["cu"].tolist() == [0, 3, 7]

    def test_an_exact_graph_is_for_one_layout_only(self) -> None:
        catalogue = make_catalogue()
        layout = catalogue.layout(sizes_of(3, 4), structure_of(3, 4))
        assert layout is not None
        assert catalogue.exact.add(layout.key, 100) == ()
        own, other = choose(catalogue, 3, 4), choose(catalogue, 4, 3)
        assert own.key == layout.key and own.reason is Reason.EXACT_GRAPH
        assert other.tier is Tier.CAPACITY, "equally many rows, different boundaries: sglang#16902"
        assert other.reason is Reason.FITS_BUCKET
        assert catalogue.layout(sizes_of(3, 4), structure_of(3, 4)) is None, "it exists"

    def test_a_retired_graph_is_replaced_by_its_bucket_or_by_an_eager_run(self) -> None:
        catalogue = make_catalogue()
        layout = catalogue.layout(sizes_of(3, 4), structure_of(3, 4))
        assert layout is not None
        catalogue.exact.add(layout.key, 100)
        catalogue.retire(layout.key, "wrong once")
        bucket = choose(catalogue, 3, 4)
        assert bucket.tier is Tier.CAPACITY and bucket.key is not None
        catalogue.retire(bucket.key, "wrong twice")
        found = choose(catalogue, 3, 4)
        assert found.reason is Reason.OUT_OF_SERVICE and found.key is None and found.detail == "wrong once"
        assert found.padded_to == bucket.key.capacity, "the shapes of the bucket's graph"

    def test_a_retired_exact_graph_is_not_captured_again(self) -> None:
        catalogue = make_catalogue(exact_max_graphs=1)
        layout = catalogue.layout(sizes_of(3, 4), structure_of(3, 4))
        assert layout is not None
        catalogue.exact.add(layout.key, 100)
        catalogue.retire(layout.key, "wrong once")
        choose(catalogue, 3, 4)
        assert not catalogue.exact.has_pending
        other = catalogue.layout(sizes_of(4, 3), structure_of(4, 3))
        assert other is not None and other.dropped == (layout.key,)
        catalogue.exact.add(other.key, 100)
        choose(catalogue, 3, 4)
        assert not catalogue.exact.has_pending, "not even after another graph took its place"
        assert catalogue.layout(sizes_of(3, 4), structure_of(3, 4)) is None

    def test_strict_settings_replay_whatever_it_costs(self) -> None:
        slow = TierCosts(eager=Curve(((1, 1.0),)), graph=Curve(((1, 2.0),)))
        lax, strict = make_catalogue(), make_catalogue(strict=True)
        lax.costs = strict.costs = slow
        assert choose(lax, 3, 4).reason is Reason.EAGER_FASTER and choose(strict, 3, 4).tier is Tier.CAPACITY
        assert choose(lax, 20).reason is Reason.TOO_LARGE
        with pytest.raises(GraphError, match=r"toy batch of segments=1 tokens=20 is not replayed.*20 > 16.*strict"):
            choose(strict, 20)
        assert not strict.exact.has_pending, "a refused batch is not counted"

    def test_graphs_that_are_off_are_not_a_fallback(self) -> None:
        """Batches run at the same padded shapes, so that no answer changes."""
        catalogue = make_catalogue(tiers=frozenset(), strict=True, captured=False)
        found = choose(catalogue, 3, 4)
        assert found.reason is Reason.GRAPHS_OFF and found.padded_to == Capacity.of(tokens=8, segments=3)

    def test_layouts_larger_than_the_buffers_are_never_captured(self) -> None:
        catalogue = make_catalogue()
        choose(catalogue, 40)
        assert not catalogue.exact.has_pending
        choose(catalogue, 30)
        assert catalogue.exact.has_pending, "larger than every bucket, but not than the buffers"


def key_of(number: int) -> GraphKey:
    return GraphKey("toy", Mode.FULL, Capacity.of(tokens=number), f"digest {number}")


def layout_of(number: int) -> ExactLayout:
    return ExactLayout(key_of(number), Capacity.of(tokens=number), {})


class TestExactIndex:
    def index(self, **settings: int) -> ExactIndex:
        return ExactIndex(GraphSettings(tiers=BOTH, **({"exact_after": 1} | settings)))  # type: ignore[arg-type]

    def test_a_graph_above_the_byte_limit_is_dropped_at_once_and_evicts_no_other(self) -> None:
        index = self.index(exact_max_bytes=100)
        index.begin(layout_of(1))
        assert index.add(key_of(1), 60) == ()
        index.begin(layout_of(2))
        assert index.add(key_of(2), 101) == (key_of(2),)
        assert key_of(1) in index.graphs and key_of(2) not in index.graphs and index.nbytes == 60
        index.see(key_of(2), Capacity.of(tokens=2), {})
        assert not index.has_pending, "it would be just as large the next time"
        index.begin(layout_of(3))
        assert index.add(key_of(3), 100) == (key_of(1),) and index.nbytes == 100, "exactly the limit"

    def test_a_pending_layout_that_was_captured_on_request_is_not_captured_again(self) -> None:
        index = self.index()
        index.see(key_of(1), Capacity.of(tokens=1), {})
        index.begin(layout_of(1))
        index.add(key_of(1), 60)
        assert index.next_pending() is None

    def test_as_many_graphs_are_dropped_as_a_new_one_needs(self) -> None:
        index = self.index(exact_max_bytes=100)
        for number in (1, 2, 3):
            index.begin(layout_of(number))
            assert index.add(key_of(number), 30) == ()
        for number in (1, 1, 3):
            index.use(key_of(number))
        index.begin(layout_of(4))
        assert index.add(key_of(4), 65) == (key_of(2), key_of(3)), "the least used"
        assert len(index.graphs) == 2 and index.nbytes == 95

    def test_a_pending_layout_names_the_graph_it_replaces(self) -> None:
        """The executor drops that graph before the capture, so that the new one can reuse its memory."""
        index = self.index(exact_max_graphs=1)
        index.begin(layout_of(1))
        index.add(key_of(1), 10)
        for _ in range(3):
            index.see(key_of(2), Capacity.of(tokens=2), {})
        layout = index.next_pending()
        assert layout is not None and (layout.key, layout.dropped) == (key_of(2), (key_of(1),))
        assert len(index.graphs) == 0, "until the capture there is neither"

    def test_the_hottest_pending_layout_is_captured_first(self) -> None:
        index = self.index()
        for number in (1, 2, 2, 3):
            index.see(key_of(number), Capacity.of(tokens=number), {})
        layout = index.next_pending()
        assert layout is not None and layout.key == key_of(2)

    def test_a_replaced_graph_may_come_back(self) -> None:
        index = self.index(exact_max_graphs=1)
        for number, times, dropped in ((1, 1, ()), (2, 3, (key_of(1),)), (1, 6, (key_of(2),))):
            for _ in range(times):
                index.see(key_of(number), Capacity.of(tokens=number), {})
            layout = index.next_pending()
            assert layout is not None and (layout.key, layout.dropped) == (key_of(number), dropped)
            index.add(layout.key, 10)

    def test_an_unused_graph_keeps_its_count_while_layouts_pass(self) -> None:
        """Candidates for its place are compared with it."""
        index = self.index(exact_max_graphs=1, exact_after=2)
        index.begin(layout_of(0))
        index.add(key_of(0), 10)
        for number in (*range(1, MAX_CANDIDATES + 2), 1, 1, 1):
            index.see(key_of(number), Capacity.of(tokens=number), {})
        layout = index.next_pending()
        assert layout is not None and layout.dropped == (key_of(0),)

    def test_counted_and_pending_layouts_are_bounded(self) -> None:
        index = self.index()
        for number in range(3 * MAX_CANDIDATES):
            index.see(key_of(number), Capacity.of(tokens=number), {})
        assert len(index._uses) <= MAX_CANDIDATES and len(index._pending) <= MAX_PENDING
        for number in range(3 * MAX_CANDIDATES):
            index.begin(layout_of(number))
        assert len(index._refused) <= MAX_CANDIDATES
        assert key_of(3 * MAX_CANDIDATES - 1) in index._refused, "the oldest may be tried again, the newest not"
