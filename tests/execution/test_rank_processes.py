"""Rank processes obey and agree; when one does not, all end with a single reason that names it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from saccade.errors import ConfigError, EngineDeadError, RankGoneError, SaccadeError
from saccade.execution import rank_processes
from saccade.execution.agreement import MAX_LATE, Agreement
from saccade.execution.channel import Sender
from saccade.execution.rank_messages import OrderOutcome, RankStart
from saccade.execution.rank_processes import RankPlan, RankProcesses
from saccade.processes import EXIT_ORPHANED
from tests.child_processes import gone
from tests.execution.fake_executor import Add, Do, FakeExecutor, digest_of

BOUND_S = 120.0  # a wait longer than this is a hang, whatever else the machine does
ROOT = Path(__file__).parents[2]
PLAN = RankPlan(
    num_ranks=3,
    factory="tests.execution.fake_executor:make",
    order_types=FakeExecutor.order_types,
    environment={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    start_s=BOUND_S,
    answer_s=BOUND_S,
)
NOTHING = OrderOutcome()
STORE = "memfd:saccade-store"


def open_files(pid: int | str = "self") -> set[str]:
    """Open files by descriptor and name, without the folder read here and stores, which stay open on purpose."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[path.name] = str(path.readlink())
    return {f"{number}: {name}" for number, name in found.items() if not name.endswith("/fd") and STORE not in name}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


class Deaths:
    """Records the calls of `on_death` and their threads."""

    def __init__(self) -> None:
        self.errors: list[SaccadeError] = []
        self.threads: list[str] = []
        self.happened = threading.Event()

    def __call__(self, error: SaccadeError) -> None:
        self.errors.append(error)
        self.threads.append(threading.current_thread().name)
        self.happened.set()

    def wait(self) -> str:
        assert self.happened.wait(BOUND_S), "on_death was not called"
        assert len(self.errors) == 1 and self.threads == ["rank watcher"]
        return str(self.errors[0])


@contextmanager
def running(plan: RankPlan = PLAN) -> Iterator[tuple[RankProcesses, Deaths]]:
    """Starts ranks. At the end they and all their files must be gone."""
    before, deaths = open_files(), Deaths()
    with closing(RankProcesses(plan, deaths)) as ranks:
        pids = ranks.pids
        ranks.wait_ready()
        yield ranks, deaths
    assert len(pids) == plan.num_ranks - 1 and all(map(gone, pids.values()))
    assert len(deaths.errors) <= 1
    assert open_files() <= before, "what the ranks were given is closed here too"


def behind(ranks: RankProcesses) -> dict[int, int]:
    ranks._sender.collect()
    ranks.check()
    return ranks._sender.behind()


def do(ranks: RankProcesses, order: Do | Add, outcome: OrderOutcome | None = None) -> None:
    """Sends an order and waits for it. `outcome` is what rank 0 did."""
    number = ranks.send(order)
    if outcome is None:
        outcome = OrderOutcome(digest=digest_of(order.values) if isinstance(order, Add) else "")
    ranks.record(number, outcome)
    ranks.wait(number, BOUND_S)


def assert_dead(ranks: RankProcesses, deaths: Deaths, reason: str) -> None:
    """Every call raises the reason, and no process is left."""
    assert re.fullmatch(reason, deaths.wait())
    wait_until(lambda: all(map(gone, ranks.pids.values())), "the other ranks are killed")
    for call in (
        ranks.check,
        ranks.wait_ready,
        lambda: ranks.send(Do("nothing")),
        lambda: ranks.record(10**6, NOTHING),
    ):
        with pytest.raises(EngineDeadError, match=reason):
            call()


def test_ranks_obey_orders_and_answer() -> None:
    plan = replace(PLAN, settings={"model": "é", "n": [1, {"x": None}]}, devices=(5, 7, 7))
    environment = {**PLAN.environment, "SACCADE_TEST": "so"}
    with running(replace(plan, environment=environment)) as (ranks, deaths):
        facts = ranks.wait_ready()
        assert [fact["rank"] for fact in facts] == [1, 2] and [fact["device"] for fact in facts] == [7, 7]
        assert [fact["pid"] for fact in facts] == list(ranks.pids.values())
        assert all(fact["settings"] == plan.settings for fact in facts)
        rng = np.random.default_rng()
        for _ in range(50):
            values = rng.integers(-(2**40), 2**40, rng.integers(0, 5000))
            do(ranks, Add(values))
        do(ranks, Do("environment", text="SACCADE_TEST"), OrderOutcome(digest="so"))
        Path(ranks.store).write_text("rendezvous")
        do(ranks, Do("read store"), OrderOutcome(digest="rendezvous"))  # all ranks share the store's file
        assert behind(ranks) == {} and not deaths.errors


