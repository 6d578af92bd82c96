"""A process is killed when its job exceeds a limit, and no other job is affected."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from saccade.errors import CapacityError, RequestError
from saccade.inputs.allowance import StopWorkError
from saccade.jobs.pool import Pool, PoolClosedError
from saccade.jobs.pool_process import JobKilledError, JobLimits, JobOutput, ProcessLostError
from tests.child_processes import gone

LIMITS = JobLimits(cpu_s=20.0, memory_bytes=64 * 2**20, max_output_bytes=2**20)
ODD = "tests.jobs.odd_jobs"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Lets processes of a pool import the tests' module, wherever pytest was started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def pool(importable: None) -> Iterator[Pool]:
    made = Pool(ODD, 2)
    yield made
    made.close()


def ask(pool: Pool, words: str, data: bytes = b"", limits: JobLimits = LIMITS, cost_s: float = 0.0) -> JobOutput:
    return pool.run(words.encode(), (data,), limits, cost_s=cost_s)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def works(pool: Pool) -> bool:
    return bytes(ask(pool, "echo", b"again").data) == b"again"


def test_results_come_back_in_memory_that_cannot_change(pool: Pool) -> None:
    data = bytes(range(256)) * 100
    output = pool.run(b"echo", (data[:1000], data[1000:]), LIMITS)
    assert output.words == b"echo" and bytes(output.data) == data
    assert not output.data.flags.writeable and not output.data.flags.owndata
    assert ask(pool, "echo").data.shape == (0,)


def test_results_hold_no_descriptors_and_are_freed_with_their_last_view(pool: Pool) -> None:
    def counts() -> tuple[int, int]:
        """Descriptors of jobs alone: whatever else this process has open may be closed meanwhile."""
        links = []
        for path in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(path.readlink()))
        maps = Path("/proc/self/maps").read_text()
        return sum("saccade-" in link for link in links), maps.count("saccade-output")

    ask(pool, "echo", b"first")
    gc.collect()  # results that other tests left
    before = counts()
    kept = [ask(pool, "echo", bytes([i]) * 5000).data[10:20] for i in range(50)]
    assert counts() == (before[0], before[1] + 50)
    assert all((data == i).all() for i, data in enumerate(kept))
    with pytest.raises(ValueError, match="WRITEABLE"):
        kept[0].flags.writeable = True
    del kept
    assert counts() == before


def test_a_process_runs_many_jobs_without_heavy_imports_or_secrets(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(pool, "pid").words
    assert all(ask(pool, "pid").words == first for _ in range(20))
    monkeypatch.setenv("SOME_SECRET", "key")
    with_secret = Pool(ODD, 2)
    try:
        assert ask(with_secret, "libraries").words == b""
    finally:
        with_secret.close()


@pytest.mark.parametrize("words", ["spin", "beg"])
def test_too_much_cpu_time_ends_only_that_job(pool: Pool, words: str) -> None:
    old = int(ask(pool, "pid").words)
    with pytest.raises(JobKilledError, match=r"0\.3 seconds of CPU") as error:
        ask(pool, words, limits=JobLimits(cpu_s=0.3, memory_bytes=2**26, max_output_bytes=1))
    assert error.value.reason == "cpu"
    assert works(pool) and not is_there(old)


def test_processes_that_end_before_their_job_are_counted(pool: Pool) -> None:
    before = pool.num_killed
    with pytest.raises(RequestError):
        ask(pool, "refuse")
    assert works(pool) and pool.num_killed == before
    with pytest.raises(JobKilledError):
        ask(pool, "spin", limits=JobLimits(cpu_s=0.1, memory_bytes=2**26, max_output_bytes=1))
    with pytest.raises(JobKilledError):
        ask(pool, "grow", str(2**30).encode())
    assert works(pool) and pool.num_killed == before + 2


def test_too_much_memory_ends_only_that_job(pool: Pool) -> None:
    with pytest.raises(JobKilledError, match="memory") as error:
        ask(pool, "grow", str(2**30).encode())
    assert error.value.reason == "memory"
    assert works(pool)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_the_jobs_fault(pool: Pool, number: signal.Signals) -> None:
    with pytest.raises(JobKilledError, match=number.name) as error:
        ask(pool, "abort", str(int(number)).encode())
    assert error.value.reason == "crash"
    assert works(pool)


def test_a_process_killed_from_outside_is_replaced(pool: Pool) -> None:
    with pytest.raises(ProcessLostError, match="SIGKILL"):
        ask(pool, "abort", str(int(signal.SIGKILL)).encode())
    assert works(pool)
    pids = pool.pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert works(pool)


def test_a_refusal_keeps_its_code_and_the_process(pool: Pool) -> None:
    before = ask(pool, "pid").words
    with pytest.raises(RequestError) as error:
        ask(pool, "refuse")
    assert (str(error.value), error.value.code, error.value.status) == ("no  [31mgood", "bad", 413)
    assert ask(pool, "pid").words == before


@pytest.mark.parametrize("status", [0, 200, 399, 500, 503])
def test_a_refusal_is_the_clients_error_whatever_the_process_says(pool: Pool, status: int) -> None:
    with pytest.raises(RequestError) as error:
        ask(pool, "refuse", str(status).encode())
    assert error.value.status == 400


@pytest.mark.parametrize(
    "words, data, said",
    [
        *(("lie", b"", "it said 1000"), ("hoard", b"", "open for writing"), ("babble", b"", "not a reply")),
        *(("fail", b"", "ValueError"), ("restart", b"", "twice"), ("hold", b"-5", "-5 bytes")),
    ],
)
def test_a_hostile_result_is_refused(pool: Pool, words: str, data: bytes, said: str) -> None:
    with pytest.raises(ProcessLostError, match=said):
        ask(pool, words, data)
    assert works(pool)


def test_a_result_beyond_its_limit_is_refused(pool: Pool) -> None:
    with pytest.raises(ProcessLostError, match="1048577 bytes"):
        ask(pool, "flood", str(2**20 + 1).encode())


def test_granted_memory_may_be_used(pool: Pool) -> None:
    held: list[int] = []
    size = 128 * 2**20
    pool.run(b"hold", (str(size).encode(),), LIMITS, hold=held.append)
    assert held == [size]

    def full(num_bytes: int) -> None:
        raise CapacityError("full")

    with pytest.raises(CapacityError, match="full"):
        pool.run(b"hold", (str(size).encode(),), LIMITS, hold=full)
    assert works(pool)


def test_a_process_that_has_grown_too_much_is_replaced(pool: Pool) -> None:
    limits = JobLimits(cpu_s=20.0, memory_bytes=256 * 2**20, max_output_bytes=0)
    old = int(ask(pool, "pid").words)
    ask(pool, "keep", str(100 * 2**20).encode(), limits)
    assert int(ask(pool, "pid").words) != old and not is_there(old)


def test_a_job_whose_client_left_is_killed(pool: Pool) -> None:
    old = int(ask(pool, "pid").words)
    checks: list[int] = []

    def check_cancelled() -> None:
        checks.append(1)
        if len(checks) > 2:
            raise StopWorkError

    with pytest.raises(StopWorkError):
        pool.run(b"spin", (b"",), LIMITS, check_cancelled=check_cancelled)
    assert works(pool) and not is_there(old)


def test_many_jobs_at_once_each_get_their_own_result(pool: Pool) -> None:
    with ThreadPoolExecutor(16) as threads:
        outputs = list(threads.map(lambda i: ask(pool, "echo", bytes([i]) * i, cost_s=i % 3), range(200)))
    assert all(np.array_equal(output.data, np.full(i, i, np.uint8)) for i, output in enumerate(outputs))
    assert len(pool.pids()) <= 2 and pool.num_busy == pool.num_waiting == 0


def spin_until(may_end: threading.Event, pool: Pool, caller: str = "") -> None:
    """Runs a large job until its client leaves."""

    def check_cancelled() -> None:
        if may_end.is_set():
            raise StopWorkError

    limits = JobLimits(cpu_s=500.0, memory_bytes=2**26, max_output_bytes=0)
    with pytest.raises(StopWorkError):
        pool.run(b"spin", (b"",), limits, cost_s=9.0, caller=caller, check_cancelled=check_cancelled)


def test_small_jobs_do_not_wait_behind_large_ones() -> None:
    """A large job occupies one of two processes and others wait; small jobs overtake them all."""
    pool, order, has_left = Pool(ODD, 2), [], threading.Event()

    def large() -> None:
        spin_until(has_left, pool)
        order.append("large")

    threads = [threading.Thread(target=large) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        while pool.num_busy + pool.num_waiting < 4:
            time.sleep(0.01)
        for _ in range(20):
            assert works(pool)
            order.append("small")
        assert pool.num_busy == 1 and pool.num_waiting == 3
    finally:
        has_left.set()
        for thread in threads:
            thread.join()
        pool.close()
    assert order == ["small"] * 20 + ["large"] * 4


def test_one_callers_large_jobs_do_not_delay_anothers() -> None:
    """While a large job runs, 40 more of its caller wait, then one of another caller, which is next."""
    pool, begun, may_end = Pool(ODD, 2), list[tuple[int, str]](), threading.Event()

    def ask_as(caller: str) -> None:
        """Notes when the job ran: the threads of two callers may come back in another order than their jobs."""
        output = pool.run(b"now", (b"",), LIMITS, cost_s=9.0, caller=caller)
        begun.append((int(output.words), caller))

    threads = [threading.Thread(target=spin_until, args=(may_end, pool, "flood"))]
    threads += [threading.Thread(target=ask_as, args=(caller,)) for caller in ["flood"] * 40 + ["other"]]
    try:
        threads[0].start()
        while not pool.num_busy:  # until its process has started
            time.sleep(0.001)
        for num_others, thread in enumerate(threads[1:]):
            thread.start()
            while pool.num_waiting <= num_others:
                time.sleep(0.001)
        assert pool.num_busy == 1 and pool.num_waiting == 41
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
        pool.close()
    order = [caller for _, caller in sorted(begun)]
    assert "other" in order[:2] and len(order) == 41, order


def test_a_closed_pool_leaves_no_process_and_no_waiter_behind() -> None:
    pool = Pool(ODD, 2)
    ends: list[BaseException] = []

    def run() -> None:
        try:
            pool.run(b"spin", (b"",), LIMITS)
        except Exception as error:
            ends.append(error)

    threads = [threading.Thread(target=run) for _ in range(5)]
    for thread in threads:
        thread.start()
    while pool.num_busy < 2:
        time.sleep(0.01)
    pids = pool.pids()
    pool.close()
    pool.close()
    for thread in threads:
        thread.join()
    assert len(ends) == 5 and all(isinstance(end, PoolClosedError | ProcessLostError) for end in ends)
    assert not any(map(is_there, pids))
    with pytest.raises(PoolClosedError):
        works(pool)
