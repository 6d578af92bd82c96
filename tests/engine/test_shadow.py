"""Shadow checks find wrong graphs in service, never blame a correct one, and change no answer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import msgpack
from torch import Tensor

from saccade.choice.key import Reason
from saccade.config import Mode
from saccade.errors import ConfigError, GraphError
from saccade.execution.shadow import MAX_RECORDS, Shadow
from saccade.execution.shadow_file import MAX_FILES, Origin
from saccade.execution.shadow_passes import Slab, TooLargeError, context_slots, every_nth, written_keys
from saccade.execution.shadow_verdict import Mismatch
from saccade.graphs import Capacity, GraphKey, GraphRunner
from saccade.graphs.capture import CapturedGraph
from saccade.graphs.compare import OutputDifference
from saccade.inputs.placeholders import Prompt
from saccade.layers.parallel import ALONE, ParallelGroup
from saccade.scheduling.engine import Engine
from saccade.wire.engine_metrics import own_metrics
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from tests.engine.conftest import Loaded
from tests.engine.rig import Answer, Options, build, executor_of, random_prompt, run
from tests.engine.wrong_graphs import spoil, spoil_outputs
from tests.models import tiny

Load = Callable[[str], Loaded]
FAMILIES = ("llama", "qwen3_moe", "gemma3", "qwen3_vl", "qwen2_5_vl", "gemma3_vl")
PHASES = ("vision", "prefill", "decode", "head", "sample")
SIZES = Options(mode=Mode.FULL, max_tokens=48, max_num_seqs=8, max_units=40, num_blocks=120, has_prefix_cache=True)
SLABS = {"language": 16 * 2**20, "vision": 4 * 2**20}
MAX_CHECKS = 2000
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)
PENALISED = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=2)


def shadowed(
    loaded: Loaded,
    folder: Path | None = None,
    options: Options = SIZES,
    *,
    share: float = 1.0,
    slabs: dict[str, int] = SLABS,
    group: ParallelGroup = ALONE,
) -> Engine:
    made, model = loaded
    engine = build(model, made.folder, options)
    origin = Origin(model=str(made.folder), settings=EngineSettings(), limits=SchedulerSettings(), folder=folder)
    engine.idle.shadow = Shadow(executor_of(engine), share, origin, slab_bytes=slabs, group=group)
    return engine


def requests(made: tiny.Tiny, count: int, seed: int) -> tuple[dict[str, Prompt], dict[str, SamplingParams]]:
    """Requests of many lengths and with all kinds of parameters, some with images if the family supports them."""
    rng = np.random.default_rng(seed)
    has_images = made.name in tiny.VISION
    prompts = {f"{seed}-{i}": random_prompt(made, rng, i % 3 if has_images else 0) for i in range(count)}
    kinds = (GREEDY, SAMPLED, PENALISED)
    return prompts, {name: kinds[i % len(kinds)] for i, name in enumerate(prompts)}


def check_all(engine: Engine) -> list[Mismatch]:
    found: list[Mismatch] = []
    for _ in range(MAX_CHECKS):
        if not engine.idle.can_check:
            return found
        one = engine.idle.check()
        if isinstance(one, Exception):
            raise one
        assert one is None or isinstance(one, Mismatch), one
        found += [one] if one is not None else []
    raise AssertionError(f"more than {MAX_CHECKS} checks")


def counts(engine: Engine) -> dict[str, int]:
    """Check results, summed over all phases."""
    total: dict[str, int] = {}
    for phase in engine.phase_snapshots().values():
        for result, times in phase["shadow"].items():
            total[result] = total.get(result, 0) + times
    return total


def shadow_of(engine: Engine) -> Shadow:
    assert isinstance(engine.idle.shadow, Shadow)
    return engine.idle.shadow


def runner_of(engine: Engine, phase: str) -> GraphRunner:
    return next(runner for runner in executor_of(engine).phases if runner.phase.name == phase)


def answers(found: dict[str, Answer]) -> dict[str, Any]:
    return {name: (answer.token_ids, [update.scores for update in answer.updates]) for name, answer in found.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, (ids, scores) in expected.items():
        assert found[name][0] == ids
        for mine, other in zip(found[name][1], scores, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_array_equal(mine.chosen, other.chosen)
                np.testing.assert_array_equal(mine.top_ids, other.top_ids)


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIECEWISE])
@pytest.mark.parametrize("family", FAMILIES)
def test_checks_of_correct_graphs_find_nothing(loaded: Load, family: str, mode: Mode, tmp_path: Path) -> None:
    engine = shadowed(loaded(family), tmp_path, replace(SIZES, mode=mode))
    for seed in (1, 2):
        run(engine, *requests(loaded(family)[0], 6, seed))
        assert check_all(engine) == []
    phases = engine.phase_snapshots()
    for name, phase in phases.items():
        assert phase["shadow"].keys() <= {"equal", "overwritten", "evicted"}, (name, phase["shadow"])
        assert phase["shadow"]["equal"] > 0, name
    assert phases.keys() >= set(PHASES[1:]) and not list(tmp_path.iterdir())


def test_a_check_restores_what_padded_rows_read(loaded: Load) -> None:
    """Experts compute padded rows together with real ones, whose last bits then depend on the padding."""
    made, _ = loaded("qwen3_moe")
    for seed in (200, 300, 700):
        engine = shadowed(loaded("qwen3_moe"))
        for more in range(2):
            run(engine, *requests(made, 7, seed + more))
        assert check_all(engine) == []


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3_vl"])
def test_checks_change_no_answer(loaded: Load, family: str) -> None:
    """Twenty requests in waves that reuse prefixes and images of earlier ones, with checks between the waves."""
    made, model = loaded(family)
    plain, watched = build(model, made.folder, SIZES), shadowed(loaded(family))
    for seed in (1, 2, 1, 3):
        prompts, params = requests(made, 5, seed)
        expected = answers(run(plain, prompts, params))
        assert_same(answers(run(watched, prompts, params)), expected)
        assert check_all(watched) == []
    assert counts(watched)["equal"] > 20
    assert watched.scheduler.stats().prefix_hit_tokens == plain.scheduler.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("phase", PHASES)
def test_a_graph_that_becomes_wrong_is_found_and_taken_out_of_service(loaded: Load, phase: str, tmp_path: Path) -> None:
    made, model = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"), tmp_path)
    run(engine, *requests(made, 5, seed=1))
    assert check_all(engine) == []
    runner = runner_of(engine, phase)
    spoil_outputs(runner)
    found: list[Mismatch] = []
    for seed in (2, 3, 2, 3):
        run(engine, *requests(made, 5, seed))
        found += check_all(engine)
    assert found and {mismatch.key.phase for mismatch in found} == {phase}
    assert len({mismatch.key for mismatch in found}) == len(found), "each graph is found wrong only once"
    snapshot = engine.phase_snapshots()[phase]
    assert snapshot["shadow"]["different"] == len(found)
    assert snapshot["fallbacks"]["out_of_service"] > 0
    retired = {graph["key"]: graph["out_of_service"] for graph in snapshot["graphs"] if graph["out_of_service"]}
    assert retired.keys() == {str(mismatch.key) for mismatch in found}
    figures = {
        (one.plain, one.labels.get("phase"), one.labels.get("result")): one.value
        for one in own_metrics(engine.scheduler.stats(), engine.phase_snapshots().values())
    }
    assert figures["shadow_checks", phase, "different"] == figures["graphs_out_of_service", phase, None] == len(found)
    first = found[0]
    assert str(first.key) in str(first) and first.digest in str(first) and str(first.path) in str(first)
    assert str(first.path) not in first.reason, "the path is only for the log"
    assert len(list(tmp_path.iterdir())) == min(len(found), MAX_FILES)
    for graph in runner.graphs:
        runner.catalogue.retire(graph.key, "all of them, for the comparison")
    prompts, params = requests(made, 5, seed=40)
    assert_same(answers(run(engine, prompts, params)), answers(run(build(model, made.folder, SIZES), prompts, params)))


def wrong_place(engine: Engine, place: str, graph: CapturedGraph) -> tuple[Tensor, Tensor]:
    """A tensor that a pass writes to besides its outputs, and the row to spoil."""
    state = executor_of(engine).state
    if place == "rows of the cache":
        assert state.vision_rows is not None
        return state.vision_rows[0], graph.frame["targets"][:1]
    if place == "keys of layer 1":
        return state.caches[1][0].flatten(0, 1), graph.frame["slots"][:1]
    return {"logits": (state.logits, torch.tensor([0])), "newest ids": (state.newest_ids, torch.tensor([8]))}[place]


@pytest.mark.parametrize("place", ["keys of layer 1", "logits", "newest ids", "rows of the cache"])
def test_writes_outside_the_outputs_of_a_pass_are_checked(loaded: Load, place: str) -> None:
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    runner = runner_of(engine, "vision" if place == "rows of the cache" else "decode")
    for graph in runner.graphs:
        home, row = wrong_place(engine, place, graph)
        spoil(graph, partial(home.index_add_, 0, row, torch.ones_like(home[row])))
    found = []
    for seed in range(3):
        run(engine, *requests(made, 4, seed))
        found += check_all(engine)
    assert found and {mismatch.key.phase for mismatch in found} == {runner.phase.name}
    assert place in {difference.output for mismatch in found for difference in mismatch.differences}


def test_cached_results_of_a_wrong_graph_are_not_reused(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    prompt = random_prompt(made, np.random.default_rng(4), num_images=1, length=40)
    spoil_outputs(runner_of(engine, "prefill"))
    run(engine, {"a": prompt}, GREEDY)
    [found] = check_all(engine)
    assert found.key.phase == "prefill"
    hits = engine.scheduler.stats().prefix_hit_tokens, engine.scheduler.stats().encoder_hits
    again = run(engine, {"b": prompt}, GREEDY)
    assert (engine.scheduler.stats().prefix_hit_tokens, engine.scheduler.stats().encoder_hits) == hits
    right = run(build(model, made.folder, SIZES), {"b": prompt}, GREEDY)
    assert_same(answers(again), answers(right))


def test_a_check_changes_nothing_in_the_caches(loaded: Load) -> None:
    """Not even where another image has replaced the one that is encoded again."""
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    shadow = shadow_of(engine)
    run(engine, *requests(made, 4, seed=1))
    state = executor_of(engine).state
    assert state.vision_rows is not None
    [first, *_] = [record for record in shadow._records if record.key.phase == "vision"]
    taken = first.arrays["targets"][:3]
    state.vision_rows[:, taken] = 7
    shadow.writers.note({"targets": taken})
    tensors = [state.vision_rows[:, 1:], *(part[1:] for pair in state.caches for part in pair)]
    before = [tensor.clone() for tensor in tensors]
    assert check_all(engine) == [] and shadow.counts("vision")["equal"] > 0
    assert all(torch.equal(tensor, same) for tensor, same in zip(tensors, before, strict=True))


def test_strict_mode_refuses_a_batch_whose_graph_is_out_of_service(loaded: Load) -> None:
    engine = shadowed(loaded("llama"), options=replace(SIZES, strict=True))
    for graph in executor_of(engine).decode.graphs:
        executor_of(engine).decode.catalogue.retire(graph.key, "for a test")
    batch = executor_of(engine).decode.example_for(executor_of(engine).decode.phase.buckets[0])
    with pytest.raises(GraphError, match="taken out of service \\(for a test\\)"):
        executor_of(engine).decode.run({**batch.tensors, **batch.arrays}, lambda outputs: None)


def test_a_command_interrupts_a_check_between_two_operations(loaded: Load) -> None:
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    run(engine, *requests(made, 4, seed=1))
    for patience in range(1, 2000, 37):
        if not engine.idle.can_check:
            break
        asked = iter([False] * patience + [True])
        before = counts(engine).get("interrupted", 0)
        assert engine.idle.check(partial(next, asked)) is None
        has_stopped = next(asked, None) is None  # after True it is not called again
        assert counts(engine).get("interrupted", 0) - before == has_stopped
    assert counts(engine)["interrupted"] > 0
    assert check_all(engine) == []
    assert counts(engine)["equal"] > 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_interrupted_check_of_a_wrong_graph_makes_no_other_look_wrong(loaded: Load, is_lost: bool) -> None:
    """The check has replaced wrong keys, which later replays had read, by correct ones, and may never be finished."""
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    keys = executor_of(engine).state.caches[0][0].flatten(0, 1)
    wrong = torch.ones(4, *keys.shape[1:])
    for graph in executor_of(engine).prefill.graphs:
        spoil(graph, partial(keys.index_add_, 0, graph.frame["slots"][:4], wrong))
    prompt = random_prompt(made, np.random.default_rng(4), length=20)
    run(engine, {"a": prompt}, replace(GREEDY, max_tokens=20))
    stops = iter([False] * 201 + [True] * MAX_CHECKS)
    assert engine.idle.check(partial(next, stops)) is None and counts(engine)["interrupted"] == 1
    shadow_of(engine)._records[0].is_lost = is_lost
    assert [mismatch.key.phase for mismatch in check_all(engine)] == ([] if is_lost else ["prefill"])


def test_a_record_whose_keys_were_overwritten_is_dropped(loaded: Load) -> None:
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"), options=replace(SIZES, num_blocks=40, has_prefix_cache=False))
    for seed in range(4):
        run(engine, *requests(made, 4, seed))
    assert check_all(engine) == []
    found = counts(engine)
    assert found["overwritten"] > 0 and found["equal"] > 0


def test_a_record_is_intact_until_a_slot_it_read_is_overwritten(loaded: Load) -> None:
    """Checking whole blocks first gives the same verdict as checking every slot."""
    shadow = shadow_of(shadowed(loaded("llama")))
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(300):
        tables = rng.permutation(np.arange(1, 120))[:12].reshape(3, 4).astype(np.int32)
        arrays = {"block_tables": tables, "key_lengths": rng.integers(1, 33, 3).astype(np.int32)}
        number = shadow.writers.note({"slots": context_slots(arrays, 8)[-1:]})
        later = rng.integers(8, 960, 20)
        shadow.writers.note({"slots": later})
        verdicts.append(shadow.writers.is_intact(arrays, number))
        assert verdicts[-1] == (not np.isin(context_slots(arrays, 8), later).any())
    assert 30 < sum(verdicts) < 270


def test_padding_rows_in_the_share_of_a_rank_are_never_its_own(loaded: Load) -> None:
    """Each rank's targets fill a row of the array, and a shorter share is filled up with 0."""
    writers = shadow_of(shadowed(loaded("qwen3_vl"))).writers
    arrays = {"targets": np.array([[5, 6, 7], [9, 0, 0]])}
    number = writers.note(arrays)
    assert writers.own_rows(arrays, number).tolist() == [0, 1, 2, 3]
    writers.note({"targets": np.array([6])})
    assert writers.own_rows(arrays, number).tolist() == [0, 2, 3]