def test_rank_0_can_ask_who_is_behind_without_waiting(tmp_path: Path) -> None:
    with running() as (ranks, _):
        number = ranks.send(Do("wait for file", rank=2, text=str(tmp_path / "go")))
        ranks.record(number, NOTHING)
        last = ranks.send(Add(np.arange(3)))
        ranks.record(last, OrderOutcome(digest=digest_of(np.arange(3))))
        wait_until(lambda: behind(ranks).keys() == {2}, "rank 1 is done")
        with pytest.raises(TimeoutError, match=f"rank 2 did not finish step {last} in 0.01 s"):
            ranks.wait(last, 0.01)
        (tmp_path / "go").touch()
        ranks.wait(last, BOUND_S)
        assert behind(ranks) == {}


def test_ranks_may_all_fail_with_the_same_error(capfd: pytest.CaptureFixture[str]) -> None:
    with running() as (ranks, deaths):
        do(ranks, Do("fail", text="too long"), OrderOutcome(error="RequestError: too long"))
        do(ranks, Add(np.arange(4)))  # the ranks still work
        do(ranks, Do("log", text="two\nlines"))
        assert not deaths.errors
    lines = capfd.readouterr().err.splitlines()
    assert {"rank 1: two", "rank 1: lines", "rank 2: two", "rank 2: lines"} <= set(lines)
    assert all(line.startswith("rank ") for line in lines)
    assert "rank 2: saccade.errors.RequestError: too long" in lines


@pytest.mark.parametrize(
    ("order", "outcome", "reason"),
    [
        (Do("fail", 1, text="bad"), NOTHING, "rank 1 failed in step 2 where rank 0 did not: RequestError: bad"),
        (Do("fail", 2, text="bad"), NOTHING, "rank 2 failed in step 2 where rank 0 did not: RequestError: bad"),
        (Do("x", 9), OrderOutcome(error="X: y"), "rank 0 failed in step 2 where rank 1 did not: X: y"),
        (
            Do("say", 1, text="decode 64"),
            OrderOutcome(),
            "rank 1 diverged from rank 0 in step 2: it did 'decode 64'; rank 0: ''",
        ),
        (
            Do("fail differently", text="of memory"),
            OrderOutcome(error="RequestError: bad"),
            "rank 1 failed differently from rank 0 in step 2: RuntimeError: of memory; rank 0: RequestError: bad",
        ),
        (
            Do("answer too much", 2),
            NOTHING,
            "rank 2 failed in step 2 where rank 0 did not: SaccadeError: the answer has .* bytes; the limit is 65536",
        ),
    ],
)
def test_ranks_that_diverge_are_ended(order: Do, outcome: OrderOutcome, reason: str) -> None:
    with running() as (ranks, deaths):
        do(ranks, Add(np.arange(2)))
        number = ranks.send(order)
        try:
            ranks.record(number, outcome)
            ranks.wait(number, BOUND_S)
        except EngineDeadError:
            pass
        # If both differ from rank 0, rank 2 may report before rank 1.
        assert_dead(ranks, deaths, reason.replace("rank 1", "rank [12]") if order.rank in (0, 9) else reason)


