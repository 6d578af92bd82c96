"""Replies, whole and streamed: the same answer, in the formats that clients rely on."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from saccade.client.output import Logprob
from saccade.errors import RequestError
from saccade.inputs.processor import Processor
from saccade.inputs.text.generation import GenerationDefaults
from saccade.server.replies.logprobs import FLOOR, CompletionScores, chat_entries, token_text
from saccade.server.replies.reply import ChunkWriter
from saccade.server.service import Service
from tests.e2e.pictures import encoded, image_part, picture
from tests.inputs.folders import write_gemma
from tests.server.fake import Answer, Caller, FakeEngine, service_for

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]


async def interleaved(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    """Two outputs, one with text that JSON must escape, one that ends early."""
    scores = ({5: Logprob(-0.5, 1), 6: Logprob(-1.5, 2)},)
    yield {"index": 1, "text": 'a"\n\u2028é', "token_ids": (5,), "logprobs": scores}
    yield {
        "index": 0,
        "text": "",
        "token_ids": (6,),
        "logprobs": ({6: Logprob(float("-inf"), 9), 5: Logprob(-0.5, 1)},),
    }
    yield {"index": 1, "text": "", "token_ids": (5,), "logprobs": scores, "finish_reason": "stop", "stop_reason": "x"}
    yield {"index": 0, "text": "b", "token_ids": (5,), "logprobs": scores, "finish_reason": "length"}


def test_chunks_add_up_to_the_whole(scripted: Scripted) -> None:
    caller, _, _ = scripted(interleaved)
    asked = {
        "messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "request_id": "me",
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    whole = asyncio.run(caller.post(CHAT, asked)).json
    streamed = asyncio.run(caller.post(CHAT, {**asked, "stream": True})).events
    assert streamed[-1] == "[DONE]" and streamed[-2]["usage"] == whole["usage"] and not streamed[-2]["choices"]
    for index in (0, 1):
        mine = [event["choices"][0] for event in streamed[:-2] if event["choices"][0]["index"] == index]
        choice = whole["choices"][index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [token for part in mine for token in part.get("token_ids", [])] == choice["token_ids"]
        scores = [entry for part in mine for entry in (part["logprobs"] or {"content": []})["content"]]
        assert scores == choice["logprobs"]["content"] and len(scores) == 2
        assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"]
        assert [part["delta"] for part in mine].index({}) == len(mine) - 1, "only the last chunk is empty"
        assert not any(part["finish_reason"] for part in mine[:-1])
    assert {event["id"] for event in streamed[:-1]} == {"chatcmpl-me"} == {whole["id"]}
    assert whole["usage"]["completion_tokens"] == 4


def test_a_prompt_computed_for_the_first_output_does_not_count_as_cached(scripted: Scripted) -> None:
    async def forked(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"index": 0, "text": "a", "token_ids": (5,), "finish_reason": "stop", "num_cached_tokens": 1}
        yield {"index": 1, "text": "b", "token_ids": (6,), "finish_reason": "stop", "num_cached_tokens": 4}

    caller, _, _ = scripted(forked)
    usage = asyncio.run(caller.post(CHAT, {"messages": HELLO, "n": 2})).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


def test_logprobs_are_finite_and_ranked(engine: FakeEngine) -> None:
    tokenizer = engine.processor.tokenizer
    found = {5: Logprob(float("-inf"), 40), 6: Logprob(-0.1, 1), 7: Logprob(-2.0, 2)}
    [entry] = chat_entries(tokenizer, [5], [found], 2)
    assert entry["logprob"] == FLOOR and [other["logprob"] for other in entry["top_logprobs"]] == [-0.1, -2.0]
    assert bytes(entry["bytes"]) == tokenizer.token_bytes(5)
    [alone] = chat_entries(tokenizer, [6], [found], 0)
    assert alone["top_logprobs"] == []


@pytest.mark.parametrize("has_usage", [False, True])
def test_spliced_chunks_are_the_intended_json(has_usage: bool) -> None:
    head = {"id": 'a"b', "object": "o", "created": 1, "model": "m"}
    writer = ChunkWriter(head, has_usage=has_usage)
    line = writer.choice(3, b'"delta":{"content":"x"}', finish=b'"stop"', more=b',"stop_reason":7')
    assert line.startswith(b"data: ") and line.endswith(b"\n\n") and b"\n" not in line[6:-2]
    choice = {"index": 3, "delta": {"content": "x"}, "logprobs": None, "finish_reason": "stop", "stop_reason": 7}
    assert orjson.loads(line[6:]) == {**head, "choices": [choice], **({"usage": None} if has_usage else {})}
    with_usage = orjson.loads(writer.choice(0, b'"text":""', usage=b'{"a":1}')[6:])
    assert with_usage["usage"] == {"a": 1}
    assert orjson.loads(writer.last({"usage": {"a": 1}})[6:]) == {**head, "choices": [], "usage": {"a": 1}}


def test_long_silence_is_broken_by_comments(scripted: Scripted) -> None:
    """The engine is silent until a comment has come, however long that takes."""
    answer, comment = Answer(), b": ping\n\n"

    async def silence() -> None:
        before = answer.body.count(comment)
        while answer.body.count(comment) == before:
            await asyncio.sleep(0.01)

    async def slow(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        await silence()
        yield {"text": "a", "token_ids": (5,)}
        await silence()
        yield {"text": "b", "token_ids": (5,), "finish_reason": "stop"}

    caller, _, _ = scripted(slow, sse_ping_s=0.03)
    body = orjson.dumps({"messages": HELLO, "stream": True})
    found = asyncio.run(caller.call("POST", CHAT, body, {"content-type": "application/json"}, answer=answer))
    at = found.body.index(b'"a"')
    assert found.body[:at].count(comment) >= 1 and found.body[at:].count(comment) >= 1
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in found.events[:-1]) == "ab"


def test_timings_are_sent_on_request(scripted: Scripted) -> None:
    async def timed(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"text": "a", "token_ids": (5,), "finish_reason": "stop", "timings": {"queue": 0.25, "prefill": 0.5}}

    caller, _, _ = scripted(timed)
    plain = asyncio.run(caller.post(CHAT, {"messages": HELLO})).json
    assert "timings" not in plain
    for found in (
        asyncio.run(caller.post(CHAT, {"messages": HELLO, "timings": True})).json,
        asyncio.run(caller.post(CHAT, {"messages": HELLO}, x_timings="1")).json,
        asyncio.run(caller.post(CHAT, {"messages": HELLO, "timings": True, "stream": True})).events[-2],
    ):
        assert found["timings"]["queue_ms"] == 250 and found["timings"]["prefill_ms"] == 500
        assert {"receive_ms", "parse_ms", "preprocess_ms", "total_ms", "first_token_ms"} <= found["timings"].keys()


def test_requests_reach_the_engine_with_salt_priority_and_deadline(scripted: Scripted) -> None:
    caller, engine, _ = scripted(request_timeout_s=100.0, allow_priority=True)
    body = {"messages": HELLO, "cache_salt": "mine", "priority": -3, "timeout": 1e3}
    assert asyncio.run(caller.post(CHAT, body)).status == 200
    [(_, params, terms)] = engine.seen
    assert terms.cache_salt == "mine" and terms.turn.priority == -3 and params.temperature == 0.25
    assert terms.deadline is not None
    assert 0 < terms.deadline - time.monotonic() <= 100, "the server's limit is smaller"


def test_many_prompts_are_run_together_and_fail_together(scripted: Scripted) -> None:
    async def echo(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        if len(prompt) == 3:
            raise ValueError("boom")
        for i in range(3):
            await asyncio.sleep(0.001 * len(prompt))
            yield {"text": str(len(prompt)), "token_ids": (5,), "finish_reason": "stop" if i == 2 else None}

    caller, engine, service = scripted(echo)
    found = asyncio.run(caller.post("/v1/completions", {"prompt": [[5, 5], [5], [5, 5, 5, 5]]})).json
    assert [choice["text"] for choice in found["choices"]] == ["222", "111", "444"]
    assert found["usage"]["prompt_tokens"] == 7 and found["usage"]["completion_tokens"] == 9
    failed = asyncio.run(caller.post("/v1/completions", {"prompt": [[5] * 4, [5] * 3, [5]]}))
    assert failed.status == 500 and not engine.running and service.is_idle
    assert asyncio.run(caller.post("/v1/completions", {"prompt": []})).status == 400
    assert asyncio.run(caller.post("/v1/completions", {"prompt": ["a"] * 1025})).status == 400


def test_token_counts_of_messages_include_images(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    content = [{"type": "text", "text": "see"}, image_part(encoded(picture(0, (64, 96))))]
    messages = [{"role": "user", "content": content}]
    found = asyncio.run(caller.post("/tokenize", {"messages": messages, "return_token_strs": True})).json
    assert found["image_tokens"] == 6 and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    rendered = asyncio.run(caller.post(f"{CHAT}/render", {"messages": messages})).json
    assert rendered["tokens"] == found["tokens"] and rendered["media"][0]["size_hw"] == [96, 64]
    assert "<|vision_start|>" in rendered["prompt"]
    text = asyncio.run(caller.post("/tokenize", {"prompt": "naïve 図"})).json
    back = asyncio.run(caller.post("/detokenize", {"tokens": text["tokens"]})).json
    assert back == {"prompt": "naïve 図"}
    unknown = asyncio.run(caller.post("/detokenize", {"tokens": [5, 10**9]}))
    assert unknown.status == 400 and unknown.json["error"]["param"] == "tokens[1]"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def calling(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    first, second = '{"name": "add", "arguments": {"a": 1}}', '{"name": "add"}'
    text = f"Sure. <tool_call>\n{first}\n</tool_call>\n<tool_call>{second}</tool_call>"
    for at in range(0, len(text), 7):
        end = "stop" if at + 7 >= len(text) else None
        yield {"text": text[at : at + 7], "token_ids": (5,), "finish_reason": end}


def test_calls_in_the_text_become_tool_calls(scripted: Scripted) -> None:
    caller, _, _ = scripted(calling)
    whole = asyncio.run(caller.post(CHAT, {"messages": HELLO, "tools": TOOLS})).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Sure."
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [function["name"] for function in functions] == ["add", "add"]
    assert [orjson.loads(function["arguments"]) for function in functions] == [{"a": 1}, {}]
    events = asyncio.run(caller.post(CHAT, {"messages": HELLO, "tools": TOOLS, "stream": True})).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "Sure."
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index in (0, 1):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert mine[0]["id"] and mine[0]["function"]["name"] == "add"
        arguments = "".join(piece["function"]["arguments"] for piece in mine)
        assert orjson.loads(arguments) == [{"a": 1}, {}][index]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_calls_are_text(scripted: Scripted) -> None:
    caller, _, _ = scripted(calling)
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = asyncio.run(caller.post(CHAT, {"messages": HELLO, **more})).json["choices"][0]
        assert "<tool_call>" in found["message"]["content"] and found["finish_reason"] == "stop"
    one = asyncio.run(caller.post(CHAT, {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False})).json
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": []},
        {"tools": [{}]},
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "sometimes"},
    ],
    ids=str,
)
def test_wrong_tools_are_refused(scripted: Scripted, wrong: dict[str, Any]) -> None:
    caller, engine, _ = scripted()
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO, **wrong}))
    assert found.status == 400 and found.json["error"]["param"].startswith("tool") and not engine.seen


def test_a_required_call_is_forced_by_a_grammar(scripted: Scripted) -> None:
    caller, engine, _ = scripted(calling)
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        assert asyncio.run(caller.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})).status == 200
        grammar = engine.seen[-1][1].grammar
        assert grammar is not None and "add" in grammar.text
    assert asyncio.run(caller.post(CHAT, {"messages": HELLO, "tools": TOOLS})).status == 200
    assert engine.seen[-1][1].grammar is None


def test_video_frames_become_a_video(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    frames = ",".join(base64.b64encode(encoded(picture(i, (64, 64)), "JPEG")).decode() for i in range(4))
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "what happens?"}]}]
    rendered = asyncio.run(caller.post(f"{CHAT}/render", {"messages": messages})).json
    assert rendered["media"][0]["kind"] == "video" and rendered["image_tokens"] > 0


@pytest.mark.parametrize("given", ["Zażółć gęślą 🙂 图片", "a<|im_end|>b", "\U0001f9ff\U0001f9ff", "é"])
def test_offsets_point_into_the_text(processor: Processor, given: str) -> None:
    """A token of whole characters is found at its offset; part of a character has that character's offset."""
    tokenizer = processor.tokenizer
    ids = processor.text(given).token_ids.tolist()
    scores = CompletionScores(tokenizer, 0)
    scores.add_prompt(ids, [{token: Logprob(-1.0, 1)} for token in ids], given)
    scores.add(ids, [{token: Logprob(-1.0, 1)} for token in ids])
    found = scores.to_json()
    whole = given + tokenizer.decode(ids, skip_special_tokens=True)
    offsets = found["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[len(ids)] == len(given)
    for token, text, offset in zip(ids * 2, found["tokens"], offsets, strict=True):
        is_skipped = token in tokenizer.special_ids and offset >= len(given)
        if "\ufffd" not in text and not is_skipped:
            assert whole[offset : offset + len(text)] == text
        assert 0 <= offset <= len(whole)


def test_tokens_added_before_a_prompt_start_at_offset_zero(tmp_path: Path) -> None:
    processor = Processor.from_folder(write_gemma(tmp_path))
    ids = processor.text("The dog").token_ids.tolist()
    scores = CompletionScores(processor.tokenizer, 0)
    scores.add_prompt(ids, [None] * len(ids), "The dog")
    found = scores.to_json()
    assert found["tokens"][0] == "<bos>" and found["text_offset"][:2] == [0, 0]
    assert "The dog"[found["text_offset"][-1] :] == found["tokens"][-1]


def test_an_error_names_the_broken_part(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": ""}}]
    messages = [*HELLO, {"role": "user", "content": parts}]
    found = asyncio.run(caller.post(CHAT, {"messages": messages})).json["error"]
    assert found["param"] == "messages[1].content[1].image_url"


@pytest.mark.parametrize(("given", "meant"), [("developer", "system"), ("function", "tool")])
def test_aliases_of_roles_are_not_dropped(scripted: Scripted, given: str, meant: str) -> None:
    """The template writes nothing for a role it does not know."""
    caller, _, _ = scripted()

    def rendered(role: str) -> str:
        messages = [{"role": role, "content": "KEEP"}, *HELLO]
        answer = asyncio.run(caller.post("/v1/chat/completions/render", {"messages": messages}))
        assert answer.status == 200
        return str(answer.json["prompt"])

    assert "KEEP" in rendered(given) and rendered(given) == rendered(meant)


def test_sglang_chunks_are_cumulative(scripted: Scripted) -> None:
    caller, _, _ = scripted(interleaved)
    asked = {"text": "hi", "sampling_params": {"n": 2}, "return_logprob": True, "top_logprobs_num": 1}
    whole = asyncio.run(caller.post("/generate", asked)).json
    *chunks, done = asyncio.run(caller.post("/generate", {**asked, "stream": True})).events
    assert done == "[DONE]" and len(chunks) == 4
    for index in (0, 1):
        *_, last = mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [len(chunk["meta_info"]["output_token_logprobs"]) for chunk in mine] == [1, 2]
        assert (last["text"], last["output_ids"]) == (whole[index]["text"], whole[index]["output_ids"])
        for key in ("output_token_logprobs", "output_top_logprobs", "finish_reason", "completion_tokens"):
            assert last["meta_info"][key] == whole[index]["meta_info"][key]


def test_sglang_logprobs_have_sglangs_format(scripted: Scripted) -> None:
    async def scored(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        ids = prompt.token_ids.tolist()
        scores = (None, *({token: Logprob(-1.0, 2), 7: Logprob(-0.5, 1)} for token in ids[1:]))
        has_scores = params.prompt_logprobs is not None
        given = {"logprobs": ({5: Logprob(-2.0, 1)},), "prompt_logprobs": scores if has_scores else None}
        yield {"text": "a", "token_ids": (5,), "finish_reason": "stop", **given}

    caller, _, service = scripted(scored)
    tokenizer = service.engine.processor.tokenizer

    def meta(**asked: Any) -> dict[str, Any]:
        body = {"input_ids": [3, 4, 6], "return_logprob": True, **asked}
        found: dict[str, Any] = asyncio.run(caller.post("/generate", body)).json["meta_info"]
        return found

    plain = meta()
    assert plain["input_token_logprobs"] == [] and plain["output_token_logprobs"] == [[-2.0, 5, None]]
    assert "input_top_logprobs" not in plain
    whole = meta(logprob_start_len=0, top_logprobs_num=1)
    assert whole["input_token_logprobs"] == [[None, 3, None], [-1.0, 4, None], [-1.0, 6, None]]
    assert whole["input_top_logprobs"] == [None, [[-0.5, 7, None]], [[-0.5, 7, None]]]
    assert meta(logprob_start_len=2, top_logprobs_num=1)["input_top_logprobs"] == [[[-0.5, 7, None]]]
    worded = meta(logprob_start_len=0, top_logprobs_num=1, return_text_in_logprobs=True)
    texts = [token_text(tokenizer, token) for token in (3, 4, 6, 7, 5)]
    assert [entry[2] for entry in worded["input_token_logprobs"]] == texts[:3]
    assert worded["input_top_logprobs"][1][0][2] == texts[3] and worded["output_token_logprobs"][0][2] == texts[4]


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("stop_regex", "x", "leave it out"),
        ("structural_tag", "x", "leave it out"),
        ("custom_params", "x", "leave it out"),
        ("allowed_token_ids", [1], "leave it out"),
        ("max_tokens", 5, "use max_new_tokens"),
        ("min_tokens", 5, "use min_new_tokens"),
        ("seed", 0, "use sampling_seed"),
        ("include_stop_str_in_output", True, "use no_stop_trim"),
        ("guided_json", {}, "use json_schema"),
        ("logprobs", 2, "use return_logprob beside sampling_params"),
    ],
)
def test_sampling_params_that_sglang_does_not_have_are_refused(
    scripted: Scripted, name: str, value: Any, hint: str
) -> None:
    caller, engine, _ = scripted(strict=True)
    answer = asyncio.run(caller.post("/generate", {"text": "a", "sampling_params": {name: value}}))
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_parameter", f"sampling_params.{name}")
    assert error["message"] == f"sampling_params.{name} is not supported; {hint}"
    assert not engine.seen
    harmless: dict[str, Any] = {"min_tokens": 0, "seed": None, "logprobs": False, "bad_words": []}
    assert asyncio.run(caller.post("/generate", {"text": "a", "sampling_params": harmless})).status == 200
    odd = asyncio.run(caller.post("/generate", {"text": "a", "sampling_params": {"odd": 1}, "even": 2}))
    assert odd.status == 200 and odd.headers["x-ignored-fields"] == "even,sampling_params.odd"


def test_sglang_errors_name_input_ids_or_text(scripted: Scripted) -> None:
    async def refuses(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        if prompt is not None:
            raise RequestError("no", param="prompt")
        yield {}

    caller, _, _ = scripted(refuses)
    for body, param in (({"input_ids": [5]}, "input_ids"), ({"text": "a"}, "text")):
        assert asyncio.run(caller.post("/generate", body)).json["error"]["param"] == param


def test_each_choice_has_the_logprobs_of_its_prompt(scripted: Scripted) -> None:
    async def scored(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        ids = prompt.token_ids.tolist()
        scores = (None, *({token: Logprob(-float(token), 1)} for token in ids[1:]))
        yield {"text": "a", "token_ids": (5,), "finish_reason": "stop", "prompt_logprobs": scores}

    caller, _, _ = scripted(scored)
    asked = {"prompt": [[5, 6], [7, 8, 9]], "prompt_logprobs": 0, "max_tokens": 1}
    found = asyncio.run(caller.post("/v1/completions", asked)).json["choices"]
    listed = [[None if entry is None else [*entry] for entry in choice["prompt_logprobs"]] for choice in found]
    assert listed == [[None, ["6"]], [None, ["8"], ["9"]]]


def test_an_echo_does_not_lengthen_prompt_logprobs(scripted: Scripted) -> None:
    """Each of them has as many alternatives as were asked for, and the token itself."""

    async def scored(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        assert params.prompt_logprobs == 2
        likeliest = {8: Logprob(-0.5, 1), 9: Logprob(-1.0, 2)}
        scores = (None, {6: Logprob(-3.0, 7), **likeliest})
        yield {
            "token_ids": (5,),
            "finish_reason": "stop",
            "prompt_logprobs": scores,
            "logprobs": ({5: Logprob(-1, 1)},),
        }

    caller, _, _ = scripted(scored)
    asked = {"prompt": [5, 6], "prompt_logprobs": 1, "echo": True, "logprobs": 2, "max_tokens": 1}
    found = asyncio.run(caller.post("/v1/completions", asked)).json
    assert [*found["prompt_logprobs"][1]] == [*found["choices"][0]["prompt_logprobs"][1]] == ["6", "8"]
    assert found["prompt_logprobs"][1]["6"]["rank"] == 7
    assert len(found["choices"][0]["logprobs"]["top_logprobs"][1]) == 3


def test_the_fingerprint_tells_configurations_apart(processor: Processor) -> None:
    found = []
    for configuration in ("a", "a", "b"):
        engine = FakeEngine(processor)
        service = service_for(engine)
        service.open(engine, GenerationDefaults(eos_token_ids=frozenset()), configuration=configuration)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        found.append(asyncio.run(Caller(service).post(CHAT, body)).json["system_fingerprint"])
    assert found[0] == found[1] != found[2] and found[0].startswith("saccade-")
