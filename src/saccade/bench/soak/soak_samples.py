"""The resources of a server: memory, files and sockets of its processes, as Linux reports them, and its /metrics."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from saccade.bench.load.metrics_text import family_and_labels, parse_metrics
from saccade.bench.soak.soak_gpu import gpu_bytes_of

PROC = Path("/proc")
# The processes that decode media and compile grammars.
JOB_MODULES = (b"saccade.inputs.media.media_process", b"saccade.scheduling.trial_process")
# What the parent holds open for each job process. It is not counted, because these processes come and go.
JOB_FILES, JOB_SOCKETS = 2, 1
SERVER, ENGINE, JOBS = "RSS, server", "RSS, engine", "RSS, job processes"
FILES, SOCKETS, PROCESSES = "open files", "sockets", "job processes"
RUNNING, WAITING, BLOCKS = "requests running", "requests waiting", "KV blocks in use"
# Memory of the whole device, of the engine's allocator, and of the server's processes as the driver reports it.
GPU, GPU_RESERVED, GPU_PROCESSES = "GPU memory, device", "GPU memory, allocator", "GPU memory, processes"
BUSY = (RUNNING, WAITING, BLOCKS)  # all 0 when a server is idle
_NAMES = {
    RUNNING: ("vllm:num_requests_running", "sglang:num_running_reqs"),
    WAITING: ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    GPU: ("saccade:gpu_memory_used_bytes",),
    GPU_RESERVED: ("saccade:gpu_memory_reserved_bytes",),
}
_USAGES = ("vllm:kv_cache_usage_perc", "sglang:token_usage")


def process_figures(root: int, proc: Path = PROC) -> dict[str, float]:
    """Figures of a server's process and its descendants. Files and sockets are those of server and engine, without
    those of the pools for media and grammars. Empty if there is no such process, or no /proc."""
    found = dict.fromkeys((SERVER, ENGINE, JOBS, FILES, SOCKETS, PROCESSES), 0.0)
    if not (proc / str(root)).is_dir():
        return {}
    family = _family(root, proc)
    if (gpu_bytes := gpu_bytes_of(family)) is not None:
        found[GPU_PROCESSES] = gpu_bytes
    for pid in family:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            is_job = pid != root and any(module in _words(pid, proc) for module in JOB_MODULES)
            found[SERVER if pid == root else JOBS if is_job else ENGINE] += _resident_bytes(pid, proc)
            try:
                num_files, num_sockets = (0, 0) if is_job else _count_files(pid, proc)
            except PermissionError:
                return {name: value for name, value in found.items() if name not in (FILES, SOCKETS)}
            found[FILES] += num_files - JOB_FILES * is_job
            found[SOCKETS] += num_sockets - JOB_SOCKETS * is_job
            found[PROCESSES] += is_job
    return found


def metric_figures(text: str) -> dict[str, float]:
    """Figures from a server's /metrics, without those that it does not have."""
    sums, num_blocks = dict[str, float](), 0.0
    for samples in parse_metrics(text):
        for name, value in samples.items():
            family, labels = family_and_labels(name)
            sums[family] = sums.get(family, 0.0) + value
            if family.endswith(":cache_config_info") and labels.get("num_gpu_blocks", "").isdecimal():
                num_blocks = float(labels["num_gpu_blocks"])
    found = {name: sums[known] for name, names in _NAMES.items() for known in names if known in sums}
    usage = next((sums[name] for name in _USAGES if name in sums), None)
    return found if usage is None else found | {BLOCKS: usage * (num_blocks or 1.0)}


def is_idle(figures: Mapping[str, float]) -> bool:
    return not any(figures.get(name) for name in BUSY)


def listener(host: str, port: int, proc: Path = PROC) -> int | None:
    """The process on this machine that listens at an address; None if it is on another machine, or hidden."""
    try:
        is_local = all(entry[4][0] in ("127.0.0.1", "::1") for entry in socket.getaddrinfo(host, port))
    except OSError:
        return None
    inodes = set(_listening(port, proc)) if is_local else set()
    for pid in _pids(proc) if inodes else ():
        with suppress(OSError):
            if any(_link(file) in inodes for file in (proc / str(pid) / "fd").iterdir()):
                return pid
    return None


def _listening(port: int, proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{words[9]}]"


def _pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]


def _family(root: int, proc: Path) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid in _pids(proc):
        with suppress(OSError, IndexError, ValueError):
            parent = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _words(pid: int, proc: Path) -> list[bytes]:
    return (proc / str(pid) / "cmdline").read_bytes().split(b"\0")


def _resident_bytes(pid: int, proc: Path) -> int:
    return int((proc / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _count_files(pid: int, proc: Path) -> tuple[int, int]:
    links = [_link(file) for file in (proc / str(pid) / "fd").iterdir()]
    return len(links), sum(link.startswith("socket:") for link in links)


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except FileNotFoundError:
        return ""
