"""The load of `saccade bench serve`, for as long as somebody looks."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RUN_TIMEOUT_S = 600.0
FLAGS = {
    "--max-concurrency": "6",
    "--image-resolution": "random:64x64-224x160",
    "--random-input-len": "40",
    "--random-output-len": "16",
    "--random-range-ratio": "0.3",
}
Ended = list[subprocess.CompletedProcess[str]]


@contextmanager
def loaded(url: str, num_prompts: int = 24) -> Iterator[Ended]:
    """Runs the benchmark with so many prompts again and again. The list has the runs that ended, all of them when the
    context is left."""
    has_ended, ended = threading.Event(), Ended()
    asked = FLAGS | {"--base-url": url, "--num-prompts": str(num_prompts)}
    command = [sys.executable, "-m", "saccade", "bench", "serve", *(word for pair in asked.items() for word in pair)]

    def run() -> None:
        while not has_ended.is_set():
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
            ended.append(done)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ended
    finally:
        has_ended.set()
        thread.join()
