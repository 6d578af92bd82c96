"""Two ranks on one GPU: sums and joins through symmetric memory, and models at their real widths.

T rows, L levels, U units, D width. Weights are random, drawn for whole tensors and then cut, so that two ranks have the
same weights as one.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from saccade.graphs.lane import lane_for
from saccade.graphs.nodes import Recording
from saccade.kernels.dispatch import Kernels
from saccade.kernels.symmetric_collectives import SymmetricCollectives
from saccade.layers.parallel import Groups, ParallelGroup
from saccade.layers.step import Step, VisionStep
from saccade.models.vlm import EncoderMode, Model
from saccade.models.weights import load_model
from saccade.scheduling.geometries import Grid
from tests.models import steps
from tests.models.packing import Engine, Request, text_positions

DEVICE = torch.device("cuda", 0)
FACTOR, SLACK = 1.5, 2e-3  # relative to the error of bfloat16 on one rank: see test_families
NUM_ROWS, BLOCK, ROOM = 600, 16, 32 * 2**20
GRIDS: list[Grid] = [(1, 16, 24), (1, 8, 12), (1, 24, 16)]
NUM_PATCHES = 1024
TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-VL-8B": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        **TOKENS,
        "text_config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "vocab_size": 151936,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **TOKENS,
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 2,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vocab_size": 152064,
        },
        "vision_config": {
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    },
}


def captured(call: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
    """A graph of a call, and the tensor in which it leaves its result."""
    lane = lane_for(DEVICE)
    with torch.no_grad(), lane.session():
        call()
        lane.begin()
        result = call()
        piece = lane.end()
    assert piece is not None
    return piece, result


def same_bits(group: ParallelGroup, x: Tensor) -> bool:
    return group.all_equal(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def brought(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def total(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.stack([brought(rank, shape, dtype, seed).float() for rank in range(size)]).sum(0)


def close(found: Tensor, right: Tensor) -> None:
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[found.dtype]
    torch.testing.assert_close(found.float(), right, atol=bound, rtol=bound)


def reserve(groups: Groups) -> None:
    for group in (groups.language, groups.vision):
        group.reserve(ROOM)
        assert isinstance(group.collectives, SymmetricCollectives)
        said = group.describe()
        assert said["backend"] == "symmetric memory" and said["all_reduce"][-1]["up_to_bytes"] is None
        assert group.all_equal(json.dumps(said["all_reduce"]).encode()), "ranks use the same algorithms"
        if group.rank == 0:
            print(json.dumps(said))


def sums(groups: Groups, algorithm: str, dtype: torch.dtype) -> None:
    """Out of place and in place, eagerly and in a graph that is replayed with other data."""
    group = groups.language
    assert isinstance(group.collectives, SymmetricCollectives)
    by = partial(group.collectives.all_reduce, algorithm=algorithm)
    for seed, shape in enumerate([(1, 4096), (7, 4096), (333, 1152), (3, 5), (2048, 4096)]):
        x, kept = brought(group.rank, shape, dtype, seed), brought(group.rank, shape, dtype, seed)
        right = total(group.size, shape, dtype, seed)
        eager = by(x)
        close(eager, right)
        assert torch.equal(x, kept) and same_bits(group, eager)
        assert torch.equal(by(x.T.contiguous().T), eager), "an input need not be contiguous"
        staging = group.staging(shape, dtype)
        assert staging is not None
        assert torch.equal(by(staging.copy_(x)), eager), "an input may be in the reserved memory already"
        assert torch.equal(by(staging.copy_(x), staging), eager), "and be replaced there"
        out = torch.zeros(2, *shape, dtype=dtype, device=DEVICE)
        assert torch.equal(by(x, out[1]), eager) and not out[0].any()
        assert by(x, x) is x and torch.equal(x, eager), "in place"

        x.copy_(kept)
        (apart, summed), (within, replaced) = captured(partial(by, x)), captured(partial(by, x, x))
        for other in (seed + 10, seed + 20):
            x.copy_(brought(group.rank, shape, dtype, other))
            eager = by(x)
            apart()
            assert torch.equal(summed, eager)
            within()
            assert torch.equal(replaced, eager) and torch.equal(x, eager)
            close(eager, total(group.size, shape, dtype, other))


def joins(groups: Groups) -> None:
    group = groups.vision
    for shape, dim in (((5, 1003), -1), ((4, 96, 256), 1), ((3, 5), 0)):
        x = brought(group.rank, shape, torch.bfloat16, seed=1)
        piece, joined = captured(partial(group.all_gather, x, dim))
        for seed in (2, 3):
            x.copy_(brought(group.rank, shape, torch.bfloat16, seed))
            right = torch.cat([brought(rank, shape, torch.bfloat16, seed) for rank in range(group.size)], dim=dim)
            assert torch.equal(group.all_gather(x, dim), right)
            out = torch.empty_like(right)
            assert group.all_gather(x.movedim(0, -1).contiguous().movedim(-1, 0), dim, out) is out
            assert torch.equal(out, right)
            piece()
            assert torch.equal(joined, right)


def load(name: str, groups: Groups | None = None, mode: EncoderMode = "weights") -> Model:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        options: dict[str, Any] = {"dtype": torch.bfloat16, "load_format": "dummy", "encoder_mode": mode}
        model = load_model(folder, device=DEVICE, groups=groups or Groups(), **options)
    model.place.kernels.compile(DEVICE, torch.bfloat16)
    model.reserve(rows=NUM_ROWS + 8, logit_rows=16, patches=NUM_PATCHES)
    return model


def in_float32(name: str, of: Model) -> Model:
    """The oracle: the same weights, but computed in float32."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        model = load_model(folder, device=DEVICE, dtype=torch.float32, load_format="dummy", kernels=_oracles())
    weights = dict(of.slots())
    for path, slot in model.slots():
        slot.view.copy_(weights[path].view)
    return model


