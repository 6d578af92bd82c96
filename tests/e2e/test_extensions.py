"""Fields and routes beyond OpenAI's, on a real server: sizes of images, times of stages, reasoning, scores, probes."""

import time
from typing import Any

import httpx2
import openai
import pytest

from saccade.server.operators.health import RECENT_S
from tests.e2e.conftest import wait_idle
from tests.e2e.metrics import gauges
from tests.e2e.pictures import asked, data_url, encoded, picture

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def image(seed: int, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(picture(seed, (48, 32)))), **more}}


def answer(http: httpx2.Client, seed: int, **fields: Any) -> dict[str, Any]:
    reply = http.post(CHAT, json={"messages": asked(image(seed)), **BODY, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def image_tokens(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["image_tokens"])


def test_an_image_at_another_size_is_not_taken_for_the_first(http: httpx2.Client) -> None:
    """Neither its features nor the blocks of the prefix cache behind them."""
    small = {"mm_processor_kwargs": {"max_pixels": 600}}
    alone = answer(http, 21, **small, cache_salt="alone")
    large = answer(http, 21)
    hits = gauges(http.get("/metrics").text)["vllm:mm_cache_hits_total"]
    again = answer(http, 21, **small)
    assert image_tokens(large) > image_tokens(again) == image_tokens(alone) == 6
    assert text_of(again) == text_of(alone) != text_of(large)
    assert gauges(http.get("/metrics").text)["vllm:mm_cache_hits_total"] == hits
    spelled = answer(http, 21, mm_processor_kwargs={"size": {"longest_edge": 610}}, timings=True)
    assert text_of(spelled) == text_of(again), "the same size under other bounds"
    assert "vision_ms" not in spelled["timings"], "and so the same features, found again"


def test_sizes_are_refused_by_name(http: httpx2.Client, client: openai.OpenAI) -> None:
    wrong = {"max_pixels": 0, "min_pixels": 5000, "fps": 2, "size": {"height": 8}}
    for name, value in wrong.items():
        reply = http.post(CHAT, json={"messages": asked(image(3)), **BODY, "mm_processor_kwargs": {name: value}})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(f"mm_processor_kwargs.{name}")
    reply = http.post(CHAT, json={"messages": asked(image(3, detail="medium")), **BODY})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages[0].content[1].image_url.detail"
    for detail in ("low", "auto", "high"):
        messages = asked(image(3, detail=detail))
        found = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=2)
        assert found.usage is not None and found.usage.prompt_tokens > 12


def test_tokens_can_be_counted_at_a_size(http: httpx2.Client) -> None:
    fields = {"messages": asked(image(3)), "mm_processor_kwargs": {"max_pixels": 600}}
    assert http.post("/tokenize", json=fields).json()["image_tokens"] == 6
    [media] = http.post(f"{CHAT}/render", json=fields).json()["media"]
    assert media["size_hw"][0] * media["size_hw"][1] <= 600


def test_vision_is_a_stage_of_its_own(http: httpx2.Client) -> None:
    first = answer(http, 22, timings=True)["timings"]
    assert 0 < first["vision_ms"] <= first["prefill_ms"] <= first["total_ms"]
    assert {"queue_ms", "preprocess_ms", "prefill_ms", "decode_ms"} <= first.keys()
    assert 0 < first["decode_media_ms"] < first["prepare_ms"] and first["preprocess_ms"] > 0
    again = answer(http, 22, timings=True)["timings"]
    assert "vision_ms" not in again and "prefill_ms" in again, "nothing was encoded"
    plain = http.post(CHAT, json={"messages": asked(), **BODY, "timings": True}).json()["timings"]
    assert "vision_ms" not in plain and "decode_media_ms" not in plain
    wait_idle(http)


def test_an_open_block_makes_everything_reasoning(client: openai.OpenAI) -> None:
    """A model with random weights never closes it."""
    messages: Any = asked()
    opened = {"chat_template_kwargs": {"shout": "<think>"}, "add_generation_prompt": False, "ignore_eos": True}
    common: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    [choice] = client.chat.completions.create(**common, extra_body=opened).choices
    said = choice.message.model_dump()
    assert said["content"] is None and said["reasoning_content"] and said["reasoning"] == said["reasoning_content"]
    chunks = list(client.chat.completions.create(**common, extra_body=opened, stream=True))
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == said["reasoning_content"]
    shape: Any = {"type": "json_object"}
    [free] = client.chat.completions.create(**common, response_format=shape, extra_body=opened).choices
    assert free.message.content is None and not free.message.model_dump()["reasoning_content"].startswith("{")
    [bound] = client.chat.completions.create(**common, response_format=shape).choices
    assert (bound.message.content or "").startswith("{")


def test_a_prompt_is_scored_without_an_answer(http: httpx2.Client) -> None:
    """Input log-probabilities without a token, as sglang#11745 asks for them: those that an answer comes with."""
    body: dict[str, Any] = {"text": "the quick brown fox", "return_logprob": True, "logprob_start_len": 0}
    none, one = (
        http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": count, "temperature": 0}}).json()
        for count in (0, 1)
    )
    assert (none["text"], none["output_ids"], len(one["output_ids"])) == ("", [], 1)
    scores = [[triple[0] for triple in reply["meta_info"]["input_token_logprobs"]] for reply in (none, one)]
    assert len(scores[0]) == none["meta_info"]["prompt_tokens"] > 1 and scores[0][0] is None
    assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-3)
    talk = {"messages": asked(image(31)), "max_tokens": 0, "prompt_logprobs": 1, "model": "auto"}
    found = http.post(CHAT, json=talk).json()
    assert found["model"] == "tiny" and found["usage"]["completion_tokens"] == 0
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]


def test_the_engine_proves_that_it_gives_tokens(http: httpx2.Client) -> None:
    wait_idle(http)
    time.sleep(RECENT_S)  # so that the engine is asked, and not known to be alive
    before = gauges(http.get("/metrics").text)
    assert http.get("/health_generate").json() == {"status": "ok"}
    after = gauges(http.get("/metrics").text)
    assert before["vllm:generation_tokens_total"] == after["vllm:generation_tokens_total"], "a probe is no request"


def test_caches_are_emptied_on_request(http: httpx2.Client) -> None:
    def cached() -> int:
        return int(answer(http, 41)["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    wait_idle(http)
    hits = gauges(http.get("/metrics").text)["vllm:mm_cache_hits_total"]
    assert http.post("/flush_cache").json() == {"status": "flushed"}
    assert cached() == 0 and gauges(http.get("/metrics").text)["vllm:mm_cache_hits_total"] == hits
