"""Traces an image request through the engine: `python -m tests.engine.request_path [--list]`.

Counts the functions of saccade that are called between `Engine.add` and the last update: how many there are, in how
many files, and how often the package changes between first calls. Only named functions count, no comprehensions or
lambdas. Calls inside a replay of the CPU twin do not count: on a GPU, the device does that work.

The third request of its kind is traced, so that nothing is captured or imported during the trace.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import saccade
from saccade import LLM, SamplingParams, bundled

SIDE, NUM_TOKENS, NUM_REQUESTS, MAX_STEPS = 96, 4, 3, 100
HOME = f"{Path(saccade.__file__).parent}/"
TWIN = ("graphs/recorded.py", "RecordedPiece.__call__")

Function = tuple[str, str]  # file and qualified name


class Tracer:
    """Records calls of named functions of saccade, in order."""

    def __init__(self) -> None:
        self.calls: list[Function] = []
        self._depth_of_twin = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(HOME):
            return
        function = (code.co_filename.removeprefix(HOME), code.co_qualname)
        if event == "call" and not self._depth_of_twin and not code.co_name.startswith("<"):
            self.calls.append(function)
        if function == TWIN:
            self._depth_of_twin += 1 if event == "call" else -1


def traced_request(llm: LLM, request_id: str, rng: np.random.Generator) -> list[Function]:
    picture = Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What shape is this?"}]
    prompt = llm.processor.chat([{"role": "user", "content": content}])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine, tracer = llm.engine, Tracer()
    sys.setprofile(tracer)
    try:
        engine.add(request_id, prompt, params)
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                break
            engine.step()
    finally:
        sys.setprofile(None)
    assert not engine.has_work, f"a request of {NUM_TOKENS} tokens did not end in {MAX_STEPS} steps"
    return tracer.calls


def package(function: Function) -> str:
    return function[0].split("/")[0]


def switches(functions: Sequence[Function]) -> int:
    return sum(package(one) != package(other) for one, other in pairwise(functions))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true", help="print the functions")
    flags = parser.parse_args()
    rng = np.random.default_rng()
    with LLM(bundled.path(), device="cpu", max_num_seqs=4, max_model_len=1024) as llm:
        traces = [traced_request(llm, str(number), rng) for number in range(NUM_REQUESTS)]
    calls = traces[-1]
    functions = list(dict.fromkeys(calls))
    for function in functions if flags.list else ():
        print(*function)
    files, packages = {file for file, _ in functions}, {package(one) for one in functions}
    print(
        f"{len(functions)} functions, {len(files)} files, {len(packages)} packages, {switches(functions)} switches "
        f"between packages ({switches(calls)} in all {len(calls)} calls)"
    )


if __name__ == "__main__":
    main()