def test_a_failed_rank_that_others_wait_for_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 never reports, as if it waited in a collective. Without this check only the watchdog would notice, and it
    would name a rank that is waiting too."""
    monkeypatch.setattr(rank_processes, "STUCK_S", 0.3)
    with running() as (ranks, deaths):
        ranks.send(Do("fail", 2, text="no graph for this key"))
        reason = "rank 2 failed in step 1, and rank 0 has not finished it 0.3 s later: .*: no graph for this key"
        assert_dead(ranks, deaths, reason)


def test_a_rank_killed_while_idle_is_the_reason() -> None:
    with running() as (ranks, deaths):
        os.kill(ranks.pids[2], signal.SIGKILL)
        assert_dead(ranks, deaths, "rank 2 of 3 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("what", "reason"), [("kill", "rank 1 of 3 was ended by SIGKILL"), ("exit", "rank 1 of 3 ended with exit code 7")]
)
def test_a_rank_that_exits_while_executing_is_the_reason(what: str, reason: str) -> None:
    """Needs nothing from the main thread, which may hang in a collective meanwhile."""
    with running() as (ranks, deaths):
        ranks.send(Do("sleep", rank=2, seconds=3600))
        ranks.send(Do(what, rank=1))
        assert_dead(ranks, deaths, reason)


def test_the_sender_raises_the_reason_found_by_the_watcher_thread() -> None:
    """The sender itself would only notice a closed socket."""
    with running() as (ranks, deaths):
        ranks.send(Do("kill", rank=2))
        with pytest.raises(EngineDeadError, match="rank 2 of 3 was ended by SIGKILL"):
            for _ in range(10**6):
                ranks.send(Do("nothing"))
        assert_dead(ranks, deaths, "rank 2 of 3 was ended by SIGKILL")


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_stopped_rank_is_found_by_the_watchdog(is_idle: bool) -> None:
    with running(replace(PLAN, answer_s=3.0)) as (ranks, deaths):
        os.kill(ranks.pids[2], signal.SIGSTOP)
        if not is_idle:
            ranks.record(ranks.send(Do("nothing")), NOTHING)
        assert_dead(ranks, deaths, "rank 2 of 3 has not answered for 3 s")


def test_idle_ranks_are_pinged_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without answers there would be only one ping, and the silence would grow."""
    pings: list[float] = []
    ping = Sender.ping

    def count(sender: Sender, after_s: float, now: float) -> None:
        if all(sender.silent_s(rank, now) == 0 for rank in (1, 2)):
            pings.append(now)
        ping(sender, after_s, now)

    monkeypatch.setattr(Sender, "ping", count)
    monkeypatch.setattr(rank_processes, "PING_S", 0.0)
    with running() as (ranks, deaths):
        wait_until(lambda: len(pings) > 4, "pings are answered")
        do(ranks, Add(np.arange(3)))
        assert not deaths.errors


def test_idle_ranks_do_not_burn_a_core() -> None:
    with running() as (ranks, _):
        before = {pid: cpu_s(pid) for pid in ranks.pids.values()}
        time.sleep(1.0)
        assert all(cpu_s(pid) - start < 0.2 for pid, start in before.items())


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("config", ConfigError, "rank 2 failed to start: 8 heads cannot be divided by 3 ranks"),
        ("error", EngineDeadError, "rank 2 failed to start: RuntimeError: no such device"),
        ("exit", RankGoneError, "rank 2 of 3 ended with exit code 5 before it was ready"),
        ("kill", RankGoneError, "rank 2 of 3 was ended by SIGKILL before it was ready"),
    ],
)
def test_a_rank_that_fails_to_start_is_the_reason(how: str, kind: type[SaccadeError], reason: str) -> None:
    deaths = Deaths()
    with closing(RankProcesses(replace(PLAN, settings={"who": 2, "how": how}), deaths)) as ranks:
        with pytest.raises(kind, match=reason):
            ranks.wait_ready()
        assert deaths.wait() == reason and type(deaths.errors[0]) is kind
        wait_until(lambda: all(map(gone, ranks.pids.values())), "the other ranks are killed")


def test_a_rank_that_hangs_while_starting_is_the_reason() -> None:
    deaths = Deaths()
    with closing(RankProcesses(replace(PLAN, settings={"who": 1, "how": "hang"}, start_s=2.0), deaths)) as ranks:
        assert re.fullmatch("rank [12] of 3 was not ready after 2 s", deaths.wait())
        wait_until(lambda: all(map(gone, ranks.pids.values())), "the other ranks are killed")


def test_a_missing_factory_is_the_reason() -> None:
    deaths = Deaths()
    reason = r"rank . failed to start: ModuleNotFoundError: .*nowhere"
    with (
        closing(RankProcesses(replace(PLAN, factory="tests.execution.nowhere:make"), deaths)) as ranks,
        pytest.raises(EngineDeadError, match=reason),
    ):
        ranks.wait_ready()
    assert re.match(reason, deaths.wait())


