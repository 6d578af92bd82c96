"""Ranks that share a model give the results of one, read only their own bytes, and refuse shapes they cannot split."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.errors import ConfigError
from saccade.layers.parallel import Groups
from saccade.models.vlm import EncoderMode
from saccade.models.weights import LoadFormat, load_model
from tests.models import rank_families
from tests.models.conftest import Loaded
from tests.ranks import run_cases


@cache
def families(size: int) -> dict[str, str]:
    return run_cases(size, rank_families.__name__)


@pytest.mark.parametrize("case", rank_families.CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_equal_one(size: int, case: str) -> None:
    """Logits and image rows agree within 1e-4, eagerly and in a graph that was recorded with other data. All ranks have
    the same bits."""
    assert not families(size)[case], families(size)[case]


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_shards_come_from_one_tensor(
    loaded: Callable[[str], Loaded], name: str, load_format: LoadFormat, size: int
) -> None:
    """This includes dummy weights, which are drawn for the whole tensor by its name and then split."""
    made, _ = loaded(name)
    whole = dict(load_model(made.folder, load_format=load_format).slots())
    mode: EncoderMode = "weights" if size == 2 else "data"  # the tower has two heads
    for rank in range(size):
        groups = Groups.imagined(rank, size)
        for path, slot in load_model(made.folder, load_format=load_format, groups=groups, encoder_mode=mode).slots():
            assert torch.equal(slot.view, slot.shard_of(whole[path].view)), path


class Reads(TorchDispatchMode):
    """Counts the bytes of weights that operations read. Views and mapping a file read none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.copy_:
            self.nbytes += args[1].nbytes
        elif func.overloadpacket is not torch.ops.aten.set_ and not _is_view(args, result):
            self.nbytes += sum(arg.nbytes for arg in args if isinstance(arg, Tensor) and arg.numel() > SMALL)
        return result


SMALL = 32  # elements: rotary frequencies, which are not weights


def _is_view(args: Any, result: Any) -> bool:
    found = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(found, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return args[0].untyped_storage().data_ptr() == found.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3_vl"])
def test_a_rank_reads_only_its_own_bytes(loaded: Callable[[str], Loaded], name: str, tmp_path: Path) -> None:
    """Also for a tied model whose checkpoint stores the head again, which is compared with the embedding."""
    made, _ = loaded(name)
    folder = with_stored_head(made.folder, tmp_path) if name == "llama" else made.folder
    for rank in range(2):
        with Reads() as reads:
            model = load_model(folder, dtype=torch.float32, groups=Groups.imagined(rank, 2))
        own = model.parameter_bytes()
        compared = 2 * model.decoder.embedding.count * model.spec.decoder.width * 4 if name == "llama" else 0
        assert reads.nbytes == own + compared
        assert own < 0.75 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def with_stored_head(folder: Path, into: Path, change: float = 0.0) -> Path:
    """The same checkpoint with a stored copy of its tied head; `change` is added to the last row."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += change
    save_file(tensors | {"lm_head.weight": head}, into / "model.safetensors")
    (into / "config.json").write_text((folder / "config.json").read_text())
    return into


def test_a_tied_head_that_differs_is_found_by_the_rank_that_holds_the_difference(
    loaded: Callable[[str], Loaded], tmp_path: Path
) -> None:
    folder = with_stored_head(loaded("llama")[0].folder, tmp_path, change=1.0)
    load_model(folder, groups=Groups.imagined(0, 2))
    with pytest.raises(ConfigError, match="ties the head to the embedding"):
        load_model(folder, groups=Groups.imagined(1, 2))


@pytest.mark.parametrize(
    ("name", "size", "changes", "sentence"),
    [
        ("qwen3", 3, {}, "num_heads = 8 cannot be split evenly over 3 ranks; .*--tensor-parallel-size"),
        ("qwen3", 4, {"num_key_value_heads": 8, "num_attention_heads": 24}, ""),
        ("qwen3", 8, {"num_key_value_heads": 3, "num_attention_heads": 24}, "num_kv_heads = 3 .* over 8 ranks"),
        ("qwen3", 8, {"intermediate_size": 7}, "MLP width = 7 .* at most 7"),
        ("qwen3", 8, {"vocab_size": 7}, "vocab_size = 7 .* at most 7"),
        ("qwen3_moe", 8, {"moe_intermediate_size": 5}, "expert width = 5 .* at most 5"),
        ("qwen3_vl", 8, {}, "vision num_heads = 4 cannot be split evenly over 8 ranks"),
    ],
)
def test_a_shape_that_cannot_be_divided_is_refused(
    tmp_path: Path, name: str, size: int, changes: dict[str, int], sentence: str
) -> None:
    config = rank_families.CONFIGS[name] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(size):
        groups = Groups.imagined(rank, size)
        if not sentence:
            load_model(tmp_path, load_format="dummy", groups=groups)
            continue
        with pytest.raises(ConfigError, match=sentence):
            load_model(tmp_path, load_format="dummy", groups=groups)


def test_a_tower_with_too_few_heads_can_be_whole_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(rank_families.CONFIGS["qwen3_vl"]))
    model = load_model(tmp_path, load_format="dummy", groups=Groups.imagined(5, 8), encoder_mode="data")
    assert model.tower is not None
    alone = load_model(tmp_path, load_format="dummy")
    assert alone.tower is not None and model.tower.parameter_bytes() == alone.tower.parameter_bytes()
    assert model.decoder.parameter_bytes() < 0.4 * alone.decoder.parameter_bytes()