def test_records_too_large_for_the_slab_are_counted_and_memory_stays_flat(loaded: Load) -> None:
    made, _ = loaded("qwen3_vl")
    tiny_slabs = shadowed(loaded("qwen3_vl"), slabs={"language": 256, "vision": 256})
    run(tiny_slabs, *requests(made, 4, seed=1))
    assert counts(tiny_slabs).keys() == {"too_large"} and not tiny_slabs.idle.can_check
    engine = shadowed(loaded("qwen3_vl"), slabs={"language": 256 * 1024, "vision": 512 * 1024})
    shadow = shadow_of(engine)
    for seed in range(4):
        run(engine, *requests(made, 4, seed))
        assert sum(slab.nbytes for slab in shadow._slabs.values()) == 768 * 1024 and len(shadow._records) <= MAX_RECORDS
    assert check_all(engine) == []
    found = counts(engine)
    assert found["evicted"] > 0 and found["equal"] > 0


def test_a_checked_record_holds_no_extra_memory(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs keep references to their records for a long time, so a record must drop what a check copied for it."""
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    shadow = shadow_of(engine)
    kept: list[Any] = []
    keep = shadow.keep

    def noted(record: Any) -> None:
        kept.append(record)
        keep(record)

    monkeypatch.setattr(shadow, "keep", noted)
    run(engine, *requests(made, 4, seed=1))
    assert check_all(engine) == [] and counts(engine)["equal"] > 0
    assert kept and all(record.cached is None for record in kept)


def test_a_slab_never_hands_out_what_is_still_in_use() -> None:
    class Holder:
        is_lost = False

    rng = np.random.default_rng(0)
    slab = Slab(64 * 256, torch.device("cpu"))
    kept: list[tuple[Holder, dict[str, Tensor], dict[str, Tensor]]] = []
    for _ in range(500):
        holder = Holder()
        tensors = {str(i): torch.randn(int(rng.integers(1, 900))) for i in range(rng.integers(1, 4))}
        copies = slab.copy(holder, tensors)
        kept.append((holder, tensors, copies))
        kept = [one for one in kept if not one[0].is_lost]
        for _, given, found in kept:
            assert all(torch.equal(found[name], given[name]) for name in given)
    assert len(kept) > 1
    with pytest.raises(TooLargeError):
        slab.copy(Holder(), {"x": torch.zeros(64 * 256 // 4 + 1)})


def test_the_share_of_checked_replays_is_kept_and_rare_graphs_get_their_turn(loaded: Load) -> None:
    shadow = shadow_of(shadowed(loaded("llama"), share=0.02))
    keys = [GraphKey("decode", Mode.FULL, Capacity.of(tokens=n)) for n in range(20)]
    rng = np.random.default_rng(3)
    chosen = [keys[0] if rng.random() < 0.95 else keys[int(rng.integers(1, 20))] for _ in range(20000)]
    taken = [key for key in chosen if shadow.wants(key)]
    assert 300 < len(taken) < 500
    assert sum(key != keys[0] for key in taken) > 2 * 0.05 * len(taken), "they are checked more often than they occur"


@pytest.mark.parametrize("result", ["failed", "unsteady"])
def test_a_check_without_a_verdict_makes_no_other_graph_look_wrong(
    loaded: Load, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has replaced wrong keys, which later replays had read, by correct ones."""
    made, _ = loaded("qwen3_vl")
    engine = shadowed(loaded("qwen3_vl"))
    prefill, keys = executor_of(engine).prefill, executor_of(engine).state.caches[0][0].flatten(0, 1)
    wrong = torch.ones(4, *keys.shape[1:])
    for graph in prefill.graphs:
        spoil(graph, partial(keys.index_add_, 0, graph.frame["slots"][:4], wrong))
    run(engine, {"a": random_prompt(made, np.random.default_rng(4), length=20)}, replace(GREEDY, max_tokens=20))
    if result == "unsteady":
        monkeypatch.setattr(prefill, "phase", replace(prefill.phase, nondeterministic=("a kernel",)))
        assert engine.idle.check() is None
    else:
        stops = iter([False] * 201 + [True])

        def stop() -> bool:
            if next(stops):
                raise RuntimeError("out of memory")
            return False

        assert str(engine.idle.check(stop)) == "out of memory"
    assert shadow_of(engine).counts("prefill") == {result: 1}
    assert check_all(engine) == []


def test_the_oldest_records_make_room_for_new_ones(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = loaded("llama")
    engine = shadowed(loaded("llama"))
    run(engine, *requests(made, 2, seed=1))
    shadow = shadow_of(engine)
    first, second = list(shadow._records)[:2]
    count = len(shadow._records)
    monkeypatch.setattr("saccade.execution.shadow.MAX_RECORDS", count)
    shadow.keep(shadow._records[-1])
    assert len(shadow._records) == count and shadow._records[0] is second
    assert counts(engine) == {"evicted": 1} and shadow.counts(first.key.phase) == {"evicted": 1}
    assert check_all(engine) == [] and counts(engine) == {"evicted": 1, "equal": count}, "it overwrote nothing"


def test_a_pass_that_fails_is_not_recorded_with_the_results_of_the_next(loaded: Load) -> None:
    """The next one runs eagerly, so it is not recorded either."""
    engine = shadowed(loaded("llama"))
    decode = executor_of(engine).decode
    values = decode.phase.example((1, 1), torch.Generator().manual_seed(0))
    key = decode.decide(decode.phase.arena.admit(values)).key
    assert key is not None

    def fail() -> None:
        raise RuntimeError("out of memory")

    for graph in decode.graphs:
        spoil(graph, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        decode.run(values, lambda outputs: None)
    decode.catalogue.retire(key, "it fails")
    decode.run(values, lambda outputs: None)
    assert decode.stats.fallbacks[Reason.OUT_OF_SERVICE] == 1
    assert not shadow_of(engine).has_records and counts(engine) == {}


def test_a_closed_shadow_records_nothing(loaded: Load) -> None:
    made, _ = loaded("llama")
    engine = shadowed(loaded("llama"))
    shadow_of(engine).close()
    run(engine, *requests(made, 3, seed=1))
    assert not engine.idle.can_check and counts(engine) == {}


def test_large_results_are_compared_in_every_nth_row() -> None:
    view = torch.randn(64, 16)
    assert torch.equal(every_nth(view, 0, view.nbytes), view)
    assert torch.equal(every_nth(view, 0, view.nbytes - 1), view[::2])
    assert torch.equal(every_nth(view, 1, view.nbytes // 4), view[:, ::4])


@pytest.mark.parametrize("place", ["keys of layer 1", "values of layer 1"])
def test_keys_and_values_are_compared_in_every_nth_slot_of_a_large_pass(loaded: Load, place: str) -> None:
    state = executor_of(shadowed(loaded("llama"))).state
    for pair in state.caches:
        for part in pair:
            part.normal_()
    slots = np.arange(8, 40)
    row_bytes = sum(part.flatten(0, 1)[0].nbytes for pair in state.caches for part in pair)
    part = state.caches[1][place.startswith("values")].flatten(0, 1)
    for room, step in ((32 * row_bytes, 1), (31 * row_bytes, 2), (8 * row_bytes, 4)):
        found = written_keys(state, {"slots": slots}, room)
        assert torch.equal(found[place], part[slots[::step]])


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shadow is 1.5; it must be between 0 and 1 \(--shadow\)"):
        EngineSettings(shadow=1.5)


class OtherRank:
    """Stands in for rank 1 of 2, and says to each question what it was told to."""

    size = 2

    def __init__(self) -> None:
        self.says: list[bytes] = []
        self.heard: list[bytes] = []

    def gather(self, data: bytes) -> list[bytes]:
        self.heard.append(data)
        return [data, self.says.pop(0)]


@pytest.fixture
def other() -> OtherRank:
    return OtherRank()


@pytest.fixture
def first(loaded: Load, other: OtherRank) -> tuple[Engine, Shadow]:
    """Rank 0, with records."""
    engine = shadowed(loaded("llama"), group=ParallelGroup(rank=0, size=2, control=other))  # type: ignore[arg-type]
    run(engine, *requests(loaded("llama")[0], 2, seed=1))
    return engine, shadow_of(engine)


SAME, WRONG = (msgpack.encode(found) for found in ([], [OutputDifference("next_ids", 1, 8, 3, 1.0)]))


def test_a_record_that_another_rank_has_lost_is_dropped(first: tuple[Engine, Shadow], other: OtherRank) -> None:
    engine, shadow = first
    number, key = shadow.choose() or pytest.fail("nothing is recorded")
    assert shadow.choose() == (number, key), "the choice is not yet taken"
    other.says = [b"evicted"]
    assert shadow.check_together(number, key) is None and counts(engine) == {"evicted": 1}
    assert shadow.choose() not in (None, (number, key))


def test_a_rank_without_the_record_says_so_and_drops_what_rank_0_has_passed_over(
    first: tuple[Engine, Shadow], other: OtherRank
) -> None:
    engine, shadow = first
    numbers = [record.number for record in shadow._records]
    other.says = [b"", b"", b""]
    assert shadow.check_together(numbers[3], GraphKey("decode", Mode.FULL, Capacity.of(tokens=999))) is None
    assert shadow.check_together(numbers[2], shadow._records[0].key) is None
    assert [record.number for record in shadow._records] == numbers[3:] and counts(engine) == {}
    assert shadow.check_together(numbers[-1] + 1, shadow._records[-1].key) is None
    assert not shadow.has_records and counts(engine) == {}
    assert other.heard == [b"evicted"] * 3


def test_a_difference_on_another_rank_counts_if_eager_runs_agree_on_all(
    first: tuple[Engine, Shadow], other: OtherRank
) -> None:
    engine, shadow = first
    other.says = [b"", WRONG, WRONG]
    assert shadow.check_together(*(shadow.choose() or pytest.fail("none"))) is None
    assert counts(engine) == {"unsteady": 1}
    other.says = [b"", WRONG, SAME, b"digest of rank 1", b""]
    number, key = shadow.choose() or pytest.fail("none")
    found = shadow.check_together(number, key)
    assert found is not None and "on rank 1 of 2 it differs" in found.reason and "digest of" not in found.reason
    assert executor_of(engine).catalogues[key.phase].retired.keys() == {key} and not engine.idle.can_check
    assert counts(engine)["different"] == 1 and "could not be saved" in str(found)
