"""The files of wrong replays: private, few, and enough to see the fault again on another engine."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.config import Mode, Tier
from saccade.errors import ConfigError
from saccade.execution.executor import DeviceExecutor
from saccade.execution.shadow_file import (
    MAX_FILES,
    SUFFIX,
    ShadowFile,
    digest_of,
    file_of_rank,
    read_file,
    replay_file,
    write_file,
)
from saccade.execution.shadow_verdict import Mismatch
from saccade.graphs import GraphKey
from saccade.inputs.placeholders import text_prompt
from tests.engine.conftest import Loaded
from tests.engine.rig import build, executor_of, random_prompt, run
from tests.engine.test_shadow import (
    GREEDY,
    PENALISED,
    PHASES,
    SIZES,
    check_all,
    requests,
    runner_of,
    shadowed,
)
from tests.engine.wrong_graphs import spoil, spoil_outputs

Load = Callable[[str], Loaded]


def test_a_mismatch_file_has_everything_needed_to_replay_it(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"), tmp_path / "made for it")
    spoil_outputs(runner_of(engine, "prefill"))
    run(engine, {"a": random_prompt(made, np.random.default_rng(4), num_images=1, length=40)}, GREEDY)
    [found] = check_all(engine)
    assert found.path is not None and found.path.stat().st_mode & 0o077 == 0
    file = read_file(found.path)
    assert file.key == found.key and file.digest == found.digest
    assert file.digest == digest_of({**file.inputs, **file.reads}, file.arrays)
    assert file.origin.model == str(made.folder)
    assert {"slots", "keys of layer 0", "vision rows"} <= file.cached.keys()
    wrong = {name for name, right in file.eager.items() if not torch.equal(file.replayed[name], right)}
    assert wrong == {difference.output for difference in found.differences}


def test_a_file_from_elsewhere_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, other)
    with pytest.raises(ConfigError, match="was not written by a shadow check"):
        read_file(other)
    other.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="is not a file of a shadow check"):
        read_file(other)
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "missing")


def test_a_mismatch_is_reported_even_if_its_file_cannot_be_written(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = shadowed(loaded("llama"), tmp_path / "file" / "folder")
    spoil_outputs(runner_of(engine, "prefill"))
    run(engine, {"a": text_prompt(range(3, 30))}, GREEDY)
    [found] = check_all(engine)
    assert found.path is None and "could not be saved" in str(found)


def wrong_file(loaded: Loaded, phase: str, folder: Path) -> tuple[Mismatch, ShadowFile]:
    """The file of the first wrong replay of a phase that reads what earlier passes wrote."""
    engine = shadowed(loaded, folder)
    prompt = random_prompt(loaded[0], np.random.default_rng(4), num_images=2, length=60)
    run(engine, {"a": prompt}, GREEDY)
    check_all(engine)
    spoil_outputs(runner_of(engine, phase))
    longer = random_prompt(loaded[0], np.random.default_rng(5), num_images=2, length=90)
    run(engine, {"b": longer, "c": prompt}, PENALISED)
    found = [mismatch for mismatch in check_all(engine) if mismatch.key.phase == phase]
    assert found and found[0].path is not None
    return found[0], read_file(found[0].path)


def dirty(executor: DeviceExecutor) -> None:
    """Fills everything that a pass may read with other values."""
    state = executor.state
    assert state.vision_rows is not None
    for tensor in (state.vision_rows, state.logits, *(part for pair in state.caches for part in pair)):
        tensor.normal_()
    state.newest_ids.fill_(1)


@pytest.mark.parametrize("phase", PHASES)
def test_a_fresh_engine_repeats_both_runs_from_the_file_alone(loaded: Load, phase: str, tmp_path: Path) -> None:
    made, model = loaded("qwen3_vl")
    mismatch, file = wrong_file(loaded("qwen3_vl"), phase, tmp_path)
    engine = build(model, made.folder, SIZES)
    executor = executor_of(engine)
    dirty(executor)
    found = replay_file(executor, file)
    assert found.differences == [] and found.replay_digest == found.eager_digest, "its graphs are right"
    seen = {difference.output for difference in mismatch.differences} - {"rows of the cache"}
    assert seen and {difference.output for difference in found.as_recorded} == seen, "the recorded replay was wrong"
    dirty(executor)
    spoil_outputs(runner_of(engine, phase))
    again = replay_file(executor, file)
    assert again.as_recorded == [] and {difference.output for difference in again.differences} == seen
    assert (again.replay_digest, again.eager_digest) != (found.replay_digest, found.eager_digest)
    assert again.eager_digest == found.eager_digest


def test_an_engine_captures_the_exact_graph_of_a_file(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3_vl")
    options = replace(SIZES, vision_tiers=frozenset({Tier.EXACT}))
    engine = shadowed(loaded("qwen3_vl"), tmp_path, options)
    vision = runner_of(engine, "vision")
    values = vision.phase.example((5, 2), torch.Generator().manual_seed(0))
    vision.capture_exact(values)
    spoil_outputs(vision)
    vision.run(values, lambda outputs: None)
    [mismatch] = check_all(engine)
    assert mismatch.path is not None and mismatch.key.digest
    executor = executor_of(build(model, made.folder, options))
    found = replay_file(executor, read_file(mismatch.path))
    assert found.differences == [] and [difference.output for difference in found.as_recorded] == ["rows"]
    assert executor.vision is not None and [graph.key for graph in executor.vision.graphs] == [mismatch.key]


@pytest.fixture
def prefill_file(loaded: Load, tmp_path: Path) -> Iterator[ShadowFile]:
    yield wrong_file(loaded("qwen3_vl"), "prefill", tmp_path)[1]


def test_a_replay_that_writes_wrong_keys_is_told_apart(loaded: Load, prefill_file: ShadowFile) -> None:
    made, model = loaded("qwen3_vl")
    executor = executor_of(build(model, made.folder, SIZES))
    keys = executor.state.caches[0][0].flatten(0, 1)
    for graph in executor.prefill.graphs:
        spoil(graph, partial(keys.index_fill_, 0, graph.frame["slots"][:1], 9.0))
    [found] = replay_file(executor, prefill_file).differences
    assert found.output == "keys of layer 0" and found.row == 0


def test_digests_depend_on_names_types_and_shapes() -> None:
    zeros = torch.zeros(2, 3)
    named = [{"a": zeros}, {"b": zeros}, {"a": zeros.T}, {"a": zeros.int()}, {"a": zeros + 1}, {}]
    assert len({digest_of(tensors) for tensors in named}) == len(named)
    assert digest_of({"a": zeros}) == digest_of({}, {"a": zeros.numpy()})


def test_a_file_that_this_engine_cannot_have_written_is_refused(loaded: Load, prefill_file: ShadowFile) -> None:
    made, model = loaded("qwen3_vl")
    executor = executor_of(build(model, made.folder, SIZES))
    keys = prefill_file.cached["keys of layer 0"]
    for cached in ({"keys of layer 0": keys.double()}, {"keys of layer 0": keys[..., :-1]}):
        with pytest.raises(ConfigError, match="of another model, or of an engine with other limits: keys of layer 0"):
            replay_file(executor, replace(prefill_file, cached={**prefill_file.cached, **cached}))
    with pytest.raises(ConfigError, match="of another model, or of an engine with other limits: 'rows'"):
        replay_file(executor, replace(prefill_file, cached={}))
    with pytest.raises(ConfigError, match="has no graph"):
        replay_file(executor, replace(prefill_file, key=GraphKey("prefill", Mode.PIECEWISE, prefill_file.key.capacity)))
    vision = replace(prefill_file, key=GraphKey("vision", Mode.FULL, prefill_file.key.capacity))
    with pytest.raises(ConfigError, match="the file is of a vision pass; this model has prefill, decode"):
        replay_file(executor_of(build(loaded("llama")[1], loaded("llama")[0].folder, SIZES)), vision)


def test_files_are_private_and_only_the_newest_are_kept(prefill_file: ShadowFile, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    (folder / "other.txt").write_text("not ours")
    for number in range(MAX_FILES + 2):
        path = write_file(folder, replace(prefill_file, digest=str(9 - number)))
        os.utime(path, (number, number))
        assert path.stat().st_mode & 0o777 == 0o600
    names = [f"prefill-{9 - number}{SUFFIX}" for number in reversed(range(2, MAX_FILES + 2))]
    assert sorted(path.name for path in folder.iterdir()) == ["other.txt", *names]


def test_each_rank_keeps_its_own_newest_files(prefill_file: ShadowFile, tmp_path: Path) -> None:
    settings = replace(prefill_file.origin.settings, tensor_parallel_size=2)
    ranked = replace(prefill_file, origin=replace(prefill_file.origin, settings=settings))
    folder = tmp_path / "shared"
    alone = write_file(folder, prefill_file)
    for number in range(MAX_FILES + 1):
        paths = [write_file(folder, replace(ranked, digest=str(number), rank=rank)) for rank in range(2)]
        for path in paths:
            os.utime(path, (number, number))
    assert [file_of_rank(paths[0], rank) for rank in range(2)] == paths == [file_of_rank(paths[1], r) for r in range(2)]
    assert file_of_rank(alone, 0) == alone and alone.exists()
    assert len(list(folder.iterdir())) == 1 + 2 * MAX_FILES


def test_a_file_that_cannot_be_finished_is_removed(
    prefill_file: ShadowFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tensors: object, path: Path, metadata: object) -> None:
        path.write_text("half of it")
        raise OSError("no space left")

    monkeypatch.setattr("saccade.execution.shadow_file.save_file", fails)
    with pytest.raises(OSError, match="no space"):
        write_file(tmp_path / "full", prefill_file)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_graph_is_retired_even_if_its_file_cannot_be_made(
    loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(state: object, arrays: object) -> None:
        raise torch.OutOfMemoryError("no memory for the context")

    monkeypatch.setattr("saccade.execution.shadow.context_of", fails)
    engine = shadowed(loaded("llama"), tmp_path)
    spoil_outputs(runner_of(engine, "decode"))
    run(engine, *requests(loaded("llama")[0], 2, seed=3))
    found = check_all(engine)
    assert found and all(mismatch.path is None for mismatch in found) and list(tmp_path.iterdir()) == []
    retired = [graph for graph in engine.phase_snapshots()["decode"]["graphs"] if graph["out_of_service"]]
    assert {graph["key"] for graph in retired} == {str(mismatch.key) for mismatch in found}
