"""The requests of a benchmark: lengths, sizes, pictures and texts as asked for, and the same for the same seed."""

import base64
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from saccade.bench.load.load_settings import SizeRange, TargetSettings, WorkloadSettings, parse_sizes
from saccade.bench.load.workload import Wording, WorkloadPrompt, draw_lengths, make_prompts
from saccade.bench.load.workload_images import draw_size
from saccade.bench.load.workload_text import LEAD, WORDS, WordList
from saccade.errors import ConfigError

SMALL = WorkloadSettings(num_prompts=12, image_resolution="32x20", random_input_len=9, random_output_len=4)


class Made(NamedTuple):
    body: bytes
    prompt: WorkloadPrompt


def made(settings: WorkloadSettings = SMALL, words: WordList | None = None, **target: Any) -> list[Made]:
    wording = Wording(TargetSettings(**target), "m", settings.ignore_eos)
    return [Made(wording.body(prompt), prompt) for prompt in make_prompts(settings, words or WordList())]


def content(sample: Made) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(sample.body)["messages"][0]["content"]
    return found


def pictures(sample: Made) -> list[bytes]:
    links = [part["image_url"]["url"] for part in content(sample) if part["type"] == "image_url"]
    return [base64.b64decode(link.partition("base64,")[2]) for link in links]


def size_of(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.width, image.height


def test_a_request_of_the_benchmark_everybody_knows() -> None:
    settings = WorkloadSettings(num_prompts=3)
    for sample in made(settings):
        body = json.loads(sample.body)
        assert (body["model"], body["stream"], body["max_completion_tokens"]) == ("m", True, 1)
        assert (body["temperature"], body["ignore_eos"]) == (0, True)
        assert body["stream_options"] == {"include_usage": True}
        assert [part["type"] for part in content(sample)] == ["image_url", "text"]
        [picture] = pictures(sample)
        assert picture[:2] == b"\xff\xd8" and size_of(picture) == (560, 560) == sample.prompt.sizes[0]
        assert len(picture) > 150_000
        assert 12 <= len(content(sample)[1]["text"].split()) <= 128


def test_the_same_seed_gives_the_same_bytes_and_another_does_not() -> None:
    settings = replace(SMALL, image_resolution="random:8x8-40x40", image_repeat_ratio=0.3)
    assert made(settings) == made(settings)
    others = made(replace(settings, seed=1))
    assert not {sample.body for sample in made(settings)} & {sample.body for sample in others}


@pytest.mark.parametrize(
    ("longest", "ratio", "low"), [(128, 0.1, 12), (100, 0.5, 50), (7, 1.0, 7), (1, 0.1, 1), (5, 0.0, 1)]
)
def test_lengths_are_uniform_between_ratio_and_longest(longest: int, ratio: float, low: int) -> None:
    settings = WorkloadSettings(num_prompts=6000, random_range_ratio=ratio)
    lengths = draw_lengths(longest, settings, np.random.default_rng(3))
    assert min(lengths) == low and max(lengths) == longest and len(lengths) == 6000
    assert np.mean(lengths) == pytest.approx((low + longest) / 2, rel=0.03)
    counts = Counter(lengths)
    assert len(counts) == longest - low + 1 and max(counts.values()) < 6000 / len(counts) * 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("560x336", [SizeRange((560, 336), (560, 336))]),
        ("720p", [SizeRange((1280, 720), (1280, 720))]),
        ("1080P", [SizeRange((1920, 1080), (1920, 1080))]),
        ("random:224x225-1280x1281", [SizeRange((224, 225), (1280, 1281))]),
        ("random:360p-720p", [SizeRange((640, 360), (1280, 720))]),
        ("mix:224x224,448x336:2.5,720p", [
            SizeRange((224, 224), (224, 224)), SizeRange((448, 336), (448, 336), 2.5),
            SizeRange((1280, 720), (1280, 720)),
        ]),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, parts: list[SizeRange]) -> None:
    assert parse_sizes(text) == parts


