"""Runs one case in a process that has the stand-in preloaded: `python -m tests.standin.one_case`, started by
`python -m tests.standin`. Reads the case from standard input, and writes what was found to the file in its argument."""

import importlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from saccade import LLM, SamplingParams
from saccade.choice.key import GraphKey
from saccade.graphs import GraphRunner
from tests.standin.cases import Case, write_model
from tests.standin.device import Device
from tests.standin.found import Found
from tests.standin.patches import replace_packages

Call = Callable[[], object]


def run(case: Case, device: Device) -> Found:
    found = Found()
    keys = note_graphs(device)
    with tempfile.TemporaryDirectory() as folder:
        write_model(case, Path(folder))
        attempt("the start", lambda: serve(folder, case, device, found), found.failures)
    found.nodes = {str(key): device.nodes(graphs) for key, graphs in keys.items()}
    found.violations = device.violations()
    return found


def serve(folder: str, case: Case, device: Device, found: Found) -> None:
    with LLM(folder, **case.settings()) as llm:
        before = {name: device.count(name) for name in ("replays", "mallocs", "modules")}
        note_compiled(found.compiled)
        for name, call in calls(llm):
            attempt(name, call, found.failures)
    for name, number in before.items():
        setattr(found, f"num_{name}", device.count(name) - number)


def note_graphs(device: Device) -> dict[GraphKey, range]:
    """Notes the numbers of the graphs that each capture makes."""
    keys: dict[GraphKey, range] = {}
    record = GraphRunner.record

    def noted(self: GraphRunner, key: GraphKey, *args: Any, **options: Any) -> Any:
        before = device.count("num_graphs")
        captured = record(self, key, *args, **options)
        keys[key] = range(before, device.count("num_graphs"))
        return captured

    changed: Any = GraphRunner
    changed.record = noted
    return keys


def note_compiled(names: list[str]) -> None:
    def compiles(*, fn: Any, **details: Any) -> None:
        names.append(fn.name)

    importlib.import_module("triton").knobs.runtime.jit_cache_hook = compiles


def attempt(name: str, call: Call, failures: list[str]) -> None:
    try:
        call()
    except Exception as error:
        traceback.print_exc()
        failures.append(f"{name}: {type(error).__name__}: {error}")


def calls(llm: LLM) -> Iterator[tuple[str, Call]]:
    """Requests that between them need every phase, every kernel for single rows, and graphs for layouts in use."""

    def image(height: int, width: int) -> Any:
        return np.zeros((height, width, 3), np.uint8)

    def chat(*parts: dict[str, Any]) -> Any:
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]

    def shown(*sizes: tuple[int, int]) -> Any:
        return chat(*({"type": "image", "image": image(*size)} for size in sizes))

    def params(**values: Any) -> SamplingParams:
        return SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | values))

    crowd = [shown((100 + 17 * index, 200), (333, 222)) for index in range(9)]
    edits: dict[str, Any] = {"top_k": 5, "presence_penalty": 0.5, "logit_bias": {3: 1.0}, "min_tokens": 3, "n": 2}
    sampled = [params(temperature=1.0, seed=seed, prompt_logprobs=2, **edits) for seed in range(12)]
    video = {"type": "video", "video": [image(64, 64)] * 4}
    text = "a b c "
    yield "an image", lambda: llm.chat(shown((100, 200)), params(logprobs=3), progress=False)
    yield "many images", lambda: llm.chat(crowd, params(), progress=False)
    yield "a large image", lambda: llm.chat(shown((700, 1200)), params(), progress=False)
    yield "a video", lambda: llm.chat(chat(video), params(), progress=False)
    yield "text", lambda: llm.generate([text * 40] * 12, params(temperature=0), progress=False)
    yield "a long text", lambda: llm.generate([text * 500], params(temperature=0), progress=False)
    yield "sampling", lambda: llm.generate([text] * 12, sampled, progress=False)
    yield "few tokens", lambda: llm.generate([text], params(allowed_token_ids=[1, 2], logprobs=20), progress=False)
    yield "embeddings", lambda: llm.embed([text] * 3, progress=False)
    yield "mean embeddings", lambda: llm.embed([text] * 3, pooling="mean", progress=False)
    for turn in range(3):  # until its layout has a graph of its own
        yield f"a layout, {turn}", lambda: llm.chat([shown((320, 224))] * 20, params(max_tokens=1), progress=False)


def main() -> int:
    case = msgspec.json.decode(sys.stdin.buffer.read(), type=Case)
    device = Device()
    replace_packages(device)
    found = run(case, device)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
