"""The parts of the stand-in that need no CUDA: its cases are models and settings of this version."""

from pathlib import Path

import pytest

from saccade.models.model_config import Config
from saccade.models.registry import read_spec
from tests.standin.__main__ import chosen, parsed
from tests.standin.cases import CASES, NUM_LAYERS, Case, write_model
from tests.standin.found import Found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_a_model_of_real_widths(case: Case, tmp_path: Path) -> None:
    write_model(case, tmp_path)
    _, spec = read_spec(Config.read(tmp_path / "config.json"))
    assert spec.vision is not None and spec.decoder.width == 4096 and len(spec.decoder.layers) == NUM_LAYERS


def test_flags_change_the_first_case_or_those_that_are_named() -> None:
    assert chosen(parsed([])) == list(CASES)
    [changed] = chosen(parsed(["--capability", "10.0", "--quantization", "fp8"]))
    assert (changed.capability, changed.quantization, changed.name) == ("10.0", "fp8", "hopper 10.0 fp8")
    [named] = chosen(parsed(["--case", "ampere", "--dtype", "float16"]))
    assert (named.capability, named.dtype) == ("8.0", "float16")


@pytest.mark.parametrize(
    "found",
    [
        Found(num_replays=0),
        Found(num_replays=1, violations=["a wait"]),
        Found(num_replays=1, failures=["text: an error"]),
        Found(num_replays=1, compiled=["norm_kernel"]),
        Found(num_replays=1, num_modules=1),
        Found(num_replays=1, num_mallocs=1),
    ],
)
def test_whatever_must_not_happen_is_a_problem(found: Found) -> None:
    assert found.problems()
    assert not Found(num_replays=1).problems()