@pytest.mark.parametrize(
    "text",
    ["", "560", "0x5", "5x-3", "axb", "5x5x5", "17000x5", "random:", "random:5x5", "random:9x9-5x20", "mix:",
     "mix:5x5:0", "mix:5x5:x", "mix:5x5:inf", "mix:5x5,,6x6", "²x5", "5x5:2"],
)  # fmt: skip
def test_wrong_sizes_are_refused_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--image-resolution"):
        parse_sizes(text)


def test_a_mix_keeps_to_its_weights_and_a_range_to_its_ends() -> None:
    rng = np.random.default_rng(5)
    mix = parse_sizes("mix:10x10,20x30:3,40x40:4")
    counts = Counter(draw_size(mix, rng) for _ in range(8000))
    assert {size: round(count / 1000) for size, count in counts.items()} == {(10, 10): 1, (20, 30): 3, (40, 40): 4}
    drawn = [draw_size(parse_sizes("random:3x7-5x9"), rng) for _ in range(400)]
    assert {width for width, _ in drawn} == {3, 4, 5} and {height for _, height in drawn} == {7, 8, 9}
    assert len(set(drawn)) == 9


@pytest.mark.parametrize("format", ["jpeg", "png"])
@pytest.mark.parametrize("kind", ["random", "blank"])
def test_pictures_have_the_size_format_and_content_asked_for(format: str, kind: str) -> None:
    settings = replace(SMALL, num_prompts=2, image_count=3, image_format=format, image_content=kind)
    for sample in made(settings):
        assert len(pictures(sample)) == 3 == len(sample.prompt.sizes)
        for data in pictures(sample):
            assert size_of(data) == (32, 20)
            with Image.open(io.BytesIO(data)) as image:
                assert image.format == format.upper() and image.mode == "RGB"
                assert (np.asarray(image).std() > 20) == (kind == "random")
        assert content(sample)[0]["image_url"]["url"].startswith(f"data:image/{format};base64,")


def test_no_two_pictures_are_alike_unless_repeats_are_asked_for() -> None:
    for kind in ("random", "blank"):
        settings = replace(SMALL, image_content=kind, image_format="png", image_count=2)
        assert len({data for sample in made(settings) for data in pictures(sample)}) == 24
    settings = replace(SMALL, num_prompts=600, image_resolution="8x8", image_repeat_ratio=0.4)
    shown = [data for sample in made(settings) for data in pictures(sample)]
    assert 1 - len(set(shown)) / len(shown) == pytest.approx(0.4, abs=0.06)
    assert (
        len(
            {
                data
                for sample in made(replace(settings, num_prompts=9, image_repeat_ratio=1.0))
                for data in pictures(sample)
            }
        )
        == 1
    )


def test_a_video_is_a_list_of_frames() -> None:
    settings = replace(SMALL, dataset_name="video", video_frames=3, image_count=2, num_prompts=2)
    for sample in made(settings):
        videos = [part["video_url"]["url"] for part in content(sample) if part["type"] == "video_url"]
        assert len(videos) == 2 and all(video.startswith("data:video/jpeg;base64,") for video in videos)
        frames = [base64.b64decode(frame) for video in videos for frame in video.partition("base64,")[2].split(",")]
        assert len(set(frames)) == 6 and {size_of(frame) for frame in frames} == {(32, 20)}
        assert len(sample.prompt.sizes) == 6


def test_words_add_up_to_the_tokens_asked_for() -> None:
    rng = np.random.default_rng(0)
    costs = {word: int(cost) for word, cost in zip(WORDS, rng.integers(1, 5, len(WORDS)), strict=True)}
    words = WordList(WORDS, tuple(costs.values()))
    for num_tokens in (1, 2, 3, 17, 128, 1000):
        assert sum(costs[word] for word in words.text(num_tokens, rng).removeprefix(LEAD).split()) == num_tokens
    lead = WordList(WORDS, tuple(costs.values()), lead_cost=2)
    assert lead.text(1, rng) == lead.text(2, rng) == LEAD
    assert sum(costs[word] for word in lead.text(9, rng).split()[1:]) == 7
    dear = WordList(WORDS, (3,) * len(WORDS))
    assert len(dear.text(7, rng).split()) == 1 + 3  # nine tokens: as little above as three a word allows
    assert len(WordList().text(50, rng).split()) == 50 and len(set(WORDS)) == len(WORDS) > 150


