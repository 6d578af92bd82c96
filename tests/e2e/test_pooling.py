"""Vectors by the official client from a real server: those of transformers."""

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from tests.e2e.metrics import gauges
from tests.e2e.pictures import data_url, encoded, picture
from tests.engine.rig import oracle_vectors
from tests.models import tiny

CLOSE = 1e-4


@pytest.fixture(scope="module")
def oracle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """The same weights: they are drawn from one seed."""
    again = tiny.make("qwen3_vl", tmp_path_factory.mktemp("again"))
    return tiny.Tiny("qwen3_vl", again.oracle, checkpoint)


def expected(oracle: tiny.Tiny, prompt: Prompt, pooling: str = "last") -> Any:
    vector = oracle_vectors(oracle, prompt, (5,))[pooling]
    return vector / np.linalg.norm(vector)


def test_many_texts_are_embedded(client: openai.OpenAI, checkpoint: Path, oracle: tiny.Tiny) -> None:
    """More than run at a time, short ones and one of several chunks."""
    processor = Processor.from_folder(checkpoint)
    rng = np.random.default_rng()
    texts = [bytes(rng.integers(97, 123, int(n)).astype(np.uint8)).decode() for n in (*rng.integers(1, 30, 20), 200)]
    for pooling in ("last", "mean"):
        found = client.embeddings.create(model="tiny", input=texts, extra_body={"pooling": pooling})
        assert [item.index for item in found.data] == list(range(len(texts)))
        for text, item in zip(texts, found.data, strict=True):
            np.testing.assert_allclose(item.embedding, expected(oracle, processor.text(text), pooling), atol=CLOSE)
        assert found.usage.prompt_tokens == sum(len(processor.text(text)) for text in texts)


def test_an_image_is_embedded(http: httpx2.Client, checkpoint: Path, oracle: tiny.Tiny) -> None:
    file = encoded(picture(33))
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}}, {"type": "text", "text": "what is it"}]
    talk = [{"role": "user", "content": parts}]
    before = gauges(http.get("/metrics").text)
    reply = http.post("/v1/embeddings", json={"messages": talk, "encoding_format": "base64"})
    assert reply.status_code == 200, reply.text
    vector = np.frombuffer(base64.b64decode(reply.json()["data"][0]["embedding"]), dtype="<f4")
    prompt = Processor.from_folder(checkpoint).chat(talk, add_generation_prompt=False)
    np.testing.assert_allclose(vector, expected(oracle, prompt), atol=CLOSE)
    after = gauges(http.get("/metrics").text)
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == len(prompt)
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"]


def test_a_vocabulary_of_letters_cannot_rank(http: httpx2.Client) -> None:
    reply = http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert reply.status_code == 400 and "no single token" in reply.json()["error"]["message"]


def test_a_long_embedding_request_that_its_client_leaves_is_ended(http: httpx2.Client) -> None:
    """The fixture waits until nothing runs and nothing is held. (A server that was quicker has nothing to end.)"""
    with suppress(httpx2.TimeoutException):
        http.post("/v1/embeddings", json={"input": ["text " * 80] * 60, "pooling": "mean"}, timeout=0.05)
