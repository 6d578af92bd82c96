"""What a request may cost the server, and the errors for those that cost too much."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from io import BytesIO
from typing import Any

import orjson
import pybase64
import pytest
from msgspec import structs
from PIL import Image

from saccade.inputs import decoding
from saccade.inputs.media.images import ImageLimits, decode_image
from saccade.inputs.processor import Processor
from saccade.inputs.text import tokenizer as tokenizers
from saccade.server.requests.protocol import GenerateRequest
from saccade.server.routes.generate import GenerateRoute
from saccade.server.service import Service
from saccade.server.sharing.caller_limits import CallerLimits
from saccade.server.sharing.callers import Caller as OtherCaller
from saccade.wire.engine_settings import SchedulerSettings
from tests.inputs.folders import write_gemma, write_qwen
from tests.server.fake import HANG_S, Answer, Caller, FakeEngine, Script, service_for, two_words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """With a limit on all images of a request, as in the server."""
    limits = ImageLimits(max_request_pixels=1_000_000)
    return Processor.from_folder(write_qwen(tmp_path_factory.mktemp("qwen")), limits=limits)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("work was done")

    monkeypatch.setattr(decoding, "decode_image", refuse)
    monkeypatch.setattr(tokenizers, "_encode", refuse)


def base64_image(width: int, height: int) -> str:
    """A small file, whatever its number of pixels."""
    buffer = BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return pybase64.b64encode(buffer.getvalue()).decode()


def talk(*sizes: tuple[int, int]) -> list[Any]:
    urls = [f"data:image/png;base64,{base64_image(*size)}" for size in sizes]
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def error_of(answer: Answer, status: int) -> dict[str, Any]:
    assert answer.status == status, answer.body
    found: dict[str, Any] = answer.json["error"]
    return found


@pytest.mark.usefixtures("no_work")
def test_a_request_with_too_many_pixels_is_refused_before_decoding(bounded: Processor) -> None:
    service = service_for(FakeEngine(bounded))
    error = error_of(asyncio.run(Caller(service).post(CHAT, {"messages": talk((700, 700), (800, 800))})), 413)
    assert error["code"] == "image_too_large" and error["param"] == "messages[0].content[1].image_url"
    assert "--max-request-pixels" in error["message"] and service.admission.pending_bytes == 0


@pytest.mark.usefixtures("no_work")
def test_images_that_can_never_fit_the_context_are_not_decoded(bounded: Processor) -> None:
    service = service_for(FakeEngine(bounded, max_model_len=100))
    error = error_of(asyncio.run(Caller(service).post(CHAT, {"messages": talk((300, 300), (300, 300))})), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "the images and videos alone have 128 tokens" in error["message"] and " 100 " in error["message"]


def test_decoded_images_count_as_memory(bounded: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_for(FakeEngine(bounded), max_pending_bytes=2_000_000)
    caller = Caller(service)
    decoded: list[int] = []

    def decode(item: Any, **more: Any) -> Any:
        decoded.append(service.admission.pending_bytes)
        return decode_image(item, **more)

    monkeypatch.setattr(decoding, "decode_image", decode)
    error = error_of(asyncio.run(caller.post(CHAT, {"messages": talk((500, 500))})), 413)
    assert error["code"] == "request_too_large" and not decoded, "2,750,000 bytes could never be accepted"
    assert asyncio.run(caller.post(CHAT, {"messages": talk((300, 300))})).status == 200
    assert decoded[0] > 11 * 90_000 and service.admission.pending_bytes == 0
    with service.admission.enter(OtherCaller("other", CallerLimits())) as other:
        other.hold(1_500_000)
        busy = asyncio.run(caller.post(CHAT, {"messages": talk((300, 300))}))
        assert error_of(busy, 503)["code"] == "queue_full" and busy.headers["retry-after"] and len(decoded) == 1
    assert service.admission.pending_bytes == 0 and service.is_idle


def test_decoding_stops_and_memory_is_freed_when_a_client_leaves(
    bounded: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(bounded)
    service = service_for(engine)
    begun, proceed = threading.Event(), threading.Event()
    decoded: list[Any] = []

    def decode(item: Any, **more: Any) -> Any:
        decoded.append(item)
        begun.set()
        assert proceed.wait(HANG_S)
        return decode_image(item, **more)

    monkeypatch.setattr(decoding, "decode_image", decode)

    async def run() -> None:
        gone = asyncio.Event()
        body = orjson.dumps({"messages": talk(*[(90, 90)] * 5)})
        call = asyncio.create_task(Caller(service).call("POST", CHAT, body, JSON, gone=gone))
        assert await asyncio.to_thread(begun.wait, HANG_S)
        gone.set()
        await asyncio.wait_for(call, HANG_S)
        assert service.is_idle and service.admission.pending_bytes > 5 * 3 * 8100, "the thread is still working"
        proceed.set()
        async with asyncio.timeout(HANG_S):
            while service.admission.pending_bytes:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert len(decoded) == 1 and not engine.seen


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 30_000}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>" * 30_000}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 10**6}, "prompt"),
        (COMPLETIONS, {"prompt": ["x" * 10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 10**6}, "prompt"),
        (COMPLETIONS, {"prompt": [[5] * 10**5]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        (f"{CHAT}/render", {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        ("/generate", {"text": "x" * 10**6}, "text"),
        ("/generate", {"input_ids": [5] * 10**5}, "input_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_prompts_that_cannot_fit_are_refused_before_any_work(
    scripted: Scripted, path: str, body: Any, param: str
) -> None:
    caller, engine, _ = scripted()
    error = error_of(asyncio.run(caller.post(path, body)), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param) and not engine.seen


def test_a_prompt_longer_than_the_context_can_still_be_counted(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    text = "quick brown fox " * 300
    found = asyncio.run(caller.post("/tokenize", {"prompt": text})).json
    assert found["count"] > found["max_model_len"] == 512
    messages = [{"role": "user", "content": text}]
    assert asyncio.run(caller.post(f"{CHAT}/render", {"messages": messages})).json["count"] > 512
    error = error_of(asyncio.run(caller.post(CHAT, {"messages": messages})), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_clients_find_the_words_by_which_they_know_that_a_prompt_is_too_long(scripted: Scripted) -> None:
    """LiteLLM then takes another model, Claude Code and opencode shorten the conversation."""
    caller, _, _ = scripted()
    for text in ("quick brown fox " * 300, "x" * 10**5):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 9}
        for path in (CHAT, "/v1/messages"):
            message = error_of(asyncio.run(caller.post(path, body)), 400)["message"]
            assert "this model's maximum context length is 512 tokens" in message
            assert message.startswith("prompt is too long: ") == (path == "/v1/messages")


def test_prompts_and_outputs_are_bounded_together(processor: Processor) -> None:
    service = service_for(FakeEngine(processor), max_prompts=20)
    caller = Caller(service)
    assert asyncio.run(caller.post(COMPLETIONS, {"prompt": ["a"] * 20})).status == 200
    error = error_of(asyncio.run(caller.post(COMPLETIONS, {"prompt": ["a"] * 7, "n": 3})), 400)
    assert error["param"] == "n" and "21 outputs" in error["message"] and "20" in error["message"]
    narrow = FakeEngine(processor)
    limits = SchedulerSettings(max_model_len=512, max_num_seqs=2, max_queued_requests=3)
    narrow.ready = structs.replace(narrow.ready, limits=limits)
    caller = Caller(service_for(narrow))
    assert asyncio.run(caller.post(COMPLETIONS, {"prompt": ["a"] * 6})).status == 400, "at most five run and wait"


def test_admission_follows_the_engines_limits(processor: Processor) -> None:
    """On the command line max_num_seqs is 0; the engine picks 4 for this machine."""
    asked = SchedulerSettings(max_queued_requests=2)
    engine = FakeEngine(processor)
    engine.ready = structs.replace(engine.ready, limits=asked.resolved(is_cuda=False, max_position=512))
    ended = asyncio.Event()

    async def wait(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        await ended.wait()
        yield {"text": "done", "token_ids": (5,), "finish_reason": "stop"}

    engine.script = wait
    service = service_for(engine, asked)
    caller, hello = Caller(service), {"messages": [{"role": "user", "content": "hi"}]}

    async def run() -> None:
        calls = [asyncio.create_task(caller.post(CHAT, hello)) for _ in range(6)]
        async with asyncio.timeout(HANG_S):
            while len(engine.running) < 6 and not any(call.done() for call in calls):
                await asyncio.sleep(0.01)
        assert len(engine.running) == 6, [call.result().body for call in calls if call.done()]
        error = error_of(await caller.post(CHAT, hello), 503)
        assert error["code"] == "queue_full" and "6 requests are running and waiting" in error["message"]
        ended.set()
        assert {call.status for call in await asyncio.wait_for(asyncio.gather(*calls), HANG_S)} == {200}

    asyncio.run(run())


def test_slow_bodies_take_no_places_from_complete_ones(processor: Processor) -> None:
    service = service_for(FakeEngine(processor), max_pending_requests=2, max_reading_requests=4)
    caller = Caller(service)

    async def run() -> None:
        gone = asyncio.Event()
        slow = [
            asyncio.create_task(caller.call("POST", CHAT, [b"{"], JSON, gone=gone, is_endless=True)) for _ in range(3)
        ]
        async with asyncio.timeout(HANG_S):
            while service.admission.reading < 3:
                await asyncio.sleep(0.01)
        hello = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await caller.post(CHAT, hello)).status == 200 and service.admission.pending == 0
        slow.append(asyncio.create_task(caller.call("POST", CHAT, [b"{"], JSON, gone=gone, is_endless=True)))
        async with asyncio.timeout(HANG_S):
            while service.admission.reading < 4:
                await asyncio.sleep(0.01)
        assert (await caller.post(CHAT, hello)).status == 503, "slow bodies have their own limit"
        gone.set()
        await asyncio.wait_for(asyncio.gather(*slow), HANG_S)
        assert service.is_idle and service.admission.reading == 0

    asyncio.run(run())


def test_sglang_clients_may_send_bare_base64(scripted: Scripted) -> None:
    caller, engine, _ = scripted()
    text = "<|vision_start|><|image_pad|><|vision_end|>see"
    for images in (base64_image(64, 96), [base64_image(64, 96)], [f"data:image/png;base64,{base64_image(64, 96)}"]):
        body = {"text": text, "image_data": images, "sampling_params": None}
        assert asyncio.run(caller.post("/generate", body)).status == 200
        assert engine.seen[-1][0].media[0].pixels.shape == (96, 64, 3)
    for images, place in ((["iVBO!"], 0), ([base64_image(64, 96), "aGVsbG8="], 1), (["ftp://a/b"], 0), ("/etc/x", 0)):
        several = text * len(images) if isinstance(images, list) else text
        error = error_of(asyncio.run(caller.post("/generate", {"text": several, "image_data": images})), 400)
        assert error["param"] == f"image_data[{place}]", error


def test_bare_base64_is_held_once_while_its_request_waits_and_runs(processor: Processor) -> None:
    image = base64_image(64, 96)
    request = GenerateRequest(text="see", image_data=[image])
    [message] = GenerateRoute(service_for(FakeEngine(processor))).messages(request)
    assert message["content"][0]["image_url"]["url"].endswith(image) and request.image_data is None


def test_sglang_clients_learn_which_token_ended_the_text(processor: Processor) -> None:
    async def ends(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5, 6), "finish_reason": "stop"}

    for ids, matched in ((frozenset({6}), 6), (frozenset({5}), None)):
        service = service_for(FakeEngine(processor, ends))
        service.eos_token_ids = ids
        found = asyncio.run(Caller(service).post("/generate", {"text": "a"})).json["meta_info"]
        assert found["finish_reason"] == {"type": "stop", "matched": matched}


BROKEN = '{"type": "object", "properties": 5}'
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"json": BROKEN}}, "structured_outputs.json"),
    (CHAT, {"guided_json": BROKEN}, "guided_json"),
    (CHAT, {"regex": "(a{1000}){1000}{1000}"}, "regex"),
    (CHAT, {"ebnf": "root ::= a"}, "ebnf"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": 5}}}},
        "response_format",
    ),
    (
        CHAT,
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None}]}]},
        "messages[0].content[0].image_url",
    ),
    (CHAT, {"stop": ["a"] * 17}, "stop"),
    (CHAT, {"stop": [5]}, "stop[0]"),
    (CHAT, {"stop": 5}, "stop"),
    (CHAT, {"stream_options": 5}, "stream_options"),
    (CHAT, {"request_id": "a b"}, "request_id"),
    (CHAT, {"cache_salt": ""}, "cache_salt"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"tool_choice": 5}, "tool_choice"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ("/generate", {"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [{"a": 1}]}, "tools[0].function.name"),
    ("/detokenize", {"tokens": [5] * (2**20 + 1)}, "tokens"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG, ids=[f"{p} {str(f)[:50]}" for p, f, _ in WRONG])
def test_an_error_names_the_clients_field_in_our_own_words(
    scripted: Scripted, path: str, fields: dict[str, Any], param: str
) -> None:
    caller, engine, _ = scripted()
    hello = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
    error = error_of(asyncio.run(caller.post(path, {**hello, **fields})), 400)
    assert error["param"] == param and not engine.seen
    for word in ("Input", "String", "instance of", "dictionary", "Error"):
        assert word not in error["message"], error["message"]


def test_errors_state_the_servers_limits(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    assert "1..16" in error_of(asyncio.run(caller.post(CHAT, {**hello, "n": 0})), 400)["message"]
    assert asyncio.run(caller.post(CHAT, {**hello, "stop": ["a"] * 16})).status == 200
    huge = error_of(asyncio.run(caller.post(CHAT, {**hello, "regex": "(a{1000}){1000}{1000}"})), 400)
    assert huge["code"] == "grammar_too_large"


def test_token_ids_may_be_written_as_floats(scripted: Scripted) -> None:
    caller, engine, _ = scripted()
    assert asyncio.run(caller.post(COMPLETIONS, {"prompt": [[5, 6.0], [7]]})).status == 200
    assert [seen[0].token_ids.tolist() for seen in engine.seen] == [[5, 6], [7]]


def test_text_is_tokenized_without_special_tokens_on_request(tmp_path: Any) -> None:
    made = Processor.from_folder(write_gemma(tmp_path))
    caller = Caller(service_for(FakeEngine(made)))
    with_bos, without, default = (
        asyncio.run(caller.post("/tokenize", {"prompt": "hi", **fields})).json["tokens"]
        for fields in ({"add_special_tokens": True}, {"add_special_tokens": False}, {})
    )
    assert with_bos == default == made.tokenizer.encode("hi", has_bos=True) and with_bos[1:] == without


def script_of(text: str, reason: str) -> Script:
    async def say(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        for i in range(0, len(text), 7):
            yield {"text": text[i : i + 7], "token_ids": (5,)}
        yield {"finish_reason": reason}

    return say if text else two_words


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("reason", "is_call"), [("length", True), ("stop", False)])
def test_a_call_cut_off_by_the_length_limit_is_reported(scripted: Scripted, reason: str, is_call: bool) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2'
    caller, _, _ = scripted(script_of(text, reason))
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "auto"}
    [choice] = asyncio.run(caller.post(CHAT, body)).json["choices"]
    assert choice["finish_reason"] == reason
    if not is_call:
        assert choice["message"]["content"] == text
        return
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": [1, 2'}
    events = asyncio.run(caller.post(CHAT, {**body, "stream": True})).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    streamed = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(streamed) == '{"a": [1, 2' and not any(delta.get("content") for delta in deltas)
