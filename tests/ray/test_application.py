"""The options given to Ray Serve; no cluster is needed."""

import socket
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.ray.application import deploy, engine_options
from saccade.ray.deploy_plan import read_plan


def options(**settings: Any) -> dict[str, Any]:
    return engine_options(read_plan({"model": "org/name", **settings}))


def test_the_ranks_of_a_replica_share_a_machine() -> None:
    found = options(tensor_parallel_size=4, replica_cpus=8, replicas=3)
    assert found["ray_actor_options"] == {"num_cpus": 8, "num_gpus": 4} and found["num_replicas"] == 3
    assert found["placement_group_bundles"] == [{"CPU": 8, "GPU": 4}]
    assert found["placement_group_strategy"] == "STRICT_PACK"
    assert "placement_group_bundles" not in options() and options()["ray_actor_options"]["num_gpus"] == 1
    assert options(device="cpu")["ray_actor_options"]["num_gpus"] == 0


def test_replicas_are_scaled_by_tokens_and_routed_by_images() -> None:
    found = options(replicas=2, max_replicas=9, target_tokens=1000, target_requests=7, routing="least-loaded")
    scaling = found["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 9) and "num_replicas" not in found
    assert scaling.policy.policy_function == "saccade.ray.autoscaling:TokenScaling"
    assert scaling.policy.policy_kwargs == {"target_tokens": 1000, "target_requests": 7}
    router = found["request_router_config"]
    assert router.request_router_class == "saccade.ray.affinity_router:AffinityRouter"
    assert router.request_router_kwargs == {"policy": "least-loaded", "room_tokens": 2 * 8192}
    assert found["max_ongoing_requests"] == 256 + 4096


def test_an_unreachable_cluster_gives_a_clear_error() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address} .--address; `ray start --head`"):
            deploy(read_plan({"address": address}))
