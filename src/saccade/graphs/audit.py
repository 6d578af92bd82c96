"""Finds what a graph froze by looking at the graph itself, without a reference output.

Two captures of one bucket with different inputs are compared node by node. A difference is a frozen host value; the
finding names the node and argument. Also checked: nodes touch only declared memory, captures and eager runs launch the
same nodes, a replay changes only what the phase declares, padding follows its policy, and nothing has moved. On CUDA
nodes are read from the graph, elsewhere from the CPU recording.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from saccade.choice.key import Capacity, GraphKey
from saccade.config import Mode, Tier
from saccade.errors import GraphError
from saccade.graphs.arena import Batch, HostArray
from saccade.graphs.buffers import Buffer, DummySegment, Fill, OwnIndex, Role
from saccade.graphs.capture import CapturedGraph
from saccade.graphs.cuda_nodes import UnreadableError
from saccade.graphs.example_layouts import Values, compose, equal_totals, num_segments
from saccade.graphs.frame import Frame
from saccade.graphs.memory_map import MemoryMap
from saccade.graphs.node_differences import WORD, Position, differences
from saccade.graphs.nodes import Node
from saccade.graphs.operation_mode import OperationMode
from saccade.graphs.phase import Outputs, copy_out
from saccade.graphs.piecewise import Tape
from saccade.graphs.runner import GraphRunner

SMALL_BYTES = 2**20  # state up to this size is compared byte by byte, larger state by the sums of its pieces
PIECE_WORDS = SMALL_BYTES // WORD  # added up by one kernel for all pieces of a tensor
# Kernels with memory of their own: cuBLAS clears its workspace before use; all-reduces have tables of their buffers.
HAS_OWN_MEMORY = re.compile("^nvjet|cublas|[dhs]gemm|gemv|splitK|all_reduce_kernel|barrier_kernel|nccl")
MAX_FINDINGS = 5  # per check


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One graph: its number of nodes, and what is wrong with it."""

    key: str
    num_nodes: int
    findings: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class AuditReport:
    rows: tuple[AuditRow, ...]

    @property
    def is_right(self) -> bool:
        """Whether at least one row was audited, and nothing was found."""
        return bool(self.rows) and all(row.is_right for row in self.rows)

    @property
    def num_nodes(self) -> int:
        return sum(row.num_nodes for row in self.rows)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            lines.append(f"{row.key:<48} {row.num_nodes:>6} nodes  {'ok' if row.is_right else 'WRONG'}")
            lines += [f"    {finding}" for finding in row.findings]
        return "\n".join(lines)


def audit(
    runner: GraphRunner,
    *,
    seed: int = 0,
    buckets: Sequence[Capacity] | None = None,
    consume: Callable[[Outputs], Any] = copy_out,
    on_graph: Callable[[], None] = lambda: None,
) -> AuditReport:
    """Audit captured buckets (all, or `buckets`), and exact graphs if that tier is on. Like verification it overwrites
    memory that requests read. `consume` takes results out of the buffers; `on_graph` is called after each bucket."""
    rng, noise = torch.Generator().manual_seed(seed), set[Position]()
    served = [graph for graph in runner.graphs if not graph.key.digest]
    served = [graph for graph in served if buckets is None or graph.key.capacity in buckets]
    rows = []
    for graph in served:
        rows.append(_audit_graph(runner, graph, rng, noise))
        on_graph()
    if served:
        smallest = min(served, key=lambda graph: graph.key.capacity[runner.phase.rows])
        rows.append(_audit_runs(runner, smallest, rng, consume))
    if Tier.EXACT in runner.settings.tiers:
        smallest_bucket = min(buckets or runner.phase.buckets, key=lambda bucket: bucket[runner.phase.rows])
        rows.append(_audit_exact(runner, smallest_bucket, rng))
    return AuditReport(tuple(rows))


