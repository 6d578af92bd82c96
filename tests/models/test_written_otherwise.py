"""Configs that are easily misread give the numbers of transformers, or an error."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from saccade.errors import ConfigError
from saccade.layers.rotary import inverse_frequencies
from saccade.models.model_config import Config
from saccade.models.registry import read_spec
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded
from tests.models.packing import Engine
from tests.models.prompts import encode, oracle_inputs, positions, request, write

Load = Callable[[str], Loaded]
SMALL = {"vocab_size": 99, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0},
    "sliding_attention": {"rope_type": "default"},
}


def changed(made: tiny.Tiny, folder: Path, gone: tuple[str, ...] = (), **changes: Any) -> Path:
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    config = {key: value for key, value in tiny.config_of(folder).items() if key not in gone}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"rope_parameters": {}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LINEAR, "rope_theta": 3e4},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {}},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": 3580165449},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_scaling": LLAMA3, "max_position_embeddings": 700},
        {"rope_scaling": {"type": "yarn", "factor": 2.5}, "max_position_embeddings": 300, "rope_theta": 1e6},
        {"rope_parameters": YARN | {"rope_theta": 5e5, "beta_fast": 8, "beta_slow": 2.5, "truncate": False}},
        {"rope_parameters": YARN | {"beta_fast": 3, "beta_slow": 3}},
    ],
)
def test_frequencies_match_transformers(rope: dict[str, Any]) -> None:
    config = SMALL | json.loads(json.dumps(rope))
    (rotary,) = read_spec(Config(config | {"architectures": ["LlamaForCausalLM"]}))[1].decoder.rotaries
    theirs = LlamaRotaryEmbedding(hf.LlamaConfig.from_dict(config))
    torch.testing.assert_close(inverse_frequencies(rotary), theirs.inv_freq)


GEMMA: list[dict[str, Any]] = [
    {"gone": ("sliding_window",)},
    {"rope_parameters": NESTED, "rope_theta": 50000.0, "rope_local_base_freq": 1000.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"hidden_act": "silu"},
    {"gone": ("layer_types",), "sliding_window_pattern": 2},
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen2", {"gone": ("layer_types",), "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("llama_plain", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("llama_plain", {"gone": ("rope_parameters",), "rope_theta": 1e4, "rope_scaling": YARN}),
    ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.5}}),
    ("qwen2", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "factor": 20.0}}),
    ("qwen3_moe", {"rope_parameters": YARN | {"rope_theta": 5e4}}),
]
MROPE = {"mrope_section": [2, 2, 2], "type": "yarn"}
INTERLEAVED = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}


@pytest.mark.parametrize(("name", "changes"), [("gemma3", changes) for changes in GEMMA] + OTHERS)
def test_logits_match_transformers(loaded: Load, tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    folder = changed(loaded(name)[0], tmp_path, **changes)
    oracle = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = load_model(folder)
    prompt = write(model, [29], seed=11)
    inputs = oracle_inputs(oracle, prompt)
    (hidden_TD,) = Engine(model).prefill(request(model, prompt, positions(inputs)))
    torch.testing.assert_close(model.decoder.logits(hidden_TD), oracle(**inputs).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "sections"), [("qwen2_5_vl", MROPE), ("qwen3_vl", INTERLEAVED)])
def test_long_texts_with_images_match_transformers(
    loaded: Load, tmp_path: Path, name: str, sections: dict[str, Any]
) -> None:
    """YaRN and M-RoPE, as the cards of Qwen2.5-VL and Qwen3-VL say."""
    made, _ = loaded(name)
    text = tiny.config_of(made.folder)["text_config"] | {"rope_scaling": YARN | sections}
    folder = changed(made, tmp_path, text_config=text)
    oracle = type(made.oracle).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = load_model(folder)
    prompt = write(model, [7, ("image", (1, 8, 4)), 30, ("image", (1, 4, 4)), 9], seed=13)
    inputs = oracle_inputs(oracle, prompt)
    (hidden_TD,) = Engine(model).prefill(request(model, prompt, positions(inputs)))
    torch.testing.assert_close(model.decoder.logits(hidden_TD), oracle(**inputs).logits[0], atol=1e-4, rtol=1e-4)


def test_yarn_extends_the_positions(loaded: Load) -> None:
    config = tiny.config_of(loaded("qwen3")[0].folder)
    for scaling, longest in ((None, 512), (YARN, 2048), (YARN | {"factor": 1.0}, 512), (LINEAR, 512)):
        assert read_spec(Config(config | {"rope_scaling": scaling}))[1].max_position == longest


def test_deepstack_mergers_follow_the_order_of_layers_in_the_config(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3_vl")
    vision = tiny.config_of(made.folder)["vision_config"] | {"deepstack_visual_indexes": [2, 0]}
    other = load_model(changed(made, tmp_path, vision_config=vision))
    oracle = hf.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = write(model, [("image", (1, 4, 6)), ("image", (1, 8, 2))], seed=12)
    output = oracle.model.visual(prompt.image_patches, grid_thw=torch.tensor(prompt.images))
    levels = [output.pooler_output, *output.deepstack_features]
    torch.testing.assert_close(encode(other, prompt), torch.stack(levels), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling: rope_type is 'longrope'"),
        ("qwen3", {"rope_scaling": YARN | {"factor": 0.5}}, "yarn needs a factor of at least 1"),
        ("gemma3", {"rope_scaling": YARN}, "yarn in some layers only is not supported; use linear"),
        ("qwen3", {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("qwen3", {"rope_parameters": NESTED}, "a rotary for each of full_attention, sliding_attention"),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide .* 4"),
        ("qwen2", {"use_sliding_window": False}, "2 of 3 layers are sliding_attention.*sliding_window"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok is 7; 1 to 6 \(num_experts\)"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is below 1"),
        ("gemma3", {"sliding_window": None}, "3 of 4 layers are sliding_attention, but there is no window"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true; only causal"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters names rope_theta"),
        ("gemma3_vl", {"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9; it must be a square .* 8 patches"),
        ("qwen3_vl", {"vision_config": {"out_hidden_size": 40}}, "rows of 40 columns; .* 48"),
        ("qwen2_vl", {"vision_config": {"hidden_size": 40}}, "rows of 40 columns; .* 48"),
        ("qwen3_vl", {"vision_config": {"num_heads": 3}}, "3 heads of the tower do not divide"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [0, 4]}}, r"is \[0, 4\]; .* from 0 to 3"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [1, 1]}}, r"is \[1, 1\]; different layers"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [0, 1, 2]}}, "at most 2 are allowed"),
    ],
)
def test_unsupported_configs_are_refused(loaded: Load, name: str, changes: dict[str, Any], message: str) -> None:
    config = tiny.config_of(loaded(name)[0].folder)
    for key, value in changes.items():
        is_part = key == "vision_config"
        config[key] = config[key] | value if is_part else value
    with pytest.raises(ConfigError, match=message):
        read_spec(Config(config))


def as_in_4(text: dict[str, Any]) -> dict[str, Any]:
    """A decoder's config as transformers 4 wrote it."""
    rope = text["rope_parameters"]
    others = {key: value for key, value in text.items() if key not in ("rope_parameters", "dtype")}
    others |= {"torch_dtype": text.get("dtype")}
    if "full_attention" not in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return others | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    whole, local = rope["full_attention"], rope["sliding_attention"]
    scaling = {key: value for key, value in whole.items() if key != "rope_theta"}
    bases = {"rope_theta": whole["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    return others | bases | {"rope_scaling": scaling}


def with_names(text: dict[str, Any], *names: str) -> dict[str, Any]:
    """With the kind of scaling under these names: "type" came first, then "rope_type", for a while both."""
    scaling = text["rope_scaling"]
    others = {key: value for key, value in scaling.items() if key != "rope_type"}
    return text | {"rope_scaling": others | dict.fromkeys(names, scaling.get("rope_type", "default"))}


@pytest.mark.parametrize("names", [("rope_type",), ("type",), ("type", "rope_type")])
@pytest.mark.parametrize("name", tiny.MAKERS)
def test_a_config_of_transformers_4_gives_the_same_model(loaded: Load, name: str, names: tuple[str, ...]) -> None:
    made, model = loaded(name)
    config = tiny.config_of(made.folder)
    if "text_config" in config:
        config["text_config"] = with_names(as_in_4(config["text_config"]), *names)
    else:
        config = with_names(as_in_4(config), *names)
    assert read_spec(Config(config))[1] == model.spec


@pytest.mark.parametrize("is_nested_too", [False, True])
@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_qwen2_5_vl_may_be_flat(loaded: Load, kind: str, *, is_nested_too: bool) -> None:
    """As its releases are, and those of transformers 4.52, which also nest it."""
    made, model = loaded("qwen2_5_vl")
    config = tiny.config_of(made.folder)
    text = as_in_4(config.pop("text_config"))
    text["rope_scaling"] = {"type": kind, "mrope_section": text["rope_scaling"]["mrope_section"]}
    flat = {key: value for key, value in text.items() if key != "model_type"} | config
    nested = {"text_config": text} if is_nested_too else {}
    assert read_spec(Config(flat | nested))[1] == model.spec


def test_a_head_tied_in_text_config_is_tied(loaded: Load, tmp_path: Path) -> None:
    """Qwen2.5-VL was once written this way, with a meaningless false at the top level."""
    made, _ = loaded("qwen2_5_vl")
    text = tiny.config_of(made.folder)["text_config"] | {"tie_word_embeddings": True}
    folder = changed(made, tmp_path, text_config=text, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(folder).spec.decoder.tied_head
