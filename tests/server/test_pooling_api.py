"""/v1/embeddings, /v1/score and /v1/rerank in front of a real engine, with and without the official client."""

import asyncio
import base64
import io
from collections.abc import AsyncGenerator, Iterator
from itertools import count
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from saccade import LLM
from saccade.inputs.placeholders import Prompt, text_prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.embedding import EmbeddingSettings
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams
from tests.engine.ranking_checkpoint import encode, make_ranker
from tests.engine.rig import oracle_vectors
from tests.models import tiny
from tests.server.fake import Answer, Caller, FakeEngine, Script, service_for
from tests.server.sdk import with_openai

CLOSE = 1e-4
EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
BROKEN_IMAGE = {"image": "data:image/png;base64,AA"}


class Rig:
    """The server around an engine in this process."""

    def __init__(self, made: tiny.Tiny) -> None:
        self.made = made
        self.llm = LLM(made.folder, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, kv_cache_tokens=2048)
        self._ids = count()
        self.seen: list[Prompt] = []
        self.service = self.new_service(self.run)

    def new_service(self, script: Script, **settings: Any) -> Service:
        service = service_for(FakeEngine(self.llm.processor, script), **settings)
        service.embedding = EmbeddingSettings.from_folder(self.made.folder)
        return service

    async def run(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        self.seen.append(prompt)
        self.llm.engine.add(f"r{next(self._ids)}", prompt, params)
        updates = [update for _ in range(99) if self.llm.engine.has_work for update in self.llm.engine.step()]
        assert updates[-1].finish is not None
        yield {"finish_reason": updates[-1].finish.reason.value, "pooled": updates[-1].pooled}

    def post(self, path: str, body: Any) -> Answer:
        self.seen.clear()
        return asyncio.run(Caller(self.service).post(path, body))

    def refused(self, path: str, body: Any) -> tuple[str | None, str]:
        found = self.post(path, body)
        assert found.status == 400, found.body
        error = found.json["error"]
        return error["param"], error["message"]

    def embedding(self, prompt: Prompt, pooling: str = "last") -> Any:
        vector = oracle_vectors(self.made, prompt, (5,))[pooling]
        return vector / np.linalg.norm(vector)

    def odds(self, prompt: Prompt) -> float:
        ids = [encode(self.made.folder, word)[0] for word in ("yes", "no")]
        return float(torch.softmax(torch.from_numpy(oracle_vectors(self.made, prompt, ids)["logits"]), dim=0)[0])

    def text(self, text: str) -> Prompt:
        return text_prompt(encode(self.made.folder, f"{text}<|endoftext|>"))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    found = Rig(make_ranker("qwen3_vl", tmp_path_factory.mktemp("ranker")))
    with found.llm:
        yield found


def picture() -> str:
    file = io.BytesIO()
    pixels = np.random.default_rng().integers(0, 256, (20, 28, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class TestEmbeddings:
    def test_the_official_client_gets_embeddings_in_order(self, rig: Rig) -> None:
        texts = ["a fox", "the document", "yes"]

        async def use(client: openai.AsyncOpenAI) -> Any:
            plain = await client.embeddings.create(model="m", input=texts)  # sent as base64, which the client decodes
            floats = await client.embeddings.create(model="m", input=texts, encoding_format="float", dimensions=9)
            ids = await client.embeddings.create(model="m", input=[[5, 6, 7], [8]], user="somebody")
            return plain, floats, ids, await client.embeddings.create(model="m", input=[5, 6, 7])

        plain, floats, ids, one = with_openai(rig.service, use)
        assert (plain.object, plain.model, plain.data[0].object) == ("list", "m", "embedding")
        num_tokens = sum(len(rig.text(text)) for text in texts)
        assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (num_tokens, num_tokens)
        assert [item.index for item in plain.data] == [0, 1, 2]
        for text, whole, short in zip(texts, plain.data, floats.data, strict=True):
            right = rig.embedding(rig.text(text))
            np.testing.assert_allclose(whole.embedding, right, atol=CLOSE)
            np.testing.assert_allclose(short.embedding, right[:9] / np.linalg.norm(right[:9]), atol=CLOSE)
        np.testing.assert_allclose(ids.data[1].embedding, rig.embedding(text_prompt([8])), atol=CLOSE)
        np.testing.assert_allclose(one.data[0].embedding, rig.embedding(text_prompt([5, 6, 7])), atol=CLOSE)

    def test_pooling_and_normalization_can_be_chosen(self, rig: Rig) -> None:
        found = rig.post(EMBED, {"input": "a fox", "pooling": "mean", "normalize": False}).json
        right = oracle_vectors(rig.made, rig.text("a fox"), (5,))["mean"]
        np.testing.assert_allclose(found["data"][0]["embedding"], right, atol=CLOSE)
        found = rig.post(EMBED, {"input": "a fox", "add_special_tokens": False, "timings": True}).json
        assert found["usage"]["prompt_tokens"] == len(rig.text("a fox")) - 1
        assert found["timings"]["total_ms"] > 0

    def test_a_checkpoint_or_flag_chooses_the_pooling(self, rig: Rig) -> None:
        service = rig.new_service(rig.run)
        service.embedding = EmbeddingSettings(pooling="mean", width=48)
        found = asyncio.run(Caller(service).post(EMBED, {"input": "a fox"})).json["data"][0]["embedding"]
        np.testing.assert_allclose(found, rig.embedding(rig.text("a fox"), "mean"), atol=CLOSE)

    def test_messages_with_an_image_get_one_embedding(self, rig: Rig) -> None:
        parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "a fox"}]
        found = rig.post(EMBED, {"messages": [{"role": "user", "content": parts}]})
        [prompt] = rig.seen
        text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>a fox<|im_end|>\n"
        same = [token for token in prompt.token_ids.tolist() if token != tiny.IMAGE]
        assert same == [token for token in encode(rig.made.folder, text) if token != tiny.IMAGE]
        assert len(prompt.media) == 1 and found.json["usage"]["prompt_tokens_details"]["image_tokens"] > 0
        np.testing.assert_allclose(found.json["data"][0]["embedding"], rig.embedding(prompt), atol=CLOSE)

    def test_vllms_way_to_end_a_conversation_works(self, rig: Rig) -> None:
        talk = [
            {"role": "user", "content": "a fox"},
            {"role": "assistant", "content": [{"type": "text", "text": ""}]},
        ]
        body = {"messages": talk, "continue_final_message": True, "add_special_tokens": True}
        assert rig.post(EMBED, body).status == 200
        [first] = rig.seen
        assert rig.post(EMBED, {"messages": talk[:1], "add_generation_prompt": True}).status == 200
        [second] = rig.seen
        ends = encode(rig.made.folder, "<|endoftext|>")
        assert first.token_ids.tolist() == second.token_ids.tolist() + ends

    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            ({}, "input", "exactly one of input and messages"),
            ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "exactly one of"),
            ({"input": []}, "input", "a list of 0; allowed are 1..1024"),
            ({"input": ""}, "input", "input is empty; at least one character"),
            ({"input": ["a", ""]}, "input[1]", "input[1] is empty"),
            ({"input": [[1], []]}, "input[1]", "input[1] is empty; at least one token"),
            ({"input": ["a", 1]}, "input", "must be text, token ids"),
            ({"input": {"text": "a"}}, "input", "must be text, token ids"),
            (
                {"input": ["a", "b" * 600]},
                "input[1]",
                "prompt has 600 tokens; this model's maximum context length is 512 tokens",
            ),
            (
                {"input": ["a", "b" * 512]},
                "input[1]",
                "prompt has 513 tokens; this model's maximum context length is 512 tokens",
            ),
            (
                {"input": [5] * 600},
                "input",
                "prompt has 600 tokens; this model's maximum context length is 512 tokens (",
            ),
            ({"input": "a", "dimensions": 49}, "dimensions", "allowed are 1 to 48"),
            ({"input": "a", "dimensions": 0}, "dimensions", "allowed are 1 to 48"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
            ({"input": "a", "pooling": "max"}, "pooling", "last"),
            ({"input": "a", "stream": True}, "stream", "not supported"),
            ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
            ({"input": [10**6]}, "input", "outside 0..119"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]}, None, ""),
        ],
    )
    def test_errors_name_the_field(self, rig: Rig, body: Any, param: str | None, said: str) -> None:
        found, message = rig.refused(EMBED, body)
        assert said in message
        assert found == param or (param is None and (found or "").startswith("messages[0].content[0]"))

    def test_sampling_fields_are_ignored(self, rig: Rig) -> None:
        assert rig.post(EMBED, {"input": "a", "temperature": 9, "max_tokens": 5, "n": 3}).status == 200


