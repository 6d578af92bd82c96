"""Where the host's milliseconds go before a request's first token: `python -m tests.server.first_token_latency
[--against SRC]`. Each request has one JPEG of noise and asks for one token of the bundled model on this CPU. With
`--against`, a server from other sources, such as another checkout's `src`, gets the same requests in turn.

Prints medians and the 10th percentile, which on a busy machine is the better measure of the work. With `--against` also
the median difference per request, which cancels noise that both servers had. `host` is the sum of the stages before it:
everything but the engine's own time (`queue` and `prefill`, which includes vision)."""

import argparse
import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

import saccade
from saccade.bench.load.client import Client, run
from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import TargetSettings, WorkloadSettings
from saccade.bench.load.workload import Wording, make_prompts
from saccade.bench.load.workload_text import WordList
from saccade.bench.serving.serving_stats import PREPARED

FloatArray = npt.NDArray[np.float64]
READY_S, WARM_UP = 300.0, 10
FLAGS = {
    "--device": "cpu",
    "--port": "0",
    "--max-num-seqs": "32",
    "--graphs": "vision=off,prefill=off,decode=off",
    "--kv-cache-tokens": "22400",  # 5600 blocks, as on a large GPU with an 8B model
    "--block-size": "4",
}
FIELDS = '{"mm_processor_kwargs": {"max_pixels": 12544}}'  # the model sees few of the decoded pixels


@contextmanager
def serving(src: Path) -> Iterator[str]:
    """Runs a server from `src` and yields its address."""
    words = [word for pair in FLAGS.items() for word in pair]
    command = [sys.executable, "-m", "saccade", "serve", "--no-enable-prefix-caching", *words]
    place = os.environ | {"PYTHONPATH": str(src)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=place)
    address: list[str] = []
    is_known = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            if line.startswith("ready on"):
                address.append(line.split()[2])
                is_known.set()
        is_known.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        is_known.wait(READY_S)
        assert address, f"the server of {src} did not start"
        yield address[0]
    finally:
        process.terminate()
        process.wait(30)


def stages(outcome: Outcome) -> dict[str, float]:
    """Milliseconds, from sending a request to the first token of its reply."""
    told = outcome.timings
    engine = told["queue"] + told["prefill"]
    parts = {name: told.get(name, 0.0) for name in ("receive", *PREPARED) if name != "fetch"}
    parts["threads"] = told["receive"] + told["prepare"] - sum(parts.values())
    parts["to the engine and back"] = told["first_token"] - told["receive"] - told["prepare"] - engine
    parts["network and client"] = outcome.ttft_s - told["first_token"]
    parts |= {"host": sum(parts.values()), "engine": engine}
    return {name: value * 1e3 for name, value in parts.items()}


async def ask(urls: Sequence[str], flags: argparse.Namespace) -> list[list[Outcome]]:
    """Outcomes by server. All get the same requests, and take turns at going first."""
    targets = [TargetSettings(base_url=url, extra_request_body=FIELDS) for url in urls]
    num_skipped = WARM_UP * flags.concurrency
    settings = WorkloadSettings(num_prompts=flags.requests + num_skipped, image_resolution=flags.size)
    wording = Wording(targets[0], "", ignore_eos=True, is_timed=True)
    bodies = [wording.body(prompt) for prompt in make_prompts(settings, WordList())]
    found: list[list[Outcome]] = [[] for _ in urls]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(target)) for target in targets]
        turns = count()
        waiting = iter(bodies)

        async def work() -> None:
            for body in waiting:
                first = next(turns)
                for place in range(len(clients)):
                    number = (first + place) % len(clients)
                    found[number].append(await clients[number].send(clients[number].prepare(body)))

        await asyncio.gather(*(work() for _ in range(flags.concurrency)))
    return [outcomes[num_skipped:] for outcomes in found]


def rows_of(outcomes: Sequence[Outcome]) -> dict[str, FloatArray]:
    """The milliseconds of all requests, by stage."""
    bad = [outcome for outcome in outcomes if not outcome.is_ok]
    assert not bad, f"{len(bad)} requests failed: {bad[0].error} {bad[0].message}"
    rows = [stages(outcome) for outcome in outcomes]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def show(src: Path, rows: dict[str, FloatArray], others: dict[str, FloatArray]) -> None:
    """`others` has the rows of the server to compare with."""
    print(f"{src}, ms: median (fastest tenth), median difference")
    for name, values in rows.items():
        difference = np.median(values - others[name])
        print(f"  {name:24} {np.median(values):7.2f} ({np.percentile(values, 10):.2f}) {difference:+7.3f}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="other sources to compare with")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--size", default="560x560")
    flags = parser.parse_args()
    sources = [Path(saccade.__file__).parents[1], *([flags.against] if flags.against else [])]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(src)) for src in sources]
        found = run(ask(urls, flags))
    rows = [rows_of(outcomes) for outcomes in found]
    for src, own in zip(sources, rows, strict=True):
        show(src, own, rows[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
