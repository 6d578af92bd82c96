"""`LLM`: text, token ids, conversations and images in, answers out."""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from saccade import LLM, SamplingParams
from saccade.choice.exact import ExactLayout
from saccade.client.served import EngineReport
from saccade.errors import ConfigError, RequestError
from saccade.offline import llm as llm_module
from saccade.offline.llm_inputs import read_prompt
from saccade.scheduling import engine as engine_module
from saccade.scheduling import request as request_module
from saccade.scheduling import scheduler as scheduler_module
from saccade.scheduling.pace import MIN_PROMPT_ROWS, Backlog
from saccade.server.figures.metrics import Facts, Metrics
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.messages import Ready, StatsReply
from tests.engine.counting import num_opcodes
from tests.engine.rig import executor_of, oracle_tokens
from tests.models import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "kv_cache_tokens": 2048,
    "encoder_cache_tokens": 512,
    "encoder_budget_tokens": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "max_model_len": 400,
}


@pytest.fixture(scope="module")
def llm(made: tiny.Tiny) -> Iterator[LLM]:
    with LLM(made.folder, **SETTINGS) as opened:
        yield opened


@pytest.fixture
def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 30, 3)).astype(np.uint8))


def test_a_prompt_is_text_or_token_ids(llm: LLM, made: tiny.Tiny) -> None:
    [from_text] = llm.generate("The quick brown fox", GREEDY, progress=False)
    [from_ids] = llm.generate(from_text.prompt_token_ids, GREEDY, progress=False)
    expected = oracle_tokens(made, llm.processor.text("The quick brown fox"), 6)
    assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids == expected
    assert from_text.finished and from_text.outputs[0].finish_reason == "length"
    assert from_text.outputs[0].text == llm.processor.tokenizer.detokenizer().push_all(expected)


def test_short_steps_change_no_answer(llm: LLM, made: tiny.Tiny) -> None:
    """Passes are timed at start-up, and prompts are computed in chunks while others are answered."""
    prompts = [[5 + i % 90 for i in range(start, start + 120)] for start in range(6)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]
    assert llm.engine.scheduler.pace is None, "by default, steps on a CPU have no limit"
    with LLM(made.folder, **SETTINGS, max_step_ms=0.01) as paced:
        scheduler = paced.engine.scheduler
        assert scheduler.pace is not None and scheduler.pace.vision is not None
        assert scheduler.pace.begin(1, Backlog(120)).prompt_rows_left == MIN_PROMPT_ROWS
        found = [output.outputs[0].token_ids for output in paced.generate(prompts, GREEDY, progress=False)]
    assert found == expected


def test_short_steps_need_graphs(made: tiny.Tiny) -> None:
    with pytest.raises(ConfigError, match=r"max_step_ms needs prefill graphs.*--graphs prefill=full"):
        LLM(made.folder, **SETTINGS, max_step_ms=5, enforce_eager=True)
    with LLM(made.folder, **SETTINGS, max_step_ms=inf, enforce_eager=True) as free:
        assert free.engine.scheduler.pace is None


def test_answers_come_in_the_order_of_the_prompts(
    llm: LLM, made: tiny.Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["The quick", "brown fox jumps over the lazy dog", "What", "is in this picture?"] * 3
    expected = [oracle_tokens(made, llm.processor.text(prompt), 6) for prompt in prompts[:4]]
    together = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in together] == expected * 3
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", ""), "the progress bar is only for terminals"


def test_a_terminal_gets_a_progress_bar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich believe it is a terminal
    llm.generate(["The quick", "What"], GREEDY)
    told = capsys.readouterr()
    assert "2/2" in told.err and told.out == ""


