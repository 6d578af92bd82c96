"""FP8 on two ranks, in separate processes and with graphs: the same answers as on one rank."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from saccade.errors import ConfigError
from saccade.execution.ranks import check_division
from saccade.inputs.placeholders import text_prompt
from saccade.models.model_config import Config
from saccade.models.quantization import read_formats
from saccade.models.registry import read_spec
from saccade.wire.sampling_params import SamplingParams
from tests.engine.rig import run
from tests.execution.alike import assert_alike, scores_of
from tests.execution.engine_ranks import Build, Ranks, build, engine_of, started
from tests.models.quantized import SCHEMES, write
from tests.models.test_quantization import wide_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
SAME_ROUNDING = 0.05  # in log-probability, if inputs are rounded alike except for a few halfway between two numbers
FP8_ERROR = 0.2  # in log-probability; a rank without its shard's scales would be off by whole numbers


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_ranks_answer_like_one(two: Ranks, scheme: str, tmp_path: Path) -> None:
    """If input scales are per row, each rank scales its half of the row, and rounds it a little finer."""
    quantized, _ = write(wide_checkpoint(tmp_path / "wide"), SCHEMES[scheme], tmp_path)
    rng = np.random.default_rng(3)  # with fresh rows, one in many would fall halfway between two FP8 numbers
    prompts = {f"r{i}": text_prompt(rng.integers(3, 63, 5 + 9 * i).tolist()) for i in range(4)}
    ours, alone = two.engine(quantized, "full"), engine_of(*build(Build(str(quantized), "off")))
    found, expected = (run(engine, prompts, GREEDY) for engine in (ours, alone))
    for name, right in expected.items():
        if scheme in ("blocks", "static"):
            assert_alike(found[name], right, close=SAME_ROUNDING)
        else:
            first, other = scores_of(found[name])[0], scores_of(right)[0]
            assert all(abs(first[token] - other[token]) < FP8_ERROR for token in first.keys() & other.keys())
            assert len(first.keys() & other.keys()) > 10
    for phase, snapshot in ours.phase_snapshots().items():
        assert phase == "vision" or sum(snapshot["replays"].values()) > 0


def test_quantized_blocks_that_ranks_would_cut_are_refused_before_ranks_start(tmp_path: Path) -> None:
    quantized, _ = write(wide_checkpoint(tmp_path / "wide", head_dim=96), SCHEMES["blocks"], tmp_path)
    config = Config.read(quantized / "config.json")
    family, spec = read_spec(config)
    check_division(spec, 2, "auto")
    with pytest.raises(ConfigError, match=r"cut the 128 x 128 blocks"):
        check_division(spec, 2, "auto", read_formats(config, family.renames))
