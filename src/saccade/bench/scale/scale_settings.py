"""Settings of `saccade bench scale`. Imports no torch, because the command line builds its flags from them."""

from dataclasses import dataclass

from saccade.config import Word, check_at_least, refused, setting
from saccade.errors import ConfigError

UNBOUNDED = "affinity-unbounded"
SCALE_POLICIES = ("affinity", UNBOUNDED, "least-loaded", "round-robin")
MAX_REPLICAS, MAX_REQUESTS = 4096, 10**7


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSettings:
    """What `saccade bench scale` simulates. By default a replica is an H200 with Qwen3-VL-8B."""

    replicas: tuple[int, ...] = setting((1, 8, 64, 512), "numbers of replicas to simulate, such as 8,64")
    policies: tuple[Word, ...] = setting(
        SCALE_POLICIES, "routing policies: affinity, affinity-unbounded (no bound on loads), least-loaded, round-robin"
    )
    requests_per_replica: int = setting(160, "requests to simulate for each replica, which start with empty caches")
    warm_up: float = setting(0.5, "share of the requests that fill the caches before anything is counted")
    request_rate: float = setting(100.0, "requests that arrive per second and replica (Poisson arrivals)")
    images_per_replica: int = setting(100, "different images for each replica; every request asks about one of them")
    zipf: float = setting(0.8, "how uneven images are liked: the n-th is asked about n**-zipf times as often")
    hot_share: float = setting(0.05, "share of all requests that ask about one more image, the hot one")
    output_tokens: int = setting(8, "tokens of an answer on average; from 1 to twice as many, all as likely")
    routers: int = setting(
        1, "front ends, each with a router that counts what it sent itself; requests reach one at random"
    )
    report_s: float = setting(
        1.0, "seconds between two reports of all loads to the routers, where there are several; 0: no reports"
    )
    max_num_seqs: int = setting(64, "requests that run at the same time on a replica; larger batches were not timed")
    kv_cache_tokens: int = setting(758_016, "tokens of a replica's KV cache")
    encoder_cache_tokens: int = setting(16_384, "image rows of a replica's encoder cache")
    seed: int = setting(0, "requests of a seed are always the same, and so are all figures")
    json: str = setting("", "file to write the figures to")
    plot: str = setting("", "PNG or SVG file to draw the figures to")

    def __post_init__(self) -> None:
        check_at_least(self, {"requests_per_replica": 2, "images_per_replica": 1, "output_tokens": 1, "routers": 1})
        check_at_least(self, {"zipf": 0, "seed": 0, "max_num_seqs": 1, "report_s": 0})
        check_at_least(self, {"kv_cache_tokens": 2048, "encoder_cache_tokens": 1024})
        if not self.replicas or not all(1 <= count <= MAX_REPLICAS for count in self.replicas):
            raise ConfigError(f"replicas is {self.replicas}; give numbers of 1 to {MAX_REPLICAS} (--replicas)")
        if not self.policies or not set(self.policies) <= set(SCALE_POLICIES):
            raise ConfigError(f"policies is {self.policies}; allowed: {', '.join(SCALE_POLICIES)} (--policies)")
        if max(self.replicas) * self.requests_per_replica > MAX_REQUESTS:
            raise ConfigError(
                f"{max(self.replicas)} replicas with {self.requests_per_replica} requests each are more than "
                f"{MAX_REQUESTS} requests (--replicas, --requests-per-replica)"
            )
        for name in ("warm_up", "hot_share"):
            if not 0 <= getattr(self, name) < 1:
                raise refused(name, getattr(self, name), "it must be at least 0 and below 1")
        if not 0 < self.request_rate <= 1e6:
            raise ConfigError(f"request_rate is {self.request_rate}; above 0 to 1e6 is allowed (--request-rate)")
        if self.plot and not self.plot.lower().endswith((".png", ".svg")):
            raise ConfigError(f"plot is {self.plot!r}; the name must end in .png or .svg (--plot)")
