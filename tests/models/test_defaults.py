"""Values missing in a config.json get the defaults of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from saccade.inputs.media_settings import read_image_settings, read_placeholder_settings
from saccade.models.model_config import Config
from saccade.models.model_spec import ModelSpec
from saccade.models.registry import FAMILIES, MODEL_TYPES, read_spec

# What a config must say so that its parts fit together or a default shows; other configs may be empty. The text's width
# is the one that the tower projects to by default.
PARTIAL: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True},
    "gemma3": {"text_config": {}, "vision_config": {"image_size": 896, "patch_size": 14}},
    "qwen2_5_vl": {
        "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
        "vision_config": {},
    },
    "qwen2_vl": {
        "text_config": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
        "vision_config": {},
    },
    "qwen3_vl": {"text_config": {"hidden_size": 3584}, "vision_config": {}},
    "qwen3_vl_moe": {"text_config": {"head_dim": 128}, "vision_config": {"out_hidden_size": 2048}},
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_spec(Config(config))[1]


def config_class(model_type: str) -> Any:
    return getattr(hf, MODEL_TYPES[model_type].architecture).config_class


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_match_transformers(model_type: str) -> None:
    """Compares classes, because a built config drops values that are switched off, such as a window."""
    ours, theirs = MODEL_TYPES[model_type].defaults, config_class(model_type)
    parts = getattr(theirs, "sub_configs", {})
    for table, kind in (
        (ours.top, theirs),
        (ours.text, parts.get("text_config", theirs)),
        (ours.vision, parts.get("vision_config")),
    ):
        found = {key: getattr(kind, key) for key in table}
        assert {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()} == table


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_partial_config_gives_the_same_model_as_in_transformers(model_type: str) -> None:
    given, named = PARTIAL.get(model_type, {}), {"architectures": [MODEL_TYPES[model_type].architecture]}
    partial = given | named | {"model_type": model_type}
    assert spec_of(partial) == spec_of(config_class(model_type)(**given).to_dict() | named)


def complete(config: dict[str, Any]) -> dict[str, Any]:
    return MODEL_TYPES[config["model_type"]].defaults.complete(config)


def test_a_family_with_a_tower_must_say_how_images_become_patches() -> None:
    with pytest.raises(AssertionError, match="only one of vision and media"):
        replace(MODEL_TYPES["qwen3_vl"], media=None)


def test_completing_a_config_keeps_its_values() -> None:
    config = complete({"model_type": "gemma3", "image_token_id": 7, "vision_config": {"patch_size": 14}})
    assert (config["image_token_index"], config["mm_tokens_per_image"]) == (7, 256)
    assert (config["vision_config"]["patch_size"], config["vision_config"]["image_size"]) == (14, 224)
    assert complete({"model_type": "qwen2", "sliding_window": None})["sliding_window"] is None, "null says none"
    flat = complete({"model_type": "qwen2_5_vl", "hidden_size": 64, "vision_config": {}})
    assert (flat["hidden_size"], flat["num_hidden_layers"], flat["vision_config"]["tokens_per_second"]) == (64, 80, 4)


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES if family.media is not None])
def test_inputs_are_prepared_with_the_same_defaults(model_type: str, tmp_path: Path) -> None:
    """The tower's config is empty, except for the image size where the rest would not fit."""
    vision = {"image_size": 1024} if model_type == "gemma3" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": vision}))
    size = {"size": {"height": 1024, "width": 1024}, "min_pixels": 9, "max_pixels": 99}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    theirs, ours = config_class(model_type)(vision_config=vision), read_placeholder_settings(tmp_path)
    assert ours is not None
    side = 1024 // 16 // 16 if model_type == "gemma3" else theirs.vision_config.spatial_merge_size
    assert (ours.merge, ours.image_token_id) == (side, theirs.image_token_id)
    assert ours.tokens_per_second == getattr(theirs.vision_config, "tokens_per_second", None)
    images = read_image_settings(tmp_path)
    assert images is not None and (model_type != "gemma3" or (images.patch, images.merge) == (16, side))


def test_only_qwen2_5_vl_names_places_in_pixels() -> None:
    """Qwen2-VL, which has the same patches, counts thousandths; the page reads this to draw boxes."""
    media = {family.model_type: family.media for family in FAMILIES if family.media is not None}
    found = {name for name, one in media.items() if one.placeholders.has_pixel_places}
    assert found == {"qwen2_5_vl"} < {"qwen2_vl", "qwen3_vl"} | found <= media.keys()
