"""FP8 checkpoints as hubs have them: the words, lists and names of AutoFP8, llm-compressor, ModelOpt, verl and
transformers. Each loads and equals its dequantised copy in transformers, or is refused by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded
from tests.models.prompts import encode
from tests.models.prompts import write as write_prompt
from tests.models.quantized import (
    FP8_BLOCKS,
    INPUT_SCALE,
    SCHEMES,
    SKIPPED,
    Scheme,
    by_channel,
    compressed,
    is_product,
    write,
)
from tests.models.test_quantization import (
    PROMPTS,
    SAME_ROUNDING,
    assert_equal_to_its_dequantised_copy,
    error_of,
    oracle_of,
    round_inputs,
    set_quantization,
    weights_of,
)

Load = Callable[[str], Loaded]
MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*visual*", "*vision_tower*", "*.mlp.gate"],
    },
}
TENSOR, CHANNEL, STATIC, BLOCKS = (SCHEMES[name] for name in ("tensor", "channel", "static", "blocks"))


def by_channel_with_input_scale(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, worth = by_channel(matrix)
    return tensors | {"input_scale": torch.tensor([INPUT_SCALE])}, worth


def blocks_of(size: Any, **inputs: Any) -> dict[str, Any]:
    """compressed-tensors' own blocks, FP8_BLOCK of llm-compressor."""
    config = compressed("block")
    config["config_groups"]["group_0"]["weights"]["block_structure"] = size
    config["config_groups"]["group_0"]["input_activations"] |= {"strategy": "group", "group_size": 128} | inputs
    return config


def auto_fp8(scheme: str) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": list(SKIPPED)}


@dataclass(frozen=True)
class Release:
    """A scheme of the other tests in the words of a tool, with its names for scales (ours to theirs)."""

    scheme: Scheme
    config: dict[str, Any]
    names: tuple[tuple[str, str], ...] = ()
    shape: tuple[int, ...] | None = None  # of scales

    def rename(self, name: str) -> str:
        for ours, theirs in self.names:
            if name.endswith(f".{ours}"):
                return name.removesuffix(ours) + theirs
        return name


