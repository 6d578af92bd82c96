"""Every family on several ranks against the same on one: random weights, generated whole and then split.

T rows, L levels, U units, D width, V vocabulary.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from saccade.graphs.recorded import RecordedLane
from saccade.layers.parallel import Groups
from saccade.layers.step import VisionStep
from saccade.models.vlm import EncoderMode, Model
from saccade.models.weights import load_model
from saccade.scheduling.geometries import Grid
from tests.models import steps
from tests.models.packing import Engine, Request, text_positions
from tests.ranks import assert_near

_TEXT = {
    "vocab_size": 121,
    "hidden_size": 48,
    "intermediate_size": 58,  # not a multiple of 4, so the last ranks hold less
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than four ranks: two of them share a head
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 42}
_VISION = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 42,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
}
_TOKENS = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
_GEMMA = _TEXT | {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24}
_SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "default", "mrope_section": sections, **more}}


def _qwen3_vl(architecture: str, **more: Any) -> dict[str, Any]:
    text = _TEXT | _mrope([3, 3, 2], mrope_interleaved=True) | more
    vision = _VISION | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
    return {"architectures": [architecture], "text_config": text, "vision_config": vision, **_TOKENS}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _TEXT | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": _TEXT | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "mistral": _TEXT | {"architectures": ["MistralForCausalLM"], "sliding_window": 6},
    "qwen3": _TEXT | {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": _TEXT | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]},
    "gemma3": _GEMMA | {"architectures": ["Gemma3ForCausalLM"]},
    "gemma3_vl": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": _GEMMA,
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 16,
        "image_token_index": 100,
        "boi_token_index": 102,
        "eoi_token_index": 103,
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **(_TEXT | _mrope([3, 3, 2])),
        "vision_config": _VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
        **_TOKENS,
    },
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": _TEXT | _mrope([3, 3, 2]),
        "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 48, "num_heads": 4, "patch_size": 4},
        **_TOKENS,
    },
    "qwen3_vl": _qwen3_vl("Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": _qwen3_vl("Qwen3VLMoeForConditionalGeneration", **_EXPERTS),
}
SEEING = [name for name, config in CONFIGS.items() if "vision_config" in config]
close = partial(assert_near, tolerance=1e-4)
NUM_ROWS, NUM_PATCHES = 40, 128


@contextmanager
def written(name: str) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
        yield Path(folder)


def load(name: str, groups: Groups | None = None, encoder_mode: EncoderMode = "weights") -> Model:
    with written(name) as folder:
        model = load_model(
            folder,
            dtype=torch.float32,
            load_format="dummy",
            groups=groups or Groups(),
            encoder_mode=encoder_mode,
        )
    model.reserve(rows=NUM_ROWS, logit_rows=NUM_ROWS, patches=NUM_PATCHES)
    return model


def same_bits(groups: Groups, *tensors: Tensor) -> bool:
    return all(groups.language.all_equal(tensor.contiguous().numpy().tobytes()) for tensor in tensors)


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, 121, (count,), generator=torch.Generator().manual_seed(seed))


def packed(model: Model, ids_T: Tensor, seed: int) -> Any:
    asked = Request(torch.zeros(len(ids_T), model.spec.decoder.width), text_positions(len(ids_T)))
    return Engine(model, seed=seed).pack([(asked, asked.length)], padding=3)


def text_logits(model: Model, ids_T: Tensor, step: Any) -> Tensor:
    """From tokens to logits, to cover embedding, decoder and head; padding is three rows of token 0."""
    padded_T = torch.cat([ids_T, torch.zeros(3, dtype=ids_T.dtype)])
    step.embeds_TD.copy_(model.embed(padded_T)[0])
    return model.decoder.logits(model.decoder.body(step))[:-3]


def check_text(groups: Groups, name: str) -> None:
    """Eagerly, then in a graph that was recorded with another prompt."""
    alone, model = load(name), load(name, groups)
    share = model.parameter_bytes() / alone.parameter_bytes()
    assert share < 0.8, f"a rank holds {share:.0%} of {name}"
    first, second = ids(11, seed=1), ids(11, seed=2)
    step, logits = packed(model, first, seed=3), []
    lane, static_T = RecordedLane(), first.clone()
    with lane.session():
        lane.begin()
        logits.append(text_logits(model, static_T, step))
        piece = lane.end()
    assert piece is not None
    expected = text_logits(alone, first, packed(alone, first, seed=3))
    close(logits[0], expected)
    assert same_bits(groups, logits[0])

    expected = text_logits(alone, second, packed(alone, second, seed=4))
    eager = text_logits(model, second, packed(model, second, seed=4))
    close(eager, expected)
    assert not torch.allclose(logits[0], expected, atol=1e-2), "two prompts that look alike show nothing"
    static_T.copy_(second)
    piece()
    close(logits[0], expected)
    assert same_bits(groups, logits[0], eager)


def images(name: str, seed: int) -> list[Grid]:
    if name == "gemma3_vl":
        return [(1, 8, 8)]
    return [[(1, 4, 6), (1, 2, 8)], [(1, 2, 4), (1, 8, 4)]][seed % 2]


def vision_step(model: Model, seed: int) -> tuple[VisionStep, int]:
    """The patches of one rank, with poisoned padding, and their number of units."""
    spec = model.spec.vision
    assert spec is not None
    grids = images(model_name(model), seed)
    count = sum(t * h * w for t, h, w in grids)
    patches = torch.full((NUM_PATCHES, spec.patch_values), float("nan"))
    patches[:count] = torch.randn(count, spec.patch_values, generator=torch.Generator().manual_seed(seed))
    return steps.vision_step(spec, grids, patches), count // spec.unit


def model_name(model: Model) -> str:
    return next(name for name, config in CONFIGS.items() if model.spec.architecture in config["architectures"])


def check_vision(groups: Groups, name: str) -> None:
    """The tower split over the ranks, eagerly and in a graph; then whole on each rank, with different images."""
    alone, model = load(name), load(name, groups)
    (step, units), (other, other_units) = vision_step(model, 5), vision_step(model, 7)
    lane = RecordedLane()
    with lane.session():
        lane.begin()
        rows_LUD = model.encode(step)
        piece = lane.end()
    assert piece is not None
    close(rows_LUD[:, :units], alone.encode(step)[:, :units])
    assert same_bits(groups, rows_LUD[:, :units])
    expected = alone.encode(other)[:, :other_units]
    assert other_units == units and not torch.allclose(rows_LUD[:, :units], expected, atol=1e-2)
    step.patches_PC.copy_(other.patches_PC)
    piece()
    close(rows_LUD[:, :units], expected)

    whole = load(name, groups, "data")
    mine, _ = vision_step(whole, groups.vision.rank)
    gathered = whole.encode(mine).chunk(groups.vision.size, dim=1)
    for rank, part in enumerate(gathered):
        theirs, count = vision_step(whole, rank)
        close(part[:, :count], alone.encode(theirs)[:, :count])
    assert same_bits(groups, *gathered)


CASES = {f"text of {name}": partial(check_text, name=name) for name in CONFIGS} | {
    f"vision of {name}": partial(check_vision, name=name) for name in SEEING
}