def test_a_python_that_cannot_be_started_leaves_no_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = open_files()
    with pytest.raises(EngineDeadError, match="the rank watcher failed: FileNotFoundError"):
        RankProcesses(PLAN, Deaths())
    assert open_files() <= before


def test_close_lets_ranks_finish_orders_and_close_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "EXIT_S", BOUND_S)
    note = tmp_path / "closed"
    with running(replace(PLAN, num_ranks=2, settings={"closed": str(note)})) as (ranks, deaths):
        ranks.send(Do("sleep", seconds=0.5))
        ranks.close()
        ranks.close()
        assert note.exists() and not deaths.errors
        with pytest.raises(EngineDeadError, match="the ranks were closed"):
            ranks.send(Do("nothing"))


def test_close_kills_a_rank_that_does_not_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "EXIT_S", 0.3)
    with running() as (ranks, deaths):
        ranks.send(Do("sleep", rank=1, seconds=3600))
        os.kill(ranks.pids[2], signal.SIGSTOP)
        ranks.close()
        wait_until(lambda: all(map(gone, ranks.pids.values())), "both are killed")
        assert not deaths.errors


def test_close_does_not_wait_for_an_order_that_rank_0_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in a pass the other ranks wait for rank 0, so all are killed, also those that could still close.
    Rank 2 has finished the order, so it may also be noticed that rank 0 has not, even while that is recorded."""
    monkeypatch.setattr(rank_processes, "EXIT_S", 5.0)
    note = tmp_path / "closed"
    with running(replace(PLAN, settings={"closed": str(note)})) as (ranks, _):
        number = ranks.send(Do("sleep", rank=1, seconds=3600))
        with suppress(EngineDeadError):
            ranks.record(number, OrderOutcome(error="KeyboardInterrupt: "))
        ranks.close()
        assert all(map(gone, ranks.pids.values())) and not note.exists()


def test_ranks_outlive_the_thread_that_created_them() -> None:
    """The kernel ends a rank with the thread that started it, which is the watcher thread, not the caller's."""
    made: list[RankProcesses] = []
    thread = threading.Thread(target=lambda: made.append(RankProcesses(PLAN, Deaths())))
    thread.start()
    thread.join()
    with closing(made[0]) as ranks:
        ranks.wait_ready()
        do(ranks, Add(np.arange(3)))


PARENT = """
    import os, signal, sys, time
    from tests.execution.test_rank_processes import PLAN, Do
    from saccade.execution.rank_processes import RankProcesses

    def die(error):
        print(error, flush=True)
        os._exit(9)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
        ranks = RankProcesses(PLAN, die)
        print(*ranks.pids.values(), flush=True)
        if sys.argv[1] != "starting":
            ranks.wait_ready()
        if sys.argv[1] == "executing":
            ranks.send(Do("sleep", seconds=3600))
        print("go", flush=True)
        time.sleep(3600)
"""


