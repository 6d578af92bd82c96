"""The processors of transformers, without torchvision.

Only their resize and normalise steps need it, and torchvision itself calls torch's antialiased interpolation on uint8.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from saccade.inputs.checkpoint_files import read_json, read_optional_json


def _resize(self: Any, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
    flat = image.reshape(-1, *image.shape[-3:])
    mode = {2: "bilinear", 3: "bicubic"}[int(resample)]
    target = (size.height, size.width)
    resized = torch.nn.functional.interpolate(flat, target, mode=mode, antialias=True, align_corners=False)
    return resized.reshape(*image.shape[:-2], *target)


def _normalize(self: Any, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    return (image - torch.as_tensor(mean)[:, None, None]) / torch.as_tensor(std)[:, None, None]


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Provides empty modules to import and plain torch for the two methods, and skips a check of video classes."""
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    saved = {name: sys.modules.get(name) for name in names}
    methods = TorchvisionBackend.resize, TorchvisionBackend.normalize, ProcessorMixin.check_argument_for_proper_class
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision.transforms.v2"].functional = sys.modules[names[-1]]  # type: ignore[attr-defined]
    TorchvisionBackend.resize, TorchvisionBackend.normalize = _resize, _normalize
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None
    try:
        yield
    finally:
        TorchvisionBackend.resize, TorchvisionBackend.normalize = methods[:2]
        ProcessorMixin.check_argument_for_proper_class = methods[2]
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def image_processor(folder: Path) -> Any:
    kind = Gemma3ImageProcessorPil if read_json(folder / "config.json")["model_type"] == "gemma3" else None
    return (kind or Qwen2VLImageProcessorPil)(**read_json(folder / "preprocessor_config.json"))


def video_processor(folder: Path) -> Any:
    """Create and call it inside `without_torchvision`."""
    kind = video_class(read_json(folder / "config.json")["model_type"])
    settings = read_optional_json(folder / "video_preprocessor_config.json")
    return kind(
        **(settings or read_json(folder / "preprocessor_config.json")), cap_pixels_per_frame=False, do_convert_rgb=False
    )


def video_class(model_type: str) -> Any:
    with without_torchvision():
        if model_type in ("qwen2_vl", "qwen2_5_vl"):
            from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

            return Qwen2VLVideoProcessor
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        return Qwen3VLVideoProcessor


def processor(folder: Path) -> Any:
    """Create and call it inside `without_torchvision`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    config = read_json(folder / "config.json")
    if config["model_type"] == "gemma3":
        return transformers.Gemma3Processor(
            image_processor(folder), tokenizer, chat_template=template, image_seq_length=config["mm_tokens_per_image"]
        )
    kind = processor_class_from_name(PROCESSOR_MAPPING_NAMES[config["model_type"]])
    return kind(image_processor(folder), tokenizer, video_processor(folder), chat_template=template)


def rope_index(model_type: str, config: dict[str, Any], **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """get_rope_index of the model classes, without building a model."""
    kind = getattr(transformers, MODEL_MAPPING_NAMES[model_type])
    stand_in = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(**config)),
        get_vision_position_ids=lambda *args, **kwargs: kind.get_vision_position_ids(None, *args, **kwargs),
    )
    found: tuple[torch.Tensor, torch.Tensor] = kind.get_rope_index(stand_in, **inputs)
    return found


def fast_image_processor(folder: Path) -> Any:
    """Turns pixels (height, width, 3) into patch rows with the classes that servers use (torch's resize on uint8)."""
    config = read_json(folder / "config.json")
    is_gemma, vision = config["model_type"] == "gemma3", config["vision_config"]
    if is_gemma:
        merge = int(vision["image_size"] / vision["patch_size"] / config["mm_tokens_per_image"] ** 0.5)
    with without_torchvision():
        if is_gemma:
            from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor as Kind
        else:
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Kind
    built = Kind(**read_json(folder / "preprocessor_config.json"), do_convert_rgb=False)

    def process(pixels: Any) -> torch.Tensor:
        tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        with without_torchvision():
            values = built(tensor, return_tensors="pt", input_data_format="channels_first")["pixel_values"]
        return cut_patches(values[0], vision["patch_size"], merge) if is_gemma else values

    return process


def cut_patches(image: torch.Tensor, patch: int, merge: int) -> torch.Tensor:
    """Rows of patches, grouped by `merge` x `merge` squares."""
    rows = torch.nn.functional.unfold(image[None], patch, stride=patch)[0].T
    height, width = image.shape[1] // patch // merge, image.shape[2] // patch // merge
    squares: torch.Tensor = rows.view(height, merge, width, merge, -1).transpose(1, 2)
    return squares.reshape(rows.shape)
