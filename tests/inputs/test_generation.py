import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.inputs.text.generation import GenerationDefaults
from saccade.inputs.text.tokenizer import Tokenizer


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_values_are_read(tmp_path: Path) -> None:
    raw = {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0}
    found = GenerationDefaults.from_folder(write(tmp_path, {"text_config": {"eos_token_id": 7}}, raw))
    assert found.eos_token_ids == {5, 6, 7}
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.7, 20, 0.8, 0)
    assert found.repetition_penalty is None


def test_a_checkpoint_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    found = GenerationDefaults.from_folder(write(tmp_path, {}, {"do_sample": False, "temperature": 0.7}))
    assert found.temperature == 0


def test_without_the_file_there_are_no_sampling_defaults(tmp_path: Path) -> None:
    found = GenerationDefaults.from_folder(write(tmp_path, {"eos_token_id": 3}))
    assert found == GenerationDefaults(eos_token_ids=frozenset({3}))


def test_the_tokenizers_end_token_ends_answers_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """A base model that was trained to chat often keeps the files that name the end of a text alone."""
    shutil.copytree(folders["qwen3_vl"], tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_folder(tmp_path)
    end, text_end = (tokenizer.token_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    assert GenerationDefaults.from_folder(tmp_path, tokenizer).eos_token_ids == {end}
    write(tmp_path, {"eos_token_id": 9}, {"eos_token_id": text_end})
    assert GenerationDefaults.from_folder(tmp_path, tokenizer).eos_token_ids == {end, text_end, 9}
    assert Tokenizer((tmp_path / "tokenizer.json").read_text()).eos_ids == frozenset()


@pytest.mark.parametrize("value", ["2", [2, "3"], True, 2.0])
def test_end_tokens_that_are_not_ids_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    for config, generation in (({"eos_token_id": value}, {}), ({}, {"eos_token_id": value})):
        with pytest.raises(ConfigError, match="eos_token_id must be a whole number or a list of them"):
            GenerationDefaults.from_folder(write(tmp_path, config, generation))


@pytest.mark.parametrize("value", ["0.7", True, [1]])
def test_values_that_are_not_numbers_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="top_p must be a number"):
        GenerationDefaults.from_folder(write(tmp_path, {}, {"top_p": value}))
