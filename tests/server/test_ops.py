"""Routes for operators."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from saccade.client.output import Logprob
from saccade.inputs.placeholders import Prompt
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams
from tests.e2e.metrics import gauges
from tests.server.fake import Caller, FakeEngine, service_for

Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_caches_are_emptied_on_request(engine: FakeEngine, method: str) -> None:
    caller = Caller(service_for(engine))
    found = asyncio.run(caller.call(method, "/flush_cache", b"", {}))
    assert (found.status, found.json, engine.num_flushes) == (200, {"status": "flushed"}, 1)


def test_caches_of_a_busy_engine_are_not_emptied(engine: FakeEngine) -> None:
    engine.running.add("1")
    found = asyncio.run(Caller(service_for(engine)).post("/flush_cache", {}))
    assert (found.status, found.json["error"]["code"], engine.num_flushes) == (400, "not_idle", 0)
    assert asyncio.run(Caller(service_for(None)).get("/flush_cache")).json["error"]["code"] == "starting"


def test_auto_means_the_served_model(scripted: Scripted) -> None:
    caller, _, _ = scripted(served_model_name=("mine", "other"))
    for asked, answered in (("auto", "mine"), ("", "mine"), ("other", "other")):
        found = asyncio.run(caller.post("/v1/completions", {"prompt": "a", "model": asked}))
        assert (found.status, found.json["model"]) == (200, answered)
    assert asyncio.run(caller.get("/v1/models/auto")).json["id"] == "mine"
    assert asyncio.run(caller.post("/v1/completions", {"prompt": "a", "model": "automatic"})).status == 404
    caller, _, _ = scripted(served_model_name=("mine", "auto"))
    assert asyncio.run(caller.post("/v1/completions", {"prompt": "a", "model": "auto"})).json["model"] == "auto"


def test_a_slash_behind_the_list_of_models_changes_nothing(scripted: Scripted) -> None:
    caller, _, _ = scripted()
    assert asyncio.run(caller.get("/v1/models/")).json == asyncio.run(caller.get("/v1/models")).json


def test_a_model_with_the_bundled_models_name_is_not_bundled(scripted: Scripted) -> None:
    caller, _, _ = scripted(served_model_name=("saccade",))
    assert asyncio.run(caller.get("/v1/models/saccade")).json["is_bundled"] is False


def test_the_model_is_still_described_while_requests_drain(scripted: Scripted) -> None:
    caller, _, service = scripted()
    before = asyncio.run(caller.get("/v1/models")).json
    service.drain()
    assert asyncio.run(caller.get("/v1/models")).json == before
    assert before["data"][0]["max_model_len"] == service.max_model_len and before["data"][0]["capabilities"]
    assert before["data"][0]["vision"]["has_pixel_places"] is False


async def scored(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
    assert params.max_tokens == 0
    scores = tuple(None if i == 0 else {int(token): Logprob(-0.5, 1)} for i, token in enumerate(prompt.token_ids))
    yield {"finish_reason": "length", "prompt_logprobs": scores, "logprobs": None if params.logprobs is None else ()}


def test_a_prompt_is_scored_without_an_answer(scripted: Scripted) -> None:
    """As sglang#11745 does with /generate, and likewise on the other routes."""
    caller, engine, service = scripted(scored)

    async def run() -> None:
        params = {"max_new_tokens": 0, "temperature": 0}
        body = {"text": "a b c", "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        found = (await caller.post("/generate", body)).json
        meta = found["meta_info"]
        assert (found["text"], found["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["output_token_logprobs"] == []
        assert [triple[0] for triple in meta["input_token_logprobs"]] == [None] + [-0.5] * (meta["prompt_tokens"] - 1)
        talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0, "prompt_logprobs": 1}
        found = (await caller.post("/v1/chat/completions", talk)).json
        assert found["choices"][0]["message"]["content"] == "" and found["usage"]["completion_tokens"] == 0
        assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
        for more in ({"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}):
            found = (await caller.post("/v1/completions", {"prompt": "a b", "max_tokens": 0, **more})).json
            assert found["usage"]["completion_tokens"] == 0 and found["choices"][0]["finish_reason"] == "length"
            assert found["choices"][0]["text"] == ("a b" if "echo" in more else "")

    asyncio.run(run())
    numbers = gauges(asyncio.run(caller.get("/metrics")).body.decode())
    assert numbers["vllm:prompt_tokens_total"] == sum(len(prompt) for prompt, _, _ in engine.seen)
    assert numbers["vllm:generation_tokens_total"] == 0
    assert service.last_output is None


def test_profiles_need_a_folder_and_name_their_file(scripted: Scripted) -> None:
    boss = {"authorization": "Bearer boss"}

    async def run() -> None:
        caller, _, _ = scripted(admin_api_key="boss")
        found = await caller.post("/start_profile", {}, **boss)
        assert found.status == 400 and "--profile-folder" in found.json["error"]["message"]
        caller, engine, _ = scripted(admin_api_key="boss", profile_folder="/some/where", profile_max_s=7.0)
        assert (await caller.post("/stop_profile", {}, **boss)).json["error"]["code"] == "profile_refused"
        assert (await caller.post("/start_profile", {}, **boss)).json["ends_after_s"] == 7.0
        assert engine.profiles == [("/some/where", 7.0)]
        assert (await caller.post("/stop_profile", {}, **boss)).json["file"] == "/some/where/a.json"

    asyncio.run(run())
