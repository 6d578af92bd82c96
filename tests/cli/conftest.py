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


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests are not theirs."""
    import os

    for name in [name for name in os.environ if name.startswith(("SACCADE_", "SGLANG_", "VLLM_"))]:
        monkeypatch.delenv(name)
