"""Two ranks: time to first tokens in both encoder modes, and whether answers are the same with and without graphs.

`python -m tests.gpu.profile_ranks FOLDER [LAYERS]` cuts a checkpoint's language model to LAYERS (default 4), gives it
random weights, and runs two ranks. On a single GPU, set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 and start NVIDIA's
MPS (`nvidia-cuda-mps-control -d`), or ranks take turns of milliseconds.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.errors import ConfigError

COUNTS, SIDE, NUM_ROUNDS = (1, 2, 4, 8, 24), 560, 6
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1)
ANSWER = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)


def main(words: Sequence[str]) -> None:
    with TemporaryDirectory() as place:
        folder = cut(Path(words[0]), int(words[1]) if len(words) > 1 else 4, Path(place) / "cut")
        for mode in ("weights", "data"):
            try:
                llm = two_ranks(folder, mm_encoder_tp_mode=mode)
            except ConfigError as error:
                print(f"{mode}: {error}", flush=True)
                continue
            with llm:
                for count in COUNTS:
                    print(
                        f"{mode}: {count} pictures, {first_token_ms(llm, count):.1f} ms to the first tokens", flush=True
                    )
        found = []
        for enforce_eager in (False, True):
            with two_ranks(folder, enforce_eager=enforce_eager) as llm:
                found.append([out.outputs[0] for out in llm.chat(questions(8), ANSWER, progress=False)])
        same = sum(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in zip(*found, strict=True))
        print(
            f"{same} of {len(found[0])} answers have bit-identical tokens and log-probabilities with and without graphs"
        )


def cut(source: Path, num_layers: int, folder: Path) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = min(num_layers, text["num_hidden_layers"])
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def two_ranks(folder: Path, **more: Any) -> LLM:
    """With a small KV cache: otherwise ranks that share a GPU would each reserve most of its memory."""
    few = {"enable_prefix_caching": False, "kv_cache_tokens": 65536}
    return LLM(folder, load_format="dummy", tensor_parallel_size=2, **few, **more)


def questions(count: int, seed: int = 0, *, every: int = 2) -> list[list[dict[str, Any]]]:
    """Every `every`-th question has a picture."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        picture = Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
        parts = [{"type": "image", "image": picture}] if i % every == 0 else []
        found.append([{"role": "user", "content": [*parts, {"type": "text", "text": "Say " + "more " * (5 + i)}]}])
    return found


def first_token_ms(llm: LLM, count: int) -> float:
    times = []
    for i in range(NUM_ROUNDS):
        asked = questions(count, seed=i, every=1)
        started = perf_counter()
        llm.chat(asked, FIRST_TOKEN, progress=False)
        times.append((perf_counter() - started) * 1e3)
    return median(times)


if __name__ == "__main__":
    main(sys.argv[1:])
