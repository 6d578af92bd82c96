import json
import shutil
from pathlib import Path

import pytest

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def real_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings files of Qwen3-VL-8B at its real dimensions, without weights."""
    folder = tmp_path_factory.mktemp("qwen3-vl-8b")
    shutil.copy(DATA / "cli_qwen3_vl_8b_config.json", folder / "config.json")
    shutil.copy(DATA / "cli_qwen3_vl_8b_preprocessor.json", folder / "preprocessor_config.json")
    return folder


@pytest.fixture(scope="session")
def few_layers(real_size: Path) -> Path:
    """Of the same dimensions but for its depth: a plan runs every layer, which takes seconds for all of them."""
    config = json.loads((real_size / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 4
    config["vision_config"] |= {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
    folder = shutil.copytree(real_size, real_size.parent / "few layers")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests are not theirs."""
    import os

    for name in [name for name in os.environ if name.startswith(("SACCADE_", "SGLANG_", "VLLM_"))]:
        monkeypatch.delenv(name)
