"""Factories for a rank 1 that does something wrong, while rank 0 builds and sends orders as usual."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import MethodType
from typing import Any, NoReturn

import torch.distributed as dist
from msgspec import structs

from saccade.config import Tier
from saccade.errors import ConfigError, GraphError
from saccade.execution import build, shadow, verification
from saccade.execution.build import follow
from saccade.execution.executor import DeviceExecutor
from saccade.execution.rank_messages import RankExecutor, RankStart
from saccade.graphs import GraphRunner
from saccade.graphs.recorded import RecordedPiece
from saccade.scheduling.orders import Orders, Run


def fails_before_it_connects(start: RankStart) -> NoReturn:
    raise RuntimeError("no such device")


def is_killed_before_it_connects(start: RankStart) -> RankExecutor:
    """It has reached the store, so the other rank waits for its address."""
    vars(dist)["init_process_group"] = lambda *args, **how: os.kill(os.getpid(), signal.SIGKILL)
    return follow(start)


def fails_while_it_loads(start: RankStart) -> RankExecutor:
    vars(build)["load_model"] = fail(ConfigError("a file of the weights cannot be read"))
    return follow(start)


def is_killed_while_it_captures(start: RankStart) -> RankExecutor:
    capture = GraphRunner.capture_buckets

    def stop_at_decode(runner: GraphRunner, *args: Any, **how: Any) -> None:
        if runner.phase.name == "decode":
            os.kill(os.getpid(), signal.SIGKILL)
        capture(runner, *args, **how)

    change(GraphRunner, "capture_buckets", stop_at_decode)
    return follow(start)


def fails_while_it_verifies(start: RankStart) -> RankExecutor:
    vars(verification)["verify"] = fail(MemoryError("too little memory"))
    return follow(start)


def fails_when_it_is_compared(start: RankStart) -> RankExecutor:
    vars(build)["check_ranks"] = fail(RuntimeError("no results"))
    return follow(start)


def is_killed_in_its_second_check(start: RankStart) -> RankExecutor:
    """The other rank waits for it in a collective of the pass."""
    run, numbers = vars(shadow)["run_eagerly"], count()

    def stop_at_second(*args: Any, **how: Any) -> Any:
        if next(numbers) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*args, **how)

    vars(shadow)["run_eagerly"] = stop_at_second
    return follow(start)


def has_a_sampler_that_does_nothing(start: RankStart) -> RankExecutor:
    def ruin(executor: DeviceExecutor) -> None:
        for graph in executor.sampler.graphs:
            graph.steps = ()

    return follow_ruined(start, ruin)


def has_a_decode_graph_without_a_product(start: RankStart) -> RankExecutor:
    """Leaves out the last product before a sum over the ranks, so all ranks see the error."""

    def ruin(executor: DeviceExecutor) -> None:
        for graph in executor.decode.graphs:
            graph.steps = tuple(_without_product(step) for step in graph.steps)

    return follow_ruined(start, ruin)


def has_decode_graphs_that_fail(start: RankStart) -> RankExecutor:
    """They fail before any sum over the ranks, for which the other rank then waits."""
    failing: Any = fail(RuntimeError("out of memory"))

    def ruin(executor: DeviceExecutor) -> None:
        for graph in executor.decode.graphs:
            graph.steps = (failing,)

    return follow_ruined(start, ruin)


def takes_another_bucket(start: RankStart) -> RankExecutor:
    """Runs decode passes in the next larger graph. Answers would be the same, but exchanges have other sizes."""

    def change_key(executor: DeviceExecutor, order: Orders) -> Orders:
        if not isinstance(order, Run) or [one.phase for one in order.passes] != ["decode"]:
            return order
        [one] = order.passes
        larger = [graph.key for graph in executor.decode.graphs if graph.key != one.decision.key]
        return replace(order, passes=(replace(one, decision=structs.replace(one.decision, key=larger[0])),))

    return disobedient(follow(start), change_key)


def takes_no_graph(start: RankStart) -> RankExecutor:
    """Runs decode passes eagerly at the shapes of their graph, so every exchange has the right size."""

    def change_tier(executor: DeviceExecutor, order: Orders) -> Orders:
        if not isinstance(order, Run) or [one.phase for one in order.passes] != ["decode"]:
            return order
        [one] = order.passes
        assert one.decision.key is not None, "decode passes are replayed"
        eager = structs.replace(one.decision, tier=Tier.EAGER, key=None, padded_to=one.decision.key.capacity)
        return replace(order, passes=(replace(one, decision=eager),))

    return disobedient(follow(start), change_tier)


def skips_passes(start: RankStart) -> RankExecutor:
    def skip(executor: DeviceExecutor, order: Orders) -> Orders:
        is_decode = isinstance(order, Run) and [one.phase for one in order.passes] == ["decode"]
        return replace(order, passes=(), num_sampled=0) if is_decode and isinstance(order, Run) else order

    return disobedient(follow(start), skip)


def cannot_end_a_bad_prompt(start: RankStart) -> RankExecutor:
    """Fails in the same way as rank 0."""
    follower = follow(start)
    break_head(executor_of(follower))
    return follower


def break_head(executor: DeviceExecutor) -> None:
    """Makes the head pass fail after a prefill pass with BAD_TOKEN in it."""
    is_bad: list[bool] = []
    prefill, head = executor.prefill.obey, executor.head.obey

    def watched(decision: Any, values: Any, consume: Any) -> Any:
        is_bad[:] = [BAD_TOKEN in values["ids"]]
        return prefill(decision, values, consume)

    def breaking(decision: Any, values: Any, consume: Any) -> Any:
        if is_bad == [True]:
            raise GraphError("no memory for the head")
        return head(decision, values, consume)

    vars(executor.prefill)["obey"], vars(executor.head)["obey"] = watched, breaking


def disobedient(follower: RankExecutor, alter: Callable[[DeviceExecutor, Orders], Orders]) -> RankExecutor:
    """Once the engine is ready, executes altered orders."""
    executor, num_runs = executor_of(follower), 0

    def execute(order: Orders) -> None:
        nonlocal num_runs
        num_runs += isinstance(order, Run)
        executor.execute(alter(executor, order) if num_runs > NUM_WARM_UP else order)

    return replace(follower, execute=execute)


def executor_of(follower: RankExecutor) -> DeviceExecutor:
    assert isinstance(follower.execute, MethodType) and isinstance(follower.execute.__self__, DeviceExecutor)
    return follower.execute.__self__


NUM_WARM_UP = 60  # runs, more than start-up takes
BAD_TOKEN = 77


def follow_ruined(start: RankStart, ruin: Callable[[DeviceExecutor], None]) -> RankExecutor:
    """Changes the graphs after their capture."""
    capture = DeviceExecutor.capture

    def capture_and_ruin(executor: DeviceExecutor, *args: Any, **how: Any) -> None:
        capture(executor, *args, **how)
        ruin(executor)

    change(DeviceExecutor, "capture", capture_and_ruin)
    return follow(start)


def _without_product(step: Any) -> Any:
    if not isinstance(step, RecordedPiece):
        return step
    products = [i for i, one in enumerate(step.operations) if "mm" in str(one.function)]
    return RecordedPiece(tuple(one for i, one in enumerate(step.operations) if i != products[-1]))


def fail(error: Exception) -> Callable[..., NoReturn]:
    def call(*args: Any, **how: Any) -> NoReturn:
        raise error

    return call


def change(owner: type, name: str, value: Any) -> None:
    """Never undone: the change ends with this process."""
    setattr(owner, name, value)
