"""The GPU memory of single processes, as NVIDIA's driver reports it."""

import ctypes
from collections.abc import Collection, Iterator
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
MAX_PROCESSES = 1024
UNKNOWN = 2**64 - 1


class ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t, as in version 3 of the call."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def gpu_bytes_of(pids: Collection[int], library: Any = None) -> int | None:
    """Sums over all GPUs. None without a driver, or if it does not know these processes, because a container may have
    its own process ids."""
    try:
        driver = library or ctypes.CDLL(LIBRARY)
        found = [used for pid, used in _processes(driver) if pid in pids]
    except (OSError, AttributeError):
        return None
    return sum(found) if found else None


def _processes(driver: Any) -> Iterator[tuple[int, int]]:
    if driver.nvmlInit_v2():
        return
    try:
        num_gpus = ctypes.c_uint()
        driver.nvmlDeviceGetCount_v2(ctypes.byref(num_gpus))
        for index in range(num_gpus.value):
            gpu, count = ctypes.c_void_p(), ctypes.c_uint(MAX_PROCESSES)
            infos = (ProcessInfo * MAX_PROCESSES)()
            if driver.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)):
                continue
            if driver.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), infos):
                continue
            yield from ((one.pid, one.used_bytes) for one in infos[: count.value] if one.used_bytes != UNKNOWN)
    finally:
        driver.nvmlShutdown()
