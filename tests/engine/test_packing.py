"""Packing: every part is in one pass, every pass fits a bucket, and padding is near the optimum."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from saccade.scheduling.buckets import MAX_FRAMES, MIN_FRAMES, UNITS_PER_FRAME, vision_buckets
from saccade.scheduling.packing import Bins, MediaPart, default_cost, pack, padded_rows, split

Passes = list[list[MediaPart]]


def serving_bins(max_units: int = 8192) -> Bins:
    rows = vision_buckets(max_units)
    return Bins(rows, tuple(min(MAX_FRAMES, max(MIN_FRAMES, n // UNITS_PER_FRAME), n) + 1 for n in rows))


def images(rng: np.random.Generator, count: int) -> list[MediaPart]:
    """Images with sides of 224 to 1280 pixels, drawn uniformly, in patches of 16 merged two by two."""
    sides = np.maximum(np.rint(rng.integers(224, 1281, (count, 2)) / 32), 1).astype(int)
    return [MediaPart(i, 0, 1, int(h * w)) for i, (h, w) in enumerate(sides)]


def cost_of(passes: Sequence[Sequence[MediaPart]], bins: Bins) -> float:
    buckets = [bins.rows_for(sum(p.rows for p in parts), sum(p.count for p in parts)) for parts in passes]
    return sum(default_cost(bucket) for bucket in buckets if bucket is not None)


def check(parts: Sequence[MediaPart], passes: Passes, bins: Bins) -> None:
    packed = [part for one in passes for part in one]
    assert sorted(packed, key=repr) == sorted(parts, key=repr)
    for one in passes:
        fits = bins.rows_for(sum(p.rows for p in one), sum(p.count for p in one)) is not None
        assert fits or len(one) == 1, one


def partitions(items: list[MediaPart]) -> Iterator[Passes]:
    """All ways to divide items into passes."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def test_random_mixes_need_little_padding() -> None:
    rng, bins = np.random.default_rng(0), serving_bins()
    shares, real, padded = [], 0, 0
    for _ in range(200):
        parts = images(rng, int(rng.integers(1, 17)))
        passes = pack(parts, bins)
        check(parts, passes, bins)
        rows, filled = sum(part.rows for part in parts), padded_rows(passes, bins)
        shares.append(filled / rows - 1)
        real, padded = real + rows, padded + filled - rows
    assert np.mean(shares) < 0.04, f"{np.mean(shares):.1%} on average over batches"
    assert padded / real < 0.03, f"{padded / real:.1%} of all rows"


def test_single_images_are_padded_by_a_few_percent() -> None:
    rng, bins = np.random.default_rng(1), serving_bins()
    shares = [padded_rows(pack([part], bins), bins) / part.rows - 1 for part in images(rng, 400)]
    assert np.mean(shares) < 0.08
    assert max(shares) < 0.28


def test_few_buckets_are_enough() -> None:
    """Capturing one takes about 40 ms."""
    assert len(vision_buckets(8192)) <= 54
    assert vision_buckets(8192)[-1] == 8192
    assert all(low < high for low, high in zip(vision_buckets(8192), vision_buckets(8192)[1:], strict=False))


def test_few_images_are_packed_nearly_optimally() -> None:
    rng, bins = np.random.default_rng(2), serving_bins(2048)
    ratios = []
    for _ in range(40):
        parts = images(rng, int(rng.integers(2, 6)))
        fitting = [part for part in parts if bins.rows_for(part.rows, 1) is not None]
        possible = [p for p in partitions(fitting) if all(bins.rows_for(sum(x.rows for x in o), len(o)) for o in p)]
        best = min(cost_of(passes, bins) for passes in possible)
        passes = pack(parts, bins)
        check(parts, passes, bins)
        ratios.append(cost_of(passes, bins) / best)
    assert np.mean(ratios) < 1.01, f"{np.mean(ratios):.3f} times the best on average"
    assert max(ratios) < 1.12


def test_a_full_load_takes_the_fewest_passes() -> None:
    bins = serving_bins()
    parts = [MediaPart(i, 0, 1, 324) for i in range(32)]
    passes = pack(parts, bins)
    check(parts, passes, bins)
    assert len(passes) == 2
    assert padded_rows(passes, bins) < 32 * 324 * 1.03


def test_many_small_frames_are_spread_over_several_passes() -> None:
    bins = serving_bins()
    parts = [MediaPart(i, 0, 1, 1) for i in range(200)]
    passes = pack(parts, bins)
    check(parts, passes, bins)
    assert all(sum(part.count for part in one) <= MAX_FRAMES for one in passes)


def test_passes_at_the_seams_of_a_long_queue_are_joined() -> None:
    """Parts are compared with 64 of about their size; what is left over of them shares passes with the next ones."""
    rng, bins = np.random.default_rng(3), serving_bins(2048)
    num_joined = 0
    for _ in range(6):
        parts = [MediaPart(i, 0, 1, int(units)) for i, units in enumerate(rng.integers(8, 120, 64 * 6))]
        passes = pack(parts, bins)
        check(parts, passes, bins)
        by_size = sorted(parts, key=lambda part: -part.rows)
        apart = [one for start in range(0, len(parts), 64) for one in pack(by_size[start : start + 64], bins)]
        assert cost_of(passes, bins) <= cost_of(apart, bins)
        num_joined += len(apart) - len(passes)
    assert num_joined > 0


@pytest.mark.parametrize(("frames", "units"), [(1, 40), (7, 40), (64, 1), (65, 1), (1000, 3), (5, 900), (2, 9000)])
def test_videos_are_divided_between_frames_only(frames: int, units: int) -> None:
    bins = serving_bins(1024)
    parts = split(3, frames, units, bins)
    assert sum(part.count for part in parts) == frames
    assert [part.first for part in parts] == list(np.cumsum([0, *(part.count for part in parts)])[:-1])
    for part in parts:
        assert part.item == 3 and part.units == units
        assert part.count == 1 or bins.rows_for(part.rows, part.count) is not None


def test_parts_too_large_for_any_bucket_get_a_pass_each() -> None:
    bins = serving_bins(1024)
    parts = [MediaPart(0, 0, 1, 5000), MediaPart(1, 0, 1, 100), MediaPart(2, 0, 1, 2000)]
    passes = pack(parts, bins)
    check(parts, passes, bins)
    assert [parts[0]] in passes and [parts[2]] in passes


def test_no_parts_give_no_passes() -> None:
    assert pack([], serving_bins(1024)) == []
