"""Capture and replay for any callable whose inputs vary in length. Knows tensors and callables, not models.

arena = Arena([rows(...), boundaries(...), output(...)], limits, device)    static buffers, allocated once
phase = Phase(name=..., body=..., arena=arena, buckets=..., example=...)    the forward pass to replay
runner = GraphRunner(phase, GraphSettings(mode=Mode.FULL))
runner.capture_buckets()                                                    largest first, in one pool
assert verify(runner).is_right                                              replays against eager runs
result = runner.run(values, copy_out)                                       any boundaries, one graph
"""

from saccade.choice.key import Capacity, GraphKey
from saccade.config import GraphSettings, Mode, Tier
from saccade.graphs.arena import Arena, Batch
from saccade.graphs.audit import AuditReport, AuditRow, audit
from saccade.graphs.buffers import Buffer, Fill, OwnIndex, boundaries, bridge, metadata, output, rows
from saccade.graphs.example_layouts import Values
from saccade.graphs.frame import Body, Frame
from saccade.graphs.lane import lane_for
from saccade.graphs.phase import Phase, copy_out
from saccade.graphs.runner import GraphRunner
from saccade.graphs.verify import Anywhere, Known, Verifier, VerifyReport, VerifyRow, verify
from saccade.graphs.watched import Watched

__all__ = [
    "Anywhere",
    "Arena",
    "AuditReport",
    "AuditRow",
    "Batch",
    "Body",
    "Buffer",
    "Capacity",
    "Fill",
    "Frame",
    "GraphKey",
    "GraphRunner",
    "GraphSettings",
    "Known",
    "Mode",
    "OwnIndex",
    "Phase",
    "Tier",
    "Values",
    "Verifier",
    "VerifyReport",
    "VerifyRow",
    "Watched",
    "audit",
    "boundaries",
    "bridge",
    "copy_out",
    "lane_for",
    "metadata",
    "output",
    "rows",
    "verify",
]
