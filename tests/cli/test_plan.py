import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.cli import main
from saccade.dry_run.blueprint import draw, peak_bytes
from saccade.dry_run.memory import CONTEXT_BYTES, find_gpu, least_room, plan_memory, plan_ranks, room_on
from saccade.errors import ConfigError
from saccade.execution.build import build_engine, build_executor, is_slow_by_default
from saccade.execution.sizes import GPU_SHADOW_BYTES, HEADROOM_BYTES
from saccade.inputs.processor import Processor
from saccade.layers.parallel import Groups
from saccade.models.model_config import Config
from saccade.models.vlm import Model
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import StartEngine
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny

LAYERS, WIDTH, MLP, VOCAB, HEADS, KV_HEADS, HEAD = 36, 4096, 12288, 151936, 32, 8, 128
V_DEPTH, V_WIDTH, V_MLP, V_PATCH, UNIT, LEVELS = 27, 1152, 4304, 3 * 2 * 16 * 16, 4, 4


def parameters_of_qwen3_vl_8b() -> int:
    """Counted by hand from the dimensions."""
    attention = WIDTH * HEAD * (2 * HEADS + 2 * KV_HEADS) + 2 * HEAD
    text = LAYERS * (attention + 3 * WIDTH * MLP + 2 * WIDTH) + WIDTH + 2 * VOCAB * WIDTH
    block = 4 * V_WIDTH * V_WIDTH + 4 * V_WIDTH + 2 * V_WIDTH * V_MLP + V_MLP + V_WIDTH + 4 * V_WIDTH
    merged = UNIT * V_WIDTH
    merger = merged * merged + merged + merged * WIDTH + WIDTH
    norms = 2 * V_WIDTH + (LEVELS - 1) * 2 * merged
    vision = V_PATCH * V_WIDTH + V_WIDTH + 2304 * V_WIDTH + V_DEPTH * block + LEVELS * merger + norms
    return text + vision


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    main(["plan", str(folder), "--json", *flags])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_one_layer_of_each_kind_shows_the_peak_of_all(real_size: Path, made: tiny.Tiny) -> None:
    for folder in (real_size, made.folder):
        blueprint = draw(folder, EngineSettings(), SchedulerSettings())
        for phase in blueprint.executor.phases:
            assert peak_bytes(blueprint, phase) == peak_bytes(blueprint, phase, all_layers=True) > 0


