"""The soak: what it finds in figures that are fed to it, and that it finds nothing in the bundled model's server."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from saccade.bench.soak import soak_samples as held
from saccade.bench.soak.soak_client import SoakAnswer
from saccade.bench.soak.soak_command import bench_soak
from saccade.bench.soak.soak_files import image_sizes
from saccade.bench.soak.soak_gpu import UNKNOWN, gpu_bytes_of
from saccade.bench.soak.soak_requests import KINDS, OK, Manner, SoakRequest, SoakTarget, make_request
from saccade.bench.soak.soak_run import Soak
from saccade.bench.soak.soak_settings import SoakSettings
from saccade.bench.soak.soak_verdict import MAX_SHOWN, ResourceVerdict, SoakReport, judge, judge_resources, shown
from saccade.cli import main
from saccade.errors import ConfigError
from tests.bench.scripted import HangupError, Reply, as_json, plain, serving

MIB = 2**20
BOUND_S = 300.0
SEED = 10  # an animation, tools, a client that leaves and one that reads slowly come first
QUIET = {held.SERVER: 100.0 * MIB, held.ENGINE: 700.0 * MIB, held.FILES: 50.0, held.SOCKETS: 12.0, held.BLOCKS: 0.0}


def verdicts(name: str, values: list[float]) -> dict[str, ResourceVerdict]:
    idle = [QUIET | {name: value} for value in values]
    return {one.name: one for one in judge_resources({}, idle, {}, 64.0)}


@pytest.mark.parametrize(
    ("name", "values", "is_flat"),
    [
        (held.SERVER, [100.0 * MIB + i * 20 * MIB for i in range(9)], False),
        (held.ENGINE, [100.0 * MIB, *[165.0 * MIB] * 2], False),
        (held.SERVER, [100.0 * MIB + i * 5 * MIB for i in range(9)], True),
        (held.SERVER, [100.0 * MIB] * 4 + [900.0 * MIB] + [100.0 * MIB] * 4, True),  # it was given back
        (held.FILES, [50.0 + 2 * i for i in range(9)], False),
        (held.FILES, [50.0, 53, 49, 52, 50, 51], True),
        (held.SOCKETS, [12.0, 12, 14, 15, 18, 18], False),
        (held.GPU, [2.0**36] * 8 + [2.0**36 + 1], True),  # one look; the median counts
        (held.GPU, [2.0**36] * 6 + [2.0**36 + 1] * 3, False),
        (held.GPU_RESERVED, [2.0**35] * 6 + [2.0**35 + 1] * 3, False),
        (held.GPU_PROCESSES, [2.0**35] * 6 + [2.0**35 + 1] * 3, False),
        (held.GPU_PROCESSES, [2.0**35] * 9, True),
        (held.BLOCKS, [0.0, 0, 0, 1, 0, 0, 0], False),
        (held.RUNNING, [0.0] * 5, True),
        (held.RUNNING, [1.0] * 5, False),
        (held.SERVER, [100.0 * MIB], None),
    ],
)
def test_what_is_not_given_back_is_found(name: str, values: list[float], is_flat: bool | None) -> None:
    found = verdicts(name, values)
    assert found[name].is_flat is is_flat
    assert found[name].peak == max(values)
    assert {one.is_flat for other, one in found.items() if other != name} <= {True if len(values) > 1 else None}
    assert held.WAITING not in found or name == held.WAITING, "nobody told"


def test_on_a_gpu_of_many_only_the_own_memory_counts() -> None:
    """To the byte, and as it is printed."""
    own, device = 2**35 + 1, 2**36
    start = {held.GPU_RESERVED: 2.0**35, held.GPU: 2.0**36}
    idle = [{held.GPU_RESERVED: float(own), held.GPU: float(device + 2**30 * i)} for i in range(9)]
    found = {one.name: one for one in judge_resources(start, idle, {}, 64.0, is_gpu_shared=True)}
    assert found[held.GPU].is_flat is None and found[held.GPU_RESERVED].is_flat
    assert found[held.GPU_RESERVED].start == 2**35, "what was there before the first request is told"
    assert not {one.name: one for one in judge_resources(start, idle, {}, 64.0)}[held.GPU].is_flat
    assert shown(held.GPU_RESERVED, own) == "34,359,738,369 bytes"
    idle[-1] = idle[-2] = idle[-3] = {held.GPU_RESERVED: own + 1.0, held.GPU: 0.0}
    found = {one.name: one for one in judge_resources(start, idle, {}, 64.0, is_gpu_shared=True)}
    assert not found[held.GPU_RESERVED].is_flat


def driver_with(used: dict[int, int], calls: list[str]) -> SimpleNamespace:
    """Answers as the driver's library does: two GPUs, of which one is hidden."""

    def call(name: str) -> int:
        calls.append(name)
        return 0

    def count(found: Any) -> int:
        found._obj.value = 2
        return 0

    def handle(index: int, gpu: Any) -> int:
        gpu._obj.value = index + 1
        return index

    def processes(gpu: Any, count: Any, infos: Any) -> int:
        assert gpu.value == 1 and calls[-1] == "open"
        for place, (pid, used_bytes) in enumerate(used.items()):
            infos[place].pid, infos[place].used_bytes = pid, used_bytes
        count._obj.value = len(used)
        return 0

    return SimpleNamespace(
        nvmlInit_v2=partial(call, "open"),
        nvmlShutdown=partial(call, "close"),
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetComputeRunningProcesses_v3=processes,
    )


