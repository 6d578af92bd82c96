"""Ranks that wait for each other in torch's collectives."""

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.execution.rank_messages import OrderOutcome
from saccade.execution.rank_processes import RankProcesses
from tests.execution.gloo_executor import GlooExecutor, Reduce
from tests.execution.test_rank_processes import BOUND_S, PLAN, STORE, Deaths, assert_dead

GLOO = replace(PLAN, factory="tests.execution.gloo_executor:make", order_types=GlooExecutor.order_types)


def test_ranks_connect_through_their_store_and_a_killed_one_is_the_reason() -> None:
    """The others fail too, because their connections to the killed rank close. Those errors are not the reason."""
    deaths = Deaths()
    with closing(RankProcesses(GLOO, deaths)) as ranks:
        first = GlooExecutor(ranks.store, 0, 3)
        ranks.wait_ready()
        for number in range(1, 4):
            sequence = ranks.send(Reduce(number))
            first.execute(Reduce(number))
            assert first.digest == f"{number * 111.0}"
            ranks.record(sequence, OrderOutcome(digest=first.digest))
            ranks.wait(sequence, BOUND_S)
        os.kill(ranks.pids[2], signal.SIGSTOP)  # so that the others are waiting for it when it is killed
        ranks.send(Reduce(1))
        threading.Timer(0.5, os.kill, (ranks.pids[2], signal.SIGKILL)).start()
        with pytest.raises(RuntimeError):  # rank 0 waited for a rank that is gone
            first.execute(Reduce(1))
        assert_dead(ranks, deaths, "rank 2 of 3 was ended by SIGKILL")
    # A FileStore reopens its file when garbage-collected; by then the descriptor must not be another file's.
    assert STORE in str(Path(ranks.store).readlink())
