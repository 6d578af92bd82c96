"""What makes prefix keys differ, and what the cache finds and counts."""

from dataclasses import replace

import pytest

from saccade.cache.blocks import BlockPool
from saccade.cache.prefix import PrefixCache, Span

TOKENS = tuple(range(100, 112))
SPAN = Span(offset=3, length=6, digest=b"a" * 32)


def keys_of(
    tokens: tuple[int, ...] = TOKENS,
    spans: tuple[Span, ...] = (),
    *,
    salt: str | None = None,
    model: bytes = b"model",
    block_size: int = 4,
) -> list[bytes]:
    keys: list[bytes] = []
    PrefixCache(BlockPool(8, block_size), model=model).extend_keys(keys, tokens, spans, salt)
    return keys


def common(a: list[bytes], b: list[bytes]) -> int:
    """How many keys agree. None may agree after the first that differs."""
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert same == sorted(same, reverse=True)
    assert len({*a, *b}) == 2 * len(a) - sum(same)
    return sum(same)


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys_of(TOKENS[:n])) for n in (0, 3, 4, 7, 8, 12)] == [0, 0, 1, 1, 2, 3]


def test_keys_are_extended_as_tokens_arrive() -> None:
    prefix, keys = PrefixCache(BlockPool(8, 4), model=b"model"), list[bytes]()
    prefix.extend_keys(keys, TOKENS[:6], (SPAN,), "s")
    prefix.extend_keys(keys, TOKENS[4:11], (SPAN,), "s")
    prefix.extend_keys(keys, TOKENS[8:], (SPAN,), "s")
    assert keys == keys_of(spans=(SPAN,), salt="s")


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (3, 0), (4, 1), (11, 2)])
def test_a_token_changes_its_block_and_all_after(position: int, expected: int) -> None:
    other = TOKENS[:position] + (7,) + TOKENS[position + 1 :]
    assert common(keys_of(), keys_of(other)) == expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (replace(SPAN, digest=b"b" * 32), 0),
        (replace(SPAN, digest=b"a" * 31), 0),
        (replace(SPAN, layout=b"2 fps"), 0),
        (replace(SPAN, first_row=1), 0),
        (replace(SPAN, offset=2), 0),
        (replace(SPAN, offset=4), 0),
        (replace(SPAN, length=7), 0),
        (replace(SPAN, media_idx=5), 3),
    ],
)
def test_media_change_the_blocks_they_overlap(other: Span, expected: int) -> None:
    """The index of a media item in its request does not count as content."""
    assert common(keys_of(spans=(SPAN,)), keys_of(spans=(other,))) == expected


def test_a_media_item_after_a_block_does_not_change_it() -> None:
    late = Span(offset=9, length=2, digest=b"c" * 32)
    assert common(keys_of(), keys_of(spans=(late,))) == 2
    assert common(keys_of(spans=(SPAN,)), keys_of(spans=(SPAN, late))) == 2


def test_two_items_differ_from_one_item() -> None:
    halves = (replace(SPAN, length=3), replace(SPAN, offset=6, length=3))
    assert common(keys_of(spans=(SPAN,)), keys_of(spans=halves)) == 0


def test_salt_model_and_block_size_change_every_key() -> None:
    variants = [keys_of(salt=salt) for salt in (None, "", "a", "b")]
    variants += [keys_of(model=b"other"), keys_of(model=b"model\1"), keys_of(TOKENS[:9], block_size=3)]
    assert len({key for keys in variants for key in keys}) == sum(map(len, variants))


def test_a_salt_of_any_text_is_accepted() -> None:
    assert keys_of(salt="\ud800") != keys_of(salt="?")


def test_a_match_is_limited_to_a_number_of_tokens() -> None:
    pool = BlockPool(8, 4)
    prefix, keys = PrefixCache(pool, model=b"m"), list[bytes]()
    prefix.extend_keys(keys, TOKENS, (), None)
    blocks = pool.allocate(3)
    for key, block in zip(keys, blocks, strict=True):
        prefix.insert(key, block)
    assert prefix.match(keys, len(TOKENS) - 1) == blocks[:2]
    assert prefix.match(keys, len(TOKENS)) == blocks


def test_a_missing_block_ends_the_match() -> None:
    pool = BlockPool(8, 4)
    prefix, keys = PrefixCache(pool, model=b"m"), list[bytes]()
    prefix.extend_keys(keys, TOKENS, (), None)
    blocks = pool.allocate(3)
    prefix.insert(keys[0], blocks[0])
    prefix.insert(keys[2], blocks[2])
    assert prefix.match(keys, 12) == blocks[:1]


def test_the_first_block_inserted_under_a_key_stays() -> None:
    pool = BlockPool(8, 4)
    prefix, keys = PrefixCache(pool, model=b"m"), list[bytes]()
    prefix.extend_keys(keys, TOKENS[:4], (), None)
    first, second = pool.allocate(2)
    prefix.insert(keys[0], first)
    prefix.insert(keys[0], second)
    assert prefix.match(keys, 4) == (first,)
    pool.release((second,))
    pool.release((first,))
    prefix.check()
    assert pool.allocate(7)[-1] == first
    assert prefix.match(keys, 4) == ()
    prefix.check()
