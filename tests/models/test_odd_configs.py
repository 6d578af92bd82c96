"""A config.json with an odd value is accepted, or refused with a ConfigError that names the file."""

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from saccade.errors import ConfigError
from saccade.inputs.media_settings import read_image_settings, read_placeholder_settings, read_video_settings
from saccade.inputs.text.generation import GenerationDefaults
from saccade.layers.layer_spec import interleaved_axes
from saccade.models.model_config import Config
from saccade.models.registry import read_spec
from tests.models import tiny

ODD: tuple[Any, ...] = (
    *(0, -1, 1, 3, 7, 2**40, 10**400, 1.5, 0.0, -1.0, float("nan"), float("inf"), True, False, None),
    *("x", "", [], [1], [-1], ["x"], [None], [1.5], [{}], [[1]], [True], {}, {"a": 1}),
)


@cache
def config_of(name: str) -> str:
    return json.dumps(tiny.MAKERS[name]().config.to_dict() | {"architectures": [type(tiny.MAKERS[name]()).__name__]})


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield *above, key
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


def odd_values(config: dict[str, Any], path: tuple[str, ...]) -> list[Any]:
    value: Any = config
    for key in path:
        value = value[key]
    return [*ODD, *([value[:-1], value * 2, value[::-1], [10**9] * len(value)] if isinstance(value, list) else [])]


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_odd_values_are_accepted_or_refused_with_a_clear_error(name: str, tmp_path: Path) -> None:
    config, num_refused = json.loads(config_of(name)), 0
    for path in paths(config):
        for value in odd_values(config, path):
            try:
                read_spec(Config(changed(config, path, value), "its/config.json"))
            except ConfigError as error:
                assert str(error).startswith("its/config.json: ") and len(str(error)) < 1000, error
                num_refused += 1
            except Exception as error:
                raise AssertionError(f"{'.'.join(path)} = {value!r}") from error
    assert num_refused > 200


READERS = (read_placeholder_settings, read_image_settings, read_video_settings, GenerationDefaults.from_folder)
PREPROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": 3,
    "min_pixels": 64,
    "max_pixels": 4096,
    "fps": 2,
    "num_frames": 4,
    "min_frames": 2,
    "max_frames": 8,
    "max_video_tokens": 64,
    "do_resize": True,
}


@pytest.mark.parametrize("name", tiny.VISION)
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "generation_config.json"])
def test_input_processing_handles_odd_values_the_same_way(name: str, file: str, tmp_path: Path) -> None:
    """The front end reads these files too, before the engine has refused them."""
    ends = {"eos_token_id": [2], "temperature": 1.0, "top_k": 5, "do_sample": True}
    config = json.loads(config_of(name))
    files = {"config.json": config, "preprocessor_config.json": PREPROCESSOR, "generation_config.json": ends}
    if name == "gemma3_vl":
        files["preprocessor_config.json"] = PREPROCESSOR | {"size": {"height": 32, "width": 32}}
    for each, values in files.items():
        (tmp_path / each).write_text(json.dumps(values))
    assert all(read(tmp_path) is not None for read in READERS[:2]), "as it is, it is read"
    num_refused = 0
    for path in paths(files[file]):
        for value in odd_values(files[file], path):
            (tmp_path / file).write_text(json.dumps(changed(files[file], path, value)))
            for read in READERS:
                try:
                    read(tmp_path)
                except ConfigError:
                    num_refused += 1
                except Exception as error:
                    raise AssertionError(f"{read.__name__}: {'.'.join(path)} = {value!r}") from error
    assert num_refused > 20


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("sections", [[1, 1, 1], [8, 8, 8], [1, 20, 1], [0, 0, 1]])
def test_sections_with_a_wrong_sum_are_refused_by_name(name: str, sections: list[int]) -> None:
    config = json.loads(config_of(name))
    config["text_config"]["rope_parameters"]["mrope_section"] = sections
    half = (config["text_config"].get("head_dim") or 64 // config["text_config"]["num_attention_heads"]) // 2
    with pytest.raises(ConfigError, match=rf"its/config\.json: mrope_section adds up to {sum(sections)}; it must be"):
        read_spec(Config(config, "its/config.json"))
    assert sum(sections) != half


@pytest.mark.parametrize("sections", [[3, 3, 2], [0, 8, 0], [0, 0, 8], [1, 6, 1], [8, 0, 0], [2, 1, 5]])
def test_interleaved_sections_match_transformers(sections: list[int]) -> None:
    config = tiny.MAKERS["qwen3_vl"]().config.text_config
    config.rope_parameters = config.rope_parameters | {"mrope_section": sections}
    rotary = Qwen3VLTextRotaryEmbedding(config)
    chosen = rotary.recomposition_frequencies(torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 8).clone())
    assert interleaved_axes((sections[0], sections[1], sections[2])) == tuple(chosen.flatten()[:8].int().tolist())
