"""Checkpoints that compressed-tensors itself wrote: their logits are those of its own quantised model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

from saccade.kernels.weight import Layout
from saccade.models.weights import load_model
from tests.models.test_quantization import SAME_ROUNDING, error_of, logits_of, wide_checkpoint

INPUT_SCALE = 0.02


def quantized(folder: Path, preset: str) -> Any:
    """A model quantised by the library and calibrated here: all products but the head's round weights and inputs."""
    model = hf.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            by_row = module.weight.abs().amax(dim=1, keepdim=True)
            largest = by_row if module.weight_scale.ndim == 2 else by_row.max()
            module.weight_scale.data.copy_(largest / 448)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(INPUT_SCALE)
    return model


@torch.no_grad()
@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8"])
def test_a_checkpoint_written_by_the_library_gives_its_logits(preset: str, tmp_path: Path) -> None:
    plain = wide_checkpoint(tmp_path / "plain")
    oracle, stored = quantized(plain, preset), tmp_path / "stored"
    model_to_write = quantized(plain, preset)
    compressor = ModelCompressor.from_pretrained_model(model_to_write)
    compressor.compress_model(model_to_write)
    model_to_write.save_pretrained(stored)
    compressor.update_config(str(stored))
    model = load_model(stored, dtype=torch.float32)
    weight = model.decoder.layers[0].attention.out.weight
    assert weight.layout is Layout.ROWS and (weight.input_scale is not None) == (preset == "FP8")
    found, right = logits_of(model, oracle)
    _, unrounded = logits_of(model, hf.Qwen3ForCausalLM.from_pretrained(plain, dtype=torch.float32).eval())
    assert error_of(found, right) < SAME_ROUNDING
    assert error_of(unrounded, right) > 2 * SAME_ROUNDING, "the library does round"
