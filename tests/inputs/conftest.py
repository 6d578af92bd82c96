"""Tiny checkpoint folders, built once."""

from pathlib import Path

import pytest

from tests.inputs.folders import write_gemma, write_qwen, write_text_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "qwen3_vl": write_qwen(root / "qwen3_vl"),
        "qwen2_5_vl": write_qwen(root / "qwen2_5_vl", "qwen2_5_vl"),
        "qwen2_vl": write_qwen(root / "qwen2_vl", "qwen2_vl"),
        "gemma3": write_gemma(root / "gemma3"),
        "qwen3": write_text_model(root / "qwen3", "inputs_qwen3.jinja"),
        "llama": write_text_model(root / "llama", "inputs_llama3.jinja", model_type="llama"),
    }