def test_metrics_match_those_of_a_server(llm: LLM, picture: Image.Image) -> None:
    def counted() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {(one.name, frozenset(one.labels.items())): one.value for one in llm.get_metrics()}

    def total(name: str) -> float:
        return sum(value - before.get(key, 0) for key, value in after.items() if key[0] == f"saccade:{name}")

    before = counted()
    talk = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What"}]}]
    outputs = [*llm.chat(talk, GREEDY, progress=False), *llm.generate(["The quick"], GREEDY, progress=False)]
    after = counted()
    assert total("request_success_total") == 2
    assert total("prompt_tokens_total") == sum(len(output.prompt_token_ids) for output in outputs)
    assert total("generation_tokens_total") == sum(len(output.outputs[0].token_ids) for output in outputs)
    assert total("mm_cache_queries_total") == 1 and total("graph_replays_total") > 0
    engine = llm.engine
    phases = {runner.phase.name: runner.snapshot() for runner in executor_of(engine).phases}
    facts = Facts(
        engines={"0": EngineReport(Ready(SchedulerSettings(), 1, 1), StatsReply(0, engine.scheduler.stats(), phases))},
        num_pending=0,
        num_refused=0,
        time_to_ready_s=None,
        is_ready=True,
    )
    told = text_string_to_metric_families(Metrics("m", "own").scrape(facts)[0].decode())
    samples = [sample for family in told for sample in family.samples]
    shared = {"model_name": "m", "engine": "0"}
    scraped = {(one.name, frozenset(one.labels.items() - shared.items())): one.value for one in samples}
    counted_in_front = {f"saccade:{name}_total" for name in ("prompt_tokens", "generation_tokens", "request_success")}
    assert {name for name, _ in after} <= {name for name, _ in scraped}
    for key, value in after.items():
        assert key[0] in counted_in_front or scraped[key] == value, key


