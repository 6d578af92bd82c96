"""Ray's own router reads only text, so it does not find replicas that have an image cached."""

from dataclasses import replace

from saccade.bench.scale.simulation import Simulation
from tests.bench.test_scale import SMALL
from tests.ray.prefix_router import PrefixTreePolicy, PrefixTreeSimulation, text_of


def test_our_router_finds_images_that_rays_router_does_not() -> None:
    ours = Simulation(SMALL, 8, "affinity").run()
    theirs = PrefixTreeSimulation(SMALL, 8).run()
    assert theirs.finished == ours.finished == 800
    assert ours.encoder_hit_rate > 1.5 * theirs.encoder_hit_rate
    assert ours.prefix_hit_rate > 1.5 * theirs.prefix_hit_rate


def test_rays_router_finds_texts() -> None:
    """Otherwise the router was used wrongly, and the comparison means nothing."""
    policy, loads = PrefixTreePolicy(), {"a": 0, "b": 0, "c": 0}
    chosen = {}
    for number in range(3):
        policy.text = text_of(tuple(range(1000 * number, 1000 * number + 50)))
        chosen[number] = policy.order(b"", 1, loads)[0]
    assert {*chosen.values()} == {*loads}
    for number in (2, 0, 1, 1):
        policy.text = text_of((*range(1000 * number, 1000 * number + 50), 7))
        assert policy.order(b"", 1, loads)[0] == chosen[number]


def test_every_request_goes_through_the_router() -> None:
    simulation = PrefixTreeSimulation(replace(SMALL, requests_per_replica=5), 2)
    simulation.run()
    assert simulation.num_asked == 10
