"""Entry point of the engine process: `python -m saccade.execution.worker_start FOLDER`, started only by
`saccade.client.spare`. It starts the spare compile processes before the slow imports, then hands over to `worker`."""

import gc
import importlib
import sys
from pathlib import Path

from saccade.execution.spare_compilers import SpareCompilers
from saccade.processes import end_with_input, end_with_parent


def main(folder: Path) -> int:
    end_with_parent()
    end_with_input()
    spares = SpareCompilers()
    gc.disable()  # imports leave hardly any garbage, and collecting takes a tenth of their time
    worker = importlib.import_module("saccade.execution.worker")
    gc.enable()
    code: int = worker.main(folder, spares)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