def test_images_are_accepted_in_every_form(llm: LLM, made: tiny.Tiny, picture: Image.Image, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(buffer.getvalue())
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts: list[Any] = [
        {"type": "image", "image": picture},
        {"type": "image", "image": path},
        {"type": "image", "image": buffer.getvalue()},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    talks = [[{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}] for part in parts]
    answers = [answer.outputs[0].token_ids for answer in llm.chat(talks, GREEDY, progress=False)]
    expected = oracle_tokens(made, llm.processor.chat(talks[0]), 6)
    assert answers == [expected] * 4
    mixed = {"prompt": "<|image_pad|> What is this?", "multi_modal_data": {"image": picture}}
    assert len(llm.generate(mixed, GREEDY, progress=False)[0].outputs[0].token_ids) == 6
    assert llm.executor.vision is not None and llm.executor.vision.stats.fallbacks.total() == 0


def test_image_files_may_be_given_as_strings(llm: LLM, made: tiny.Tiny, picture: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "a, b.png"
    picture.save(path)
    text = {"type": "text", "text": "What is this?"}
    for part in (
        {"type": "image", "image": str(path)},
        {"type": "image_url", "image_url": {"url": str(path)}},
        {"type": "image_url", "image_url": {"url": path.as_uri()}},
    ):
        talk = [{"role": "user", "content": [part, text]}]
        [answer] = llm.chat(talk, GREEDY, progress=False)
        shown: list[Any] = [{"role": "user", "content": [{"type": "image", "image": picture}, text]}]
        assert answer.outputs[0].token_ids == oracle_tokens(made, llm.processor.chat(shown), 6)
        assert isinstance(talk[0]["content"], list) and talk[0]["content"][0] is part, "messages are not modified"
    raw = {"prompt": "<|image_pad|> What is this?", "multi_modal_data": {"image": str(path)}}
    given = {"prompt": raw["prompt"], "multi_modal_data": {"image": picture}}
    outputs = [output.outputs[0].token_ids for output in llm.generate([raw, given], GREEDY, progress=False)]
    assert outputs[0] == outputs[1]


def test_a_file_that_cannot_be_decoded_is_named(llm: LLM, picture: Image.Image, tmp_path: Path) -> None:
    fine, broken = tmp_path / "fine.png", tmp_path / "broken.png"
    picture.save(fine)
    broken.write_bytes(fine.read_bytes()[: fine.stat().st_size // 2])
    parts = [{"type": "image", "image": fine}, {"type": "image", "image": str(broken)}, {"type": "text", "text": "a"}]
    with pytest.raises(RequestError) as chatted:
        llm.chat([{"role": "user", "content": parts}])
    given = {"prompt": "<|image_pad|><|image_pad|>", "multi_modal_data": {"image": [fine, broken]}}
    with pytest.raises(RequestError) as generated:
        llm.generate(given)
    for caught in (chatted, generated):
        assert str(caught.value).startswith(f"{broken}: "), caught.value


@pytest.mark.parametrize("name", ["no/such.png", "https://example.com/a.png", "x" * 10_000, "a\0b", "file:///no.png"])
def test_a_missing_file_is_named(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match="is neither an existing file nor a data URL") as refused:
        llm.generate({"prompt": "<|image_pad|>", "multi_modal_data": {"image": name}}, GREEDY, progress=False)
    assert repr(name[:80])[1:-1] in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        list(np.array([5, 6, 7])),
        (5, np.int32(6), 7),
        torch.tensor([5, 6, 7]),
        {"prompt_token_ids": np.array([5, 6, 7])},
        {"prompt_token_ids": [5, 6, 7], "cache_salt": "mine", "mm_processor_kwargs": None},
    ],
    ids=["int64", "uint8", "list", "tuple", "torch", "mapping", "mapping of vLLM"],
)
def test_token_ids_may_be_arrays(llm: LLM, ids: Any) -> None:
    [expected] = llm.generate([5, 6, 7], GREEDY, progress=False)
    for prompts in (ids, [ids]):
        [answer] = llm.generate(prompts, GREEDY, progress=False)
        assert answer.prompt_token_ids == [5, 6, 7]
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    "ids",
    [
        [2**32 + 7],
        np.array([2**32 + 7]),
        [2**70],
        [-1],
        np.array([1.5, 2.0]),
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [[1], [2, 3]]},
        {"prompt_token_ids": 5},
        {"prompt_token_ids": None},
        {"prompt": 5},
        {"text": "no prompt"},
        {"prompt": "a", "multi_modal_data": 5},
        {"prompt": "a", "multi_modal_data": [5]},
        {"prompt": "a", "multi_modal_data": {"audio": b""}},
        {"prompt": "<|image_pad|>", "multi_modal_dta": {"image": b""}},
        {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 64}},
        torch.tensor([1.5], requires_grad=True),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor(5),
        np.array(5),
        5,
        None,
        [None],
    ],
    ids=str,
)
def test_invalid_prompts_are_refused_with_a_request_error(llm: LLM, ids: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(ids, GREEDY, progress=False)


def test_the_number_of_images_is_limited_as_asked(made: tiny.Tiny, picture: Image.Image) -> None:
    conversation = [{"role": "user", "content": [{"type": "image", "image": picture}] * 2}]
    with LLM(made.folder, **SETTINGS, limit_mm_per_prompt={"image": 1}) as llm:
        with pytest.raises(RequestError, match=r"has 2 images; the limit is 1 \(--limit-mm-per-prompt\)") as refused:
            llm.chat(conversation, GREEDY, progress=False)
        assert refused.value.code == "too_many_images"
    for wrong in (3, {"images": 1}, {"image": -1}, {"image": "2"}):
        with pytest.raises(ConfigError, match=r'it must be a mapping such as {"image": 16'):
            LLM(made.folder, limit_mm_per_prompt=wrong)


def test_invalid_conversations_and_parameters_are_refused_with_a_request_error(llm: LLM) -> None:
    for messages in (5, "hello", {"role": "user"}, None, [5]):
        with pytest.raises(RequestError, match="message"):
            llm.chat(messages, GREEDY, progress=False)
    for params in ({"temperature": 0}, [5], 5, {}, 0, [None]):
        with pytest.raises(RequestError, match="sampling_params must be SamplingParams; got a"):
            llm.generate("a", params, progress=False)  # type: ignore[arg-type]


def test_unknown_keywords_are_refused_in_the_name_of_the_method(llm: LLM) -> None:
    talk = [{"role": "user", "content": "fox"}]
    for name in ("chat", "embed", "generate"):
        with pytest.raises(TypeError, match=rf"LLM\.{name}\(\) got an unexpected keyword argument 'use_tqdm'"):
            getattr(llm, name)(talk, use_tqdm=False)


def test_images_and_videos_keep_their_order(llm: LLM) -> None:
    shades = [Image.new("RGB", (16, 16), (shade, 0, 0)) for shade in (10, 250)]
    frames = [Image.new("RGB", (16, 16), (0, shade, 0)) for shade in (10, 250)]
    image, video = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
    expected = llm.processor.text(
        f"{image}{video}{image}", media=[("image", shades[0]), ("video", frames), ("image", shades[1])]
    )
    forms: list[Any] = [
        {"image": shades, "video": frames},
        {"video": [frames], "image": shades},
        [{"image": shades[0]}, {"video": frames}, {"image": shades[1]}],
        [("image", shades[0]), ("video", frames), ("image", shades[1])],
    ]
    for given in forms:
        found = read_prompt({"prompt": f"{image}{video}{image}", "multi_modal_data": given}, llm.processor)
        assert [item.kind for item in found.media] == ["image", "video", "image"]
        assert [item.digest for item in found.media] == [item.digest for item in expected.media]
    other = read_prompt({"prompt": f"{video}{image}{image}", "multi_modal_data": forms[0]}, llm.processor)
    assert [item.kind for item in other.media] == ["video", "image", "image"]
    for given in (forms[2][:2], forms[2][::-1][1:], {"image": shades}):
        with pytest.raises(RequestError, match="each must have its placeholder"):
            read_prompt({"prompt": f"{image}{video}{image}", "multi_modal_data": given}, llm.processor)


def test_frequent_layouts_get_their_own_graphs_after_a_call(made: tiny.Tiny, picture: Image.Image) -> None:
    prompt = {"prompt": "<|image_pad|> What is this?", "multi_modal_data": {"image": picture}}
    with LLM(made.folder, **SETTINGS, graphs="vision=exact,prefill=off,decode=off") as llm:
        vision = llm.executor.vision
        assert vision is not None
        before = len(vision.catalogue.exact.graphs)
        for shade in range(4):
            own = Image.new("RGB", (24, 30), (shade, 0, 0))  # a new image of the same layout, so that it is not cached
            llm.generate(prompt | {"multi_modal_data": {"image": own}}, GREEDY, progress=False)
        assert len(vision.catalogue.exact.graphs) == before + 1 and not llm.engine.idle.can_capture
        replayed = vision.stats.replays.total()
        llm.generate(prompt, GREEDY, progress=False)
        assert vision.stats.replays.total() > replayed


def test_a_graph_that_cannot_be_captured_does_not_fail_the_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(layout: ExactLayout) -> None:
        calls.append(layout)
        raise torch.OutOfMemoryError("no memory")

    vision = llm.engine.composer.vision
    assert vision is not None
    bucket = vision.catalogue.shape.buckets[0]
    layout = ExactLayout(vision.catalogue.key(bucket), bucket, {})
    monkeypatch.setattr(type(llm.engine.idle), "can_capture", True)
    monkeypatch.setattr(vision.catalogue.exact, "next_pending", lambda: layout)
    monkeypatch.setattr(llm.executor, "capture_layout", fail)
    assert llm.generate("fine", GREEDY, progress=False)[0].finished
    assert len(calls) == llm_module.MAX_IMPROVEMENTS, "a call ends, however much could still be captured"
    assert "no memory" in caplog.text


def test_logprobs_cover_the_chosen_and_the_likeliest_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [answer] = llm.generate("The quick brown fox", params, progress=False)
    output = answer.outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 3
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        assert found[token].rank == 1 and len(found) == 2
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    for token, known in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True):
        assert known is not None and known[token].logprob <= 0


