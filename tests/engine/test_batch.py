"""Arrays of plans, compared with rows that are put together one at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.inputs.placeholders import Prompt
from saccade.scheduling.arrays import CacheLayout, LiveRequest, decode_values, mixed_values, places
from saccade.scheduling.step_plan import Chunk, MediaRows

LAYOUT = CacheLayout(block_size=4, max_blocks=12, page_rows=3, has_vision=True, has_limits=True)


@given(st.data(), st.integers(1, 7), st.lists(st.integers(0, 99), min_size=1, max_size=9))
def test_places_of_rows_in_pages(data: st.DataObject, page_size: int, pages: list[int]) -> None:
    first = data.draw(st.integers(0, len(pages) * page_size))
    count = data.draw(st.integers(0, len(pages) * page_size - first))
    expected = [pages[i // page_size] * page_size + i % page_size for i in range(first, first + count)]
    assert places(first, count, tuple(pages), page_size).tolist() == expected
    with pytest.raises(AssertionError, match="pages"):
        places(first, len(pages) * page_size - first + 1, tuple(pages), page_size)


def owner(rng: np.random.Generator, sequence: int, has_limits: bool) -> LiveRequest:
    count = int(rng.integers(1, 30))
    prompt = Prompt(
        rng.integers(0, 99, count).astype(np.int32),
        rng.integers(0, 99, (3, count)).astype(np.int32),
        int(rng.integers(-9, 9)),
        rng.integers(0, 99, count).astype(np.int32) if has_limits else None,
    )
    request: Any = SimpleNamespace(output_ids=rng.integers(0, 99, 12).tolist())
    return LiveRequest(request, prompt, sequence, 0)


def chunk(rng: np.random.Generator, name: str, who: LiveRequest) -> Chunk:
    blocks = tuple(int(n) for n in rng.integers(1, 99, LAYOUT.max_blocks - int(rng.integers(0, 2))))
    if rng.random() < 0.3:
        start = len(who.prompt) + int(rng.integers(0, 10))
        return Chunk(name, start, 1, blocks, wants_logits=True, is_pending_input=bool(rng.random() < 0.5))
    start = int(rng.integers(0, len(who.prompt)))
    count = int(rng.integers(1, len(who.prompt) + 10 - start))
    media: tuple[MediaRows, ...] = ()
    if count > 4:
        media = (MediaRows(start + 1, 3, int(rng.integers(0, 4)), (7, 5, 9)),)
    return Chunk(name, start, count, blocks, media)


def row(who: LiveRequest, part: Chunk, i: int) -> dict[str, Any]:
    """The expected values of one row."""
    num_prompt = len(who.prompt)
    is_prompt = i < num_prompt
    later = 0 if part.is_pending_input else (who.request.output_ids[i - num_prompt] if not is_prompt else 0)
    inside = [m for m in part.media if m.start <= i < m.start + m.count]
    source = -1
    if inside:
        at = inside[0].first_row + i - inside[0].start
        source = inside[0].pages[at // LAYOUT.page_rows] * LAYOUT.page_rows + at % LAYOUT.page_rows
    limits = who.prompt.limits_T
    return {
        "ids": int(who.prompt.token_ids[i]) if is_prompt else later,
        "pending": who.sequence if part.is_pending_input else -1,
        "positions": who.prompt.positions_3T[:, i].tolist() if is_prompt else [i + who.prompt.rope_delta] * 3,
        "slots": part.blocks[i // LAYOUT.block_size] * LAYOUT.block_size + i % LAYOUT.block_size,
        "sources": source,
        "limits": int(limits[i]) if limits is not None and is_prompt else 0,
    }


def check_requests(values: dict[str, Any], chunks: list[Chunk]) -> None:
    assert values["query_start"].tolist() == [sum(c.count for c in chunks[:i]) for i in range(len(chunks) + 1)]
    assert values["key_lengths"].tolist() == [c.start + c.count for c in chunks]
    padded = [[*c.blocks, *[0] * (LAYOUT.max_blocks - len(c.blocks))] for c in chunks]
    assert values["block_tables"].tolist() == padded


def test_rows_of_mixed_batches() -> None:
    rng = np.random.default_rng(3)
    for _ in range(120):
        running = {f"r{i}": owner(rng, i + 1, bool(rng.random() < 0.5)) for i in range(int(rng.integers(1, 5)))}
        chunks = [chunk(rng, name, who) for name, who in running.items()]
        values = mixed_values(chunks, running, LAYOUT)
        expected = [row(running[c.request_id], c, i) for c in chunks for i in range(c.start, c.end)]
        for name in expected[0]:
            found = values[name].T if name == "positions" else values[name]
            assert found.tolist() == [r[name] for r in expected], name
        check_requests(values, chunks)


def test_rows_of_decode_batches() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        running = {f"r{i}": owner(rng, i + 1, has_limits=False) for i in range(int(rng.integers(1, 9)))}
        chunks = []
        for name, who in running.items():
            start = len(who.prompt) + int(rng.integers(0, 10))
            blocks = tuple(int(n) for n in rng.integers(1, 99, start // LAYOUT.block_size + 1))
            is_pending = bool(rng.random() < 0.5)
            chunks.append(Chunk(name, start, 1, blocks, wants_logits=True, is_pending_input=is_pending))
        values = decode_values(chunks, running, LAYOUT)
        expected = [row(running[c.request_id], c, c.start) for c in chunks]
        for name in ("ids", "pending", "positions", "slots"):
            found = values[name].T if name == "positions" else values[name]
            assert found.tolist() == [r[name] for r in expected], name
        assert values["sequences"].tolist() == [who.sequence for who in running.values()]
        check_requests(values, chunks)


def test_excess_blocks_are_never_written_into_the_next_requests_table() -> None:
    rng = np.random.default_rng(5)
    running = {name: owner(rng, 1, has_limits=False) for name in ("a", "b")}
    chunks = [Chunk("a", 0, 1, tuple(range(1, LAYOUT.max_blocks + 2))), Chunk("b", 0, 1, (1,))]
    with pytest.raises(AssertionError, match="13 blocks; a table has room for 12"):
        mixed_values(chunks, running, LAYOUT)
