"""From a request to what the engine takes: images, videos, chat templates, tokens, positions."""

from saccade.inputs.generation import GenerationDefaults
from saccade.inputs.images import ImageLimits, load_image
from saccade.inputs.placeholders import Media, MediaSpan, Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.tokenizer import Tokenizer
from saccade.inputs.videos import Video

__all__ = [
    "GenerationDefaults",
    "ImageLimits",
    "Media",
    "MediaSpan",
    "Processor",
    "Prompt",
    "Tokenizer",
    "Video",
    "load_image",
]