def _oracles() -> Kernels:
    return Kernels("oracles", {})


def prefill_step(model: Model, seed: int) -> Step:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (NUM_ROWS, model.spec.decoder.width)
    embeds = torch.randn(shape, generator=generator, device=DEVICE).to(model.place.dtype)
    asked = [Request(part, text_positions(len(part))) for part in embeds.split([NUM_ROWS - 200, 200])]
    engine = Engine(model, num_blocks=64, block_size=BLOCK, seed=seed, poison=False)
    return engine.pack([(one, one.length) for one in asked], padding=0)


def ratio(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


def agree(name: str, found: Tensor, alone: Tensor, right: Tensor) -> None:
    """Two ranks may be little further from float32 than one rank is."""
    here, there = ratio(found, right), ratio(alone, right)
    print(f"{name}: relative error {here:.2e} on two ranks, {there:.2e} on one")
    assert here <= FACTOR * there + SLACK, f"{here:.2e} on two ranks, {there:.2e} on one"


def decoder(groups: Groups, name: str) -> None:
    """Embedding, two layers and head of a prompt. A graph has the bits of an eager run, also for another prompt."""
    group, alone, model = groups.language, load(name), load(name, groups)
    right = in_float32(name, alone)
    step, other = prefill_step(model, 1), prefill_step(model, 2)
    hidden = model.decoder.body(step)
    assert same_bits(group, hidden)
    agree(
        f"decoder of {name}",
        hidden,
        alone.decoder.body(prefill_step(alone, 1)),
        right.decoder.body(prefill_step(right, 1)),
    )
    piece, replayed = captured(lambda: model.decoder.body(step))
    piece()
    assert torch.equal(replayed, hidden)
    step.embeds_TD.copy_(other.embeds_TD)
    piece()
    assert torch.equal(replayed, model.decoder.body(step)) and not torch.equal(replayed, hidden)

    ids_T = torch.randint(0, model.spec.decoder.vocab_size, (9,), device=DEVICE, generator=_seeded(5))
    assert torch.equal(model.embed(ids_T)[0], alone.embed(ids_T)[0]), "one rank has a row, the others add zeros"
    logits = model.decoder.logits(hidden[:16])
    assert same_bits(group, logits) and logits.shape[1] == model.spec.decoder.vocab_size
    agree(f"head of {name}", logits, alone.decoder.logits(hidden[:16]), right.decoder.logits(hidden[:16].float()))
    piece, replayed = captured(lambda: model.decoder.logits(hidden[:16]))
    piece()
    assert torch.equal(replayed, logits)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def vision_step(model: Model, seed: int) -> tuple[VisionStep, int]:
    spec = model.spec.vision
    assert spec is not None
    count = sum(t * h * w for t, h, w in GRIDS)
    patches = torch.zeros(NUM_PATCHES, spec.patch_values, device=DEVICE, dtype=model.place.dtype)
    content = torch.randn(count, spec.patch_values, generator=_seeded(seed), device=DEVICE)
    patches[:count] = content.to(torch.bfloat16)
    return steps.vision_step(spec, GRIDS, patches), count // spec.unit


def tower(groups: Groups, name: str) -> None:
    """Two blocks and the mergers split over the ranks; then whole on each rank, with different images."""
    group, alone, model = groups.vision, load(name), load(name, groups)
    right = in_float32(name, alone)
    (step, units), (other, _) = vision_step(model, 1), vision_step(model, 2)
    rows = model.encode(step)[:, :units].clone()
    assert same_bits(group, rows)
    expected = [one.encode(vision_step(one, 1)[0])[:, :units] for one in (alone, right)]
    agree(f"tower of {name}", rows, *expected)
    piece, replayed = captured(lambda: model.encode(step))
    piece()
    assert torch.equal(replayed[:, :units], rows)
    step.patches_PC.copy_(other.patches_PC)
    piece()
    assert torch.equal(replayed, model.encode(step)) and not torch.equal(replayed[:, :units], rows)

    whole = load(name, groups, "data")
    mine, _ = vision_step(whole, 10 + group.rank)
    piece, gathered = captured(lambda: whole.encode(mine))
    piece()
    for rank, part in enumerate(gathered.chunk(group.size, dim=1)):
        assert torch.equal(part, alone.encode(vision_step(alone, 10 + rank)[0])), "the same kernels on the same shapes"
    assert same_bits(group, gathered)


CASES: dict[str, Callable[[Groups], None]] = {
    "reserve": reserve,
    **{
        f"{algorithm} sum of {str(dtype).removeprefix('torch.')}": partial(sums, algorithm=algorithm, dtype=dtype)
        for algorithm in ("one_shot", "two_shot", "gather")
        for dtype in (torch.bfloat16, torch.float32)
    },
    "gather sum of float16": partial(sums, algorithm="gather", dtype=torch.float16),
    "joins": joins,
    **{f"decoder of {name}": partial(decoder, name=name) for name in MODELS},
    **{f"tower of {name}": partial(tower, name=name) for name in MODELS},
}