def test_several_outputs_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, n=3, seed=3, max_tokens=6, ignore_eos=True)
    [answer] = llm.generate("The quick", params, progress=False)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in answer.outputs}) > 1


def test_a_stop_string_ends_the_text_before_itself(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [whole] = llm.generate("The quick brown fox", long, progress=False)
    text = whole.outputs[0].text
    stop = text[4:7]
    at = text.index(stop)
    [cut] = llm.generate(
        "The quick brown fox", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop), progress=False
    )
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == (text[:at], "stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("The quick brown fox", kept, progress=False)[0].outputs[0].text == text[: at + 3]
    assert llm.engine.scheduler.stats().kv_usage == 0


def test_a_stop_string_is_ignored_before_min_tokens(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    text = llm.generate("The quick brown fox", long, progress=False)[0].outputs[0].text
    patient = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=text[0], min_tokens=5)
    [answer] = llm.generate("The quick brown fox", patient, progress=False)
    output = answer.outputs[0]
    first = llm.processor.tokenizer.detokenizer(is_continued=True).push_all(output.token_ids)
    assert len(output.token_ids) == 5 and text.startswith(first), "the text ends at min_tokens"
    assert (output.text, output.finish_reason, output.stop_reason) == (first, "stop", text[0])


def test_calls_of_several_threads_get_their_own_answers(llm: LLM) -> None:
    prompts = [[[5 + i, 6, 7]] * 4 for i in range(4)]

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        return [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY, progress=False)]

    alone = [answers(each) for each in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(answers, prompts)) == alone


