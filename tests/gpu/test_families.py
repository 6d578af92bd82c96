"""Every family at its real dimensions on the GPU: bfloat16 with our kernels against transformers in float32.

The weights are drawn on the GPU in the transformers model, rounded to bfloat16, and loaded into ours through the
renaming of checkpoints; nothing touches the disk. `SACCADE_TEST_LAYERS=n` keeps only n decoder layers.

bfloat16 has 8 bits of precision, so each of the few hundred roundings between embedding and last norm adds about 2e-3,
and how they accumulate depends on the network. The yardstick is therefore transformers in bfloat16: our error relative
to float32 may be at most 1.5 times as large, plus 2e-3 for luck. A wrong position, mask or weight causes an error near
1; one test breaks M-RoPE on purpose to show that.
"""

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from saccade.kernels.dispatch import kernels_for
from saccade.layers.layer import Placement
from saccade.layers.layer_spec import MoESpec
from saccade.layers.moe import MoE
from saccade.models.dummy import fill_with_noise
from saccade.models.vlm import Model
from saccade.scheduling.geometries import Grid
from tests.models.memory import model_of
from tests.models.packing import Engine, Request, text_positions
from tests.models.prompts import image_limits
from tests.models.steps import vision_step

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
FACTOR, SLACK = 1.5, 2e-3
BLOCK = 16
NUM_TEXT, FIRST_CHUNK = 1200, 700

QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
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
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
}
QWEN2_VL_7B: dict[str, Any] = QWEN2_5_VL_7B | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
FAMILIES: dict[str, tuple[dict[str, Any], list[Grid]]] = {
    "Qwen3-VL-8B": (QWEN3_VL_8B, [(1, 36, 36), (1, 20, 44), (2, 12, 16)]),
    "Qwen2.5-VL-7B": (QWEN2_5_VL_7B, [(1, 40, 40), (1, 22, 50), (2, 12, 16)]),
    "Qwen2-VL-7B": (QWEN2_VL_7B, [(1, 40, 40), (1, 22, 50), (2, 12, 16)]),
    "Gemma-3-4B": (GEMMA3_4B, [(1, 64, 64), (1, 64, 64)]),
    "Qwen3-0.6B": (QWEN3_0_6B, []),
    "Qwen3-0.6B-YaRN": (
        QWEN3_0_6B | {"rope_scaling": YARN, "max_position_embeddings": 131072},
        [],
    ),
    "SmolLM2-135M": (SMOLLM2_135M, []),
    "Mistral-7B": (MISTRAL_7B, []),
}


