"""The server with the bundled model, its graphs on, as `saccade serve` starts it."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

READY_S = 300.0
FLAGS = {
    "--served-model-name": "org/another-name",
    "--max-model-len": "256",
    "--max-num-seqs": "2",
    "--max-num-batched-tokens": "128",
    "--encoder-budget-tokens": "64",
    "--encoder-cache-tokens": "256",
}


@contextmanager
def running_bundled() -> Iterator[str]:
    """Its address."""
    flags = [word for pair in FLAGS.items() for word in pair]
    command = [sys.executable, "-m", "saccade", "serve", "--port", "0", "--device", "cpu", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            lines.append(line)
            if line.startswith("ready on"):
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        found.wait(READY_S)
        ready = [line for line in lines if line.startswith("ready on")]
        assert ready, f"the server did not start: {''.join(lines)}"
        yield ready[0].split()[2]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        reader.join(10)
        if process.stderr is not None:
            process.stderr.close()
