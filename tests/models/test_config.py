"""Configs of the hub, old and new, flat and nested, describe the same models."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from saccade.errors import ConfigError
from saccade.layers.layer_spec import LinearScaling, PoolSpec
from saccade.models.model_config import Config
from saccade.models.model_spec import DecoderSpec, ModelSpec, VisionSpec
from saccade.models.registry import read_spec
from tests.gpu.test_families import FAMILIES


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_spec(Config(config))[1]


def real(name: str) -> tuple[DecoderSpec, VisionSpec]:
    spec = spec_of(FAMILIES[name][0])
    assert spec.vision is not None
    return spec.decoder, spec.vision


@pytest.mark.parametrize("name", FAMILIES)
def test_the_way_a_config_is_written_does_not_matter(name: str) -> None:
    """As on the hub, and as transformers 5 writes it back."""
    config, _ = FAMILIES[name]
    values = {key: value for key, value in config.items() if key != "architectures"}
    written = getattr(hf, config["architectures"][0]).config_class(**values).to_dict() | {
        "architectures": config["architectures"]
    }
    assert "rope_parameters" in (written.get("text_config") or written)
    assert spec_of(written) == spec_of(config)


def test_a_flat_config_of_qwen2_5_vl_equals_a_nested_one() -> None:
    nested = FAMILIES["Qwen2.5-VL-7B"][0]
    flat = nested | nested["text_config"]
    del flat["text_config"]
    assert spec_of(flat) == spec_of(nested)


def test_qwen3_vl_8b() -> None:
    decoder, vision = real("Qwen3-VL-8B")
    assert len(decoder.layers) == 36 and decoder.deepstack_levels == 3
    assert decoder.attention.norm == decoder.norm and not decoder.attention.qkv_bias and not decoder.tied_head
    assert decoder.rotaries[0].base == 5e6 and decoder.rotaries[0].axes[:4] == (0, 1, 2, 0)
    assert (vision.grid_side, vision.patch_values, vision.levels, vision.window) == (48, 1536, 4, 0)


def test_qwen2_5_vl_7b() -> None:
    decoder, vision = real("Qwen2.5-VL-7B")
    assert decoder.attention.qkv_bias and not decoder.attention.out_bias and decoder.attention.head_dim == 128
    assert [decoder.rotaries[0].axes.count(axis) for axis in range(3)] == [16, 24, 24]
    assert (vision.window, vision.full_layers, vision.grid_side) == (4, frozenset({7, 15, 23, 31}), 0)


def test_gemma3_4b() -> None:
    decoder, vision = real("Gemma-3-4B")
    windows = [layer.window for layer in decoder.layers]
    assert windows[:6] == [1024] * 5 + [None] and windows[29] is None and windows[33] == 1024
    assert [layer.rotary for layer in decoder.layers[:6]] == [0, 0, 0, 0, 0, 1]
    local, whole = decoder.rotaries
    assert (local.base, local.scaling, whole.base, whole.scaling) == (1e4, None, 1e6, LinearScaling(factor=8.0))
    assert decoder.embedding_scale == 2560**0.5 and decoder.norm.offset == 1.0 and decoder.tied_head
    assert vision.merge == 4 and isinstance(vision.projector, PoolSpec)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"^{re.escape(str(tmp_path))} has no config.json, so it is not a checkpoint$"
    ):
        Config.read(tmp_path / "config.json")