def _audit_graph(runner: GraphRunner, graph: CapturedGraph, rng: torch.Generator, noise: set[Position]) -> AuditRow:
    capacity, findings = graph.key.capacity, list[str]()
    findings += [f"moved since the capture: {change}" for change in graph.moved()]
    first, *others = _varied_values(runner, capacity, rng)
    try:
        base = _nodes(graph) if _is_cpu(runner) else _captured_on(runner, graph.key, first)
        memory = MemoryMap(runner.phase.arena, capacity, runner.watched, runner.lane)
        findings += _undeclared(base, memory)
        # Every capture is made whatever was found: on a CPU it runs the pass, which other ranks may take part in.
        frozen = [_frozen(runner, graph.key, memory, noise, base, first, other) for other in others]
        findings += next(filter(None, frozen), [])
        findings += _body_differences(runner, graph.key, base, first)
    except UnreadableError:
        raise
    except GraphError as error:
        return AuditRow(str(graph.key), 0, (*findings, f"frozen: a capture with different inputs fails: {error}"))
    return AuditRow(str(graph.key), len(base), tuple(findings))


def _is_cpu(runner: GraphRunner) -> bool:
    """On a CPU the graph in service lists its own nodes. On CUDA another capture of the same batch stands in for it."""
    return runner.phase.arena.device.type == "cpu"


def _captured_on(runner: GraphRunner, key: GraphKey, values: Values) -> list[Node]:
    """The nodes of a capture right after this batch was admitted, so that host state belongs to it, as in a run. A CUDA
    capture runs nothing, so there the buffers get the empty batch, which always leaves the same bytes on the stack."""
    arena = runner.phase.arena
    batch = arena.admit(values)
    arena.fill(batch if _is_cpu(runner) else arena.empty_batch(), key.capacity)
    with runner.lane.keeping_nodes():
        return _nodes(runner.record(key, batch.structure if key.digest else None, is_warm=True))


def _nodes(graph: CapturedGraph) -> list[Node]:
    return [node for step in graph.steps for node in step.nodes()]


def _frozen(
    runner: GraphRunner,
    key: GraphKey,
    memory: MemoryMap,
    noise: set[Position],
    base: list[Node],
    first: Values,
    other: Values,
) -> list[str]:
    """What differs between two captures, apart from noise: structs passed to kernels have uninitialised bytes, which
    hold whatever was on the stack. Repeated captures of the same inputs, with a different and with the same stack,
    reveal those bytes; `noise` collects their positions."""
    there = _captured_on(runner, key, other)
    found = [one for one in differences(base, there, memory) if one.position not in noise]
    if found and not _is_cpu(runner):
        ways: tuple[AbstractContextManager[Any], ...] = (_AnotherStack(), nullcontext())
        for way in ways:
            with way:
                again = [(base, _captured_on(runner, key, first)), (there, _captured_on(runner, key, other))]
            noise |= {d.position for a, b in again for d in differences(a, b, memory) if d.position is not None}
        found = [one for one in found if one.position not in noise]
    return [str(one) for one in found[:MAX_FINDINGS]]


class _AnotherStack(OperationMode):
    """Routes every operation through Python, so that the stack has different leftovers when its kernel is launched."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _undeclared(nodes: Sequence[Node], memory: MemoryMap) -> list[str]:
    """Tensors that are neither buffers, nor state, nor made in the graph: their content is frozen at capture."""
    found = [
        f"undeclared: node {i} ({node.name}) has {argument} = {what} in memory that is neither a buffer, nor declared "
        "state, nor made in the graph: what it holds is frozen"
        for i, node in enumerate(nodes)
        for argument, what in _undeclared_arguments(node, memory)
    ]
    return found[:MAX_FINDINGS]


def _undeclared_arguments(node: Node, memory: MemoryMap) -> Iterator[tuple[str, str]]:
    """Checks raw arguments of one word only: larger ones may have stray addresses in uninitialised bytes."""
    for argument, touch in node.touches.items():
        if touch.address and memory.find(touch.address) is None:
            yield argument, touch.layout
    if node.name == "fill" or HAS_OWN_MEMORY.search(node.name):
        return
    for argument, data in node.raw.items():
        if len(data) == WORD and memory.is_foreign(int.from_bytes(data, "little")):
            yield argument, f"{int.from_bytes(data, 'little'):#x}"


class _BoundsOfCapacity(Frame):
    """An eager frame with host boundaries but a capacity graph's bounds, so that the same kernels are launched."""

    def longest(self, name: str) -> int:
        return Frame(self.arena, self.capacity).longest(name)


