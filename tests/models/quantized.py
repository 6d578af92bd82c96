"""Quantised checkpoints, written here from plain ones: the tensors of each format, and their dequantised values."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
INPUT_SCALE = 0.02
PRODUCT = (".self_attn.", ".mlp.")
VISUAL = ("visual", "vision_tower", "multi_modal_projector")
SKIPPED = ("lm_head", *VISUAL, *(f"model.{name}" for name in VISUAL), "mlp.gate")


Write = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True)
class Scheme:
    """How a matrix is written (its tensors by suffix, and its dequantised values), and the entry in config.json."""

    write: Write
    config: dict[str, Any]
    scale_name: str
    round_inputs: Callable[[Tensor], Tensor]


def round_by_token(x: Tensor) -> Tensor:
    scales = x.abs().amax(dim=-1, keepdim=True) / 448
    return (x / scales).to(E4M3).float() * scales


def round_by_group(x: Tensor) -> Tensor:
    """128 values at a time."""
    return torch.cat([round_by_token(group) for group in x.split(128, dim=-1)], dim=-1)


def round_as_calibrated(x: Tensor) -> Tensor:
    return (x / INPUT_SCALE).clamp(-448, 448).to(E4M3).float() * INPUT_SCALE


def by_blocks(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rounded, scales = torch.empty_like(matrix, dtype=E4M3), []
    worth = torch.empty_like(matrix)
    for i in range(0, matrix.shape[0], 128):
        row = []
        for j in range(0, matrix.shape[1], 128):
            block = matrix[i : i + 128, j : j + 128]
            scale = block.abs().max() / 448
            rounded[i : i + 128, j : j + 128] = (block / scale).to(E4M3)
            worth[i : i + 128, j : j + 128] = (block / scale).to(E4M3).float() * scale
            row.append(scale)
        scales.append(torch.stack(row))
    return {"weight": rounded, "weight_scale_inv": torch.stack(scales)}, worth


def by_channel(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = matrix.abs().amax(dim=1, keepdim=True) / 448
    rounded = (matrix / scales).to(E4M3)
    return {"weight": rounded, "weight_scale": scales}, rounded.float() * scales


def by_tensor(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = matrix.abs().max() / 448
    rounded = (matrix / scale).to(E4M3)
    return {"weight": rounded, "weight_scale": scale.reshape(1)}, rounded.float() * scale


def by_tensor_with_input_scale(matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, worth = by_tensor(matrix)
    return tensors | {"input_scale": torch.tensor([INPUT_SCALE])}, worth


def compressed(strategy: str, *, dynamic: bool = True, **more: Any) -> dict[str, Any]:
    eight: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": strategy, "dynamic": False},
        "input_activations": eight | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic},
        "output_activations": None,
    }
    found = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return found | {"config_groups": {"group_0": group}, "ignore": list(SKIPPED), "kv_cache_scheme": None} | more


FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": list(SKIPPED),
}
SCHEMES = {
    "blocks": Scheme(by_blocks, FP8_BLOCKS, "weight_scale_inv", round_by_group),
    "channel": Scheme(by_channel, compressed("channel"), "weight_scale", round_by_token),
    "tensor": Scheme(by_tensor, compressed("tensor"), "weight_scale", round_by_token),
    "static": Scheme(
        by_tensor_with_input_scale, compressed("tensor", dynamic=False), "weight_scale", round_as_calibrated
    ),
}


def is_product(name: str, tensor: Tensor) -> bool:
    """Whether releases quantise this tensor: matrices of decoder layers, except routers."""
    is_language = any(word in name for word in PRODUCT) and not any(word in name for word in VISUAL)
    return is_language and tensor.ndim >= 2 and not name.endswith("mlp.gate.weight")


def write(
    folder: Path,
    scheme: Scheme,
    into: Path,
    *,
    is_chosen: Callable[[str, Tensor], bool] = is_product,
    rename: Callable[[str], str] = str,
) -> tuple[Path, Path]:
    """A quantised copy of a checkpoint, and a plain copy with the dequantised values. `rename` changes the names in the
    first."""
    stored: dict[str, Tensor] = {}
    worth: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not is_chosen(name, tensor):
            stored[name] = worth[name] = tensor
        elif tensor.ndim == 3:
            _write_experts(name, tensor, scheme, stored, worth)
        else:
            written, worth[name] = scheme.write(tensor)
            stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in written.items()}
    quantized, plain = into / "quantized", into / "plain"
    stored = {rename(name): tensor for name, tensor in stored.items()}
    for target, tensors in ((quantized, stored), (plain, worth)):
        shutil.copytree(folder, target)
        contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text()) | {"quantization_config": scheme.config}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


def _write_experts(
    name: str, tensor: Tensor, scheme: Scheme, stored: dict[str, Tensor], worth: dict[str, Tensor]
) -> None:
    """Fused experts become one tensor each, as in releases, with gate and up quantised separately."""
    layer, kind = name.rsplit(".", 1)
    worths = []
    for i, matrix in enumerate(tensor):
        halves = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        parts = []
        for part_name, half in zip(names, halves, strict=True):
            written, value = scheme.write(half.contiguous())
            parts.append(value)
            stored |= {f"{layer}.{i}.{part_name}.{suffix}": part for suffix, part in written.items()}
        worths.append(torch.cat(parts))
    worth[name] = torch.stack(worths)
