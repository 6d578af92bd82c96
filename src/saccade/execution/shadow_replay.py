"""A replay that a shadow check found wrong, run again from its file: in the graph of its key, and without."""

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import ConfigError, GraphError
from saccade.execution.executor import DeviceExecutor
from saccade.execution.shadow_file import Kept, ShadowFile, digest_of
from saccade.execution.shadow_passes import cached_keys, put_back, results_of, run_eagerly, written_keys
from saccade.execution.state import DeviceState
from saccade.graphs import Batch, GraphRunner
from saccade.graphs.compare import OutputDifference, Tensors, bit_differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the graph and an eager run give now: their digests, and where they differ."""

    replay_digest: str
    eager_digest: str
    differences: list[OutputDifference]
    as_recorded: list[OutputDifference]  # where the graph gives something else than the one of the file did


def replay_file(executor: DeviceExecutor, file: ShadowFile) -> Replayed:
    """Both runs begin with the state of the file. It writes to caches, so nothing else may run."""
    runner, batch = _find(executor, file.kept)
    state = executor.state
    _check_fits(state, runner, file)
    with torch.no_grad():
        _restore(state, runner, file)
        replay = runner.replay(file.kept.key, batch, lambda outputs: _results(state, runner, file.kept, outputs))
        _restore(state, runner, file)
        values = {**batch.tensors, **batch.arrays}
        eager = run_eagerly(
            runner, values, lambda outputs: _results(state, runner, file.kept, outputs), like=file.kept.key
        )
    recorded = {name: file.kept.replayed[name].to(tensor.device) for name, tensor in replay.items()}
    return Replayed(
        replay_digest=digest_of(replay),
        eager_digest=digest_of(eager),
        differences=bit_differences(replay, eager),
        as_recorded=bit_differences(replay, recorded),
    )


def _find(executor: DeviceExecutor, kept: Kept) -> tuple[GraphRunner, Batch]:
    """The runner that has a graph of this key, and the batch."""
    runners = {runner.phase.name: runner for runner in executor.phases}
    runner = runners.get(kept.key.phase)
    if runner is None:
        raise ConfigError(f"the file is of a {kept.key.phase} pass; this model has {', '.join(runners)}")
    device = runner.phase.arena.device
    values = {**{name: tensor.to(device) for name, tensor in kept.inputs.items()}, **kept.arrays}
    try:
        batch = runner.phase.arena.admit(values)
    except GraphError as error:
        raise ConfigError(f"the file is of another model, or of an engine with other limits: {error}") from None
    if kept.key.digest:
        runner.catalogue.costs = None  # captured whether or not it is the fastest way
        runner.capture_exact(values)
    if kept.key not in {graph.key for graph in runner.graphs}:
        raise ConfigError(
            f"an engine with the settings of the file has no graph [{kept.key}]: the file is of another model, or of "
            "another version of Saccade"
        )
    return runner, batch


def _check_fits(state: DeviceState, runner: GraphRunner, file: ShadowFile) -> None:
    """Raises where the engine is not one that could have written the file."""
    try:
        there = runner.phase.volatile_in(file.kept.arrays) | _caches(state, file.cached)
        wrong = [
            name for name, tensor in there.items() if not _is_like(tensor, {**file.kept.reads, **file.cached}[name])
        ]
    except (KeyError, IndexError, RuntimeError) as error:
        wrong = [str(error).partition("\n")[0]]
    if wrong:
        raise ConfigError(f"the file is of another model, or of an engine with other limits: {wrong[0]}")


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.shape == other.shape


def _caches(state: DeviceState, cached: Tensors) -> dict[str, Tensor]:
    """What the file has of caches, as they have it now."""
    found = cached_keys(state, cached["slots"].numpy()) if "slots" in cached else {}
    if "rows" in cached and state.vision_rows is not None:
        found["vision rows"] = state.vision_rows.index_select(1, cached["rows"].to(state.vision_rows.device))
    return found


def _restore(state: DeviceState, runner: GraphRunner, file: ShadowFile) -> None:
    """Put all that the pass read where it read it."""
    device, cached = state.newest_ids.device, file.cached
    put_back(runner.phase, file.kept.arrays, {name: tensor.to(device) for name, tensor in file.kept.reads.items()})
    if "rows" in cached and state.vision_rows is not None:
        state.vision_rows.index_copy_(1, cached["rows"].to(device), cached["vision rows"].to(device))
    if "slots" in cached:
        slots = cached["slots"].to(device)
        for layer, (keys, values) in enumerate(state.caches):
            keys.flatten(0, 1).index_copy_(0, slots, cached[f"keys of layer {layer}"].to(device))
            values.flatten(0, 1).index_copy_(0, slots, cached[f"values of layer {layer}"].to(device))


def _results(state: DeviceState, runner: GraphRunner, kept: Kept, outputs: Tensors) -> dict[str, Tensor]:
    found = results_of(runner.phase, kept.arrays, outputs, kept.most_bytes)
    found |= written_keys(state, kept.arrays, kept.most_bytes)
    return {name: view.clone() for name, view in found.items()}
