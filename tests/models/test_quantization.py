"""FP8: each checkpoint format against transformers with the dequantised weights, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.weight import BLOCK, Layout, Weight, matrix_of
from saccade.layers.formats import NumberSlot
from saccade.layers.layer import Layer
from saccade.layers.parallel import Groups
from saccade.models.quantization import Quantize
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded
from tests.models.packing import Engine
from tests.models.prompts import oracle_inputs, positions, request, write
from tests.models.quantized import FP8_BLOCKS, SCHEMES, SKIPPED, compressed, is_product
from tests.models.quantized import write as write_quantized

Load = Callable[[str], Loaded]
FAMILIES = ("llama_bias", "qwen3", "qwen3_moe", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FP8 = Quantize(language="fp8", vision="fp8")
E4M3_ERROR = 0.04  # of a product of random data: 3.75 % on an H200
MAX_ERROR = 0.25  # of logits after three layers whose products all round their inputs
ROUTED_ERROR = 0.5  # the same if rounding sends rows to other experts
SAME_ROUNDING = 0.01  # of logits whose inputs were rounded alike
PROMPTS = range(1, 5)  # the best counts: in some, an input halfway between two numbers may be rounded either way


def logits_of(model: Model, oracle: Any, seed: int = 1) -> tuple[Tensor, Tensor]:
    prompt = write(model, [37], seed=seed)
    inputs = oracle_inputs(oracle, prompt)
    (hidden_TD,) = Engine(model).prefill(request(model, prompt, positions(inputs)))
    with torch.no_grad():
        return model.decoder.logits(hidden_TD), oracle(**inputs).logits[0]


def error_of(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def weights_of(layer: Layer, path: str = "") -> dict[str, Weight]:
    found = {f"{path}{name}": value for name, value in vars(layer).items() if isinstance(value, Weight)}
    for name, child in layer.children():
        found |= weights_of(child, f"{path}{name}.")
    return found


def oracle_of(made: tiny.Tiny, plain: Path) -> Any:
    oracle = type(made.oracle).from_pretrained(plain).eval()
    oracle.set_attn_implementation("eager")
    return oracle


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_equals_its_dequantised_copy(loaded: Load, name: str, scheme: str, tmp_path: Path) -> None:
    """Weights agree bit for bit, logits within the error of rounding the inputs of products."""
    made, _ = loaded(name)
    quantized, plain = write_quantized(made.folder, SCHEMES[scheme], tmp_path)
    assert_equal_to_its_dequantised_copy(quantized, oracle_of(made, plain), plain, SCHEMES[scheme].round_inputs)


def assert_equal_to_its_dequantised_copy(
    quantized: Path,
    oracle: Any,
    plain: Path,
    rounded: Callable[[Tensor], Tensor],
    is_chosen: Callable[[str, Tensor], bool] = is_product,
) -> Model:
    model, right = load_model(quantized, dtype=torch.float32), load_model(plain, dtype=torch.float32)
    assert any(not weight.is_plain for weight in weights_of(model).values())
    slots = dict(model.slots())
    for path, slot in right.slots():
        held = slots[path].view
        if held.dtype.itemsize == 1:
            scales = slots[path.replace("weight", "weight_scale")].view
            held = held.float() * spread_over(scales, held)
        assert torch.equal(held, slot.view), path
    is_routed = hasattr(oracle.config.get_text_config(), "num_experts")
    found, logits = logits_of(model, oracle)
    plainly = error_of(found, logits)
    assert 0 < plainly < (ROUTED_ERROR if is_routed else MAX_ERROR)
    if not is_routed:
        round_inputs(oracle, rounded, is_chosen)
        error = min(error_of(*logits_of(model, oracle, seed)) for seed in PROMPTS)
        assert error < SAME_ROUNDING < plainly, "inputs are rounded, and nothing else differs"
    return model


def round_inputs(
    oracle: Any, rounded: Callable[[Tensor], Tensor], is_chosen: Callable[[str, Tensor], bool] = is_product
) -> None:
    """Makes every quantised product round its inputs as the format requires."""
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and is_chosen(f"{name}.weight", module.weight):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))


def spread_over(scales: Tensor, data: Tensor) -> Tensor:
    if scales.ndim == 1:
        return scales.unsqueeze(1)
    if scales.shape == (data.shape[0], 1):
        return scales
    return scales.repeat_interleave(BLOCK, 0)[: data.shape[0]].repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


@pytest.mark.parametrize("name", ["llama_bias", "qwen3_moe", "qwen3_vl", "gemma3_vl"])
def test_plain_weights_are_rounded_while_they_are_loaded(loaded: Load, name: str) -> None:
    made, plain = loaded(name)
    model = load_model(made.folder, dtype=torch.float32, quantize=FP8)
    exact = weights_of(plain)
    rounded = {path: weight for path, weight in weights_of(model).items() if not weight.is_plain}
    kinds = ("attention.qkv", "attention.out", "mlp")
    assert all(any(kind in path for kind in kinds) for path in rounded)
    assert not any(word in path for path in rounded for word in ("router", "embedding", "head", "patches", "projector"))
    for path, weight in rounded.items():
        worth = matrix_of(weight)
        assert weight.layout is Layout.ROWS and weight.data.dtype.itemsize == 1
        if worth.shape == exact[path].shape:
            assert 0 < error_of(worth, exact[path].data) < E4M3_ERROR, path
    found, logits = logits_of(model, made.oracle)
    assert 0 < error_of(found, logits) < MAX_ERROR
    assert model.parameter_bytes() < plain.parameter_bytes()


def test_vision_is_rounded_only_on_request(loaded: Load) -> None:
    made, _ = loaded("qwen3_vl")
    for asked, has_language, has_vision in (
        (Quantize(language="fp8"), True, False),
        (Quantize(vision="fp8"), False, True),
        (Quantize(), False, False),
    ):
        rounded = [
            path for path, weight in weights_of(load_model(made.folder, quantize=asked)).items() if not weight.is_plain
        ]
        assert any(path.startswith("decoder.") for path in rounded) == has_language
        assert any(path.startswith("tower.") for path in rounded) == has_vision


@pytest.mark.parametrize("scheme", ["blocks", "channel"])
def test_layers_that_config_json_names_stay_plain(loaded: Load, scheme: str, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    quantized, plain = write_quantized(made.folder, SCHEMES[scheme], tmp_path)
    tensors, worth = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    layer = "model.layers.1.self_attn.o_proj"
    tensors[f"{layer}.weight"] = worth[f"{layer}.weight"]
    del tensors[f"{layer}.{SCHEMES[scheme].scale_name}"]
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 missing: .*o_proj.*e4m3 is needed: its quantization is not what config"):
        load_model(quantized)
    name = "ignore" if scheme == "channel" else "modules_to_not_convert"
    for word in (layer, "re:.*layers.1.self_attn.o_proj" if scheme == "channel" else layer):
        set_quantization(quantized, **{name: [*SKIPPED, word]})
        found = weights_of(load_model(quantized))
        assert found["decoder.layers.1.attention.out.weight"].is_plain
        assert not found["decoder.layers.0.attention.out.weight"].is_plain


def test_parts_of_one_product_must_have_one_format(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    quantized, _ = write_quantized(made.folder, SCHEMES["blocks"], tmp_path)
    set_quantization(quantized, modules_to_not_convert=[*SKIPPED, "model.layers.0.self_attn.k_proj"])
    with pytest.raises(ConfigError, match=r"qkv: q and k are quantised differently.* all of q, k, v or none"):
        load_model(quantized)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        (
            FP8_BLOCKS | {"activation_scheme": "static"},
            r"activation_scheme 'static' and weight_block_size \[128, 128\]",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        (compressed("group"), "weights by group"),
        (compressed("channel", config_groups={}), "0 config_groups"),
        (compressed("channel", quantization_status="calibration"), "quantization_status 'calibration'"),
        ({}, "quant_method 'unknown'"),
    ],
)
def test_unsupported_schemes_are_refused_by_name(loaded: Load, tmp_path: Path, config: Any, problem: str) -> None:
    made, _ = loaded("qwen3")
    values = tiny.config_of(made.folder) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"quantised with {problem} .*not supported; supported: FP8 .e4m3. weights"):
        load_model(tmp_path, load_format="dummy")


@pytest.mark.parametrize("config", [5, [1], {"quant_method": 3}, compressed("channel", config_groups={"a": 3})])
def test_an_invalid_quantization_config_is_an_error(loaded: Load, tmp_path: Path, config: Any) -> None:
    made, _ = loaded("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_of(made.folder) | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=r"is needed"):
        load_model(tmp_path, load_format="dummy")


@pytest.mark.parametrize("word", ["re:(", "re:a{99999999999}"])
def test_a_broken_pattern_of_skipped_layers_is_refused(loaded: Load, tmp_path: Path, word: str) -> None:
    made, _ = loaded("qwen3")
    config = tiny.config_of(made.folder) | {"quantization_config": compressed("channel", ignore=[word])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is not a regular expression"):
        load_model(tmp_path, load_format="dummy")


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--quantization is 'int4'; allowed: auto, fp8"):
        Quantize(language="int4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dummy_weights_have_the_format_of_the_config(loaded: Load, scheme: str, tmp_path: Path) -> None:
    made, _ = loaded("qwen3")
    quantized, _ = write_quantized(made.folder, SCHEMES[scheme], tmp_path)
    first, second = (load_model(quantized, load_format="dummy", dtype=torch.bfloat16) for _ in range(2))
    weight = first.decoder.layers[0].attention.out.weight
    assert weight.layout is (Layout.BLOCKS if scheme == "blocks" else Layout.ROWS)
    assert matrix_of(weight).std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)
    for path, held in weights_of(first).items():
        assert torch.equal(matrix_of(held), matrix_of(weights_of(second)[path])), path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_split_scales_like_weights(scheme: str, tmp_path: Path) -> None:
    """Bit for bit; here the keys and values of a rank are half a block of 128 rows."""
    quantized, _ = write_quantized(wide_checkpoint(tmp_path / "wide"), SCHEMES[scheme], tmp_path)
    whole = dict(load_model(quantized, dtype=torch.float32).slots())
    for rank in range(2):
        for path, slot in load_model(quantized, dtype=torch.float32, groups=Groups.imagined(rank, 2)).slots():
            held = whole[path].view
            if isinstance(slot, NumberSlot):
                assert slot.view.unique().equal(held.unique()), path
            else:
                assert torch.equal(slot.view, slot.shard_of(held)), path


@pytest.mark.parametrize("plain", [("q_proj", "k_proj", "v_proj"), ("o_proj",)], ids=["columns", "rows"])
def test_splitting_a_block_between_ranks_is_refused(plain: tuple[str, ...], tmp_path: Path) -> None:
    """Whether a rank holds some columns of a weight or some of its rows."""
    quantized, _ = write_quantized(wide_checkpoint(tmp_path / "wide", head_dim=96), SCHEMES["blocks"], tmp_path)
    layer = "model.layers.0.self_attn"
    set_quantization(quantized, modules_to_not_convert=[*SKIPPED, *(f"{layer}.{name}" for name in plain)])
    with pytest.raises(
        ConfigError, match=r"shares of 192 over 2 ranks cut the 128 x 128 blocks.*smaller tensor-parallel"
    ):
        load_model(quantized, groups=Groups.imagined(1, 2))


def test_scales_of_channels_can_be_split_anywhere(tmp_path: Path) -> None:
    quantized, _ = write_quantized(wide_checkpoint(tmp_path / "wide", head_dim=96), SCHEMES["channel"], tmp_path)
    load_model(quantized, groups=Groups.imagined(1, 2))


def test_only_plain_weights_of_the_right_shape_are_rounded(loaded: Load, tmp_path: Path) -> None:
    """Without their scales, e4m3 weights would be taken for numbers up to 448."""
    made, _ = loaded("qwen3")
    quantized, _ = write_quantized(made.folder, SCHEMES["channel"], tmp_path)
    config = tiny.config_of(quantized)
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    tensors = load_file(quantized / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
    save_file(plain, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"is e4m3; weights that are already quantised need a quantization_config"):
        load_model(quantized, quantize=FP8)
    short = {name: tensor.float()[:-1] if "o_proj" in name else tensor.float() for name, tensor in plain.items()}
    save_file(short, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"misshapen: model.layers.0.self_attn.o_proj.weight is (\d+)x(\d+); \d+x\2 is"
    ):
        load_model(quantized, quantize=FP8)


def wide_checkpoint(folder: Path, head_dim: int = 64) -> Path:
    """With widths of several blocks."""
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    hf.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def set_quantization(folder: Path, **changes: Any) -> None:
    config = tiny.config_of(folder)
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
