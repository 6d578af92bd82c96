"""Requests go where their images are, no replica exceeds its bound, and replicas that come and go move little."""

import subprocess
import sys
from collections import Counter
from random import Random, randbytes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import ConfigError
from saccade.inputs.placeholders import Media, text_prompt
from saccade.inputs.plans import MediaPlan
from saccade.routing import (
    POLICIES,
    ConsistentHashing,
    LeastLoaded,
    Policy,
    RoundRobin,
    Router,
    affinity_key,
    make_policy,
    request_tokens,
)
from saccade.routing.affinity import HEAD_TOKENS, MAX_OUTPUT_TOKENS
from saccade.server.server_settings import ServerSettings
from saccade.wire.sampling_params import SamplingParams

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
keys = st.binary(min_size=1, max_size=16)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, count)]


@given(names, st.lists(st.tuples(keys, st.integers(1, 500), st.booleans()), max_size=60), st.floats(1, 3))
def test_no_replica_exceeds_the_bound_unless_it_was_the_least_loaded(
    replicas: list[str], arrivals: list[tuple[bytes, int, bool]], bound: float
) -> None:
    policy = ConsistentHashing(bound)
    router = Router(policy)
    for name in replicas:
        router.join(name)
    inside = []
    for key, tokens, ends in arrivals:
        before = router.loads
        taken = router.assign(key, tokens)
        assert taken is not None
        mean = (sum(before.values()) + tokens) / len(before)
        within = router.loads[taken.replica] <= np.ceil(bound * mean)
        assert within or before[taken.replica] == min(before.values())
        inside.append(taken)
        if ends:
            router.finish(inside.pop(0))
    for one in inside:
        router.finish(one)
    assert set(router.loads.values()) == {0}


@given(names, st.lists(keys, min_size=1, max_size=60))
def test_requests_of_one_token_never_exceed_the_bound(replicas: list[str], arrivals: list[bytes]) -> None:
    router = Router(ConsistentHashing(1.25))
    for name in replicas:
        router.join(name)
    for count, key in enumerate(arrivals, start=1):
        router.assign(key, 1)
        assert max(router.loads.values()) <= np.ceil(1.25 * count / len(replicas))


@given(names, names, keys)
def test_a_replica_that_joins_or_leaves_moves_only_its_own_keys(few: list[str], more: list[str], key: bytes) -> None:
    policy = ConsistentHashing()
    both = [*few, *(name for name in more if name not in few)]
    kept = [name for name in policy.ranked(key, dict.fromkeys(both, 0)) if name in few]
    assert kept == policy.ranked(key, dict.fromkeys(few, 0))


def test_a_new_replica_gets_its_fair_share_of_keys() -> None:
    policy, num_keys = ConsistentHashing(), 4000
    drawn = [randbytes(16) for _ in range(num_keys)]
    old, new = ({f"r{i}": 0 for i in range(count)} for count in (8, 9))
    moved = [key for key in drawn if policy.ranked(key, old)[0] != policy.ranked(key, new)[0]]
    assert {policy.ranked(key, new)[0] for key in moved} == {"r8"}
    assert num_keys / 9 * 0.75 < len(moved) < num_keys / 9 * 1.25  # five standard deviations


def test_keys_spread_evenly() -> None:
    policy, loads = ConsistentHashing(), {f"10.0.0.{i}": 0 for i in range(16)}
    shares = Counter(policy.ranked(randbytes(16), loads)[0] for _ in range(8000))
    assert set(shares) == set(loads)
    assert max(shares.values()) < 500 * 1.3


def test_the_order_of_replicas_does_not_matter_and_is_the_same_in_another_process() -> None:
    program = (
        "from saccade.routing import ConsistentHashing;"
        "print([ConsistentHashing().ranked(bytes([k]), dict.fromkeys('abcdef', 0)) for k in range(50)])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    shuffled = Random(7).sample("abcdef", 6)
    here = [ConsistentHashing().ranked(bytes([k]), dict.fromkeys(shuffled, 0)) for k in range(50)]
    assert out.strip() == str(here)


def test_a_hot_image_spreads_over_as_many_replicas_as_it_needs_and_returns() -> None:
    router = Router(ConsistentHashing())
    for name in "abcd":
        router.join(name)
    inside = [router.assign(b"hot", 100) for _ in range(40)]
    assert max(router.loads.values()) <= 1250
    home = inside[0].replica if inside[0] else ""
    for one in filter(None, inside):
        router.finish(one)
    again = router.assign(b"hot", 100)
    assert again is not None and again.replica == home


def test_a_replica_with_room_keeps_its_images() -> None:
    router = Router(ConsistentHashing(room_tokens=1000))
    for name in "abcd":
        router.join(name)
    taken = [router.assign(b"hot", 100) for _ in range(11)]
    homes = [one.replica for one in taken if one is not None]
    assert len(set(homes[:10])) == 1
    assert homes[10] != homes[0]


@pytest.mark.parametrize("policy", [ConsistentHashing(), RoundRobin(), LeastLoaded()])
@given(loads=st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 1000), min_size=1, max_size=9), key=keys)
def test_every_policy_orders_all_replicas(policy: Policy, loads: dict[str, int], key: bytes) -> None:
    assert sorted(policy.order(key, 10, loads)) == sorted(loads)