def test_a_plan_at_real_size_agrees_with_counting_by_hand(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(real_size), "--json", "--gpu", "H200", "--max-model-len", "8K"]) == 0
    plan = json.loads(capsys.readouterr().out)
    sizes = plan["bytes"]
    assert sizes["weights"] == 2 * parameters_of_qwen3_vl_8b()
    assert plan["kv_token_bytes"] == 2 * 2 * LAYERS * KV_HEADS * HEAD
    assert sizes["encoder cache"] == 2 * LEVELS * 16384 * WIDTH
    logits = 256 * VOCAB * 4
    assert sizes["logits and sampling"] == 2 * logits + 257 * VOCAB * 4 + 257 * 8
    [gpu] = plan["gpus"]
    left = int(find_gpu("H200").nbytes * 0.9) - sum(sizes.values())
    block = plan["block_size"] * plan["kv_token_bytes"]
    assert gpu["kv_tokens"] == (left // block - 1) * plan["block_size"]
    assert gpu["longest_requests"] == gpu["kv_tokens"] / 8192
    assert gpu["fits"]


@pytest.mark.parametrize("flags", [["--quantization", "fp8"], ["--dtype", "float16"]])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"])
def test_models_with_experts_are_planned_in_every_dtype(
    made: tiny.Tiny, name: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make(name, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text((made.folder / "preprocessor_config.json").read_text())
    weights = planned(tmp_path, capsys)["bytes"]
    assert isinstance(weights, dict) and weights["weights"] > 0
    other = planned(tmp_path, capsys, *flags)["bytes"]
    assert isinstance(other, dict) and 0 < other["weights"] <= weights["weights"]


def test_a_checkpoint_in_float32_is_planned_as_it_runs(
    few_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless --dtype says otherwise it runs in float32 on a GPU, which the engine warns of."""

    def weights(folder: Path, *flags: str) -> Any:
        found: Any = planned(folder, capsys, *flags)
        return found["bytes"]["weights"]

    wide = json.loads((few_layers / "config.json").read_text())
    wide["text_config"]["dtype"] = wide["dtype"] = "float32"
    for file in few_layers.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(wide))
    assert weights(tmp_path) == 2 * weights(few_layers) == 2 * weights(tmp_path, "--dtype", "bfloat16")
    config, gpu = Config.read(tmp_path / "config.json"), torch.device("cuda")
    assert is_slow_by_default(EngineSettings(), gpu, config)
    assert not is_slow_by_default(EngineSettings(), torch.device("cpu"), config)
    assert not is_slow_by_default(EngineSettings(dtype="float32"), gpu, config)
    assert not is_slow_by_default(EngineSettings(), gpu, Config.read(few_layers / "config.json"))


def test_what_does_not_fit_is_said_and_changes_the_exit_code(
    real_size: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(real_size), "--gpu", "12GiB"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown.replace("\n", " ") and "--max-model-len" in shown
    assert main(["plan", str(real_size / "config.json")]) == 0, "a list of GPUs answers whether it fits or not"


def test_a_limit_of_requests_is_not_taken_for_one_of_memory(
    real_size: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", str(real_size), "--gpu", "H200", "--max-num-seqs", "8"]
    assert main(small) == 0
    shown = capsys.readouterr().out
    assert "│ 8 *" in shown and "* memory has room for more; at most 8 run at a time (--max-num-seqs)" in shown
    assert shown.startswith(str(real_size)) and shown.count(str(real_size)) == 1
    plan: dict[str, Any] = planned(real_size, capsys, *small[2:], "--gpu", "30GiB")
    [large, little] = plan["gpus"]
    assert (large["is_capped"], little["is_capped"]) == (True, False)
    assert little["longest_requests"] < 8 == large["longest_requests"]
    assert main(["plan", str(real_size), "--gpu", "30GiB"]) == 0
    assert "*" not in capsys.readouterr().out


def test_the_bundled_model_is_planned_with_the_limits_it_is_served_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["max_model_len"], plan["max_num_seqs"]) == (1024, 4)


@pytest.mark.parametrize("width", [40, 80])
def test_numbers_are_whole_however_narrow_the_terminal(
    real_size: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plan: dict[str, Any] = planned(real_size, capsys, "--gpu", "H200", "--gpu", "L4")
    main(["plan", str(real_size), "--gpu", "H200", "--gpu", "L4"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines[1:]), "but for the model's name, which is one word"
    shown = "\n".join(lines)
    for gpu in plan["gpus"]:
        assert f"{gpu['kv_tokens']:,}" in shown and f"{gpu['kv_bytes'] / 2**30:.1f}" in shown
    for part in plan["bytes"]:
        assert part.split()[0] in shown
    assert ("┃" in shown) == (width == 80) and "…" not in shown


def test_more_of_anything_leaves_less(few_layers: Path) -> None:
    def tokens(engine: EngineSettings, limits: SchedulerSettings) -> int:
        plan = plan_memory(draw(few_layers, engine, limits))
        return room_on(plan, find_gpu("80GiB").nbytes, engine.gpu_memory_utilization).kv_tokens

    limits = SchedulerSettings()
    base = tokens(EngineSettings(), limits)
    assert tokens(EngineSettings(gpu_memory_utilization=0.8), limits) < base
    assert tokens(EngineSettings(encoder_cache_tokens=32768), limits) < base
    assert tokens(EngineSettings(), SchedulerSettings(encoder_budget_tokens=2048)) > base
    assert tokens(EngineSettings(enforce_eager=True), limits) > base
    assert tokens(EngineSettings(kv_cache_tokens=10_000), limits) == -(-10_000 // 128) * 128


@pytest.mark.parametrize(
    ("settings", "is_kept"),
    [
        (EngineSettings(), True),
        (EngineSettings(graphs_strict=True), True),  # layouts are run once before they get a graph of their own
        (EngineSettings(graphs="vision=capacity"), False),
        (EngineSettings(graphs="vision=off"), True),
    ],
)
def test_memory_is_kept_for_vision_passes_without_a_graph(
    few_layers: Path, settings: EngineSettings, is_kept: bool
) -> None:
    assert bool(plan_memory(draw(few_layers, settings, SchedulerSettings())).eager_vision) == is_kept


def test_memory_is_kept_for_images_larger_than_the_encoders_budget(few_layers: Path) -> None:
    settings, limits = EngineSettings(graphs="vision=capacity"), SchedulerSettings(encoder_budget_tokens=64)
    assert plan_memory(draw(few_layers, settings, limits)).eager_vision > 0


@pytest.mark.parametrize("graphs", ["", "vision=off,prefill=piecewise"])
def test_a_plan_says_what_an_engine_allocates(made: tiny.Tiny, graphs: str) -> None:
    engine_settings = EngineSettings(device="cpu", encoder_cache_tokens=512, kv_cache_tokens=700, graphs=graphs)
    limits = SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128, encoder_budget_tokens=48)
    processor = Processor.from_folder(made.folder)
    executor = build_engine(made.folder, engine_settings, limits, processor=processor).executor
    plan = plan_memory(draw(made.folder, engine_settings, limits, is_cuda=False))
    state = executor.state
    assert plan.weights == state.model.parameter_bytes()
    assert plan.arenas == {phase.phase.name: phase.phase.arena.nbytes for phase in executor.phases}
    assert state.vision_rows is not None and plan.encoder_cache == state.vision_rows.nbytes
    assert plan.sampling == sum(t.nbytes for t in (state.newest_ids, state.logits, state.edited, state.seen))
    assert plan.num_graphs == sum(len(phase.graphs) for phase in executor.phases)
    room = room_on(plan, 2**32, 0.9)
    assert room.num_blocks == state.num_blocks
    assert room.kv_bytes == sum(keys.nbytes + values.nbytes for keys, values in state.caches)


def test_ranks_share_a_model_of_real_size(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but norms, biases of sums, patches and positions is divided; keys and values by their heads."""
    one: dict[str, Any] = planned(real_size, capsys, "--gpu", "H200")
    assert "ranks" not in one and "tensor_parallel_size" not in one
    four: dict[str, Any] = planned(real_size, capsys, "--gpu", "H200", "--tensor-parallel-size", "4")
    assert four["tensor_parallel_size"] == 4 and [rank["rank"] for rank in four["ranks"]] == [0, 1, 2, 3]
    text = LAYERS * (2 * WIDTH + 2 * HEAD) + WIDTH
    merged = UNIT * V_WIDTH
    vision = (V_PATCH + 1 + 2304) * V_WIDTH + V_DEPTH * 6 * V_WIDTH + LEVELS * WIDTH + 2 * V_WIDTH + 3 * 2 * merged
    shares = [rank["bytes"]["weights"] for rank in four["ranks"]]
    assert sum(shares) == 2 * (parameters_of_qwen3_vl_8b() + 3 * (text + vision))
    rows = max(8192 * WIDTH, 256 * VOCAB // 4)
    patches = 8192 * UNIT * V_WIDTH
    assert {rank["bytes"]["exchange with other ranks"] for rank in four["ranks"]} == {2 * (rows + patches)}
    assert four["kv_token_bytes"] == one["kv_token_bytes"] / 4
    assert four["gpus"][0]["kv_tokens"] > 4 * one["gpus"][0]["kv_tokens"]
    shared: dict[str, Any] = planned(real_size, capsys, "--gpu", "H200", "--tensor-parallel-size", "16")
    assert shared["kv_token_bytes"] == one["kv_token_bytes"] / KV_HEADS, "two ranks hold a copy of the same head"


def test_what_each_rank_holds_is_printed(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(real_size), "--gpu", "H200", "--tensor-parallel-size", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "GiB, ranks 0 to 3" in shown and "exchange with other ranks" in shown
    assert "each of the 4 ranks has such a GPU" in shown and "36 KiB of KV cache per rank" in shown


@pytest.mark.parametrize(
    ("size", "what"), [("3", "num_heads = 32 cannot be split evenly over 3 ranks"), ("32", "vision num_heads = 16")]
)
def test_a_shape_that_cannot_be_divided_is_refused(
    real_size: Path, capsys: pytest.CaptureFixture[str], size: str, what: str
) -> None:
    mode = ["--mm-encoder-tp-mode", "weights"]
    assert main(["plan", str(real_size), "--tensor-parallel-size", size, *mode]) == 2
    said = capsys.readouterr().err
    assert what in said and "--tensor-parallel-size" in said


def test_where_heads_of_the_tower_cannot_be_divided_ranks_hold_it_whole(
    few_layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of 32 ranks have padding beside their weights, the first have none."""
    assert main(["plan", str(few_layers), "--tensor-parallel-size", "32"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "GiB, ranks 0 to" in shown and "padding of weights" in shown


@pytest.mark.parametrize("mode", ["weights", "data"])
def test_a_plan_says_what_each_rank_allocates(made: tiny.Tiny, mode: str) -> None:
    settings = EngineSettings(
        device="cpu",
        encoder_cache_tokens=512,
        kv_cache_tokens=700,
        tensor_parallel_size=2,
        mm_encoder_tp_mode=mode,
    )
    limits = SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128, encoder_budget_tokens=48)
    plans = plan_ranks(draw(made.folder, settings, limits, is_cuda=False))
    for rank, plan in enumerate(plans):
        start = StartEngine(str(made.folder), settings, limits)
        executor, _ = build_executor(start, torch.device("cpu"), Groups.imagined(rank, 2))
        state = executor.state
        assert plan.weights == state.model.parameter_bytes()
        homes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _weights(state.model)}
        assert plan.weights + plan.padding == sum(homes.values())
        assert plan.arenas == {phase.phase.name: phase.phase.arena.nbytes for phase in executor.phases}
        room = room_on(plan, 2**32, 0.9)
        assert room.num_blocks == state.num_blocks
        assert room.kv_bytes == sum(keys.nbytes + values.nbytes for keys, values in state.caches)


def _weights(model: Model) -> list[torch.Tensor]:
    """What is filled from a checkpoint, as it lies in memory."""
    return [slot.view for _, slot in model.slots()]


def test_the_kv_cache_is_what_the_fullest_rank_can_hold(made: tiny.Tiny) -> None:
    plan = plan_memory(draw(made.folder, EngineSettings(), SchedulerSettings(max_num_seqs=4)))
    fuller = replace(plan, weights=plan.weights + 10 * plan.block_bytes)
    rooms = [room_on(one, 2**32, 0.9) for one in (plan, fuller)]
    assert rooms[1].num_blocks == rooms[0].num_blocks - 10
    assert least_room([plan, fuller, plan], 2**32, 0.9) == rooms[1]
    huge = replace(plan, weights=2**34)
    assert not least_room([plan, huge], 2**32, 0.9).fits, "one rank without room is enough"


def test_shadow_checks_take_memory(few_layers: Path) -> None:
    plain, shadowed = (
        plan_memory(draw(few_layers, EngineSettings(shadow=n), SchedulerSettings())) for n in (0.0, 0.01)
    )
    assert plain.shadow == 0 and not any("shadow" in name for name, _, _ in plain.rows())
    assert shadowed.shadow == sum(GPU_SHADOW_BYTES.values()) + shadowed.language_temporaries
    assert shadowed.needed == plain.needed + shadowed.shadow
    assert ("shadow checks", shadowed.shadow, "estimated, --shadow") in shadowed.rows()


def test_room_is_what_is_left() -> None:
    from saccade.dry_run.memory import MemoryPlan

    plan = MemoryPlan(
        weights=1000,
        encoder_cache=0,
        sampling=0,
        arenas={},
        language_temporaries=0,
        vision_temporaries=0,
        eager_vision=0,
        num_graphs=0,
        block_bytes=160,
        block_size=16,
        max_model_len=32,
        max_num_seqs=100,
        wanted_blocks=None,
    )
    fixed = 1000 + CONTEXT_BYTES + HEADROOM_BYTES
    room = room_on(plan, fixed + 4 * 160 + 7, 1.0)
    assert (room.num_blocks, room.kv_tokens, room.longest_requests, room.fits) == (4, 48, 1.5, True)
    short = room_on(plan, fixed + 2 * 160, 1.0)
    assert (short.fits, short.missing_bytes) == (False, 160)


@pytest.mark.parametrize(("name", "gib"), [("h200", 139.8), ("RTX 4090", 23.5), ("4090", 23.5), ("80GiB", 80.0)])
def test_gpus_have_names_and_sizes(name: str, gib: float) -> None:
    assert find_gpu(name).gib == gib


@pytest.mark.parametrize("name", ["A100", "GPU", "-3GiB", "nanGiB", "GiB"])
def test_other_gpus_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--gpu"):
        find_gpu(name)
