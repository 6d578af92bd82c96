"""Checkpoints that fit and checkpoints that do not: the error names the file or the tensor, and the fix."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.folder import find_model
from saccade.models.quantization import Quantize
from saccade.models.rename import Renames, Rule, one
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded

Load = Callable[[str], Loaded]
WEIGHTS = "model.safetensors"


def copy(made: tiny.Tiny, folder: Path, change: Callable[[dict[str, Tensor]], Any] | None = None) -> Path:
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    if change is not None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def set_config(folder: Path, **changes: Any) -> None:
    config = tiny.config_of(folder) | changes
    (folder / "config.json").write_text(json.dumps(config))


def shard(folder: Path, num_files: int) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % num_files + 1:05d}-of-{num_files:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same_weights(a: Model, b: Model) -> bool:
    pairs = zip(a.slots(), b.slots(), strict=True)
    return all(x == y and torch.equal(s.view, t.view) for (x, s), (y, t) in pairs)


def renamed(tensors: dict[str, Tensor], *pairs: tuple[str, str]) -> None:
    for name in list(tensors):
        for old, new in pairs:
            if name.startswith(old):
                tensors[new + name.removeprefix(old)] = tensors.pop(name)
                break


OLD_AND_NEW = {
    "llama": [("model.", "")],
    "qwen2_5_vl": [("visual.", "model.visual."), ("model.", "model.language_model.")],
    "qwen3_vl": [("model.visual.", "visual."), ("model.language_model.", "model.")],
    "gemma3_vl": [
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower.vision_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
}


@pytest.mark.parametrize("name", OLD_AND_NEW)
def test_old_and_new_tensor_names_load_alike(loaded: Load, name: str, tmp_path: Path) -> None:
    made, model = loaded(name)
    folder = copy(made, tmp_path, lambda tensors: renamed(tensors, *OLD_AND_NEW[name]))
    assert same_weights(load_model(folder), model)


def test_a_checkpoint_saved_without_a_head_loads_without_one(loaded: Load, tmp_path: Path) -> None:
    """Like Qwen3-Embedding-8B. With other tensor names a missing head is an error (see below)."""
    made, model = loaded("qwen3")

    def behead(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]
        renamed(tensors, ("model.", ""))

    found = load_model(copy(made, tmp_path, behead))
    assert not found.has_head and found.decoder.head is None and model.has_head
    theirs = {name for name, _ in model.slots()} - {"decoder.head.weight"}
    assert {name for name, _ in found.slots()} == theirs


def test_experts_load_alike_fused_in_either_order_and_one_by_one(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3_vl_moe")

    def transpose(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    assert same_weights(load_model(copy(made, tmp_path, transpose)), model)


def test_shards_load_like_one_file(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3")
    shard(copy(made, tmp_path), 3)
    assert same_weights(load_model(tmp_path), model)


def test_a_stored_copy_of_a_tied_head_and_rotary_buffers_are_ignored(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("llama")

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        tensors["model.layers.0.self_attn.rotary_emb.cos_cached"] = torch.ones(1, 1, 8, 6)
        tensors["rotary_emb.inv_freq"] = torch.ones(6)

    assert same_weights(load_model(copy(made, tmp_path, add)), model)


def test_positions_saved_with_a_tower_are_ignored(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("gemma3_vl")
    positions = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(64)[None]}
    assert same_weights(load_model(copy(made, tmp_path, lambda tensors: tensors.update(positions))), model)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stored_head_that_differs_from_the_embedding_is_not_ignored(
    loaded: Load, tmp_path: Path, is_last: bool
) -> None:
    """Whether the head is read before or after the embedding: files are read in the order of their names."""
    made, model = loaded("llama")
    folder = copy(made, tmp_path)
    (folder / WEIGHTS).rename(folder / "b.safetensors")
    head = torch.randn(model.spec.decoder.vocab_size, model.spec.decoder.width)
    save_file({"lm_head.weight": head}, folder / ("c.safetensors" if is_last else "a.safetensors"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight.* differ; set tie_word_embeddings to false"):
        load_model(folder)
    set_config(folder, tie_word_embeddings=False)
    untied = load_model(folder)
    assert torch.equal(dict(untied.slots())["decoder.head.weight"].view, head)


def test_a_whole_file_takes_precedence_over_an_index_and_its_shards(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3")
    shard(copy(made, tmp_path, lambda tensors: [tensor.mul_(0.5) for tensor in tensors.values()]), 2)
    shutil.copy(made.folder / WEIGHTS, tmp_path / WEIGHTS)
    assert same_weights(load_model(tmp_path), model)


def test_a_tensor_in_two_files_is_refused_and_both_are_named(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "new.safetensors")
    shutil.copy(tmp_path / "new.safetensors", tmp_path / "old.safetensors")
    with pytest.raises(ConfigError, match=r"both new\.safetensors and old\.safetensors hold .*keep the files of one"):
        load_model(tmp_path)


def test_a_tensor_under_two_names_is_refused(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3_vl")
    old, new = "model.language_model.norm.weight", "model.norm.weight"
    copy(made, tmp_path, lambda tensors: tensors.update({new: tensors[old] * 2}))
    with pytest.raises(ConfigError, match=r"1 repeated: model\..*norm\.weight"):
        load_model(tmp_path)


def test_an_unknown_load_format_is_refused(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="'pickle' is not known; allowed: auto, safetensors, gguf, dummy"):
        load_model(loaded("qwen3")[0].folder, load_format="pickle")  # type: ignore[arg-type]


def test_a_missing_tensor_is_named(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_missing_tensors_are_named_as_in_the_checkpoint(loaded: Load, name: str, tmp_path: Path) -> None:
    made, _ = loaded(name)
    tensors = load_file(made.folder / WEIGHTS)
    for gone in list(tensors)[:: max(1, len(tensors) // 5)]:
        folder = copy(made, tmp_path / gone, partial(_pop, gone))
        with pytest.raises(ConfigError) as raised:
            load_model(folder)
        assert gone in str(raised.value)


def _pop(name: str, tensors: dict[str, Tensor]) -> None:
    del tensors[name]


def test_a_tensor_that_fills_several_slots_counts_once_if_it_is_missing(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3_vl")
    name = "model.visual.blocks.1.attn.qkv.weight"
    copy(made, tmp_path, partial(_pop, name))
    with pytest.raises(ConfigError, match=rf": 1 missing: {re.escape(name)}\."):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "rule",
    [
        one("blocks.{n}.fc1.{w}", "tower.blocks.{i}.up.{w}"),
        Rule("blocks.{n}.qkv.{w}", ("tower.blocks.{n}.q.{w}", "tower.blocks.{n}.k.weight")),
        Rule("experts.{n}", ("decoder.{n}.experts.up",), unbind=True),
    ],
)
def test_a_rule_whose_sides_have_different_words_is_refused_at_once(rule: Rule) -> None:
    with pytest.raises(AssertionError, match="other words in"):
        Renames((), (rule,))


def test_an_unexpected_tensor_is_named(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(ConfigError, match=r"1 unexpected: model\.layers\.9\.mlp\.up_proj\.weight"):
        load_model(tmp_path)


def test_a_misshapen_tensor_is_named_with_both_shapes(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3_vl")
    name = "model.visual.blocks.1.attn.qkv.weight"
    copy(made, tmp_path, lambda tensors: tensors.update({name: torch.ones(95, 32)}))
    with pytest.raises(ConfigError, match=rf"misshapen: {re.escape(name)} is 95x32; 32x32 is needed"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", tiny.VISION)
def test_patches_with_their_channels_last_are_refused(loaded: Load, name: str, tmp_path: Path) -> None:
    """As MLX stores them: flattened, they have the shape that is needed."""
    made, _ = loaded(name)

    def move_channels(tensors: dict[str, Tensor]) -> None:
        (patches,) = (name for name in tensors if "patch_embed" in name and name.endswith("weight"))
        tensors[patches] = tensors[patches].movedim(1, -1).contiguous()

    copy(made, tmp_path, move_channels)
    with pytest.raises(
        ConfigError, match=r"1 misshapen: .*patch_embed.* is 32x.*4x4x3, with channels last, as MLX has"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("quantize", [Quantize(), Quantize(language="fp8")])
def test_whole_numbers_are_not_weights(loaded: Load, quantize: Quantize, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    name = "model.layers.1.self_attn.o_proj.weight"
    copy(made, tmp_path, lambda tensors: tensors.update({name: tensors[name].int()}))
    with pytest.raises(ConfigError, match=rf"1 misshapen: {re.escape(name)} is int32; a float is needed"):
        load_model(tmp_path, quantize=quantize)


def test_a_config_without_architectures_is_known_by_its_model_type(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen2_5_vl")
    copy(made, tmp_path)
    for named in (None, list[str]()):
        set_config(tmp_path, architectures=named)
        assert same_weights(load_model(tmp_path), model)
    set_config(tmp_path, model_type="mamba")
    with pytest.raises(ConfigError, match="architecture none is not known"):
        load_model(tmp_path)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_alone_is_refused_as_such(loaded: Load, file: str, tmp_path: Path) -> None:
    """With a config.json, some tools save the adapter beside it."""
    (tmp_path / file).write_text("{}")
    if file != "adapter_config.json":
        shutil.copy(loaded("qwen3")[0].folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="it is a LoRA adapter, so merge it into its base model first"):
        load_model(find_model(tmp_path))


def test_a_missing_shard_is_named(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    shard(copy(made, tmp_path), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003\.safetensors is missing.*download it again"):
        load_model(tmp_path)


def test_an_index_cannot_point_outside_its_folder(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    shard(copy(made, tmp_path), 1)
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside its folder"):
        load_model(tmp_path)


def test_a_truncated_file_is_named(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path)


def test_pickled_weights_are_never_loaded(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pickled weights.*convert them to \.safetensors"):
        load_model(tmp_path)


def test_a_folder_without_weights_says_what_to_do(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors files.*--load-format dummy"):
        load_model(tmp_path)


def test_the_refusal_of_an_unknown_architecture_lists_the_supported_ones(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    set_config(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match=r"config\.json: architecture MambaForCausalLM.*Qwen3ForCausalLM"):
        load_model(tmp_path)


def test_remote_code_is_never_run(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3")
    copy(made, tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(marker)!r}, 'w')")
    set_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert same_weights(load_model(tmp_path), model), "a known architecture does not need the code"
    set_config(tmp_path, architectures=["OwnForCausalLM"])
    with pytest.raises(ConfigError, match="remote code is never run"):
        load_model(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; a whole number is needed"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; allowed: default"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
    ],
)
def test_a_config_that_cannot_be_built_is_named(
    loaded: Load, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    set_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as raised:
        load_model(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize("where", ["/nowhere/at/all", "./nowhere", "no-org/no-such-model"])
def test_the_error_for_a_model_that_is_not_found_says_what_was_tried(where: str) -> None:
    with pytest.raises(ConfigError, match="folder"):
        load_model(where)


def test_mrope_sections_must_fill_the_head(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3_vl")
    config = tiny.config_of(made.folder)
    config["text_config"]["rope_parameters"]["mrope_section"] = [3, 3, 3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json: mrope_section adds up to 9; it must be 8"):
        load_model(tmp_path, load_format="dummy")


def test_progress_counts_bytes_to_the_end(loaded: Load) -> None:
    made, _ = loaded("qwen3")
    calls: list[tuple[int, int, str]] = []
    load_model(made.folder, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1] == (made.folder / WEIGHTS).stat().st_size


def test_dummy_weights_have_a_realistic_scale_and_are_reproducible(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("gemma3_vl")
    shutil.copy(made.folder / "config.json", tmp_path)
    first, second = (load_model(tmp_path, load_format="dummy", dtype=torch.bfloat16) for _ in range(2))
    assert same_weights(first, second)
    slots = dict(first.slots())
    assert slots["decoder.layers.0.attention.out.weight"].view.float().std() == pytest.approx(64**-0.5, rel=0.1)
    assert slots["decoder.norm.weight"].view.abs().max() < 0.5, "Gemma's norms add one by themselves"
    assert slots["tower.norm.weight"].view.float().mean() == pytest.approx(1.0, abs=0.1)
    down = [slots[f"decoder.layers.{i}.mlp.down.weight"].view for i in range(2)]
    assert not torch.equal(*down)


def test_the_dtype_is_the_checkpoints_own_unless_given(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    copy(made, tmp_path)
    assert load_model(tmp_path).place.dtype == torch.float32
    config = tiny.config_of(tmp_path)
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert load_model(tmp_path).place.dtype == torch.bfloat16
    set_config(tmp_path, torch_dtype="int8")
    with pytest.raises(ConfigError, match=r"dtype is 'int8'.*--dtype"):
        load_model(tmp_path)
