"""How long shadow checks take to find a graph that goes wrong under load.

`python -m tests.gpu.profile_shadow FOLDER [REQUESTS_PER_SECOND] [SHARE]` answers requests of one image and 16 tokens as
they arrive, for at most 90 seconds. After 15 seconds it corrupts the most replayed prefill graph and the most replayed
decode graph. It prints when each was found, and the outcomes of all checks.
"""

import sys
from collections.abc import Sequence
from functools import partial
from time import monotonic, sleep

import numpy as np
import torch
from rich.console import Console

from saccade import LLM, SamplingParams
from saccade.execution.shadow_verdict import Mismatch
from saccade.graphs import GraphKey
from saccade.scheduling.engine import Engine
from tests.engine.rig import executor_of
from tests.gpu.profile_engine import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
POISON_S, END_S = 15.0, 90.0
SIDE = 224


def main(words: Sequence[str]) -> None:
    rate, share = (float(word) for word in (*words[1:3], *("6", "0.01")[max(len(words) - 1, 0) :])[:2])
    console = Console(width=150)
    load_format = "dummy" if torch.cuda.is_available() else "auto"
    with LLM(words[0], load_format=load_format, enable_prefix_caching=False, shadow=share) as llm:
        prompts = [prompt(llm, SIDE, SIDE, seed) for seed in range(64)]
        arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, int(rate * END_S * 2)))
        engine, started, num_added = llm.engine, monotonic(), 0
        wrong, caught = set[GraphKey](), set[GraphKey]()
        while (now := monotonic() - started) < END_S and (not wrong or wrong - caught):
            while arrivals[num_added] <= now:
                engine.add(str(num_added), prompts[num_added % len(prompts)], PARAMS)
                num_added += 1
            if not wrong and now > POISON_S:
                wrong = {spoil(engine, "prefill", "trunk"), spoil(engine, "decode", "next_ids")}
                console.print(f"corrupted after {num_added} requests: {', '.join(map(str, sorted(wrong, key=str)))}")
            if engine.has_work:
                engine.step()
            elif engine.idle.can_check:
                due = started + arrivals[num_added]
                found = engine.idle.check(lambda due=due: monotonic() >= due)  # type: ignore[misc]
                if isinstance(found, Mismatch):
                    caught.add(found.key)
                if found is not None:
                    text = f"{monotonic() - started - POISON_S:.1f} s later, {num_added} requests: {found}"
                    console.print(text, markup=False)
            else:
                sleep(0.001)
        for name, phase in engine.phase_snapshots().items():
            console.print(f"{name}: {phase['shadow']}")


def spoil(engine: Engine, phase: str, output: str) -> GraphKey:
    """Make the most replayed graph of a phase give wrong results from now on."""
    runner = getattr(executor_of(engine), phase)
    graph = max(runner.graphs, key=lambda graph: graph.num_replays)
    view = graph.frame[output]
    graph.steps = (*graph.steps, partial(view.mul_, 1.01) if view.is_floating_point() else partial(view.add_, 1))
    key: GraphKey = graph.key
    return key


if __name__ == "__main__":
    main(sys.argv[1:])
