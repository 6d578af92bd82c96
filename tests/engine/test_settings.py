"""Limits that default to the machine's, and settings of a checkpoint that must agree with its model."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from saccade import LLM
from saccade.dry_run.blueprint import draw
from saccade.errors import ConfigError
from saccade.models import quantization
from saccade.models.weights import DTYPES, LoadFormat
from saccade.wire.engine_settings import CPU_LIMITS, GPU_LIMITS, WORDS, EngineSettings, SchedulerSettings
from tests.engine.rig import image_settings
from tests.models import tiny


def test_gpu_and_cpu_have_different_default_limits() -> None:
    for is_cuda, own in ((True, GPU_LIMITS), (False, CPU_LIMITS)):
        found = SchedulerSettings().resolved(is_cuda=is_cuda, max_position=10**6)
        assert {name: getattr(found, name) for name in own} == own


def test_given_limits_stay_unless_the_model_does_not_allow_them() -> None:
    given = SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=77, max_model_len=5000, encoder_budget_tokens=9)
    assert given.resolved(is_cuda=False, max_position=10**6) == given
    with pytest.raises(
        ConfigError, match=r"max_model_len is 5000; this model's positions end at 2048 \(--max-model-len"
    ):
        given.resolved(is_cuda=True, max_position=2048)
    assert SchedulerSettings().resolved(is_cuda=True, max_position=2048).max_model_len == 2048


def test_default_limits_agree_with_given_ones() -> None:
    few_rows = SchedulerSettings(max_num_batched_tokens=8).resolved(is_cuda=True, max_position=100)
    assert few_rows.max_num_seqs == 8
    many = SchedulerSettings(max_num_seqs=1000).resolved(is_cuda=False, max_position=100)
    assert many.max_num_batched_tokens == 1000


def test_steps_on_a_cpu_are_limited_to_a_useful_number_of_rows() -> None:
    asked = SchedulerSettings(max_num_batched_tokens=8192, max_num_seqs=64)
    assert asked.resolved(is_cuda=True, max_position=4096).max_num_batched_tokens == 8192
    assert asked.resolved(is_cuda=False, max_position=4096) == replace(
        asked, max_num_batched_tokens=1024, max_model_len=4096, encoder_budget_tokens=512
    )
    many = SchedulerSettings(max_num_batched_tokens=8192, max_num_seqs=3000)
    assert many.resolved(is_cuda=False, max_position=4096).max_num_batched_tokens == 3000, "every request needs a row"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_num_seqs", "4", "a whole number"),
        ("max_model_len", 4096.0, "a whole number"),
        ("max_model_len", None, "a whole number"),
        ("tensor_parallel_size", True, "a whole number"),
        ("gpu_memory_utilization", "0.5", "a number"),
        ("max_step_ms", False, "a number"),
        ("enforce_eager", "no", "True or False"),
        ("enforce_eager", 1, "True or False"),
        ("graphs", None, "text"),
        ("dtype", ["float32"], "text"),
    ],
)
def test_values_of_the_wrong_type_are_refused(name: str, value: Any, allowed: str) -> None:
    flag = re.escape(f"(--{name.replace('_', '-')})")
    with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}; it must be {allowed} {flag}$"):
        LLM("model", **{name: value})


def test_numbers_of_numpy_and_paths_are_settings(tmp_path: Path) -> None:
    numbers: Any = {"max_num_seqs": np.int64(4), "max_step_ms": np.float32(2)}
    assert SchedulerSettings(**numbers).max_num_seqs == 4
    with pytest.raises(ConfigError, match=r"revision is v2, but .* is a local folder"):
        LLM(tmp_path, download_dir=tmp_path, revision="v2")


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "encoder_budget_tokens"])
def test_negative_limits_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1; it must be at least 0"):
        SchedulerSettings(**{name: -1})


@pytest.mark.parametrize(
    ("word", "allowed"),
    [
        ("vision=piecewise", "auto, capacity, exact, off, full (--graphs); a vision pass calls nothing between pieces"),
        ("vision=often", "auto, capacity, exact, off, full (--graphs)"),
        ("prefill=exact", "auto, full, piecewise, off (--graphs)"),
        ("head=full", "a phase of vision, prefill, decode"),
    ],
)
def test_unknown_graph_modes_are_refused_with_the_allowed_words(word: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineSettings(graphs=f"decode=off,{word}")
    assert f"graphs has {word!r}" in str(refused.value) and allowed in str(refused.value)


@pytest.mark.parametrize("name", ["dtype", "load_format", "quantization", "mm_encoder_quantization", "verify"])
def test_unknown_words_are_refused_before_anything_starts(name: str) -> None:
    wrong: dict[str, Any] = {name: "int9"}
    with pytest.raises(ConfigError, match=rf"{name} is 'int9'; allowed: auto, .*\(--{name.replace('_', '-')}\)"):
        EngineSettings(**wrong)


def test_allowed_words_are_the_ones_that_loading_knows() -> None:
    known = {"dtype": DTYPES, "load_format": get_args(LoadFormat)[1:], "quantization": quantization.WORDS[1:]}
    assert {name: list(WORDS[name][1:]) for name in known} == {name: list(words) for name, words in known.items()}


def other_processor(folder: Path, target: Path, name: str, **values: Any) -> Path:
    shutil.copytree(folder, target)
    raw = json.loads((folder / "preprocessor_config.json").read_text())
    (target / name).write_text(json.dumps(raw | values))
    return target


@pytest.mark.parametrize(
    ("key", "value", "needed"), [("patch_size", 8, 4), ("temporal_patch_size", 1, 2), ("merge_size", 1, 2)]
)
@pytest.mark.parametrize(
    ("kind", "name"), [("images", "preprocessor_config.json"), ("videos", "video_preprocessor_config.json")]
)
def test_patches_that_do_not_fit_the_tower_are_refused(
    made: tiny.Tiny, tmp_path: Path, kind: str, name: str, key: str, value: int, needed: int
) -> None:
    folder = other_processor(made.folder, tmp_path / "other", name, **{key: value})
    message = f"give {kind} a {key} of {value}, but config.json gives the vision tower {needed}"
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cpu")
    with pytest.raises(ConfigError, match=message):
        draw(folder, EngineSettings(device="cpu"), SchedulerSettings(), is_cuda=False)


def test_an_image_size_that_does_not_fit_the_tower_is_refused(tmp_path: Path) -> None:
    made = tiny.make("gemma3_vl", tmp_path / "made")
    size = image_settings(made.folder).fixed_size
    assert size is not None
    how = EngineSettings(device="cpu"), SchedulerSettings()
    assert draw(made.folder, *how, is_cuda=False).model.tower is not None
    for other in ({"height": size[0] * 2, "width": size[1] * 2}, {"height": size[0], "width": size[1] * 2}):
        folder = other_processor(made.folder, tmp_path / str(other["height"]), "preprocessor_config.json", size=other)
        with pytest.raises(ConfigError, match=f"but the vision tower of config.json takes {size[0]}x{size[1]}"):
            draw(folder, *how, is_cuda=False)
