"""Settings, templates and tokens of a checkpoint do not change when transformers 5 loads and saves it."""

import shutil
from pathlib import Path

import pytest

from saccade.inputs.media_settings import read_image_settings, read_video_settings
from saccade.inputs.text.chat_template import read_template
from saccade.inputs.text.tokenizer import Tokenizer
from tests.inputs import oracles
from tests.inputs.texts import fuzz_texts


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_a_folder_that_transformers_saved_is_read_alike(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    """It has one processor_config.json, and fewer fields in tokenizer_config.json."""
    first = folders[family]
    with oracles.without_torchvision():
        oracles.processor(first).save_pretrained(tmp_path)
    shutil.copy(first / "config.json", tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    for read in (read_image_settings, read_video_settings, read_template):
        assert read(tmp_path) == read(first)
    before, after = Tokenizer.from_folder(first), Tokenizer.from_folder(tmp_path)
    assert (before.special_tokens, before.tags) == (after.special_tokens, after.tags)
    for text in fuzz_texts(seed=5, count=50):
        assert before.encode(text, has_bos=True) == after.encode(text, has_bos=True)
