"""Groups of ranks: their collectives, and the decisions that need no running ranks."""

from functools import cache
from pathlib import Path

import pytest
import torch

from saccade.errors import ConfigError
from saccade.kernels.collectives import AlgorithmChoice, choose, fastest
from saccade.layers.connect import check_devices, connect, refusal
from saccade.layers.parallel import ParallelGroup
from tests.layers import rank_cases
from tests.ranks import run_cases


@cache
def found(size: int) -> dict[str, str]:
    return run_cases(size, rank_cases.__name__)


@pytest.mark.parametrize("case", rank_cases.CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together(size: int, case: str) -> None:
    """The cases say what they test. Three ranks are needed because torch has no out-of-place two-shot sum for three."""
    assert not found(size)[case], found(size)[case]


@pytest.mark.parametrize(("total", "size", "multiple"), [(121, 4, 1), (121, 4, 16), (20, 4, 16), (7, 3, 1), (64, 1, 9)])
def test_padded_shares_cover_everything_once(total: int, size: int, multiple: int) -> None:
    shares = [ParallelGroup(rank=rank, size=size).spread(total, "width", multiple=multiple) for rank in range(size)]
    covered = [i for start, count, _ in shares for i in range(start, start + count)]
    assert covered == list(range(total))
    (room,) = {room for _, _, room in shares}
    assert (size == 1 or room % multiple == 0) and room * size >= total
    assert all(start == rank * room for rank, (start, count, _) in enumerate(shares) if count)


def test_the_fastest_algorithm_is_chosen_by_size() -> None:
    timings = {
        16: {"one_shot": 5.0, "two_shot": 8.0},
        64: {"one_shot": 5.5, "two_shot": 8.0},
        256: {"one_shot": 9.0, "two_shot": 8.5},
        1024: {"one_shot": 30.0, "two_shot": 16.0},
    }
    choices = fastest(timings)
    assert choices == (AlgorithmChoice("one_shot", 64), AlgorithmChoice("two_shot"))
    taken = [choose(choices, nbytes) for nbytes in (1, 64, 65, 256, 10**9)]
    assert taken == ["one_shot", "one_shot", "two_shot", "two_shot", "two_shot"]
    assert fastest({16: {"one_shot": 1.0, "two_shot": 2.0}}) == (AlgorithmChoice("one_shot"),)


def test_two_ranks_on_one_gpu_are_refused_unless_they_may_share() -> None:
    places = [{"machine": "a", "index": i, "gpu": name} for i, name in ((0, "x"), (1, "y"), (1, "y"))]
    check_devices(places[:2], may_share=False)
    check_devices(places, may_share=True)
    with pytest.raises(ConfigError, match=r"ranks 1 and 2 are both on GPU 1 of a; .*--tensor-parallel-size"):
        check_devices(places, may_share=False)


def test_symmetric_memory_is_for_gpus_of_one_machine_that_reach_each_other() -> None:
    places = [{"machine": m, "index": i, "gpu": f"{m}{i}"} for m, i in (("a", 0), ("a", 1), ("b", 0))]
    assert refusal(places[0], places[:2], lambda here, there: True) == ""
    assert refusal(places[0], [places[0], places[0]], lambda here, there: False) == "", "a GPU reaches itself"
    assert refusal(places[1], places[:2], lambda here, there: False) == "GPU 1 cannot read the memory of GPU 0"
    assert refusal(places[2], places, lambda here, there: True) == "ranks are on different machines, b and a"


def test_a_single_rank_needs_no_communication(tmp_path: Path) -> None:
    groups = connect(rank=0, size=1, store=tmp_path / "store", device=torch.device("cpu"))
    x = torch.randn(3, 4)
    assert groups.language.all_reduce(x) is x and groups.vision.all_gather(x) is x
    assert groups.language.agree(7) == 7 and groups.language.all_equal(b"x")
    groups.language.barrier()
    groups.close()
