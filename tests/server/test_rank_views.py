"""What a server reports about the ranks that share its model."""

import asyncio
import io
import socket
from typing import Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console

from saccade.server import front_end
from saccade.server.lifecycle import Launch
from saccade.server.server_settings import ServerSettings
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.messages import Ready, decode_reply, encode
from saccade.wire.tensor_parallel import ONE_RANK, AllReduceChoice, RankShare, TensorParallel
from tests.server.fake import Caller, FakeEngine, service_for
from tests.server.test_metrics import samples

CHOICES = (
    AllReduceChoice(algorithm="one_shot", up_to_bytes=256 * 1024),
    AllReduceChoice(algorithm="two_shot"),
)
TWO = TensorParallel(
    size=2,
    backend="symmetric memory",
    reason="every GPU can read the others' memory",
    reserved_bytes=2**20,
    all_reduce=CHOICES,
    microseconds={"16384": {"one_shot": 5.5, "two_shot": 8.25}},
    held=tuple(RankShare(rank=rank, weights_bytes=100 - rank, num_blocks=7) for rank in range(2)),
)


def test_graphs_and_metrics_show_the_ranks(engine: FakeEngine) -> None:
    engine.ready = structs.replace(engine.ready, ranks=TWO)
    caller = Caller(service_for(engine))
    shown = asyncio.run(caller.get("/graphs")).json["ranks"]
    assert (shown["size"], shown["backend"], shown["reason"]) == (2, TWO.backend, TWO.reason)
    assert shown["all_reduce"] == [
        {"algorithm": "one_shot", "up_to_bytes": 262144},
        {"algorithm": "two_shot", "up_to_bytes": None},
    ]
    assert shown["microseconds"]["16384"]["two_shot"] == 8.25
    assert [(one["rank"], one["weights_bytes"], one["num_blocks"]) for one in shown["held"]] == [
        (0, 100, 7),
        (1, 99, 7),
    ]
    found = samples(asyncio.run(caller.get("/metrics")).body.decode())
    assert [one.value for one in found["saccade:tensor_parallel_size"]] == [2]
    [info] = found["saccade:all_reduce_info"]
    assert (info.labels, info.value) == ({"backend": "symmetric memory"}, 1)


def test_a_single_rank_has_no_all_reduce(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine))
    found = samples(asyncio.run(caller.get("/metrics")).body.decode())
    assert found["saccade:tensor_parallel_size"][0].value == 1 and "saccade:all_reduce_info" not in found
    assert asyncio.run(caller.get("/graphs")).json["ranks"]["size"] == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (TWO, "2 ranks; all-reduce: symmetric memory, one-shot up to 256 KiB, two-shot above"),
        (TensorParallel(size=4, backend="gloo", reason="the device is a CPU"), "4 ranks; all-reduce: gloo"),
        (
            TensorParallel(size=2, backend="symmetric memory", all_reduce=(AllReduceChoice(algorithm="one_shot"),)),
            "2 ranks; all-reduce: symmetric memory, one-shot",
        ),
        (
            TensorParallel(size=2, backend="NCCL", reason="GPU 0 cannot read the memory of GPU 1"),
            "2 ranks; all-reduce: NCCL (GPU 0 cannot read the memory of GPU 1)",
        ),
        (TensorParallel(size=2, backend="gloo", encoder_mode="weights"), "2 ranks; all-reduce: gloo"),
        (
            TensorParallel(size=2, backend="gloo", encoder_mode="data", encoder_reason="num_heads = 5"),
            "2 ranks; all-reduce: gloo; each rank encodes whole images (num_heads = 5)",
        ),
        (ONE_RANK, "1 rank"),
    ],
)
def test_the_summary_names_backend_and_algorithms(ranks: TensorParallel, text: str) -> None:
    assert ranks.summary() == text


def test_ranks_survive_the_wire() -> None:
    ready = Ready(SchedulerSettings(), 64, 16, 0, TWO)
    assert decode_reply(encode(ready)) == ready


def test_the_description_of_collectives_is_understood() -> None:
    """The fields of `describe` in kernels/symmetric_collectives.py."""
    said = {
        "rank": 0,
        "size": 2,
        "backend": "symmetric memory",
        "reason": "r",
        "reserved_bytes": 5,
        "all_reduce": [{"algorithm": "one_shot", "up_to_bytes": None}],
        "microseconds": {"16384": {"one_shot": 3.0}},
    }
    found = msgspec.convert(said, TensorParallel)
    assert found.all_reduce == (AllReduceChoice(algorithm="one_shot"),) and found.microseconds == said["microseconds"]


def test_startup_prints_the_summary_of_the_ranks(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*given: Any) -> FakeEngine:
        return engine

    def said() -> str:
        front = front_end._Front(ServerSettings(), plan, Console(file=(file := io.StringIO()), width=200))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            asyncio.run(front._start(listener))
        return file.getvalue()

    monkeypatch.setattr(front_end, "start", start)
    plan = Launch("m")
    assert "rank" not in said() and "ready on" in said()
    engine.ready = structs.replace(engine.ready, ranks=TWO)
    assert TWO.summary() in said()
