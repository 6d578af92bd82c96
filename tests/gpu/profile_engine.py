"""Throughput of an engine without a front end, for requests of one image and some text at a fixed concurrency.

`python -m tests.gpu.profile_engine FOLDER [COUNT] [CONCURRENCY] [WIDTHxHEIGHT]` prints requests per second and times
between tokens, twice, and with `--profile` where the device spends its time. `--outputs` is the number of tokens per
answer (default 1); `--max-step-ms` is that of `saccade serve`.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_up
from itertools import islice, pairwise
from time import perf_counter

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from saccade import LLM, SamplingParams
from saccade.inputs.placeholders import Prompt


@dataclass(frozen=True)
class Served:
    """Seconds until all requests were answered, steps, and per request its arrival time and token times."""

    seconds: float
    steps: int
    times: Sequence[Sequence[float]]

    def __str__(self) -> str:
        first = np.array([times[1] - times[0] for times in self.times]) * 1e3
        gaps = np.array([b - a for times in self.times for a, b in pairwise(times[1:])] or [0.0]) * 1e3
        return (
            f"{len(self.times) / self.seconds:.1f} requests/s, {self.steps} steps of "
            f"{self.seconds / self.steps * 1e3:.1f} ms; first token {first.mean():.0f} ms; "
            f"{gaps.mean():.2f} ms a token, p99 {np.percentile(gaps, 99):.1f}, longest {gaps.max():.1f}"
        )


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("count", nargs="?", type=int, default=256)
    parser.add_argument("concurrency", nargs="?", type=int, default=32)
    parser.add_argument("size", nargs="?", default="560x560")
    parser.add_argument("--outputs", type=int, default=1)
    parser.add_argument("--max-step-ms", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    flags = parser.parse_args()
    width, height = map(int, flags.size.split("x"))
    params = SamplingParams(temperature=0, max_tokens=flags.outputs, ignore_eos=True)
    load_format = "dummy" if torch.cuda.is_available() else "auto"
    limits = {"max_step_ms": flags.max_step_ms, "enable_prefix_caching": False}
    with LLM(flags.folder, load_format=load_format, **limits) as llm:
        console, seeds = Console(width=150), count_up()
        for _ in range(2):
            prompts = [prompt(llm, width, height, next(seeds)) for _ in range(flags.count)]
            console.print(f"{serve(llm, prompts, flags.concurrency, params)}")
        if flags.profile:
            prompts = [prompt(llm, width, height, next(seeds)) for _ in range(2 * flags.concurrency)]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                served = serve(llm, prompts, flags.concurrency, params)
            console.print(f"profiled: {served.seconds * 1e3:.0f} ms")
            console.print(
                profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
            )


def prompt(llm: LLM, width: int, height: int, seed: int) -> Prompt:
    """A random picture and some words."""
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    text = " ".join(map(str, rng.integers(0, 10, rng.integers(6, 64))))
    return llm.processor.chat(
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]
    )


def serve(llm: LLM, prompts: Sequence[Prompt], concurrency: int, params: SamplingParams) -> Served:
    """Each finished request makes room for the next."""
    engine, waiting = llm.engine, enumerate(prompts)
    times: dict[str, list[float]] = {}
    started, running, steps = perf_counter(), 0, 0
    while True:
        for number, item in islice(waiting, concurrency - running):
            engine.add(f"{number}", item, params)
            times[f"{number}"] = [perf_counter()]
            running += 1
        if not running:
            return Served(perf_counter() - started, steps, list(times.values()))
        for update in engine.step():
            times[update.request_id] += [perf_counter()] * len(update.token_ids)
            running -= update.finish is not None
        steps += 1


if __name__ == "__main__":
    main()
