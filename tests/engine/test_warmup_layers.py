"""The warm-up layers of a pass launch all its kernels, so that a capture launches none for the first time."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saccade.graphs import Frame, GraphRunner
from saccade.graphs.frame import run_body
from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Placement
from saccade.models.model_config import Config
from saccade.models.quantization import read_formats
from saccade.models.registry import read_spec
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from tests.engine.rig import Options, build, executor_of
from tests.models import tiny

SIZES = Options(max_tokens=24, max_num_seqs=3, max_units=40, num_blocks=12, max_model_len=64)
DEEP = 11
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "gemma3_vl", "qwen3_moe", "llama"]


class Launches(TorchDispatchMode):
    """Counts operations by shapes, strides and types of their tensors, which stand for kernels on a CPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        shapes = [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else str(type(x)) for x in leaves]
        self.seen[(str(func), *shapes)] += 1
        return func(*args, **(kwargs or {}))


def launches(runner: GraphRunner, *, is_warmup: bool) -> Counter[tuple[Any, ...]]:
    bucket = max(runner.phase.buckets, key=lambda bucket: bucket[runner.phase.rows])
    runner.phase.arena.fill(runner.example_for(bucket), bucket)
    frame = Frame(runner.phase.arena, bucket, is_warmup=is_warmup)
    with torch.no_grad(), Launches() as launched:
        run_body(runner.phase.body, frame)
    seen: Counter[tuple[Any, ...]] = launched.seen
    return seen


def make_deep(name: str, folder: Path) -> None:
    """A checkpoint with more layers of each kind than it has weights for."""
    tiny.make(name, folder)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    text["num_hidden_layers"] = DEEP
    if "layer_types" in text:
        text["layer_types"] = (text["layer_types"] * DEEP)[:DEEP]
    if "mlp_only_layers" in text:
        text["mlp_only_layers"] = [1, 4, 5]
    vision |= {name: DEEP for name in ("depth", "num_hidden_layers") if name in vision}
    vision |= {"deepstack_visual_indexes": [2, 5, 7]} if "deepstack_visual_indexes" in vision else {}
    vision |= {"fullatt_block_indexes": [3, 7]} if "fullatt_block_indexes" in vision else {}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_up_layers_launch_every_kernel_of_the_pass_less_often(family: str, tmp_path: Path) -> None:
    make_deep(family, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, load_format="dummy")
    executor = executor_of(build(model, tmp_path, SIZES))
    for name in ("vision", "prefill", "decode"):
        graphs: GraphRunner | None = getattr(executor, name)
        if graphs is None:
            continue
        whole, warmup = (launches(graphs, is_warmup=is_warmup) for is_warmup in (False, True))
        assert not whole.keys() ^ warmup.keys(), name
        assert warmup.total() < 0.75 * whole.total(), name


def test_layers_whose_weights_have_another_format_are_warmed_up_too(tmp_path: Path) -> None:
    make_deep("qwen3_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert meta_model(tmp_path).decoder.warmup_layers == [0, 1, 4]
    scheme = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*layers.6.self_attn", "re:.*layers.8.mlp", "re:.*blocks.9.mlp", "re:.*(lm_head|merger.*)$"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = meta_model(tmp_path)
    assert model.decoder.warmup_layers == [0, 1, 4, 6, 9], "a layer runs the MLP before it"
    assert model.tower is not None and model.tower.warmup_layers == [0, 1, 2, 9, 10], "the last anyway"
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*merger_list.1"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = meta_model(tmp_path)
    assert model.tower is not None and model.tower.warmup_layers == [0, 1, 2, 5, 10], "mergers have formats, too"


def test_a_large_model_has_a_handful_of_warm_up_layers(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent.parent / "data" / "cli_qwen3_vl_8b_config.json", tmp_path / "config.json")
    model = meta_model(tmp_path)
    assert model.tower is not None and len(model.tower.blocks) == 27 and len(model.decoder.layers) == 36
    assert model.decoder.warmup_layers == [0, 1, 4], "the first, with deepstack rows, without"
    assert model.tower.warmup_layers == [0, 1, 8, 26], "without a residual, with one, with a merger, the last"


def meta_model(folder: Path) -> Model:
    """The model of a config.json, without memory."""
    config = Config.read(folder / "config.json")
    family, spec = read_spec(config)
    formats = read_formats(config, family.renames)
    kernels = kernels_for("cpu", torch.float32)
    place = Placement(kernels=kernels, device=torch.device("meta"), dtype=torch.float32, formats=formats)
    return Model(place, spec)
