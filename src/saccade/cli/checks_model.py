"""Model checks of `saccade doctor`, from the checkpoint's files to an answer about an image."""

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from saccade.cli.checks import GIB, Finding, Level, guarded

if TYPE_CHECKING:
    from saccade.inputs.processor import Processor

MAX_SAMPLE_BYTES = 2 * GIB  # larger models take too long on a CPU
AGAIN = "download the checkpoint again, or choose another"


def check_model(model: str, *, sample: bool) -> Iterator[Finding]:
    from saccade.models.folder import find_folder

    found: list[Path] = []

    def look() -> Finding:
        found.append(find_folder(model))
        return Finding("checkpoint", Level.OK, str(found[0]))

    yield guarded("checkpoint", look, "give a folder with config.json and .safetensors files, or a hub id")
    if not found:
        return
    folder = found[0]
    is_whole = True
    for name, check, fix in FILE_CHECKS:
        finding = guarded(name, partial(check, folder), fix)
        is_whole &= finding.level is not Level.BROKEN
        yield finding
    if not is_whole:
        yield Finding(
            "sample", Level.NOTE, "skipped: the checkpoint cannot be used as it is", "mend what is named above"
        )
        return
    yield guarded(
        "sample", lambda: check_sample(folder, sample), "report it, with the output of `saccade doctor --json`"
    )


def check_config(folder: Path) -> Finding:
    from saccade.models.model_config import Config
    from saccade.models.registry import read_spec

    _, spec = read_spec(Config.read(folder / "config.json"))
    sees = "sees images" if spec.vision else "text only"
    found = f"{spec.architecture}, {len(spec.decoder.layers)} layers, {spec.max_position} positions, {sees}"
    return Finding("config", Level.OK, found)


def check_ranks(folder: Path) -> Finding:
    from saccade.dry_run.blueprint import dividing_sizes
    from saccade.models.model_config import Config
    from saccade.models.quantization import read_formats
    from saccade.models.registry import read_spec

    config = Config.read(folder / "config.json")
    family, spec = read_spec(config)
    formats = read_formats(config, family.renames)
    sizes = dividing_sizes(spec, formats, "weights")
    found = f"runs with --tensor-parallel-size {_listed(sizes)}"
    if spec.vision is not None and (more := sorted({*dividing_sizes(spec, formats, "data")} - {*sizes})):
        found += f"; also {_listed(more)}, where each rank encodes whole images (--mm-encoder-tp-mode data)"
    return Finding("ranks", Level.OK, found)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def check_weights(folder: Path) -> Finding:
    from saccade.models.checkpoint import SafetensorsFolder

    weights = SafetensorsFolder.open(folder)
    return Finding("weights", Level.OK, f"{len(weights.files)} files, {weights.total_bytes / GIB:.2f} GiB")


def check_tokenizer(folder: Path) -> Finding:
    """Building the processor also checks the media placeholder tokens against config.json."""
    from saccade.inputs.processor import Processor
    from saccade.inputs.text.generation import GenerationDefaults

    processor = Processor.from_folder(folder)
    tokenizer, places = processor.tokenizer, processor.placeholders
    ends = sorted(GenerationDefaults.from_folder(folder, tokenizer).eos_token_ids)
    names = {token: tokenizer.token_text(token) for token in ends}
    found = f"{len(tokenizer.special_tokens)} special tokens; stops at {', '.join(map(str, names.values())) or 'none'}"
    if not ends:
        fix = "no file names an end token (eos_token_id, eos_token): answers end only at --max-tokens"
        return Finding("tokenizer", Level.NOTE, found, fix)
    if places is not None:
        found += f"; an image is {tokenizer.token_text(places.image_token_id)}"
    return Finding("tokenizer", Level.OK, found)


def check_template(folder: Path) -> Finding:
    from saccade.inputs.processor import Processor

    processor = Processor.from_folder(folder)
    prompt = processor.chat(_question("What is this?", processor))
    media = sum(span.length for span in prompt.spans)
    return Finding("template", Level.OK, f"renders to {len(prompt)} tokens, {media} of them for an image")


def check_sample(folder: Path, wanted: bool) -> Finding:
    """Generates an answer on the CPU, about an image if the model takes images."""
    from saccade.models.checkpoint import SafetensorsFolder

    size = SafetensorsFolder.open(folder).total_bytes
    if not wanted or size > MAX_SAMPLE_BYTES:
        why = "--no-sample" if not wanted else f"a model of {size / GIB:.1f} GiB is too slow on a CPU"
        return Finding("sample", Level.NOTE, f"skipped: {why}", "try `saccade run` with an image")
    from saccade import LLM, SamplingParams

    started = perf_counter()
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "kv_cache_tokens": 4096}
    with LLM(folder, device="cpu", enforce_eager=True, **limits) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        [output] = llm.chat(_question("What shape is this?", llm.processor), params, progress=False)
    answer = output.outputs[0]
    found = f"answered {answer.text!r} in {perf_counter() - started:.1f} s"
    if answer.finish_reason == "error":
        return Finding("sample", Level.BROKEN, f"failed: {answer.stop_reason}", "report it")
    return Finding("sample", Level.OK, found)


FILE_CHECKS = (
    ("config", check_config, AGAIN),
    ("ranks", check_ranks, AGAIN),
    ("weights", check_weights, AGAIN),
    ("tokenizer", check_tokenizer, AGAIN),
    ("template", check_template, "add the model's chat_template.jinja to the folder"),
)


def _question(text: str, processor: "Processor") -> list[dict[str, Any]]:
    """Asks about a red circle on white if the model takes images."""
    from PIL import Image, ImageDraw

    words = {"type": "text", "text": text}
    if processor.images is None:
        return [{"role": "user", "content": [words]}]
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((20, 20, 76, 76), fill="red")
    file = io.BytesIO()
    image.save(file, "PNG")
    return [{"role": "user", "content": [{"type": "image", "image": file.getvalue()}, words]}]
