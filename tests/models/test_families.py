"""Every family against transformers: tiny random checkpoints, float32, 1e-4."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from saccade.models.registry import ARCHITECTURES
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded
from tests.models.packing import Engine
from tests.models.prompts import Part, Prompt, encode, oracle_inputs, positions, request, write
from tests.models.rank_families import CONFIGS

Load = Callable[[str], Loaded]
TOLERANCE = 1e-4

QWEN_PROMPTS: dict[str, list[Part]] = {
    "text": [11],
    "one image": [4, ("image", (1, 4, 6)), 5],
    "images of other sizes": [3, ("image", (1, 6, 2)), 2, ("image", (1, 4, 10)), ("image", (1, 8, 8)), 3],
    "video": [2, ("video", (3, 4, 4)), 4],
    "interleaved": [("image", (1, 2, 2)), 3, ("video", (2, 6, 4)), 1, ("image", (1, 10, 6)), ("video", (1, 2, 4)), 2],
}
GEMMA_PROMPTS: dict[str, list[Part]] = {
    "text": [11],
    "one image": [4, ("image", (1, 8, 8)), 5],
    "interleaved": [("image", (1, 8, 8)), 3, ("image", (1, 8, 8)), ("image", (1, 8, 8)), 2],
}
CASES = [(name, prompt) for name in tiny.QWEN_VL for prompt in QWEN_PROMPTS]
CASES += [("gemma3_vl", prompt) for prompt in GEMMA_PROMPTS]


def parts_of(name: str, prompt: str) -> list[Part]:
    return (GEMMA_PROMPTS if name == "gemma3_vl" else QWEN_PROMPTS)[prompt]


def ours(model: Model, prompt: Prompt, positions_3T: Tensor) -> Tensor:
    (hidden_TD,) = Engine(model).prefill(request(model, prompt, positions_3T))
    return model.decoder.logits(hidden_TD)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_family_is_in_the_tables_that_tests_take_families_from() -> None:
    made = {type(make()).__name__ for make in tiny.MAKERS.values()}
    split = {name for config in CONFIGS.values() for name in config["architectures"]}
    assert set(ARCHITECTURES) - made == set(), "add it to MAKERS in tests/models/tiny.py"
    assert set(ARCHITECTURES) - split == set(), "add it to CONFIGS in tests/models/rank_families.py"


@pytest.mark.parametrize("name", tiny.TEXT)
def test_text_logits_agree(loaded: Load, name: str) -> None:
    made, model = loaded(name)
    prompt = write(model, [37], seed=1)
    inputs = oracle_inputs(made.oracle, prompt)
    close(ours(model, prompt, positions(inputs)), made.oracle(**inputs).logits[0])


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_logits_agree_with_media(loaded: Load, name: str, prompt: str) -> None:
    made, model = loaded(name)
    written = write(model, parts_of(name, prompt), seed=2)
    inputs = oracle_inputs(made.oracle, written)
    close(ours(model, written, positions(inputs)), made.oracle(**inputs).logits[0])


@pytest.mark.parametrize("name", tiny.QWEN_VL)
def test_tower_agrees_at_every_level(loaded: Load, name: str) -> None:
    made, model = loaded(name)
    written = write(model, parts_of(name, "images of other sizes") + parts_of(name, "video"), seed=3)
    rows_LUD = encode(model, written)
    grids = torch.tensor(written.images + written.videos)
    output = made.oracle.model.visual(torch.cat([written.image_patches, written.video_patches]), grid_thw=grids)
    levels = getattr(output, "deepstack_features", None) or []
    assert rows_LUD.shape[0] == 1 + len(levels)
    for mine, theirs in zip(rows_LUD, [output.pooler_output, *levels], strict=True):
        close(mine, theirs)


def test_scaled_embeddings_round_as_in_transformers(loaded: Load) -> None:
    """bfloat16 cannot represent sqrt(48): the factor is rounded first, then the product."""
    made, _ = loaded("gemma3")
    model = load_model(made.folder, dtype=torch.bfloat16)
    ids_T = torch.arange(120)
    theirs = copy.deepcopy(made.oracle.model.embed_tokens).bfloat16()(ids_T)
    assert torch.equal(model.decoder.embed(ids_T), theirs)


def test_siglip_tower_agrees(loaded: Load) -> None:
    made, model = loaded("gemma3_vl")
    written = write(model, parts_of("gemma3_vl", "interleaved"), seed=4)
    pixels = oracle_inputs(made.oracle, written)["pixel_values"]
    theirs = made.oracle.model.get_image_features(pixels).pooler_output.flatten(0, 1)
    close(encode(model, written)[0], theirs)


@pytest.mark.parametrize("name", tiny.MAKERS)
def test_packed_chunked_and_decoded_rows_equal_a_single_pass(loaded: Load, name: str) -> None:
    """Two requests together, one of them in three chunks and then token by token; padding is always NaN."""
    made, model = loaded(name)
    spots: list[Part] = [] if name in tiny.TEXT else parts_of(name, "one image")
    first, second = write(model, [*spots, 9], seed=5), write(model, [6, *spots, 4], seed=6)
    expected = [made.oracle(**oracle_inputs(made.oracle, prompt)).logits[0] for prompt in (first, second)]
    a, b = (request(model, p, positions(oracle_inputs(made.oracle, p))) for p in (first, second))
    engine = Engine(model, seed=7)
    start = a.length - 9
    got_a, got_b = [], []
    cuts = [start + 2, start + 5] if name in tiny.TEXT or name == "gemma3_vl" else [6, start + 5]
    for cut, rows_b in zip(cuts, (b.length - 3, b.length - 2), strict=True):
        rows = engine.run([(a, cut), (b, rows_b)])
        got_a.append(rows[0])
        got_b.append(rows[1])
    while a.done < a.length:
        work = [(b, b.done + 1), (a, a.done + 1)] if b.done < b.length else [(a, a.done + 1)]
        *rows_of_b, row_of_a = engine.run(work)
        got_a.append(row_of_a)
        got_b += rows_of_b
    close(model.decoder.logits(torch.cat(got_a)), expected[0])
    close(model.decoder.logits(torch.cat(got_b)), expected[1])


@pytest.mark.parametrize("name", tiny.VISION)
def test_moving_a_patch_moves_the_same_logits(loaded: Load, name: str) -> None:
    made, model = loaded(name)
    before = write(model, parts_of(name, "one image"), seed=8)
    moved = before.image_patches.clone()
    moved[[0, 5]] = moved[[5, 0]]
    after = replace(before, image_patches=moved)
    inputs = [oracle_inputs(made.oracle, prompt) for prompt in (before, after)]
    theirs = [made.oracle(**given).logits[0] for given in inputs]
    mine = [ours(model, p, positions(i)) for p, i in zip((before, after), inputs, strict=True)]
    assert (theirs[1] - theirs[0])[-1].abs().max() > 100 * TOLERANCE, "the swap must be visible in the last logits"
    torch.testing.assert_close(mine[1] - mine[0], theirs[1] - theirs[0], atol=2 * TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", tiny.QWEN_VL)
@pytest.mark.parametrize("lost", ["height", "width", "all"])
def test_losing_a_position_row_is_noticed(loaded: Load, name: str, lost: str) -> None:
    """The comparison must fail if M-RoPE is broken, as it once was in fused kernels of others."""
    made, model = loaded(name)
    written = write(model, parts_of(name, "images of other sizes"), seed=9)
    inputs = oracle_inputs(made.oracle, written)
    broken = positions(inputs).clone()
    if lost == "all":
        broken[:] = torch.arange(broken.shape[1], dtype=torch.int32)
    else:
        broken[{"height": 1, "width": 2}[lost]] = broken[0]
    with pytest.raises(AssertionError):
        close(ours(model, written, broken), made.oracle(**inputs).logits[0])


def test_losing_deepstack_is_noticed(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    written = write(model, parts_of("qwen3_vl", "one image"), seed=10)
    inputs = oracle_inputs(made.oracle, written)
    blind = request(model, written, positions(inputs))
    assert blind.deepstack_LTD is not None
    blind.deepstack_LTD = torch.zeros_like(blind.deepstack_LTD)
    with pytest.raises(AssertionError):
        close(model.decoder.logits(Engine(model).prefill(blind)[0]), made.oracle(**inputs).logits[0])


def test_an_image_that_sees_only_its_past_is_noticed(loaded: Load) -> None:
    made, model = loaded("gemma3_vl")
    written = write(model, parts_of("gemma3_vl", "one image"), seed=11)
    inputs = oracle_inputs(made.oracle, written)
    causal = request(model, written, positions(inputs))
    causal.limits_T = torch.zeros_like(causal.limits_T) if causal.limits_T is not None else None
    with pytest.raises(AssertionError):
        close(model.decoder.logits(Engine(model).prefill(causal)[0]), made.oracle(**inputs).logits[0])