class TestRanking:
    def test_scores_are_the_odds_of_yes(self, rig: Rig) -> None:
        found = rig.post(SCORE, {"model": "m", "text_1": "a fox", "text_2": ["the document", "no"]})
        assert [prompt.media for prompt in rig.seen] == [(), ()]
        for i, prompt in enumerate(rig.seen):
            item = found.json["data"][i]
            assert (item["index"], item["object"]) == (i, "score")
            assert item["score"] == pytest.approx(rig.odds(prompt), abs=CLOSE)
        assert found.json["usage"]["total_tokens"] == sum(map(len, rig.seen))
        pairs = rig.post(SCORE, {"queries": ["a fox", "the dog"], "documents": ["the document", "no"]}).json["data"]
        assert pairs[0]["score"] == pytest.approx(found.json["data"][0]["score"], abs=CLOSE)
        assert pairs[1]["score"] != pytest.approx(found.json["data"][1]["score"], abs=1e-9)

    @pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
    def test_documents_are_ordered_by_score(self, rig: Rig, path: str) -> None:
        documents = ["the document", {"text": "a fox"}, "no", {"content": [{"type": "text", "text": "yes"}]}]
        found = rig.post(path, {"query": "a fox", "documents": documents}).json["results"]
        right = [rig.odds(prompt) for prompt in rig.seen]
        assert sorted(result["index"] for result in found) == [0, 1, 2, 3]
        scores = [result["relevance_score"] for result in found]
        assert scores == sorted(scores, reverse=True)
        assert scores == pytest.approx([right[result["index"]] for result in found], abs=CLOSE)
        texts = ["the document", "a fox", "no", "yes"]
        assert [result["document"]["text"] for result in found] == [texts[result["index"]] for result in found]
        best = rig.post(path, {"query": "a fox", "documents": documents, "top_n": 2, "return_documents": False}).json
        assert [set(result) for result in best["results"]] == [{"index", "relevance_score"}] * 2
        assert [result["index"] for result in best["results"]] == [result["index"] for result in found[:2]]

    def test_images_are_ranked(self, rig: Rig) -> None:
        url = picture()
        documents = [
            {"image": url},
            {"text": "a fox", "image_url": {"url": url}},
            {"content": [{"type": "image_url", "image_url": {"url": picture()}}]},
        ]
        body = {"query": {"image": url}, "documents": documents, "instruction": "Find the same picture."}
        found = rig.post(RERANK, body).json["results"]
        assert [len(prompt.media) for prompt in rig.seen] == [2, 2, 2]
        right = [rig.odds(prompt) for prompt in rig.seen]
        for result in found:
            assert result["relevance_score"] == pytest.approx(right[result["index"]], abs=CLOSE)
        asked = rig.llm.processor.tokenizer.decode(rig.seen[0].token_ids.tolist())
        assert "<Instruct>: Find the same picture.<Query>:" in asked

    @pytest.mark.parametrize(
        ("path", "body", "param", "said"),
        [
            (SCORE, {"text_1": "a"}, "text_2", "exactly one of text_2 and documents"),
            (SCORE, {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", "exactly one of"),
            (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "send one text_1, or as many as"),
            (SCORE, {"text_1": "a", "text_2": []}, "text_2", "there are 0 documents"),
            (SCORE, {"text_1": "a", "text_2": 5}, "text_2", "must be text or an object"),
            (SCORE, {"text_1": "a", "text_2": "b" * 600}, "text_2", "tokens"),
            (RERANK, {"documents": ["a"]}, "query", "missing"),
            (RERANK, {"query": ["a"], "documents": ["a"]}, "query", "one text or object"),
            (RERANK, {"query": "a", "documents": ["a", {}]}, "documents[1]", "must be text, or an object with"),
            (RERANK, {"query": "a", "documents": ["a", {"text": 5}]}, "documents[1]", "text"),
            (RERANK, {"query": "a", "documents": ["a", "b" * 600]}, "documents[1]", "tokens"),
            (RERANK, {"query": "a", "documents": ["a", "b"], "top_n": 0}, "top_n", "at least 1"),
            (RERANK, {"query": "a", "documents": ["a", "b"], "stream": True}, "stream", "not supported"),
            (RERANK, {"query": "a", "documents": ["a", BROKEN_IMAGE]}, "documents[1]", ""),
            (RERANK, {"query": "a", "documents": ["a", {"image": "http://x/y"}]}, "documents[1]", ""),
            (RERANK, {"query": BROKEN_IMAGE, "documents": ["a", "b"]}, "query", "image"),
            (SCORE, {"text_1": ["a", BROKEN_IMAGE], "text_2": ["a", "b"]}, "text_1[1]", "image"),
        ],
    )
    def test_errors_name_the_field(self, rig: Rig, path: str, body: Any, param: str, said: str) -> None:
        found, message = rig.refused(path, body)
        assert (found or "").startswith(param) and said in message

    def test_a_vocabulary_without_the_answers_is_refused(self, processor: Processor) -> None:
        """This tokenizer writes yes as several tokens."""
        service = service_for(FakeEngine(processor))
        found = asyncio.run(Caller(service).post(SCORE, {"text_1": "a", "text_2": "b"}))
        assert found.status == 400
        assert found.json["error"]["message"].endswith('its vocabulary has no single token for "yes"')


def test_an_aborted_request_gets_an_error(rig: Rig) -> None:
    async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"finish_reason": "abort"}

    found = asyncio.run(Caller(rig.new_service(script)).post(EMBED, {"input": ["a", "b"]}))
    assert (found.status, found.json["error"]["code"]) == (500, "aborted")


def test_invalid_numbers_are_an_error_without_retry(rig: Rig) -> None:
    async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        yield {"finish_reason": "error", "stop_reason": "the model's hidden states are not numbers"}

    found = asyncio.run(Caller(rig.new_service(script)).post(EMBED, {"input": "a"}))
    assert (found.status, found.headers["x-should-retry"]) == (500, "false")


def test_routes_are_listed_and_described(rig: Rig) -> None:
    async def run() -> tuple[Any, Any]:
        caller = Caller(rig.service)
        return (await caller.get("/nowhere")).json, (await caller.get("/openapi.json")).json

    unknown, document = asyncio.run(run())
    for path in (EMBED, SCORE, "/score", RERANK, "/rerank"):
        assert f"{path}, " in unknown["error"]["message"] and path in document["paths"]