def test_round_robin_takes_turns_and_least_loaded_looks_at_loads() -> None:
    turns = RoundRobin()
    assert [turns.order(b"k", 1, {"a": 9, "b": 0})[0] for _ in range(4)] == ["a", "b", "a", "b"]
    least = LeastLoaded()
    assert {least.order(b"k", 1, {"a": 9, "b": 3, "c": 4})[0] for _ in range(4)} == {"b"}
    assert {least.order(b"k", 1, {"a": 0, "b": 0})[0] for _ in range(2)} == {"a", "b"}


def test_a_replica_that_rejoins_has_no_load_and_late_finishes_change_nothing() -> None:
    router = Router(LeastLoaded())
    router.join("a")
    taken = router.assign(b"k", 100)
    router.leave("a")
    assert router.assign(b"k", 1) is None
    router.join("a")
    assert taken is not None
    router.finish(taken)
    assert router.loads == router.num_requests == {"a": 0}


def test_avoided_replicas_are_not_chosen() -> None:
    router = Router(ConsistentHashing())
    router.join("a")
    router.join("b")
    taken = [router.assign(b"k", 1, avoid={"a"}) for _ in range(5)]
    assert {one.replica for one in taken if one is not None} == {"b"}
    assert router.assign(b"k", 1, avoid={"a", "b"}) is None


def test_the_key_covers_the_first_image_and_the_salt() -> None:
    plain = text_prompt(tokens_of(300))
    pixels = np.zeros((4, 4, 3), np.uint8)
    plan = MediaPlan.__new__(MediaPlan)
    first, second = (Media("image", pixels, plan, randbytes(32)) for _ in range(2))

    def key(*media: Media, seed: int = 0, salt: str | None = None) -> bytes:
        prompt = text_prompt(tokens_of(300, seed))
        return affinity_key(type(prompt)(prompt.token_ids, prompt.positions_3T, 0, media=media), salt)

    assert key(first) == key(first, second, seed=1) != key(second, first)
    assert key(first) != key(first, salt="") != key(first, salt="tenant") != key(salt="tenant")
    assert key() == affinity_key(plain) != affinity_key(plain, "tenant")


def test_the_key_of_text_covers_its_beginning() -> None:
    head = tokens_of(HEAD_TOKENS)
    one, other = text_prompt([*head, 1, 2, 3]), text_prompt([*head, 4])
    assert affinity_key(one) == affinity_key(other) != affinity_key(text_prompt([*head[:-1], head[-1] + 1]))


def test_a_request_counts_its_prompt_and_a_bounded_output() -> None:
    assert request_tokens(100, SamplingParams(max_tokens=16, n=2)) == 132
    assert request_tokens(100, SamplingParams(max_tokens=10**6)) == 100 + MAX_OUTPUT_TOKENS
    assert request_tokens(100, SamplingParams(max_tokens=None)) == 100 + MAX_OUTPUT_TOKENS


def test_the_refusal_of_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'random'; allowed: affinity, least-loaded, round-robin"):
        make_policy("random")
    with pytest.raises(ConfigError, match="it must be at least 1"):
        ConsistentHashing(bound=0.5)
    with pytest.raises(ConfigError, match=f"allowed are {', '.join(POLICIES)} [(]--routing[)]"):
        ServerSettings(routing="random")
    kinds = {"affinity": ConsistentHashing, "least-loaded": LeastLoaded, "round-robin": RoundRobin}
    assert {name: type(make_policy(name, room_tokens=7)) for name in POLICIES} == kinds


def test_the_bound_applies_to_the_mean_including_the_request() -> None:
    policy = ConsistentHashing(bound=1.5)
    assert policy.most_tokens(10, {"a": 30, "b": 0}) == 30 and policy.most_tokens(10, {"a": 0}) == 15
    assert ConsistentHashing(bound=1.5, room_tokens=100).most_tokens(10, {"a": 30, "b": 0}) == 100
