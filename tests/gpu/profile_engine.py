"""What an engine serves without a front end: requests of one image and some text, one token each, so many at a time.

`python -m tests.gpu.profile_engine FOLDER [COUNT] [CONCURRENCY] [WIDTHxHEIGHT]` prints requests a second with images
encoded beside language steps and in order with them, and where the device's time goes (`--profile`).
"""

import sys
from collections.abc import Sequence
from itertools import count as count_up
from itertools import islice
from time import perf_counter

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from saccade import LLM, SamplingParams
from saccade.execution.side_stream import SideStream
from saccade.inputs.placeholders import Prompt

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def main(words: Sequence[str]) -> None:
    given = [word for word in words if not word.startswith("-")]
    count, concurrency = (int(word) for word in (*given[1:3], "256", "32")[:2])
    width, height = map(int, (given[3] if len(given) > 3 else "560x560").split("x"))
    is_small = not torch.cuda.is_available()
    with LLM(given[0], load_format="auto" if is_small else "dummy", enable_prefix_caching=False) as llm:
        encoder = llm.executor.encoder
        assert encoder is not None, "the model has no vision tower"
        beside, console, seeds = encoder.side_stream, Console(width=150), count_up()
        for name in ("beside", "in order", "beside"):
            encoder.side_stream = beside if name == "beside" else SideStream(torch.device("cpu"))
            prompts = [prompt(llm, width, height, next(seeds)) for _ in range(count)]
            seconds, steps = serve(llm, prompts, concurrency)
            console.print(f"{name}: {count / seconds:.1f} requests/s, {steps} steps of {seconds / steps * 1e3:.1f} ms")
        if "--profile" in words:
            prompts = [prompt(llm, width, height, next(seeds)) for _ in range(2 * concurrency)]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                seconds, _ = serve(llm, prompts, concurrency)
            console.print(f"profiled: {seconds * 1e3:.0f} ms")
            console.print(
                profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
            )


def prompt(llm: LLM, width: int, height: int, seed: int) -> Prompt:
    """A picture and some words; with another seed, another picture."""
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    text = " ".join(map(str, rng.integers(0, 10, rng.integers(6, 64))))
    return llm.processor.chat(
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]
    )


def serve(llm: LLM, prompts: Sequence[Prompt], concurrency: int) -> tuple[float, int]:
    """Seconds and steps until all are answered; whoever is done makes room for the next."""
    engine, waiting = llm.engine, enumerate(prompts)
    started, running, steps = perf_counter(), 0, 0
    while True:
        for number, item in islice(waiting, concurrency - running):
            engine.add(f"{number}", item, PARAMS)
            running += 1
        if not running:
            return perf_counter() - started, steps
        running -= sum(update.finish is not None for update in engine.step())
        steps += 1


if __name__ == "__main__":
    main(sys.argv[1:])