@dataclass(frozen=True)
class Case:
    """One prompt of text and images, as numbers for both sides."""

    ids_T: Tensor
    is_image_T: Tensor
    grids: list[Grid]
    patches_PC: Tensor


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """The oracle computes in true float32, without TF32 in products or convolutions. Frees memory afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def config_of(name: str) -> dict[str, Any]:
    config = FAMILIES[name][0]
    layers = os.environ.get("SACCADE_TEST_LAYERS")
    if layers is None:
        return config
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | {"num_hidden_layers": int(layers)}}
    return config | {"num_hidden_layers": int(layers)}


def new_oracle(config: dict[str, Any]) -> Any:
    """A float32 transformers model on the GPU, with weights at the scale of a trained model, rounded to bfloat16."""
    values = {key: value for key, value in config.items() if key != "architectures"}
    kind = getattr(hf, config["architectures"][0])
    with torch.device(DEVICE):
        oracle = kind(kind.config_class(**values)).eval().float()
    oracle.set_attn_implementation("sdpa")
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in oracle.parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        # Norms start at one (Gemma's at zero) and biases at zero; noise makes all of them matter.
        parameter.copy_(noise * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else parameter + 0.05 * noise)
        parameter.copy_(parameter.bfloat16())
    return oracle


def in_bfloat16(oracle: Any) -> Any:
    """The oracle in bfloat16 like a loaded checkpoint: rotary frequencies stay in float32."""
    kept = {path: buffer.clone() for path, buffer in oracle.named_buffers()}
    oracle = oracle.bfloat16()
    for path, buffer in kept.items():
        owner, _, leaf = path.rpartition(".")
        setattr(oracle.get_submodule(owner), leaf, buffer)
    return oracle


def write_case(name: str, config: dict[str, Any]) -> Case:
    grids = FAMILIES[name][1]
    generator = torch.Generator().manual_seed(1)
    token = config.get("image_token_id", config.get("image_token_index", -1))
    ids = torch.randint(10, 30000, (NUM_TEXT,), generator=generator).tolist()
    values, merge = _patch_values(config)
    for t, h, w in grids:
        ids += [token] * (t * h * w // merge**2) + torch.randint(10, 30000, (17,), generator=generator).tolist()
    num_patches = sum(t * h * w for t, h, w in grids)
    patches = torch.randn(num_patches, values, generator=generator).bfloat16().float()
    ids_T = torch.tensor(ids)
    return Case(ids_T, ids_T == token, grids, patches)


def _patch_values(config: dict[str, Any]) -> tuple[int, int]:
    vision = config.get("vision_config")
    if vision is None:
        return 1, 1
    merge = vision.get("spatial_merge_size", 4)
    return 3 * vision.get("temporal_patch_size", 1) * vision["patch_size"] ** 2, merge


def oracle_hidden(oracle: Any, case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """Last hidden states, rows of the vision tower and positions, from transformers."""
    ids = case.ids_T[None].to(DEVICE)
    kinds = case.is_image_T[None].int().to(DEVICE)
    dtype = oracle.dtype
    if hasattr(oracle.model, "get_rope_index"):
        grids = torch.tensor(case.grids).to(DEVICE)
        # A grid of several frames counts as an image here, and gets the positions of one.
        positions, _ = oracle.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        pixels = case.patches_PC.to(DEVICE).to(dtype)
        rows = oracle.model.visual(pixels, grid_thw=grids).pooler_output
        given = {"pixel_values": pixels, "image_grid_thw": grids, "position_ids": positions, "mm_token_type_ids": kinds}
        return oracle.model(input_ids=ids, **given).last_hidden_state[0], rows, positions[:, 0].int().cpu()
    positions = text_positions(len(case.ids_T))
    if not case.grids:
        return oracle.model(input_ids=ids).last_hidden_state[0], None, positions
    pixels = _images(case).to(DEVICE).to(dtype)
    rows = oracle.model.get_image_features(pixels).pooler_output.flatten(0, 1)
    hidden = oracle.model(input_ids=ids, pixel_values=pixels, token_type_ids=kinds).last_hidden_state[0]
    return hidden, rows, positions


def _images(case: Case) -> Tensor:
    """(images, 3, 896, 896) from patches in blocks of 4 x 4."""
    blocks = case.patches_PC.view(-1, 16, 16, 4, 4, 3, 14, 14)
    return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, 896, 896)


def our_hidden(model: Model, case: Case, positions_3T: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same from our model: one packed, padded pass for the tower, two padded chunks for the decoder."""
    sources_T = torch.where(case.is_image_T, case.is_image_T.cumsum(0) - 1, -1).to(DEVICE)
    rows_LUD = None
    if case.grids:
        assert model.spec.vision is not None
        padding = 8 * model.spec.vision.unit
        patches = torch.cat([case.patches_PC, torch.full((padding, case.patches_PC.shape[1]), float("nan"))])
        step = vision_step(model.spec.vision, case.grids, patches.to(DEVICE).bfloat16())
        rows_LUD = model.encode(step)[:, : -padding // model.spec.vision.unit]
    embeds_TD, deepstack_LTD = model.embed(case.ids_T.to(DEVICE), rows_LUD, sources_T)
    limits_T = image_limits(case.is_image_T) if model.spec.sees_whole_image else None
    asked = Request(embeds_TD, positions_3T, deepstack_LTD, limits_T)
    engine = Engine(model, num_blocks=asked.length // BLOCK + 8, block_size=BLOCK, poison=False)
    first = engine.run([(asked, FIRST_CHUNK)], padding=10)
    rest = engine.run([(asked, asked.length)], padding=22)
    return torch.cat([*first, *rest]), rows_LUD[0] if rows_LUD is not None else None


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_as_close_to_float32_as_those_of_transformers(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(name)
    oracle = new_oracle(config)
    model = model_of(config, oracle.state_dict(), device=DEVICE, dtype=torch.bfloat16)
    case = write_case(name, config)
    exact, exact_rows, positions_3T = oracle_hidden(oracle, case)
    ours, our_rows = our_hidden(model, case, positions_3T)
    broken = our_hidden(model, case, text_positions(len(case.ids_T)))[0] if model.spec.vision else None
    theirs, their_rows, _ = oracle_hidden(in_bfloat16(oracle), case)

    errors = {"hidden": (relative(ours, exact), relative(theirs, exact))}
    if exact_rows is not None and our_rows is not None and their_rows is not None:
        errors["tower"] = (relative(our_rows, exact_rows), relative(their_rows, exact_rows))
    with capsys.disabled():
        for part, (mine, yardstick) in errors.items():
            print(
                f"\n{name:14} {part:6} {len(case.ids_T):5} tokens  saccade bf16 {mine:.4f}  "
                f"transformers bf16 {yardstick:.4f}  [{model.place.kernels.name}]",
                end="",
            )
    for part, (mine, yardstick) in errors.items():
        assert mine <= FACTOR * yardstick + SLACK, f"{part}: {mine:.4f}, transformers {yardstick:.4f}"
    if broken is not None and hasattr(oracle.model, "get_rope_index"):
        assert relative(broken, exact) > 3 * errors["hidden"][0], "losing M-RoPE must be visible"


def test_experts_of_real_size_are_captured_and_replayed_on_other_rows() -> None:
    """Qwen3-30B-A3B's experts. The graph must follow a routing that it was not captured with."""
    spec = MoESpec(num_experts=128, top_k=8, width=768, activation="silu", renormalise=True)
    device = torch.device(DEVICE)
    half, full = (
        MoE(Placement(kernels=kernels_for(device, dtype), device=device, dtype=dtype), 2048, spec)
        for dtype in (torch.bfloat16, torch.float32)
    )
    fill_with_noise(half)
    for (_, source), (_, target) in zip(half.slots(), full.slots(), strict=True):
        target.fill(source.view)
    rows_TD = torch.randn(3, 300, 2048, device=device, dtype=torch.bfloat16)
    static_TD = rows_TD[0].clone()
    graph = torch.cuda.CUDAGraph()
    half(static_TD)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y_TD = half(static_TD)
    for x_TD in rows_TD:
        static_TD.copy_(x_TD)
        graph.replay()
        assert torch.equal(y_TD, half(x_TD))
        # Near ties of the router go either way in bfloat16, so a few rows may choose another expert.
        exact_TD = dense_experts(full, x_TD.float())
        errors_T = (y_TD.float() - exact_TD).norm(dim=1) / exact_TD.norm(dim=1)
        assert float(errors_T.median()) < 1e-2


def dense_experts(moe: MoE, x_TD: Tensor) -> Tensor:
    """Runs every expert on every row, weighted; most weights are zero."""
    weights_TA, chosen_TA = moe.router(x_TD).softmax(-1).topk(moe.spec.top_k)
    weights_TA = weights_TA / weights_TA.sum(-1, keepdim=True)
    weights_TN = torch.zeros(len(x_TD), moe.spec.num_experts, device=x_TD.device).scatter(1, chosen_TA, weights_TA)
    y_TD = torch.zeros_like(x_TD)
    for gate_up, down, weight_T in zip(moe.experts.gate_up.data, moe.experts.down.data, weights_TN.T, strict=True):
        gate, up = (x_TD @ gate_up.T).chunk(2, dim=-1)
        y_TD += weight_T[:, None] * ((torch.nn.functional.silu(gate) * up) @ down.T)
    return y_TD
