"""Questions about pictures that the bundled model answers right, as many different pictures as a test wants."""

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import numpy as np
from PIL import Image

from tests.e2e.metrics import gauges
from tests.e2e.pictures import encoded, image_part

FOLDER = Path(__file__).parents[2] / "examples" / "pictures"
QUESTIONS = (
    ("digit.png", "What digit is this?", "7"),
    ("heart.png", "What color is the heart?", "purple"),
    ("shapes.png", "How many circles are there?", "2"),
)
BLOCK = 16  # tokens; a prompt's last ones may not fill one
BUNDLED: dict[str, dict[str, Any]] = {
    "engine": {"device": "cpu", "block_size": BLOCK, "kv_cache_tokens": 8192, "encoder_cache_tokens": 2048},
    "limits": {"max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": 256},
}


class Question:
    """A question about a picture of its own: no other question's picture has the same bytes."""

    def __init__(self, number: int) -> None:
        file, self.text, self.answer = QUESTIONS[number % len(QUESTIONS)]
        pixels = np.array(Image.open(FOLDER / file).convert("RGB"))
        noise = np.random.default_rng(number).integers(0, 6, (1, pixels.shape[1], 3), dtype=np.uint8)
        pixels[:1] ^= noise  # in the topmost row only, and too faint to be seen
        self._image = encoded(Image.fromarray(pixels))

    def body(self, **more: Any) -> dict[str, Any]:
        content = [image_part(self._image), {"type": "text", "text": self.text}]
        return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **more}

    async def ask(self, client: httpx2.AsyncClient) -> bool:
        """Whether the answer is right; raises for what is none."""
        reply = await client.post("/v1/chat/completions", json=self.body())
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
        return self.answer in str(choice["message"]["content"]).lower()


def repeated(count: int, times: int, seed: int) -> list[Question]:
    """Each of `count` pictures `times` times, in any order."""
    found = [Question(seed * 1000 + i) for i in range(count)] * times
    Random(seed).shuffle(found)
    return found


def cache_hits(text: str) -> dict[str, float]:
    """Counts of all engines together, from what /metrics says."""
    found = gauges(text)
    names = ("mm_cache_queries", "mm_cache_hits", "prefix_cache_queries", "prefix_cache_hits")
    return {name: found[f"vllm:{name}_total"] for name in names}


def check_that_repeated_images_are_found(client: httpx2.Client, asking: httpx2.AsyncClient) -> None:
    """Several engines with blocks of BLOCK encode six pictures about as often as one would, however often each is asked
    about: once."""
    seed, at_a_time = int(time.time()), asyncio.Semaphore(4)
    rounds = repeated(6, 1, seed), repeated(6, 4, seed)  # what is asked again was computed before, not meanwhile

    async def ask(question: Question) -> bool:
        async with at_a_time:
            return await question.ask(asking)

    async def ask_all() -> list[bool]:
        async with asking:
            return [is_right for each in rounds for is_right in await asyncio.gather(*map(ask, each))]

    before = cache_hits(client.get("/metrics").text)
    assert all(asyncio.run(ask_all()))
    after = cache_hits(client.get("/metrics").text)
    found = {name: after[name] - before[name] for name in after}
    num_encoded = found["mm_cache_queries"] - found["mm_cache_hits"]
    assert 30 - num_encoded >= 0.9 * (30 - 6), found
    assert found["prefix_cache_hits"] >= 0.9 * 24 / 30 * (found["prefix_cache_queries"] - 30 * BLOCK), found