def test_gpu_memory_of_a_servers_processes_is_told_apart() -> None:
    calls: list[str] = []
    driver = driver_with({10: 2**33 + 7, 11: 2**20, 12: UNKNOWN, 99: 2**36}, calls)
    assert gpu_bytes_of([10, 11, 12, 13], driver) == 2**33 + 7 + 2**20
    assert calls == ["open", "close"]
    assert gpu_bytes_of([12, 13], driver) is None, "it knows them by other numbers, or tells nothing"
    assert gpu_bytes_of([10], object()) is None, "an old driver"


def test_job_processes_may_keep_some_memory_each() -> None:
    idle = [QUIET | {held.PROCESSES: float(n), held.JOBS: 60.0 * n * MIB} for n in (1, 1, 2, 2, 3, 3)]
    found = {one.name: one for one in judge_resources({}, idle, {held.JOBS: 900.0 * MIB}, 64.0)}
    assert found[held.JOBS].is_flat and found[held.JOBS].peak == 900 * MIB
    idle[-2:] = [QUIET | {held.PROCESSES: 3.0, held.JOBS: 600.0 * MIB}] * 2
    assert not {one.name: one for one in judge_resources({}, idle, {}, 64.0)}[held.JOBS].is_flat


def request(expected: frozenset[int] = OK, manner: Manner = "whole") -> SoakRequest:
    return SoakRequest(7, "some kind", b"{}", expected, manner)


@pytest.mark.parametrize(
    ("answer", "expected", "why"),
    [
        (SoakAnswer(200), OK, None),
        (SoakAnswer(400, problem="HTTP 400: no"), frozenset({400, 413}), None),
        (SoakAnswer(500, problem="HTTP 500: oh"), OK, "answered with 500, expected 200: HTTP 500: oh"),
        (SoakAnswer(200), frozenset({400, 413}), "answered with 200, expected 400 or 413"),
        (SoakAnswer(0, problem="no end after 3 s"), OK, "answered with nothing, expected 200: no end after 3 s"),
        (SoakAnswer(200, problem="incomplete reply"), OK, "incomplete reply"),
        (SoakAnswer(0, has_left=True), OK, None),
        (SoakAnswer(200, has_left=True, problem="incomplete reply"), OK, None),
        (SoakAnswer(503, has_left=True), OK, "answered with 503"),
        (SoakAnswer(0, has_left=True, problem="the connection was closed"), OK, "the connection was closed"),
    ],
)
def test_answers_that_were_not_expected_are_found(
    answer: SoakAnswer, expected: frozenset[int], why: str | None
) -> None:
    found = judge(request(expected), answer)
    assert found is None if why is None else found is not None and why in found


