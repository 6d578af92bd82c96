"""Questions about pictures that the bundled model answers right, as many different pictures as a test wants."""

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
BUNDLED: dict[str, dict[str, Any]] = {
    "engine": {"device": "cpu", "block_size": 16, "kv_cache_tokens": 8192, "encoder_cache_tokens": 2048},
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
