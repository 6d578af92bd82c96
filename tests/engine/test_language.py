"""Buckets of the language passes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.scheduling.buckets import decode_buckets, prefill_buckets, prefill_rows


@pytest.mark.parametrize(("least", "most", "allowed"), [(1, 8192, 0.06), (256, 4096, 0.06), (2048, 8192, 0.018)])
def test_prompts_of_uniform_lengths_are_padded_by_little(least: int, most: int, allowed: float) -> None:
    rows = np.array(prefill_rows(8192))
    sizes = np.arange(least, most + 1)
    padded = rows[np.searchsorted(rows, sizes)] - sizes
    assert padded.sum() / sizes.sum() < allowed
    assert len(rows) <= 80


@given(st.integers(1, 10_000))
def test_rows_rise_to_the_largest(largest: int) -> None:
    rows = prefill_rows(largest)
    assert list(rows) == sorted(set(rows)) and rows[-1] == largest
    assert all(n % 16 == 0 for n in rows[:-1])


@given(st.data())
def test_any_batch_fits_a_bucket_of_about_its_size(data: st.DataObject) -> None:
    most = data.draw(st.integers(2, 300), label="requests")
    largest = data.draw(st.integers(most, 9000), label="tokens")
    tokens = data.draw(st.integers(1, largest), label="rows")
    requests = data.draw(st.integers(1, min(tokens + 1, most)), label="of requests")
    fitting = [b for b in prefill_buckets(largest, most) if b["tokens"] >= tokens and b["requests"] >= requests]
    assert fitting
    rows = prefill_rows(largest)
    place = next(i for i, n in enumerate(rows) if n >= tokens)
    roomy = min(-(-tokens // 512) * 512, largest) if tokens > 2048 else 0
    assert min(b["tokens"] for b in fitting) <= max(rows[min(place + 1, len(rows) - 1)], roomy)


def test_small_decode_batches_are_not_padded_and_large_ones_by_a_quarter_at_most() -> None:
    buckets = decode_buckets(256)
    assert buckets[:8] == tuple(range(1, 9)) and buckets[-1] == 256
    assert all(b <= 1.25 * a for a, b in pairwise(buckets[7:]))
