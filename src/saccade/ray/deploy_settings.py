"""How many replicas run, and where."""

from dataclasses import dataclass

from saccade.config import check_above_zero, check_at_least, check_not_negative, refused, setting
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploySettings:
    """Replicas on a Ray cluster. A replica uses one GPU for each of its ranks, all on one machine."""

    address: str = setting("auto", "address of the Ray cluster; auto: the one this machine belongs to")
    app_name: str = setting("saccade", "name of the application in Ray Serve; deploying it again updates it")
    route_prefix: str = setting("/", "path under which Ray Serve's proxies serve the application")
    replicas: int = setting(1, "number of engines, each with the whole model; the minimum if --max-replicas is set")
    max_replicas: int = setting(
        0, "number of engines to scale up to under load, with --replicas as the minimum; 0: no scaling"
    )
    target_tokens: int = setting(32768, "tokens queued and running per engine above which more engines are started")
    target_requests: int = setting(128, "requests queued and running per engine above which more engines are started")
    look_back_s: float = setting(
        30.0, "seconds over which load is averaged for scaling; Ray Serve collects it every 10"
    )
    upscale_delay_s: float = setting(10.0, "seconds that a need for more engines must last before they are started")
    downscale_delay_s: float = setting(300.0, "seconds that fewer engines must be enough before some are stopped")
    replica_gpus: float = setting(-1.0, "GPUs per engine; -1: one per rank, and none on a CPU or for the bundled model")
    replica_cpus: float = setting(1.0, "CPU cores reserved for each engine")
    ingress_replicas: int = setting(1, "number of front ends; each can serve any request")
    ingress_cpus: float = setting(1.0, "CPU cores reserved for each front end")
    stats_period_s: float = setting(1.0, "seconds between two reports of an engine's load to the front ends")
    health_period_s: float = setting(
        2.0, "seconds between two checks of an engine; after three failures it is replaced"
    )

    def __post_init__(self) -> None:
        check_at_least(self, {"replicas": 1, "ingress_replicas": 1, "target_tokens": 1, "target_requests": 1})
        check_above_zero(self, "look_back_s", "stats_period_s", "health_period_s")
        check_not_negative(self, "upscale_delay_s", "downscale_delay_s", "replica_cpus", "ingress_cpus")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; it must be at least replicas, which is {self.replicas} "
                "(--max-replicas, --replicas)"
            )
        if not self.route_prefix.startswith("/"):
            raise refused("route_prefix", repr(self.route_prefix), "it must begin with /")

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.max_replicas)
