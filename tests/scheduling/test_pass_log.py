"""Times of passes that a device runs asynchronously, as a GPU does."""

from dataclasses import dataclass

import numpy as np
import pytest

from saccade.choice.key import Capacity, Decision, GraphKey, Reason
from saccade.config import Mode, Tier
from saccade.scheduling.orders import Pass
from saccade.scheduling.pass_log import PassLog
from tests.scheduling.fakes import make_composer


@dataclass
class Lap:
    value: float | None = None

    def seconds(self) -> float | None:
        return self.value


class Rig:
    def __init__(self) -> None:
        self.now = 10.0
        self.log = PassLog(make_composer().catalogues, lambda: self.now)

    def times(self) -> list[tuple[str, float, float | None]]:
        return [(one.stream, one.start, one.seconds) for one in self.log.records(0)]


def decode(rows: int, bucket: int) -> Pass:
    key = GraphKey("decode", Mode.FULL, Capacity.of(tokens=bucket, requests=bucket))
    return Pass("decode", Decision(Tier.CAPACITY, Reason.FITS_BUCKET, key), {"ids": np.zeros(rows)})


def vision(rows: int) -> Pass:
    decision = Decision(Tier.EAGER, Reason.TOO_LARGE, detail="units: 9 > 8")
    return Pass("vision", decision, {"targets": np.zeros(rows)})


def test_a_step_starts_when_the_previous_one_has_ended() -> None:
    rig = Rig()
    first = rig.log.add("language", [decode(3, 4)], ["a", "b", "c"], rig.now)
    rig.now = 10.1  # launched while the first runs
    second = rig.log.add("language", [decode(4, 4)], ["a"], rig.now)
    assert rig.times() == []
    rig.now = 11.0
    rig.log.end(first)
    rig.now = 11.5
    rig.log.end(second)
    rig.log.end(second)
    assert rig.times() == [("language", 10.0, 1.0), ("language", 11.0, 0.5)]
    [shape] = rig.log.records(0)[0].passes
    assert (shape.rows, shape.padded, shape.graph) == (3, 1, "decode/full requests=4 tokens=4")


def test_vision_passes_are_reported_in_order_before_their_step() -> None:
    rig = Rig()
    laps = [Lap(), Lap()]
    for lap in laps:
        rig.log.add("vision", [vision(9)], ["a"], rig.now, lap)
    step = rig.log.add("language", [decode(1, 1)], ["b"], rig.now)
    rig.now = 13.0
    rig.log.end(step)
    assert rig.times() == [], "passes after one that still runs are reported later"
    laps[0].value, laps[1].value = 1.5, 0.5
    assert rig.times() == [("vision", 10.0, 1.5), ("vision", 11.5, 0.5), ("language", 12.0, 1.0)]
    [shape] = rig.log.records(0)[0].passes
    assert (shape.graph, shape.reason) == ("", "it is larger than every bucket (units: 9 > 8)")


def test_passes_are_counted_only_for_requests_that_ask() -> None:
    rig = Rig()
    rig.log.count_for("a")
    for requests in (["a", "b"], ["b"], ["a"]):
        rig.log.end(rig.log.add("language", [decode(len(requests), 2)], requests, rig.now))
    [count] = rig.log.take_counts("a") or ()
    assert (count.passes, count.rows, count.padded) == (2, 3, 1)
    assert rig.log.take_counts("a") is None and rig.log.take_counts("b") is None


@pytest.mark.parametrize("bucket", [None, 16])
def test_a_padded_pass_without_a_graph_has_padding(bucket: int | None) -> None:
    rig = Rig()
    room = None if bucket is None else Capacity.of(tokens=bucket, requests=bucket)
    decision = Decision(Tier.EAGER, Reason.GRAPHS_OFF, padded_to=room)
    rig.log.end(rig.log.add("language", [Pass("decode", decision, {"ids": np.zeros(5)})], ["a"], rig.now))
    [shape] = rig.log.records(0)[0].passes
    assert (shape.rows, shape.padded) == (5, 0 if bucket is None else 11)
