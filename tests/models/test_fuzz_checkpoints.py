"""A few seconds of the fuzzer for files of weights; see fuzz_checkpoints.py for longer runs."""

import struct
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.models.checkpoint import SafetensorsFolder
from saccade.models.gguf import GGUFFile
from tests.models import fuzz_checkpoints
from tests.models.fuzz_checkpoints import FileCase, FoundError, check, corpus, make_case, run_cases

NUM_CASES = 1500


@pytest.mark.parametrize("seed", [1, 2])
def test_files_load_or_are_refused(seed: int) -> None:
    cases = run_cases(seed, iter(range(NUM_CASES)))
    assert [f"--seed {seed} --only {case.index}: {error}" for case, error in cases if error] == []


def test_files_of_the_corpus_are_valid(tmp_path: Path) -> None:
    """Mutating files that are already broken would find nothing."""
    files = corpus(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(files["model.gguf"])
    file = GGUFFile.open(path)
    assert file.config().need("num_attention_heads", int) == 2 and len(list(file.tensors())) == 3
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    assert len(list(SafetensorsFolder.open(tmp_path).tensors())) == 2


def test_an_array_longer_than_its_file_is_refused_at_once(tmp_path: Path) -> None:
    """A file of a kilobyte once made the reader loop and allocate memory for every claimed element."""
    data = corpus(tmp_path)["model.gguf"]
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    assert struct.unpack_from("<Q", data, at) == (3,)
    path = tmp_path / "x.gguf"
    path.write_bytes(data[:at] + struct.pack("<Q", 2**62) + data[at + 8 :])
    with pytest.raises(ConfigError, match=r"x\.gguf cannot be read as GGUF \(it ends too early\)"):
        GGUFFile.open(path)


def test_cases_are_reproducible(tmp_path: Path) -> None:
    files = corpus(tmp_path)
    found = [make_case(5, index, files).data for index in range(50)]
    assert found == [make_case(5, index, files).data for index in range(50)] and len(set(found)) > 30


@pytest.mark.parametrize(("name", "of"), [("model.gguf", "GGUFFile"), ("model.safetensors", "SafetensorsFolder")])
def test_a_broken_reader_is_found(name: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: Any) -> Any:
        raise IndexError("beyond the end")

    files = corpus(tmp_path)
    monkeypatch.setattr(getattr(fuzz_checkpoints, of), "open", fail)
    with pytest.raises(FoundError, match="IndexError"):
        check(FileCase(0, 0, name, files[name]), tmp_path)
