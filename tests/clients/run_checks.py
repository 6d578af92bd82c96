"""Runs the checks of clients against a server: `python -m tests.clients.run_checks URL NAME...`, in an environment that
has these clients. Prints one line of JSON per check."""

import importlib
import json
import sys
import traceback


def main(url: str, names: list[str]) -> None:
    for name in names:
        module = importlib.import_module(f"tests.clients.{name}_client")
        for check in [found for found in vars(module) if found.startswith("check_")]:
            error = ""
            try:
                getattr(module, check)(url)
            except Exception:
                error = traceback.format_exc()
            sys.stdout.write("\n" + json.dumps({"client": name, "check": check, "error": error}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
