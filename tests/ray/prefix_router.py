"""Ray's own router for language models next to ours, in the simulation of `saccade bench scale`:
`python -m tests.ray.prefix_router [REPLICAS ...]`. Its prefix tree is Ray's; it is asked as
`PrefixCacheAffinityRouter` of Ray 2.60 asks it with its defaults, about what that router reads of a request: the text,
without images."""

import sys
from collections.abc import Mapping
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from saccade.bench.scale.scale_settings import ScaleSettings
from saccade.bench.scale.scale_workload import Arrival
from saccade.bench.scale.simulation import Simulation

MATCH_RATE = 0.1  # below it the replica with the least text takes a request
FIRST_CHARACTER = 0x20000  # random tokens become characters, one each


class PrefixTreePolicy:
    """`text` is that of the next request."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self.num_asked = 0
        self.text = ""

    def order(self, key: bytes, tokens: int, loads: Mapping[str, int]) -> list[str]:
        if not self.num_asked:
            self._tree.add_tenants(list(loads), 0)
        self.num_asked += 1
        matched, names = self._tree.prefix_match(self.text, list(loads))
        if len(matched) < MATCH_RATE * len(self.text):
            names = self._tree.get_smallest_tenants()
        chosen = min(names or loads, key=loads.__getitem__)
        self._tree.insert(self.text, chosen, self.num_asked)
        return [chosen, *(name for name in loads if name != chosen)]


class PrefixTreeSimulation(Simulation):
    """All requests come through one router."""

    def __init__(self, settings: ScaleSettings, num_replicas: int) -> None:
        policy = self._tree_policy = PrefixTreePolicy()
        super().__init__(settings, num_replicas, "Ray's prefix tree", policy_for=lambda _: policy)

    @property
    def num_asked(self) -> int:
        return self._tree_policy.num_asked

    def _admit(self, arrival: Arrival) -> None:
        start = max((span.end for span in arrival.request.spans), default=0)
        self._tree_policy.text = text_of(arrival.request.prompt_ids[start:])
        super()._admit(arrival)


def text_of(token_ids: tuple[int, ...]) -> str:
    return "".join(chr(FIRST_CHARACTER + token % 0x10000) for token in token_ids)


def main(*words: str) -> int:
    settings = ScaleSettings()
    for count in [int(word) for word in words] or [8, 64]:
        simulations: list[Any] = [PrefixTreeSimulation(settings, count)]
        simulations += [Simulation(settings, count, policy) for policy in ("affinity", "round-robin")]
        for line in (simulation.run() for simulation in simulations):
            print(
                f"{count} replicas, {line.policy}: encoder hits {line.encoder_hit_rate:.1%}, prefix hits "
                f"{line.prefix_hit_rate:.1%}, TTFT {line.ttft_p50_ms:.0f} / {line.ttft_p99_ms:.0f} ms, "
                f"busiest {line.busiest:.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
