"""A Ray cluster of node processes on this machine, on loopback addresses, in a separate process. It reads commands and
writes answers as lines of JSON. When its input ends, it ends together with the cluster."""

import contextlib
import json
import os
import socket
import sys
from random import Random
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # on a busy machine 5 s are not enough
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")

import ray
from ray import serve
from ray.cluster_utils import Cluster

STORE_BYTES = 100 * 2**20
APP = "saccade"


class Driver:
    """The head offers five CPUs, other nodes two, so a front end that asks for three runs on the head."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._cluster = Cluster(initialize_head=True, head_node_args=self._node(5, include_dashboard=False))
        self._others = [self._cluster.add_node(**self._node(2))]
        ray.init(address=self._cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
        self.port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})

    def _node(self, num_cpus: int, **more: Any) -> dict[str, Any]:
        """Ray would replace 127.0.0.1 itself by the machine's address."""
        self._num_nodes += 1
        ip = f"127.0.0.{self._num_nodes + 1}"
        return {"num_cpus": num_cpus, "node_ip_address": ip, "object_store_memory": STORE_BYTES, **more}

    def deploy(self, **settings: Any) -> str:
        """Returns when the application is ready. A running application is updated."""
        from saccade.ray import build_app

        serve.run(build_app(settings), name=APP, route_prefix="/")
        return f"http://127.0.0.1:{self.port}"

    def place(self) -> dict[str, str]:
        """The addresses of the cluster and of its proxy."""
        return {"address": self._cluster.address, "url": f"http://127.0.0.1:{self.port}"}

    def num_replicas(self) -> dict[str, int]:
        """The number of engines in each state of Ray Serve."""
        found = serve.status().applications[APP].deployments["engines"].replica_states
        return {str(getattr(state, "value", state)): count for state, count in found.items()}

    def kill_node(self) -> int:
        """Kills the node process that is not the head, with everything that runs on it."""
        node = self._others.pop(0)
        pid: int = node.all_processes["raylet"][0].process.pid
        self._cluster.remove_node(node, allow_graceful=False)
        return pid

    def add_node(self) -> None:
        self._others.append(self._cluster.add_node(**self._node(2)))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def free_port() -> int:
    """A port outside the ephemeral range of the kernel and that of Ray's workers (10002 to 19999). The cluster takes
    hundreds of those in the seconds before the proxy listens."""
    for port in Random().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("of a hundred ports below those of the kernel, none is free")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to the log
    driver = Driver()
    try:
        for line in sys.stdin:
            name, settings = json.loads(line)
            try:
                said = {"answer": getattr(driver, name)(**settings)}
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(said) + "\n")
            answers.flush()
    finally:
        driver.close()


if __name__ == "__main__":
    main()