def test_counted_words_make_counted_prompts() -> None:
    costs = {word: 1 + index % 3 for index, word in enumerate(WORDS)}
    for sample in made(words=WordList(WORDS, tuple(costs.values()))):
        assert sample.prompt.text_tokens == sum(costs[word] for word in content(sample)[-1]["text"].split()[1:])
    assert {sample.prompt.text_tokens for sample in made()} == {None}


def test_text_for_completions_and_for_the_native_endpoint() -> None:
    settings = replace(SMALL, dataset_name="random", ignore_eos=False)
    for sample in made(settings, backend="vllm", disable_stream=True, extra_request_body='{"top_k": 5}'):
        body = json.loads(sample.body)
        assert body.keys() == {"model", "temperature", "stream", "prompt", "max_tokens", "top_k"}
        assert body["max_tokens"] == sample.prompt.max_tokens and not body["stream"]
    for sample in made(settings, backend="sglang"):
        body = json.loads(sample.body)
        sampling = {"max_new_tokens": sample.prompt.max_tokens, "temperature": 0, "ignore_eos": False}
        assert body == {"text": body["text"], "sampling_params": sampling, "stream": True}
    with pytest.raises(ConfigError, match="chat backend"):
        made(backend="vllm")


def test_requests_from_a_file(tmp_path: Path) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "a.png")
    entries = [
        {"prompt": "one", "output_tokens": 5},
        {"prompt": "two", "images": ["a.png", "https://example.org/b.jpg"]},
        {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "..."}]},
        {"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "four"}], "max_tokens": 9},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    settings = replace(SMALL, dataset_name="custom", dataset_path=str(path), num_prompts=5)
    bodies = [json.loads(sample.body) for sample in made(settings)]
    assert [body["max_completion_tokens"] for body in bodies] == [5, 4, 4, 9, 5]
    assert [body["messages"][-1]["content"] for body in bodies if body is not bodies[1]] == [
        "one",
        "three",
        "four",
        "one",
    ]
    parts = bodies[1]["messages"][0]["content"]
    assert size_of(base64.b64decode(parts[0]["image_url"]["url"].removeprefix("data:image/png;base64,"))) == (6, 4)
    assert parts[1]["image_url"]["url"] == "https://example.org/b.jpg" and parts[2] == {"type": "text", "text": "two"}
    path.write_text(json.dumps(entries[:1]))
    assert len(made(settings)) == 5


def test_a_line_of_a_file_ends_only_with_a_line_break(tmp_path: Path) -> None:
    """Texts of the web have Unicode's own line separators, which JSON need not escape."""
    texts = ["one\u2028two", "three\u0085four"]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "images": None}, ensure_ascii=False) for text in texts))
    settings = replace(SMALL, dataset_name="custom", dataset_path=str(path), num_prompts=2)
    assert [json.loads(sample.body)["messages"][0]["content"] for sample in made(settings)] == texts


def test_empty_conversations_of_a_file_are_left_out(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hello"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "a", "conversations": []}, {"id": "b", "conversations": turns}]))
    settings = replace(SMALL, dataset_name="sharegpt", dataset_path=str(path), num_prompts=2)
    assert [json.loads(sample.body)["messages"][0]["content"] for sample in made(settings)] == ["hello"] * 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", '{"other": 1}', '{"prompt": "x", "images": ["missing.png"]}'),
        *('{"conversations": []}', '{"conversations": [5]}', '{"prompt": "x", "images": "a.png"}'),
        *('{"prompt": "x", "output_len": "y"}', '{"prompt": "x", "output_len": -1}'),
    ],
)
def test_wrong_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--dataset-path"):
        made(replace(SMALL, dataset_name="sharegpt", dataset_path=str(path)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("dataset_name", "mmmu"), ("num_prompts", 0), ("random_range_ratio", 1.5), ("random_range_ratio", float("nan")),
     ("image_format", "gif"), ("image_content", "cat"), ("image_count", 0), ("image_quality", 101),
     ("image_repeat_ratio", -0.1), ("video_frames", 0), ("seed", -1),
     ("image_resolution", "560")],
)  # fmt: skip
def test_wrong_settings_name_their_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        WorkloadSettings(**{name: value})
