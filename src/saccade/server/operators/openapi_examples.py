"""An example body for each route that takes one; /docs offers them to try."""

from typing import Any

# A red square of 16 x 16 pixels.
PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGklEQVR42mO8IyfHQApgYiARjGoY1TB0NAAAjEsBOPY5fDQAAAAASUVORK5CYII="
)
_ASKED = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What color is this?"},
            {"type": "image_url", "image_url": {"url": PICTURE}},
        ],
    }
]
_SCORED = {"text_1": "What color is the sky?", "text_2": ["The sky is blue.", "Fish swim."]}
_RANKED = {"query": "What color is the sky?", "documents": ["Fish swim.", "The sky is blue."], "top_n": 1}
_SAID: list[dict[str, Any]] = [{"role": "user", "content": "Hello!"}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _ASKED, "max_tokens": 32},
    "/v1/chat/completions/render": {"messages": _SAID},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 32},
    "/v1/messages": {"messages": _SAID, "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": _SAID},
    "/v1/embeddings": {"input": ["A red square.", "A blue circle."]},
    **dict.fromkeys(("/v1/score", "/score"), _SCORED),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RANKED),
    "/generate": {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/abort_request": {"rid": "the-id-of-a-request"},
}
