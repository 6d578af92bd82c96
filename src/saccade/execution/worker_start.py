"""Entry point of the engine process: `python -m saccade.execution.worker_start SOCKET`, started only by
`saccade.client.spare`, which hands the open socket down. It starts the spare compile processes before the slow imports,
then hands over to `worker`."""

import gc
import importlib
import socket
import sys

from saccade.execution.spare_compilers import SpareCompilers
from saccade.processes import end_with_input, end_with_parent


def main(file: int) -> int:
    end_with_parent()
    end_with_input()
    spares = SpareCompilers()
    gc.disable()  # until all packages are imported: they leave hardly any garbage, and collecting takes long
    worker = importlib.import_module("saccade.execution.worker")
    code: int = worker.main(socket.socket(fileno=file), spares)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
