"""The engine process before its imports: `python -m saccade.execution.worker_start FOLDER`, started only by
`saccade.client.spare`. What runs beside those imports is started here; then the process is `worker`."""

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
    gc.disable()  # imports leave next to no garbage, and looking for it takes a tenth of their time
    worker = importlib.import_module("saccade.execution.worker")
    gc.enable()
    code: int = worker.main(folder, spares)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
