"""A few seconds of the media fuzzer; see fuzz_media.py for longer runs."""

from collections.abc import Iterator
from typing import Any

import pytest

from saccade.inputs.allowance import ANYTHING
from saccade.inputs.media.media_pool import MediaPool
from tests.inputs import fuzz_media
from tests.inputs.fuzz_media import FoundError, corpus, make_case, run_cases

NUM_PARSED, NUM_DECODED = 3000, 400


@pytest.fixture(scope="module")
def pool() -> Iterator[MediaPool]:
    made = MediaPool(2)
    yield made
    made.close()


def found(seed: int, count: int, pool: MediaPool | None = None) -> list[str]:
    cases = run_cases(seed, iter(range(count)), pool)
    return [f"--seed {seed} --only {case.index}: {error}" for case, error in cases if error is not None]


@pytest.mark.parametrize("seed", [1, 2])
def test_parsers_give_facts_or_refuse(seed: int) -> None:
    assert found(seed, NUM_PARSED) == []


def test_decoders_give_pixels_or_refuse(pool: MediaPool) -> None:
    assert found(3, NUM_DECODED, pool) == []


def test_files_of_the_corpus_are_whole(pool: MediaPool) -> None:
    """A corpus of broken files would find nothing."""
    for name, data in corpus().items():
        case = fuzz_media.Case(0, 0, name, data)
        fuzz_media.check_parsers(case)
        if name not in ("growing avi", "growing gif"):
            assert pool.video(data, fuzz_media.LIMITS, ANYTHING)[0].size, name


def test_a_case_is_the_same_every_time() -> None:
    seeds = corpus()
    cases = [make_case(5, index, seeds).data for index in range(50)]
    assert cases == [make_case(5, index, corpus()).data for index in range(50)]
    assert len(set(cases)) > 40


@pytest.mark.parametrize("name", ["read_header", "read_frame", "count_visits", "measure_image", "read_data_url"])
def test_a_parser_that_breaks_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise IndexError("beyond the end")

    monkeypatch.setattr(fuzz_media, name, fail)
    with pytest.raises(FoundError, match="IndexError"):
        fuzz_media.check_parsers(make_case(0, 0, corpus()))
