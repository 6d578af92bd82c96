"""Makes a checkpoint folder: `python -m training.export --data FILE --weights FILE --out FOLDER`."""

import argparse
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training.checkpoint import write_checkpoint
from training.model import Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "weights", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    with safe_open(options.data, "pt") as file:
        tokenizer = Tokenizer.from_str(file.metadata()["tokenizer"])
    write_checkpoint(options.out, load_file(options.weights), Shape(), tokenizer)


if __name__ == "__main__":
    main()
