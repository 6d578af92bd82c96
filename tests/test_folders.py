"""Folders that a user names are created or refused at the start, and the flag is named."""

import os
from pathlib import Path

import pytest

from saccade.cli.commands import EXIT_BAD_SETTING, main
from saccade.cli.models import local_models
from saccade.config import (
    BYTECODE_FOLDER,
    NO_BYTECODE,
    TRITON_CACHE,
    history_file,
    kernel_folder,
    use_private_kernel_cache,
    worker_environment,
    writable_folder,
)
from saccade.errors import ConfigError
from saccade.execution.build import build_engine
from saccade.inputs.processor import Processor
from saccade.server.front_end import EXIT_CANNOT_START, serve
from saccade.server.lifecycle import Launch
from saccade.server.server_settings import ServerSettings
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings


def test_a_folder_is_created_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = writable_folder("~/a/b", "--shadow-dir")
    assert folder == tmp_path / "a" / "b" and folder.stat().st_mode & 0o777 == 0o700
    assert writable_folder(str(folder), "--shadow-dir") == folder, "it may exist"


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is not a folder \(--shadow-dir\)"):
        writable_folder(str(tmp_path / "file"), "--shadow-dir")
    with pytest.raises(ConfigError, match=r"inner cannot be created: Not a directory \(--shadow-dir\)"):
        writable_folder(str(tmp_path / "file" / "inner"), "--shadow-dir")
    with pytest.raises(ConfigError, match=r"~nobody-has-this-name/x cannot be created: .*\(--shadow-dir\)"):
        writable_folder("~nobody-has-this-name/x", "--shadow-dir")
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ConfigError, match=r"cannot be written to by this user \(--shadow-dir\)"):
        writable_folder(str(tmp_path), "--shadow-dir")


def test_a_user_without_a_home_needs_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Containers may run as any user id, and then nothing says where its home is."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    for name in ("XDG_CACHE_HOME", BYTECODE_FOLDER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(NO_BYTECODE, "1")
    assert kernel_folder() is None and history_file() is None
    assert worker_environment() == dict(os.environ)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert [model.name for model in local_models()] == ["(bundled)"]
    assert main(["pull", "org/name"]) == EXIT_BAD_SETTING
    assert "Set HF_HOME to a folder that this user can write to" in capsys.readouterr().err


def test_kernels_are_compiled_into_a_temporary_folder_where_none_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only image, or one that runs as another user than it was made for. Triton compiles nothing without one."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("atexit.register", lambda *words, **options: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for chosen in ("", str(tmp_path / "file" / "triton")):
        monkeypatch.setenv(TRITON_CACHE, chosen)
        use_private_kernel_cache()
        folder = Path(os.environ[TRITON_CACHE])
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        use_private_kernel_cache()
        assert os.environ[TRITON_CACHE] == str(folder), "and it stays the same"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    monkeypatch.setenv(TRITON_CACHE, "")
    with pytest.raises(ConfigError, match=r"none can be written \(TMPDIR, TRITON_CACHE_DIR\)"):
        use_private_kernel_cache()


def test_a_server_refuses_a_folder_for_profiles_before_it_listens(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    settings = ServerSettings(port=0, profile_folder=str(tmp_path / "file"))
    assert serve(Launch(str(tmp_path)), settings) == EXIT_CANNOT_START
    told = capfd.readouterr().err
    assert f"{tmp_path / 'file'} is not a folder (--profile-folder)" in told and "listening" not in told


def test_an_engine_refuses_a_folder_for_wrong_replays_before_it_loads_anything(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = EngineSettings(device="cpu", shadow=0.5, shadow_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="--shadow-dir"):
        build_engine(tmp_path, settings, SchedulerSettings(), processor=Processor.__new__(Processor))
    ignored = EngineSettings(device="cpu", shadow=0.0, shadow_dir=str(tmp_path / "file"))
    with pytest.raises(Exception, match=r"config\.json"):  # it goes on to the model
        build_engine(tmp_path, ignored, SchedulerSettings(), processor=Processor.__new__(Processor))
