"""Builds the application: an ingress in front of replicas of the model."""

import socket
from collections.abc import Mapping
from typing import Any

from saccade.errors import ConfigError
from saccade.ray.deploy_plan import DeployPlan, encode_plan, read_plan

try:
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
except ImportError:
    raise ConfigError('saccade.ray needs Ray; install it with `pip install "saccade-vlm[ray]"`') from None

INGRESS_REQUESTS = 2**16  # at a time; the front end's own limits are lower and give clients a reason
CONNECT_S = 5.0
ENGINES, FRONT = "engines", "front"


def build_app(args: dict[str, Any]) -> Any:
    """A Ray Serve application. `args` has `model` and settings under the names of their flags; see `read_plan`."""
    return build(read_plan(args))


def build(plan: DeployPlan) -> Any:
    # Imported late: these load the whole client and front end.
    from saccade.ray.engine_replica import EngineReplica
    from saccade.ray.ingress import Ingress

    packed = encode_plan(plan)
    engines = serve.deployment(EngineReplica, name=ENGINES, **engine_options(plan)).bind(packed)
    front = serve.deployment(
        serve.ingress()(Ingress),
        name=FRONT,
        num_replicas=plan.deploy.ingress_replicas,
        max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": plan.deploy.ingress_cpus},
        graceful_shutdown_timeout_s=plan.server.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return front.bind(packed, engines)


app = build_app


def deploy(plan: DeployPlan) -> str:
    """Deploys or updates the application on a running cluster; returns its address once it is ready."""
    address = plan.deploy.address
    try:
        _check_reachable(address)
        ray.init(address=address, namespace=plan.deploy.app_name, log_to_driver=False, ignore_reinit_error=True)
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address} (--address; `ray start --head` starts one)") from error
    serve.start(proxy_location="EveryNode", http_options={"host": plan.server.host, "port": plan.server.port})
    serve.run(build(plan), name=plan.deploy.app_name, route_prefix=plan.deploy.route_prefix)
    return f"http://{plan.server.host}:{plan.server.port}{plan.deploy.route_prefix}"


def _check_reachable(address: str) -> None:
    """Fails fast: Ray itself keeps trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def engine_options(plan: DeployPlan) -> dict[str, Any]:
    """Options of the engine deployment."""
    deploy, needs = plan.deploy, {"CPU": plan.deploy.replica_cpus, "GPU": float(plan.num_gpus)}
    options: dict[str, Any] = {
        "max_ongoing_requests": plan.most_inside,
        "ray_actor_options": {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"]},
        "health_check_period_s": deploy.health_period_s,
        "graceful_shutdown_timeout_s": plan.server.shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": RequestRouterConfig(
            request_router_class="saccade.ray.affinity_router:AffinityRouter",
            request_router_kwargs={"policy": plan.server.routing, "room_tokens": plan.room_tokens},
            request_routing_stats_period_s=deploy.stats_period_s,
        ),
        **_count(plan),
    }
    if plan.num_gpus > 1:  # the ranks of a replica share a machine
        options["placement_group_bundles"] = [{name: amount for name, amount in needs.items() if amount}]
        options["placement_group_strategy"] = "STRICT_PACK"
    return options


def _count(plan: DeployPlan) -> Mapping[str, Any]:
    deploy = plan.deploy
    if not deploy.max_replicas:
        return {"num_replicas": deploy.replicas}
    policy = AutoscalingPolicy(
        policy_function="saccade.ray.autoscaling:TokenScaling",
        policy_kwargs={"target_tokens": deploy.target_tokens, "target_requests": deploy.target_requests},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=deploy.replicas,
            max_replicas=deploy.max_replicas,
            look_back_period_s=deploy.look_back_s,
            upscale_delay_s=deploy.upscale_delay_s,
            downscale_delay_s=deploy.downscale_delay_s,
            policy=policy,
        )
    }
