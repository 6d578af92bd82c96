"""Two and four ranks in one process, one thread each, give what one rank gives."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.layers.parallel import ParallelGroup
from saccade.models.weights import LoadFormat, load_model
from tests.models.conftest import Loaded
from tests.models.packing import Engine
from tests.models.prompts import Part, oracle_inputs, positions, request, write

T = TypeVar("T")


class Ranks:
    """Ranks as threads that meet at a barrier; what each brings is seen by all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=300)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def group(self, rank: int) -> ParallelGroup:
        return ParallelGroup(
            rank=rank,
            size=self.size,
            all_reduce=lambda x: torch.stack(self._exchange(rank, x)).sum(0),
            all_gather=lambda x: torch.cat(self._exchange(rank, x), dim=-1),
        )

    def run(self, work: Callable[[ParallelGroup], T]) -> list[T]:
        def guarded(rank: int) -> T:
            try:
                with torch.no_grad():
                    return work(self.group(rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(guarded, range(self.size)))

    def _exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.brought[rank] = x
        self.barrier.wait()
        everyone = list(self.brought)
        self.barrier.wait()
        return everyone


IMAGE: dict[str, list[Part]] = {
    "qwen3_vl": [3, ("image", (1, 4, 6)), 4, ("image", (1, 2, 8))],
    "qwen3_vl_moe": [3, ("image", (1, 4, 6)), 4],
    "qwen2_5_vl": [3, ("image", (1, 10, 6)), 4],
    "gemma3_vl": [3, ("image", (1, 8, 8)), 4],
}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama_bias", 2),
        ("llama", 4),
        ("qwen3_moe", 2),
        ("qwen3_vl", 2),
        ("qwen3_vl_moe", 2),
        ("qwen2_5_vl", 2),
        ("gemma3_vl", 2),
    ],
)
def test_ranks_together_equal_one(loaded: Callable[[str], Loaded], name: str, size: int) -> None:
    made, alone = loaded(name)
    prompt = write(alone, IMAGE.get(name, [13]), seed=1)
    rows_3T = positions(oracle_inputs(made.oracle, prompt))
    (hidden,) = Engine(alone).prefill(request(alone, prompt, rows_3T))
    expected = alone.logits(hidden)

    def work(group: ParallelGroup) -> Tensor:
        model = load_model(made.folder, dtype=torch.float32, group=group)
        assert model.parameter_bytes() < 0.8 * alone.parameter_bytes()
        (rows,) = Engine(model).prefill(request(model, prompt, rows_3T))
        return model.logits(rows)

    for logits in Ranks(size).run(work):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_shards_are_shards_of_one_tensor(loaded: Callable[[str], Loaded], load_format: LoadFormat) -> None:
    made, _ = loaded("qwen3")
    whole = dict(load_model(made.folder, load_format=load_format).slots())
    for rank in (0, 1):
        group = ParallelGroup(rank=rank, size=2)
        for name, slot in load_model(made.folder, load_format=load_format, group=group).slots():
            full = whole[name].view
            part = full if slot.dim is None else full.narrow(slot.dim, slot.start, slot.view.shape[slot.dim])
            assert torch.equal(slot.view, part), name


def test_a_size_that_does_not_divide_is_refused(loaded: Callable[[str], Loaded]) -> None:
    made, _ = loaded("qwen3")
    with pytest.raises(ConfigError, match=r"num_heads = 4 .* 3 ranks.*--tensor-parallel-size"):
        load_model(Path(made.folder), group=ParallelGroup(rank=0, size=3))
