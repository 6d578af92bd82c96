import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.bundled import LIMITS as BUNDLED_LIMITS
from saccade.cli import main
from saccade.config import Tier
from saccade.dry_run.blueprint import draw
from saccade.dry_run.steps import dry_run, synthetic_prompt
from saccade.inputs.media_settings import read_placeholder_settings
from saccade.inputs.plans import plan_image
from saccade.scheduling.buckets import vision_buckets
from saccade.wire.engine_settings import CPU_LIMITS, GPU_LIMITS, EngineSettings, SchedulerSettings
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny


def explained(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["explain", "--model", str(folder), "--json", "--device", "cuda", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tokens_buckets_and_padding_at_real_size(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--image", "1280x720", "--image", "640x480", "--prompt-tokens", "200"]
    found = explained(real_size, capsys, *flags)
    assert [item["tokens"] for item in found["media"]] == [40 * 22, 20 * 15], "units of 32x32 pixels"
    assert found["prompt_tokens"] == 200 + 880 + 300
    first, *later = found["steps"]
    by_phase = {one["phase"]: one for one in first}
    assert by_phase["vision"]["rows"] == 1180
    assert by_phase["vision"]["bucket_rows"] == min(n for n in vision_buckets(8192) if n >= 1180)
    assert by_phase["prefill"]["rows"] == 1380
    assert by_phase["prefill"]["bucket_rows"] == 1408, "an eighth of an octave above 1024: 1024 + 3 * 128"
    assert by_phase["head"]["rows"] == 1
    assert [[one["phase"] for one in step] for step in later] == [["decode"]]
    assert all(
        one["tier"] == "capacity" and one["reason"] == "it fits a bucket" for step in found["steps"] for one in step
    )


def test_usual_images_have_graphs_of_their_own(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size, tier in (("560x560", "exact"), ("560x620", "capacity")):
        vision = explained(real_size, capsys, "--image", size)["steps"][0][0]
        assert (vision["phase"], vision["tier"]) == ("vision", tier)


def test_reasons_are_given_where_nothing_is_replayed(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(real_size, capsys, "--image", "2048x2048", "--encoder-budget-tokens", "1K")
    vision = found["steps"][0][0]
    assert (vision["phase"], vision["tier"], vision["rows"]) == ("vision", "eager", 4096)
    assert vision["reason"].startswith("it is larger than every bucket (")
    found = explained(real_size, capsys, "--image", "640x480", "--graphs", "vision=off", "--disable-cuda-graph")
    assert {one["reason"] for step in found["steps"] for one in step} == {"graphs are off"}


def test_videos_and_long_prompts(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--video", "8x640x480", "--prompt-tokens", "3000", "--max-num-batched-tokens", "2K", "--max-num-seqs", "8"]
    found = explained(real_size, capsys, *flags)
    frames = found["media"][0]["grid_thw"][0]
    assert found["media"][0]["tokens"] == frames * 300
    prefills = [one["rows"] for step in found["steps"] for one in step if one["phase"] == "prefill"]
    assert sum(prefills) == found["prompt_tokens"] and prefills[0] == 2048


def test_a_table_is_printed(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(real_size), "--image", "560x560", "--batch", "3", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "resized to 576x576" in shown or "resized to 544x544" in shown
    assert "prefill" in shown and "decode" in shown


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_loses_no_word(
    real_size: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["explain", str(real_size), "--device", "cuda", "--image", "560x560"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    shown = " ".join(lines)
    assert ("┃" in shown) == (width == 80) and "…" not in shown
    assert all(word in shown for word in ("prefill", "decode", "capacity", "padding", "bucket"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image", "12"], "write WIDTHxHEIGHT, or name an existing file (--image)"),
        (["--image", "0x4"], "write WIDTHxHEIGHT, or name an existing file (--image)"),
        (["--image", "99999999x99999999"], "99999999x99999999 pixels; the limit is 67108864 pixels (--image)"),
        (["--image", "no/such.png"], "write WIDTHxHEIGHT, or name an existing file (--image)"),
        (["--image", __file__], "the image format is not known"),
        (["--video", "640x480"], "write FRAMESxWIDTHxHEIGHT (--video)"),
        (["--video", "8x64x64@0"], "0 frames per second"),
        (["--batch", "0"], "it must be at least 1 (--batch)"),
        (["--prompt-tokens", "9k", "--max-model-len", "8k"], "(--max-model-len)"),
        (["--image", "10000x10"], "at most 200 times"),
    ],
)
def test_what_cannot_be_run_is_refused(
    real_size: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["explain", str(real_size), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_file_is_as_large_as_a_person_sees_it(
    real_size: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (640, 320)).save(path, exif=exif)
    found = explained(real_size, capsys, "--image", str(path), "--image", "320x640")
    first, second = found["media"]
    assert first["resized"] == second["resized"] == [320, 640]


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_a_model_is_explained_for_a_gpu_unless_a_cpu_is_asked_for(
    real_size: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model = ["explain", str(real_size), "--prompt-tokens", "300", "--device", device]
    assert main([*model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    is_cuda = device != "cpu"
    assert found["device"] == ("cuda" if is_cuda else "cpu")
    assert found["limits"] == (GPU_LIMITS if is_cuda else CPU_LIMITS)
    reasons = {one["reason"] for step in found["steps"] for one in step}
    assert reasons == ({"it fits a bucket"} if is_cuda else {"graphs are off"}), "too large to record on a CPU"
    assert main(model) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "on a GPU (--device cpu for a CPU): 8,192" if is_cuda else "on a CPU (--device cuda for a GPU): "
    )


def test_the_bundled_model_is_explained_with_the_limits_it_is_served_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limits"] == {name: BUNDLED_LIMITS[name] for name in found["limits"]}
    [prefill] = [one for one in found["steps"][0] if one["phase"] == "prefill"]
    assert (prefill["rows"], prefill["bucket_rows"]) == (200, 256), "on a CPU every fourth bucket alone is captured"
    assert main(["explain", "--prompt-tokens", "2000"]) == 2
    assert "(--max-model-len)" in capsys.readouterr().err


def test_what_is_explained_is_what_happens(made: tiny.Tiny) -> None:
    """Replays, rows, padding and graphs of a real engine, against the dry run of the same requests."""
    rng = np.random.default_rng(5)
    sizes = [(24, 30), (17, 40), (32, 12)]
    settings = EngineSettings(device="cpu", encoder_cache_tokens=512, kv_cache_tokens=1024, graphs="vision=capacity")
    limits = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=128, encoder_budget_tokens=40)
    blueprint = draw(made.folder, settings, limits, is_cuda=False)
    images = blueprint.executor.settings.images
    placeholders = read_placeholder_settings(made.folder)
    assert images is not None
    plans = [plan_image(height, width, images) for height, width in sizes]
    arguments = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    arguments |= {name: getattr(limits, name) for name in limits.__dataclass_fields__}
    with LLM(made.folder, **arguments) as llm:
        pictures = [Image.fromarray(rng.integers(0, 256, (h, w, 3)).astype(np.uint8)) for h, w in sizes]
        talks = [
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what is it" * i}],
                }
            ]
            for i, picture in enumerate(pictures, start=1)
        ]
        lengths = [len(llm.processor.chat(talk)) for talk in talks]
        before, replayed_before = llm.executor.snapshots(), replays_by_graph(llm)
        llm.chat(talks, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), progress=False)
        after, replayed = llm.executor.snapshots(), replays_by_graph(llm) - replayed_before
    texts = [length - plan.num_tokens for length, plan in zip(lengths, plans, strict=True)]
    prompts = [
        synthetic_prompt([plan], text, placeholders, str(i))
        for i, (plan, text) in enumerate(zip(plans, texts, strict=True))
    ]
    assert [len(prompt) for prompt in prompts] == lengths
    passes = [one for step in dry_run(blueprint, prompts) for one in step]
    assert Counter(one.graph for one in passes) == replayed
    for phase in ("vision", "prefill", "decode", "head"):
        mine = [one for one in passes if one.phase == phase]
        assert all(one.tier is Tier.CAPACITY for one in mine)
        grown = {name: after[phase][name] - before[phase][name] for name in ("real_rows", "padded_rows")}
        assert sum(one.rows for one in mine) == grown["real_rows"], phase
        assert sum(one.bucket_rows - one.rows for one in mine) == grown["padded_rows"], phase
        replays = after[phase]["replays"].get("capacity", 0) - before[phase]["replays"].get("capacity", 0)
        assert len(mine) == replays, phase


def replays_by_graph(llm: LLM) -> Counter[str]:
    return Counter({str(graph.key): graph.num_replays for runner in llm.executor.phases for graph in runner.graphs})


def test_steps_are_composed_alike_for_any_number_of_ranks(real_size: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank's share of the model has other shapes; which pass runs on which graph must not follow from them."""
    flags = ["--image", "1280x720", "--image", "560x560", "--batch", "2", "--max-num-batched-tokens", "1K"]
    alone, shared = (explained(real_size, capsys, *flags, "--tensor-parallel-size", size) for size in ("1", "4"))
    assert alone["steps"] == shared["steps"] and len(alone["steps"]) > 2