def test_unexpected_answers_are_counted_and_some_are_kept() -> None:
    tally = SoakReport(seed=0, model="m")
    tally.note(request(), SoakAnswer(200))
    for _ in range(3 * MAX_SHOWN):
        tally.note(request(), SoakAnswer(500))
    tally.note(request(manner="leave"), SoakAnswer(0, has_left=True))
    assert tally.answers == {"some kind": {"200": 1, "500": 3 * MAX_SHOWN, "left": 1}}
    assert tally.num_unexpected == 3 * MAX_SHOWN and len(tally.unexpected) == MAX_SHOWN
    assert tally.requests == 3 * MAX_SHOWN + 2
    assert (tally.unexpected[0].index, tally.unexpected[0].status) == (7, 500)


def test_requests_of_a_seed_are_the_same_and_of_every_kind() -> None:
    target = SoakTarget("m", True, 1024, image_sizes(500, 3))
    assert len(set(target.sizes)) == 500 and target.sizes == image_sizes(500, 3) != image_sizes(500, 4)
    made = [make_request(3, index, target) for index in range(1500)]
    assert made[::50] == [make_request(3, index, target) for index in range(0, 1500, 50)]
    assert Counter(one.kind for one in made).keys() == {kind.name for kind in KINDS}
    assert all(size in target.sizes for one in made for size in one.sizes)
    blind = SoakTarget("m", False, 1024, target.sizes)
    assert not any(b"image_url" in make_request(3, index, blind).body for index in range(300))


def write_process(proc: Path, pid: int, parent: int, pages: int, words: str, links: list[str]) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a) b) S {parent} 1 1")
    (folder / "statm").write_text(f"999 {pages} 1")
    (folder / "cmdline").write_bytes(words.replace(" ", "\0").encode())
    for number, link in enumerate(links):
        (folder / "fd" / str(number)).symlink_to(link)


def test_all_processes_of_a_server_are_counted(tmp_path: Path) -> None:
    files = ["/dev/null", "socket:[1]", "pipe:[2]", "socket:[3]"]
    write_process(tmp_path, 10, 1, 5, "python -m saccade serve", files)
    write_process(tmp_path, 11, 10, 7, "python -m saccade.execution.worker_start", files[:2])
    write_process(tmp_path, 12, 11, 3, "python -m saccade.scheduling.trial_process 4", files)
    write_process(tmp_path, 13, 10, 2, "python -m saccade.inputs.media.media_process 4", files)
    write_process(tmp_path, 20, 1, 100, "something else", files)
    page = os.sysconf("SC_PAGE_SIZE")
    assert held.process_figures(10, tmp_path) == {
        held.SERVER: 5 * page,
        held.ENGINE: 7 * page,
        held.JOBS: 5 * page,
        held.PROCESSES: 2,
        held.FILES: 6 - 2 * 2,
        held.SOCKETS: 3 - 2,
    }
    assert held.process_figures(99, tmp_path) == {}


LISTENER = """
import socket, sys
print("begun", flush=True)
sys.stdin.readline()
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.readline()
"""