def _body_differences(runner: GraphRunner, key: GraphKey, base: Sequence[Node], values: Values) -> list[str]:
    """Where a captured body launches other nodes than one that runs eagerly with host boundaries."""
    arena, capacity = runner.phase.arena, key.capacity
    arena.fill(arena.admit(values), capacity)
    tape = Tape(runner.lane, arena, runner.watched)
    splitter = tape if key.mode is Mode.PIECEWISE else None
    frame = _BoundsOfCapacity(arena, capacity, _padded_structure(runner, capacity), splitter)
    with torch.no_grad(), runner.lane.keeping_nodes(), runner.lane.session():
        tape.record(runner.phase.body, frame)
    runs = [node.name for node in base], [node.name for step in tape.steps for node in step.nodes()]
    if runs[0] == runs[1]:
        return []
    at = next((i for i, (a, b) in enumerate(zip(*runs, strict=False)) if a != b), min(map(len, runs)))
    here, there = (names[at] if at < len(names) else "nothing" for names in runs)
    return [f"another body: node {at} is {here} in a capture and {there} in an eager run"]


def _padded_structure(runner: GraphRunner, capacity: Capacity) -> dict[str, HostArray]:
    """The boundaries in a filled arena, including padding, as an eager run of all rows would see them."""
    views = runner.phase.arena.views(capacity)
    boundaries = [b.name for b in runner.phase.arena.buffers.values() if isinstance(b.padding, DummySegment)]
    return {name: views[name].cpu().numpy().copy() for name in boundaries}


def _audit_runs(
    runner: GraphRunner, graph: CapturedGraph, rng: torch.Generator, consume: Callable[[Outputs], Any]
) -> AuditRow:
    """Checks that need a replay: what it writes, how buffers are filled, and which output views are kept."""
    phase, capacity = runner.phase, graph.key.capacity
    values = phase.example(equal_totals(phase, capacity, rng)[0], rng)
    batch = phase.arena.admit(values)
    findings: list[str] = []
    if phase.arena.misfit(batch.sizes, capacity) is None:
        phase.arena.fill(batch, capacity)
        findings += fill_problems(runner, batch, capacity)
        phase.set_up(values)
        before = _contents(runner)
        try:
            result = runner.replay(graph.key, batch, consume)
            findings += _kept_views(runner, result)
        except GraphError as error:
            findings.append(str(error))
        findings += [
            f"undeclared write: a replay changes {name!r}, which is not in Phase.writes: what one batch leaves there, "
            "the next one finds"
            for name, content in _contents(runner).items()
            if not torch.equal(content, before[name])
        ]
    return AuditRow(f"{phase.name}/{runner.settings.mode} a replay", 0, tuple(findings))


def _kept_views(runner: GraphRunner, result: Any) -> list[str]:
    kept = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and runner.phase.arena.owns(leaf)]
    return [f"kept: the consumer keeps a view of shape {tuple(view.shape)} of an output buffer" for view in kept]


