"""The latency that Ray adds to a lone request: `python -m tests.ray.hop`. A server and a cluster with one replica of
the same model take turns; the result is a request's time minus the time that its engine reports."""

import statistics
import tempfile
import time
from pathlib import Path

import httpx2

from saccade import bundled
from tests.e2e.known import BUNDLED, Question
from tests.e2e.process import running
from tests.ray.running import cluster

NUM_ROUNDS = 100
ENGINE_STAGES = ("queue_ms", "prefill_ms", "decode_ms")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="hop-"))
    with running(bundled.path(), folder / "server", **BUNDLED) as server, cluster(folder / "ray") as nodes:
        nodes.deploy(replicas=1, **BUNDLED["engine"], **BUNDLED["limits"])
        nodes.wait_running(1)
        server.wait_ready()
        found: dict[str, list[tuple[float, float]]] = {"server": [], "ray": []}
        with server.client() as direct, nodes.client() as through:
            for number in range(NUM_ROUNDS):
                for name, client in (("server", direct), ("ray", through)):
                    found[name].append(overheads(client, number))
    for name, pairs in found.items():
        text, image = (statistics.quantiles(column, n=20) for column in zip(*pairs, strict=True))
        print(f"{name}: median (95th) ms beside the engine's: text {text[9]:.1f} ({text[18]:.1f}), ", end="")
        print(f"image {image[9]:.1f} ({image[18]:.1f})")


def overheads(client: httpx2.Client, number: int) -> tuple[float, float]:
    """Milliseconds that a text and an image request spent outside the engine."""
    text = {"messages": [{"role": "user", "content": f"{number}: hello"}], "max_tokens": 4, "ignore_eos": True}
    bodies = ({**text, "timings": True}, Question(number).body(timings=True))
    spent = []
    for body in bodies:
        begun = time.perf_counter()
        reply = client.post("/v1/chat/completions", json=body)
        total_ms = (time.perf_counter() - begun) * 1000
        assert reply.status_code == 200, reply.text
        spent.append(total_ms - sum(reply.json()["timings"].get(stage, 0.0) for stage in ENGINE_STAGES))
    return spent[0], spent[1]


if __name__ == "__main__":
    main()