def test_a_thread_that_calls_gets_the_device_of_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current device is the first GPU, wherever the model is."""
    inside: list[torch.device] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def step() -> Any:
        assert inside == [torch.device("cpu")]
        return run_step()

    run_step = llm.engine.step
    monkeypatch.setattr("saccade.offline.llm.as_current", noted)
    monkeypatch.setattr(llm.engine, "step", step)
    assert llm.generate([[5, 6, 7]], GREEDY, progress=False)[0].outputs[0].token_ids
    assert not inside


def test_more_prompts_than_the_queue_holds_take_turns(made: tiny.Tiny) -> None:
    with LLM(made.folder, **SETTINGS, enforce_eager=True, max_queued_requests=2) as small:
        answers = small.generate(["The quick", "brown"] * 6, GREEDY, progress=False)
    assert len(answers) == 12 and all(answer.finished for answer in answers)


def test_the_work_for_a_prompt_does_not_grow_with_the_number_of_prompts(made: tiny.Tiny) -> None:
    modules = (llm_module, engine_module, request_module, scheduler_module)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM(made.folder, **SETTINGS, enforce_eager=True) as llm:
        few = num_opcodes(lambda: llm.generate(["The quick"] * 60, params), *modules)
        many = num_opcodes(lambda: llm.generate(["The quick"] * 240, params), *modules)
    assert few > 60 * 100, "instructions were counted"
    assert many < 1.3 * 4 * few


def test_bad_prompts_are_named_and_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt has 500 tokens"):
        llm.generate(["fine", [5] * 500], GREEDY, progress=False)
    with pytest.raises(RequestError, match=r"^prompts\[2\]: token ids must be a list of integers"):
        llm.generate(["fine", "fine", {"prompt_token_ids": [None]}], GREEDY, progress=False)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: messages\[0\]\.role: role must be"):
        llm.chat([[{"role": "user", "content": "fine"}], [{"role": "critic"}]], GREEDY, progress=False)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt has 500 tokens"):
        llm.embed(["fine", [5] * 500], progress=False)
    with pytest.raises(RequestError, match=r"^prompt has 500 tokens"):
        llm.generate([[5] * 500], GREEDY, progress=False)
    with pytest.raises(RequestError, match="a prompt is text, token ids or a mapping; got a float"):
        llm.generate([1.5], GREEDY, progress=False)
    with pytest.raises(RequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY], progress=False)
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1
    assert not llm.engine.has_work


def test_settings_are_checked_and_a_closed_llm_says_so(made: tiny.Tiny) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'max_len'; known settings are"):
        LLM(made.folder, max_len=3)
    with pytest.raises(ConfigError, match=r"graphs has 'prefill=fast'; write PHASE=WORD"):
        LLM(made.folder, graphs="prefill=fast")
    with pytest.raises(ConfigError, match=r"the KV cache holds 64 tokens; a request may have 400"):
        LLM(made.folder, **{**SETTINGS, "kv_cache_tokens": 64})
    llm = LLM(made.folder, **SETTINGS, enforce_eager=True)
    llm.close()
    with pytest.raises(ConfigError, match="this LLM is closed"):
        llm.generate("a", GREEDY)


def test_max_model_len_may_be_below_max_num_batched_tokens(made: tiny.Tiny) -> None:
    """A step holds several prompts, but no prompt fills it."""
    sizes = {"max_model_len": 32, "max_num_batched_tokens": 128, "max_num_seqs": 4, "encoder_budget_tokens": 16}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = []
    for graphs in ("vision=auto,prefill=full,decode=full", "vision=off,prefill=off,decode=off"):
        with LLM(made.folder, graphs=graphs, verify="short" if "full" in graphs else "off", **sizes) as llm:
            outputs = llm.generate([[5, 6, 7, 8] * 6, [9, 10, 11] * 8, [3, 4]], params)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_prompt_is_scored_without_an_answer(llm: LLM) -> None:
    """The scores are the same as with an answer, and no token is generated."""
    prompt = "The quick brown fox jumps over the lazy dog " * 4  # more than one step
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2)
    replays = [phase.snapshot() for phase in (llm.executor.decode, llm.executor.head)]
    [scored, again] = llm.generate([prompt, prompt], params, progress=False)
    assert [phase.snapshot() for phase in (llm.executor.decode, llm.executor.head)] == replays
    [answered] = llm.generate(prompt, replace(params, max_tokens=1), progress=False)
    for found in (scored, again):
        [output] = found.outputs
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        assert found.prompt_logprobs is not None and answered.prompt_logprobs is not None
        assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(found.prompt_token_ids)
        for one, other in zip(found.prompt_logprobs[1:], answered.prompt_logprobs[1:], strict=True):
            assert one is not None and other is not None
            assert {k: v.logprob for k, v in one.items()} == pytest.approx(
                {k: v.logprob for k, v in other.items()}, abs=1e-4
            )


def test_no_image_is_kept_between_requests_without_an_encoder_cache(made: tiny.Tiny, picture: Image.Image) -> None:
    talk = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What"}]}]
    answers, queries = {}, {}
    for rows in (0, 512):
        settings = SETTINGS | {"encoder_cache_tokens": rows, "enable_prefix_caching": False, "enforce_eager": True}
        with LLM(made.folder, **settings) as one:
            found = [one.chat(talk, GREEDY, progress=False)[0].outputs[0].token_ids for _ in range(3)]
            assert found[0] == found[1] == found[2]
            stats = one.engine.scheduler.stats()
            answers[rows], queries[rows] = found[0], (stats.encoder_queries, stats.encoder_hits)
            assert stats.encoder_usage == 0
    assert answers[0] == answers[512]
    assert queries == {0: (3, 0), 512: (3, 2)}


def test_a_chat_template_may_come_from_a_file(made: tiny.Tiny, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    with LLM(made.folder, **SETTINGS, enforce_eager=True, chat_template=str(file)) as one:
        [answer] = one.chat([{"role": "user", "content": "fox"}], GREEDY, progress=False)
        assert answer.prompt_token_ids == one.processor.text("<fox>").token_ids.tolist()


def test_variables_of_the_chat_template_may_be_given(made: tiny.Tiny, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ greeting }} {{ messages[0].content }}")
    talk = [{"role": "user", "content": "fox"}]
    with LLM(made.folder, **SETTINGS | {"chat_template": str(file), "enforce_eager": True}) as one:
        [answer] = one.chat(talk, GREEDY, chat_template_kwargs={"greeting": "The quick"}, progress=False)
        assert answer.prompt_token_ids == one.processor.text("The quick fox").token_ids.tolist()


def test_a_local_folder_takes_no_revision(made: tiny.Tiny) -> None:
    with pytest.raises(ConfigError, match=r"revision is v2, but .* is a local folder, which has none"):
        LLM(made.folder, revision="v2")