def test_figures_of_this_machine_are_found() -> None:
    """Of a process of its own: this one may have others, of other tests, that open and close files meanwhile."""
    command = [sys.executable, "-I", "-c", LISTENER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        before = held.process_figures(process.pid)
        process.stdin.write("listen\n")
        process.stdin.flush()
        port = int(process.stdout.readline())
        after = held.process_figures(process.pid)
        assert after[held.SOCKETS] == before[held.SOCKETS] + 1 and after[held.FILES] == before[held.FILES] + 1
        assert held.listener("127.0.0.1", port) == process.pid
        process.stdin.close()
        process.wait(BOUND_S)
    assert held.listener("127.0.0.1", port) is None
    assert held.listener("192.0.2.1", port) is None


def test_metrics_of_any_server_are_read() -> None:
    lines = ['vllm:num_requests_running{engine="0"} 2', 'vllm:num_requests_running{engine="1"} 1']
    lines += ['vllm:cache_config_info{num_gpu_blocks="64"} 1', "vllm:kv_cache_usage_perc 0.25"]
    found = held.metric_figures("\n".join([*lines, ""]))
    assert found == {held.RUNNING: 3, held.BLOCKS: 16} and not held.is_idle(found)
    found = held.metric_figures(
        "saccade:gpu_memory_used_bytes 5\nsaccade:gpu_memory_reserved_bytes 3.4359738369e+010\n"
    )
    assert held.is_idle(found) and found == {held.GPU: 5, held.GPU_RESERVED: 2**35 + 1}


MODELS = as_json({"data": [{"id": "m", "max_model_len": 64, "capabilities": ["chat"]}]})


BOUND_MINUTES = BOUND_S / 60


def run_soak(**settings: Any) -> tuple[int, str]:
    text = io.StringIO()
    code = bench_soak("", SoakSettings(request_timeout_s=BOUND_S, **settings), Console(file=text, width=160))
    return code, text.getvalue()


def test_a_server_that_fails_is_given_up_and_told_of(tmp_path: Path) -> None:
    async def fails(asked: Any) -> Reply:
        if asked.path == "/v1/models":
            yield MODELS
        elif asked.path == "/metrics":
            yield plain(200, b"", "text/plain")
        elif len(asked.body) % 2:
            raise HangupError
        else:
            yield as_json({"error": {"message": "oh no"}}, 500)

    with serving(fails) as server:
        code, text = run_soak(minutes=BOUND_MINUTES, url=f"{server.url}/v1", json=str(tmp_path / "x.json"))
    saved = json.loads((tmp_path / "x.json").read_text())
    assert code == 1 and not saved["is_clean"] and saved["num_unexpected"] > 100
    assert "answered with 500, expected 200" in text and "problems found" in text


def test_a_soak_that_is_stopped_has_the_report_so_far() -> None:
    """The one client asks for the second time when it has its first answer, so that answer is in the report."""
    questions = count()
    stops: list[Callable[[], object]] = []

    async def works(asked: Any) -> Reply:
        if asked.path == "/v1/models":
            yield MODELS
        elif asked.path == "/health":
            yield as_json({"status": "ok"})
        elif asked.path == "/metrics":
            yield plain(200, b"", "text/plain")
        else:
            if next(questions):
                stops[0]()
            yield as_json({"error": {"message": "no"}}, 400)

    async def soak(url: str) -> SoakReport:
        settings = SoakSettings(request_timeout_s=BOUND_S, minutes=BOUND_MINUTES, url=url, concurrency=1)
        one = Soak(url, settings, None, lambda text: None)
        stops.append(partial(asyncio.get_running_loop().call_soon_threadsafe, one.stop))
        return await one.run()

    with serving(works) as server:
        report = asyncio.run(soak(server.url))
    assert report.is_interrupted and report.requests > 0 and not report.problems


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="minutes is 0"):
        SoakSettings(minutes=0)
    assert main(["bench", "soak", "--concurrency", "5000"]) == 2
    assert "at most 1024 (--concurrency)" in capsys.readouterr().err
    assert main(["bench", "soak", "a/model", "--url", "http://127.0.0.1:1"]) == 2
    assert "leave out MODEL" in capsys.readouterr().err
    assert main(["bench", "soak", "--url", "http://127.0.0.1:1"]) == 2
    assert "does not answer /v1/models" in capsys.readouterr().err
    assert main(["bench", "soak", "--url", "here"]) == 2
    assert "'here' is no address of a server; write http://HOST:PORT (--url)" in capsys.readouterr().err


def test_the_server_of_the_bundled_model_passes(tmp_path: Path) -> None:
    """A few seconds show no leaks, but every figure is there and no answer is unexpected."""
    code, text = run_soak(
        minutes=0.06, concurrency=4, rss_allowance_mib=1024, json=str(tmp_path / "x.json"), sample_s=0.5, seed=SEED
    )
    saved = json.loads((tmp_path / "x.json").read_text())
    assert code == 0, text
    assert saved["requests"] >= 4 and saved["answers"] and saved["health_largest_ms"] > 0
    told = {one["name"] for one in saved["resources"]}
    assert told == {*QUIET, held.JOBS, held.PROCESSES, held.RUNNING, held.WAITING}
    assert "no problems found" in text