@contextmanager
def parent(state: str, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    script = folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    command = [sys.executable, str(script), state]
    environment = {**os.environ, **PLAN.environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == 2 and process.stdout.readline() == "go\n"
            yield process, pids
        finally:
            process.kill()


@pytest.mark.parametrize("state", ["starting", "idle", "executing", "stopped"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_no_rank_outlives_its_parent(state: str, number: signal.Signals, tmp_path: Path) -> None:
    with parent(state, tmp_path) as (process, pids):
        if state == "stopped":
            os.kill(pids[0], signal.SIGSTOP)
        process.send_signal(number)
        process.wait(BOUND_S)
        wait_until(lambda: all(map(gone, pids)), "ranks end with their parent")


@pytest.mark.parametrize("has_line", [True, False])
def test_a_rank_whose_parent_is_already_gone_exits(has_line: bool) -> None:
    """The kernel only reports parents that end later. Standard input stays open here, as if another process held it."""
    start = RankStart(
        rank=1,
        num_ranks=2,
        device=1,
        factory=PLAN.factory,
        settings={},
        parent_pid=1,
        socket_fd=0,
        memory_fd=0,
        store_fd=0,
    )
    command = [sys.executable, "-P", "-m", rank_processes.MODULE]
    environment = {**os.environ, **PLAN.environment}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        try:
            if has_line:
                process.stdin.write(msgspec.json.encode(start) + b"\n")
                process.stdin.flush()
            else:
                process.stdin.close()
            assert process.wait(BOUND_S) == EXIT_ORPHANED
        finally:
            process.kill()


def test_nothing_that_ranks_share_has_a_name_to_leave_behind(tmp_path: Path) -> None:
    with parent("idle", tmp_path) as (process, pids):
        for pid in (process.pid, *pids):
            names = {name.partition(": ")[2] for name in open_files(pid)}
            mapped = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
            assert any("saccade-orders" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
            found = [Path(name) for name in names | mapped if name.startswith(("/dev/shm", tempfile.gettempdir()))]
            libraries = Path(sys.prefix)  # the checkout may itself be in the temporary folder
            assert [path for path in found if path.exists() and not path.is_relative_to(libraries)] == []


def test_a_process_whose_main_thread_hangs_ends_with_the_reason(tmp_path: Path) -> None:
    with parent("executing", tmp_path) as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(BOUND_S) == 9
        assert process.stdout is not None and process.stdout.read() == "rank 2 of 3 was ended by SIGKILL\n"
        wait_until(lambda: all(map(gone, pids)), "ranks end with their parent")


def test_ranks_are_compared_with_rank_0() -> None:
    agreement = Agreement(3)
    assert agreement.note(1, 5, OrderOutcome(digest="a"), 0.0) is None
    assert agreement.note(2, 5, OrderOutcome(digest="b"), 0.0) is None
    why = agreement.note(0, 5, OrderOutcome(digest="a"), 0.0)
    assert why == "rank 2 diverged from rank 0 in step 5: it did 'b'; rank 0: 'a'"


def test_a_step_that_only_rank_0_does_not_finish_is_reported_after_a_while() -> None:
    """Rank 0 waits for something another rank did not do. Without a limit it may wait forever."""
    agreement = Agreement(3)
    agreement.note(2, 7, OrderOutcome(digest="nothing"), now=10.0)
    assert agreement.waiting(now=14.9, limit_s=5.0) is None and agreement.waiting(now=1e6, limit_s=0.0) is None
    reason = "rank 0 has not finished step 7, 5 s after rank 2, which did 'nothing'"
    assert agreement.waiting(now=15.1, limit_s=5.0) == reason
    agreement.note(1, 7, OrderOutcome(digest="nothing"), now=15.2)
    assert agreement.waiting(now=15.3, limit_s=5.0) == reason
    agreement.note(0, 7, OrderOutcome(digest="nothing"), now=15.4)
    assert agreement.waiting(now=1e6, limit_s=5.0) is None


def test_a_failed_step_is_reported_if_the_others_do_not_finish_it_in_time() -> None:
    agreement, failed = Agreement(3), OrderOutcome(error="GraphError: moved")
    agreement.note(1, 7, failed, now=10.0)
    agreement.note(2, 7, failed, now=14.0)
    assert agreement.stuck(now=14.9, limit_s=5.0) is None
    reason = "rank 1 failed in step 7, and rank 0 has not finished it 5 s later: GraphError: moved"
    assert agreement.stuck(now=15.1, limit_s=5.0) == reason
    agreement.note(0, 7, failed, now=15.2)
    assert agreement.stuck(now=1e6, limit_s=5.0) is None


def test_steps_on_which_all_ranks_agree_are_forgotten() -> None:
    agreement = Agreement(2)
    for number in range(1, 3 * MAX_LATE):
        assert agreement.note(1, number, OrderOutcome(digest="a"), 0.0) is None
        assert agreement.note(0, number, OrderOutcome(digest="a"), 0.0) is None


def test_a_step_that_rank_0_never_reports_is_an_error() -> None:
    agreement = Agreement(2)
    agreement.note(1, 1, OrderOutcome(), 0.0)
    with pytest.raises(AssertionError, match="rank 0 has not reported step 1"):
        for number in range(2, 10 + MAX_LATE):
            agreement.note(0, number, OrderOutcome(), 0.0)
            agreement.note(1, number, OrderOutcome(), 0.0)


def test_the_modules_of_ranks_import_no_torch() -> None:
    names = ("agreement", "channel", "codec", "rank", "rank_messages", "rank_processes")
    code = (
        "; ".join(f"import saccade.execution.{name}" for name in names)
        + "; import sys; sys.exit('torch' in sys.modules)"
    )
    environment: dict[str, Any] = {**os.environ, **PLAN.environment}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
