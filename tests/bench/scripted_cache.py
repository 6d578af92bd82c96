"""A scripted server with caches that it counts, as vLLM, SGLang or Saccade do."""

from typing import Any

from tests.bench.scripted import Asked, Reply, as_json, plain, stream, stream_of

TEMPLATE_TOKENS, IMAGE_TOKENS = 12, 20
COUNTERS = {
    "vllm": """# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0"}} {tokens}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {hit_tokens}
# TYPE vllm:mm_cache_queries counter
vllm:mm_cache_queries_total{{engine="0"}} {images}
# TYPE vllm:mm_cache_hits counter
vllm:mm_cache_hits_total{{engine="0"}} {hit_images}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="{block_size}",engine="0"}} 1
""",
    "sglang": """# TYPE sglang:prompt_tokens counter
sglang:prompt_tokens_total {tokens}
# TYPE sglang:cached_tokens counter
sglang:cached_tokens_total{{cache_source="device"}} {hit_tokens}
""",
    "": "",
}


class CachingServer:
    """A token a word. Every request with the same text and images as an earlier one is found in the caches but for its
    last token, every other one but the first finds the chat template."""

    def __init__(
        self,
        name: str,
        turns: list[str] | None = None,
        *,
        counters: str = "vllm",
        block_size: int = 16,
        tells_cached: bool = False,
        image_tokens: int = IMAGE_TOKENS,
    ) -> None:
        self.name, self.turns, self.counters = name, turns, COUNTERS[counters]
        self.block_size, self.tells_cached, self.image_tokens = block_size, tells_cached, image_tokens
        self.is_dead = False
        self.counts = dict.fromkeys(("tokens", "hit_tokens", "images", "hit_images"), 0)
        self.seen: set[str] = set()
        self.contents: list[str] = []

    async def __call__(self, asked: Asked) -> Reply:
        if asked.path == "/v1/chat/completions":
            async for data in self.chat(asked.json):
                yield data
        elif asked.path == "/metrics":
            yield plain(200, self.counters.format(block_size=self.block_size, **self.counts).encode(), "text/plain")
        elif asked.path == "/v1/models":
            yield as_json({"data": [{"id": f"{self.name}-model", "owned_by": self.name}]})
        elif asked.path == "/flush_cache":
            self.seen.clear()
            yield as_json({})
        elif asked.path == "/tokenize":
            body = asked.json
            words = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
            yield as_json({"count": len(words.split()) + TEMPLATE_TOKENS * ("messages" in body)})
        else:
            yield as_json({"error": {"message": "no such route"}}, 404)

    async def chat(self, body: Any) -> Reply:
        if self.is_dead:
            yield as_json({"error": {"message": "gone", "code": "engine_dead"}}, 500)
            return
        if self.turns is not None:
            self.turns.append(self.name)
        parts = body["messages"][0]["content"]
        self.contents.append(str(parts))
        tokens, cached = self._look_up(parts if isinstance(parts, list) else [{"type": "text", "text": parts}])
        events = stream_of(*["a"] * body["max_completion_tokens"], prompt=tokens)
        details = {"cached_tokens": cached} if self.tells_cached else {}
        for event in events:
            if isinstance(event, dict) and event.get("usage"):
                event["usage"]["prompt_tokens_details"] = details
        async for data in stream(events):
            yield data

    def _look_up(self, parts: list[dict[str, Any]]) -> tuple[int, int]:
        images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        text = parts[-1]["text"]
        tokens = TEMPLATE_TOKENS + len(images) * self.image_tokens + len(text.split())
        hits = TEMPLATE_TOKENS if self.seen else 0
        if str(parts) in self.seen:
            hits = tokens - 1
        hit_images = sum(image in self.seen for image in images)
        self.seen |= {str(parts), *images}
        for name, value in (("tokens", tokens), ("hit_tokens", hits), ("images", len(images))):
            self.counts[name] += value
        self.counts["hit_images"] += hit_images
        return tokens, hits