def _contents(runner: GraphRunner) -> dict[str, Tensor]:
    """State that a pass must not change: small tensors in full, large ones as sums of their pieces."""
    return {name: _bits(tensor) for name, tensor in runner.watched.items() if name not in runner.phase.writes}


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() <= SMALL_BYTES or flat.storage_offset() % WORD:  # words must be aligned
        return flat.clone()
    words = flat[: flat.numel() // WORD * WORD].view(torch.int64)
    pieces = words[: words.numel() // PIECE_WORDS * PIECE_WORDS].view(-1, PIECE_WORDS)
    return torch.cat([pieces.sum(1), words[pieces.numel() :].sum(0, keepdim=True), flat[words.nbytes :].long()])


def fill_problems(runner: GraphRunner, batch: Batch, capacity: Capacity) -> list[str]:
    """Inputs whose buffer does not hold the batch and its padding, both recomputed here."""
    views, found = runner.phase.arena.views(capacity), []
    for name, buffer in runner.phase.arena.buffers.items():
        if buffer.role not in (Role.INPUT, Role.METADATA):
            continue
        given = batch.tensors[name].cpu() if name in batch.tensors else torch.from_numpy(np.array(batch.arrays[name]))
        expected = _padded(buffer, given.to(buffer.dtype), capacity)
        if not torch.equal(views[name].cpu().nan_to_num(), expected.nan_to_num()):
            found.append(f"padding: {name!r} does not hold the batch, padded by {type(buffer.padding).__name__}")
    return found


def _padded(buffer: Buffer, given: Tensor, capacity: Capacity) -> Tensor:
    if buffer.axis is None:
        return given
    rows = given.movedim(buffer.axis, 0)
    count, total = rows.shape[0], buffer.sized(capacity)[buffer.axis]
    full = torch.zeros((total, *rows.shape[1:]), dtype=buffer.dtype)
    full[:count] = rows
    match buffer.padding:
        case DummySegment(rows=dimension, longest=longest):
            last = capacity[dimension]
            steps = torch.arange(1, total - count + 1) * (longest or last) + int(rows[-1])
            full[count:] = steps.clamp(max=last).to(buffer.dtype)
        case OwnIndex():
            full[count:] = torch.arange(count, total, dtype=buffer.dtype)
        case Fill(value=value):
            full[count:] = value
    return full.movedim(0, buffer.axis)


def _audit_exact(runner: GraphRunner, capacity: Capacity, rng: torch.Generator) -> AuditRow:
    """Captures two structures of the same sizes: graphs that differ must have different keys."""
    phase = runner.phase
    found: list[tuple[GraphKey, list[Node]]] = []
    for lengths in equal_totals(phase, capacity, rng):
        values = phase.example(lengths, rng)
        batch = phase.arena.admit(values)
        runner.eager(values, lambda outputs: None)  # compiles kernels for these sizes, which a capture cannot
        key = runner.key_of(batch)
        found.append((key, _captured_on(runner, key, values)))
    (one, here), (other, there) = found
    findings: list[str] = []
    if one == other:
        memory = MemoryMap(phase.arena, one.capacity, runner.watched, runner.lane)
        findings = [f"one key for two structures [{one}]: {found}" for found in differences(here, there, memory)]
    return AuditRow(f"{phase.name}/{runner.settings.mode} exact", len(here), tuple(findings[:MAX_FINDINGS]))


def _varied_values(runner: GraphRunner, capacity: Capacity, rng: torch.Generator) -> list[Values]:
    """The inputs that a bucket is captured with, then different ones: other numbers (even where examples never vary),
    other boundaries, a single row, and all rows in many segments."""
    phase, arena = runner.phase, runner.phase.arena
    rows = capacity[phase.rows]
    layouts = (*equal_totals(phase, capacity, rng), (1,), compose(rows, num_segments(phase, capacity), rng))
    found: list[Values] = []
    for lengths in dict.fromkeys(layouts):
        values = phase.example(lengths, rng)
        if arena.misfit(arena.admit(values).sizes, capacity) is None:
            found.append(values if found else _with_all_varied(runner, values, phase.example(lengths, rng)))
    if not _is_cpu(runner) and capacity != min(phase.buckets, key=lambda bucket: bucket[phase.rows]):
        found = found[:1]  # on CUDA each costs a capture, and all buckets freeze the same things
    return [runner.example_values(capacity), *found]


def _with_all_varied(runner: GraphRunner, values: Values, again: Values) -> Values:
    """The same inputs, with other numbers in metadata that a second example of the same lengths does not vary."""
    arena = runner.phase.arena
    batch, other = arena.admit(values), arena.admit(again)
    changed: dict[str, Any] = dict(values)
    for name, array in batch.arrays.items():
        is_constant = array.shape == other.arrays[name].shape and np.array_equal(array, other.arrays[name])
        if name not in batch.structure and array.size and is_constant:
            changed[name] = _changed(array)
    return changed if arena.device.type == "cuda" or _can_run(runner, changed) else values


def _changed(array: HostArray) -> HostArray:
    """Other numbers of the same kind: rolled by one or, if that changes nothing, one smaller (0 becomes 1)."""
    turned = np.roll(array, 1, axis=-1)
    if not np.array_equal(turned, array):
        return turned
    return np.where(array > 0, array - 1, array + 1).astype(array.dtype)


def _can_run(runner: GraphRunner, values: Values) -> bool:
    """Whether the body accepts these numbers, some of which may be indices: recording on a CPU runs it."""
    try:
        runner.phase.set_up(values)
        runner.eager(values, lambda outputs: None)
    except (IndexError, RuntimeError, GraphError):
        return False
    return True