IN_TRANSFORMERS = (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale"))
RELEASES = {
    "FP8_BLOCK of llm-compressor": Release(BLOCKS, blocks_of([128, 128]), (("weight_scale_inv", "weight_scale"),)),
    "its older spelling": Release(BLOCKS, blocks_of("128x128"), (("weight_scale_inv", "weight_scale"),)),
    "verl, with ignored_layers": Release(
        BLOCKS,
        {key: value for key, value in FP8_BLOCKS.items() if key != "modules_to_not_convert"}
        | {"ignored_layers": list(SKIPPED)},
    ),
    "AutoFP8, dynamic": Release(TENSOR, auto_fp8("dynamic")),
    "AutoFP8, static": Release(STATIC, auto_fp8("static"), shape=()),
    "transformers without blocks": Release(
        STATIC, FP8_BLOCKS | {"activation_scheme": "static", "weight_block_size": None}, IN_TRANSFORMERS
    ),
    "ModelOpt in config.json": Release(
        STATIC, MODELOPT["quantization"] | {"quant_method": "modelopt", "ignore": ["lm_head"]}, shape=()
    ),
    "ModelOpt by its producer": Release(STATIC, MODELOPT),
    "ModelOpt by channel": Release(
        CHANNEL,
        MODELOPT | {"quantization": MODELOPT["quantization"] | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
        shape=(-1,),
    ),
    "rows, calibrated inputs": Release(
        replace(STATIC, write=by_channel_with_input_scale), compressed("channel", dynamic=False)
    ),
    "regular expressions of transformers": Release(
        BLOCKS, FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", r".*(visual|vision_tower)\..*", r".*mlp\.gate$"]}
    ),
    "compressed_tensors": Release(CHANNEL, CHANNEL.config | {"quant_method": "compressed_tensors"}),
}


def reshaped(folder: Path, shape: tuple[int, ...]) -> None:
    file = folder / "model.safetensors"
    tensors = {
        name: tensor.reshape(shape) if name.endswith("_scale") else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json; None removes one."""
    config = tiny.config_of(folder) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2_5_vl", "gemma3_vl"])
@pytest.mark.parametrize("name", RELEASES)
def test_a_release_equals_its_dequantised_copy(loaded: Load, family: str, name: str, tmp_path: Path) -> None:
    made, release = loaded(family)[0], RELEASES[name]
    quantized, plain = write(made.folder, release.scheme, tmp_path, rename=release.rename)
    set_config(quantized, quantization_config=release.config)
    if release.shape is not None:
        reshaped(quantized, release.shape)
    assert_equal_to_its_dequantised_copy(quantized, oracle_of(made, plain), plain, release.scheme.round_inputs)


@pytest.mark.parametrize("place", ["compression_config", "text_config", "hf_quant_config.json"])
def test_the_format_is_found_wherever_it_is_described(loaded: Load, place: str, tmp_path: Path) -> None:
    made, _ = loaded("qwen3_vl")
    scheme = STATIC if place.endswith(".json") else CHANNEL
    quantized, plain = write(made.folder, scheme, tmp_path)
    if place == "compression_config":
        set_config(quantized, quantization_config=None, compression_config=scheme.config)
    elif place == "text_config":
        text = tiny.config_of(quantized)["text_config"] | {"quantization_config": scheme.config}
        set_config(quantized, quantization_config=None, text_config=text)
    else:
        set_config(quantized, quantization_config=None)
        (quantized / place).write_text(json.dumps(MODELOPT))
    assert_equal_to_its_dequantised_copy(quantized, oracle_of(made, plain), plain, scheme.round_inputs)


# What the tensors are called, and what the list calls the same layers: lists have the names of modules, which
# transformers renamed in 4.52, tensors those of the first release.
NOW = {
    "qwen3_vl": ("model.visual.", "model.language_model."),
    "qwen2_5_vl": ("model.visual.", "model.language_model."),
    "gemma3_vl": ("model.vision_tower.vision_model.", "model.language_model."),
}
BEFORE = {
    "qwen3_vl": ("visual.", "language_model.model."),
    "qwen2_5_vl": ("visual.", "model."),
    "gemma3_vl": ("vision_tower.vision_model.", "language_model.model."),
}


def renamed(name: str, family: str, to: dict[str, tuple[str, str]]) -> str:
    parts = {"visual": 0, "vision_tower": 0, "layers": 1}
    word = next((word for word in parts if f"{word}." in name), None)
    if word is None:
        return name
    tail = name.split(f"{word}.", 1)[1].removeprefix("vision_model.")
    return to[family][parts[word]] + (f"layers.{tail}" if word == "layers" else tail)


@pytest.mark.parametrize("family", NOW)
@pytest.mark.parametrize(("stored", "listed"), [(BEFORE, BEFORE), (BEFORE, NOW), (NOW, BEFORE), (NOW, NOW)])
def test_lists_may_be_older_or_newer_than_the_names_of_tensors(
    loaded: Load, family: str, stored: dict[str, Any], listed: dict[str, Any], tmp_path: Path
) -> None:
    made, _ = loaded(family)

    def is_chosen(name: str, tensor: Tensor) -> bool:
        return is_product(name, tensor) and "layers.1." not in name

    quantized, plain = write(
        made.folder, CHANNEL, tmp_path, is_chosen=is_chosen, rename=lambda name: renamed(name, family, stored)
    )
    matrices = [name for name, tensor in load_file(plain / "model.safetensors").items() if tensor.ndim == 2]
    left_out = [name for name in matrices if name.endswith("weight") and ("layers.1." in name or "vis" in name)]
    ignored = [renamed(name.removesuffix(".weight"), family, listed) for name in left_out]
    set_quantization(quantized, ignore=[*ignored, "lm_head"])
    rounded = CHANNEL.round_inputs
    assert_equal_to_its_dequantised_copy(quantized, oracle_of(made, plain), plain, rounded, is_chosen)


@pytest.mark.parametrize("shape", [(), (1,), (-1,), None])
def test_a_tower_is_quantised_whole_with_its_mergers(
    loaded: Load, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """As when a recipe's pattern for the tower fits no module (vllm-project/llm-compressor#2597)."""
    made, _ = loaded("qwen3_vl")
    scheme = STATIC if shape in ((), (1,)) else CHANNEL

    def is_chosen(name: str, tensor: Tensor) -> bool:
        is_matrix = tensor.ndim == 2 and any(word in name for word in ("attn", "mlp", "linear_fc"))
        return is_matrix and name.endswith("weight")

    quantized, plain = write(made.folder, scheme, tmp_path, is_chosen=is_chosen)
    set_quantization(quantized, ignore=["lm_head"])
    if shape is not None:
        reshaped(quantized, shape)
    oracle = oracle_of(made, plain)
    model = assert_equal_to_its_dequantised_copy(quantized, oracle, plain, scheme.round_inputs, is_chosen)
    rounded = {path for path, weight in weights_of(model).items() if not weight.is_plain}
    assert {"tower.projector.mlp.up.weight", "tower.deepstack.1.mlp.down.weight"} <= rounded
    errors = []
    for seed in PROMPTS:
        prompt = write_prompt(model, [("image", (1, 8, 6)), 9], seed=seed)
        output = oracle.model.visual(prompt.image_patches, grid_thw=torch.tensor(prompt.images))
        errors.append(error_of(encode(model, prompt), torch.stack([output.pooler_output, *output.deepstack_features])))
    assert min(errors) < SAME_ROUNDING, errors


def test_groups_may_have_different_formats(loaded: Load, tmp_path: Path) -> None:
    """A whole name goes before a pattern, and a pattern before the class."""
    made, _ = loaded("qwen3_vl")
    group = compressed("channel")["config_groups"]["group_0"]
    static = compressed("tensor", dynamic=False)["config_groups"]["group_0"]
    special = "model.language_model.layers.2.mlp.down_proj"
    none = {"weights": None, "input_activations": None}
    groups = {
        "group_0": group | {"format": "float-quantized"},
        "group_1": static | {"targets": ["re:.*mlp.*"], "format": "float-quantized"},
        "group_2": group | none | {"targets": [special, "re:.*visual.*"], "format": "dense"},
    }

    def is_attention(name: str, tensor: Tensor) -> bool:
        return is_product(name, tensor) and "self_attn" in name

    def is_mlp(name: str, tensor: Tensor) -> bool:
        return is_product(name, tensor) and "mlp" in name and not name.startswith(special)

    half, worth = write(made.folder, CHANNEL, tmp_path / "half", is_chosen=is_attention)
    quantized, _ = write(half, STATIC, tmp_path / "whole", is_chosen=is_mlp)
    _, plain = write(worth, STATIC, tmp_path / "worth", is_chosen=is_mlp)
    set_config(quantized, quantization_config=compressed("channel", config_groups=groups, format="mixed-precision"))
    model = load_model(quantized, dtype=torch.float32)
    layers = model.decoder.layers
    held = weights_of(model)
    assert held["decoder.layers.2.mlp.down.weight"].is_plain and not held["decoder.layers.1.mlp.down.weight"].is_plain
    assert layers[0].attention.out.weight.input_scale is None
    assert held["decoder.layers.0.mlp.down.weight"].input_scale is not None
    oracle = oracle_of(made, plain)
    round_inputs(oracle, CHANNEL.round_inputs, is_attention)
    assert_equal_to_its_dequantised_copy(quantized, oracle, plain, STATIC.round_inputs, is_mlp)


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.kv_scale",
        "self_attn.k_scale",
        "self_attn.v_scale",
        "self_attn.k_proj.k_scale",
        "self_attn.v_proj.v_scale",
        "self_attn.k_proj.output_scale",
        "self_attn.qkv_proj.k_scale",
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scales_of_a_quantised_cache_are_not_used(loaded: Load, family: str, name: str, tmp_path: Path) -> None:
    """Keys and values keep the model's dtype."""
    made, _ = loaded(family)
    quantized, plain = write(made.folder, STATIC, tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    scales = {f"model.layers.{i}.{name}": torch.rand(1) for i in range(tiny.config_of(plain)["num_hidden_layers"])}
    save_file(tensors | scales, quantized / "model.safetensors", metadata={"format": "pt"})
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    set_quantization(quantized, kv_cache_scheme=cache)
    assert_equal_to_its_dequantised_copy(quantized, oracle_of(made, plain), plain, STATIC.round_inputs)


def test_a_checkpoint_that_quantises_only_its_cache_is_plain(loaded: Load, tmp_path: Path) -> None:
    made, right = loaded("qwen3")
    _, copy = write(made.folder, STATIC, tmp_path, is_chosen=lambda name, tensor: False)
    set_config(copy, quantization_config=compressed("tensor", config_groups={}, kv_cache_scheme={"num_bits": 8}))
    slots = dict(load_model(copy, dtype=torch.float32).slots())
    assert all(torch.equal(slots[path].view, slot.view) for path, slot in right.slots())


def with_groups(**changes: Any) -> dict[str, Any]:
    group = compressed("channel")["config_groups"]["group_0"] | changes
    return compressed("channel", config_groups={"group_0": group})


EIGHT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FOUR = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "quant_method 'fbgemm_fp8'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "quant_method 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "quark", "export": {}}, "quant_method 'quark'"),
        (FP8_BLOCKS | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt's quant_algo 'NVFP4'"),
        (MODELOPT | {"quantization": {"quant_algo": "W4A8_AWQ"}}, "modelopt's quant_algo 'W4A8_AWQ'"),
        (with_groups(input_activations=None), "float of 8 bits for weights alone"),
        (with_groups(weights=INT4, input_activations=None), "int of 4 bits for weights alone"),
        (with_groups(weights=FOUR, input_activations=FOUR | {"dynamic": "local"}), "weights in float of 4 bits"),
        (with_groups(weights=EIGHT | {"strategy": "group", "group_size": 32}), "weights by group"),
        (with_groups(weights=None), "quantised inputs alone"),
        (with_groups(targets=["LlamaAttention"]), "target 'LlamaAttention', a class other than Linear"),
        (blocks_of([64, 64]), r"weights by block of \[64, 64\]"),
        (blocks_of([128, 128], group_size=64), "weights by block and inputs by group of 64, dynamic"),
        (compressed("channel", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity .'sparse-24-bitmask'"),
        (compressed("channel", transform_config={"config_groups": {"u": {}}}), "rotations of inputs"),
    ],
)
def test_other_formats_are_refused_by_name(loaded: Load, tmp_path: Path, config: Any, problem: str) -> None:
    made, _ = loaded("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_of(made.folder) | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=rf"quantised with {problem}.* not supported; supported: FP8 .e4m3. weights"):
        load_model(tmp_path, load_format="dummy")


def test_a_missing_scale_has_the_name_that_the_checkpoint_would_use(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    for scheme, last in ((BLOCKS, "weight_scale_inv"), (CHANNEL, "weight_scale")):
        quantized, _ = write(made.folder, scheme, tmp_path / last)
        tensors = load_file(quantized / "model.safetensors")
        name = f"model.layers.1.mlp.up_proj.{last}"
        del tensors[name]
        save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=rf"1 missing: {name}\."):
            load_model(quantized)


@pytest.mark.parametrize(("family", "layer"), [("qwen3", "lm_head"), ("qwen3_moe", "model.layers.0.mlp.gate")])
def test_a_quantised_head_or_router_is_refused_by_name(loaded: Load, family: str, layer: str, tmp_path: Path) -> None:
    made, _ = loaded(family)

    def is_chosen(name: str, tensor: Tensor) -> bool:
        return is_product(name, tensor) or name == f"{layer}.weight"

    quantized, _ = write(made.folder, CHANNEL, tmp_path, is_chosen=is_chosen)
    set_quantization(quantized, ignore=[])
    with pytest.raises(ConfigError, match=rf"{layer}.weight is e4m3; .*must be plain .embedding, head or router."):
        load_model(quantized)
