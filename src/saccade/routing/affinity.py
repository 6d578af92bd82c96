"""What a request shares with others, and how much work it is."""

from hashlib import blake2b

import numpy as np

from saccade.inputs.placeholders import Prompt
from saccade.wire.sampling_params import SamplingParams

KEY_BYTES = 16
HEAD_TOKENS = 128  # a KV block on a GPU: the least that two prompts must share for the prefix cache to help
MOST_OUTPUT_TOKENS = 256  # that a request counts with: most ask for far more than they take


def affinity_key(prompt: Prompt, cache_salt: str | None = None) -> bytes:
    """Requests with equal keys are best sent to one replica. The first image or video decides, where there is one:
    later turns of a conversation begin with the same one. Caches of different salts share nothing."""
    hasher = blake2b(digest_size=KEY_BYTES, person=b"saccade.route")
    salt = None if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
    hasher.update(b"\0" if salt is None else b"\1" + len(salt).to_bytes(8, "little") + salt)
    if prompt.media:
        hasher.update(b"media" + prompt.media[0].digest)
    else:
        hasher.update(b"text" + np.ascontiguousarray(prompt.token_ids[:HEAD_TOKENS], dtype="<i4").tobytes())
    return hasher.digest()


def room_of(step_tokens: int) -> int:
    """A load at which a replica is not busy yet: a step that runs, and one that waits for it."""
    return 2 * step_tokens


def request_tokens(num_prompt_tokens: int, params: SamplingParams) -> int:
    """The tokens a request adds to its replica's load: its prompt's, and those it may be answered with."""
    asked = MOST_OUTPUT_TOKENS if params.max_tokens is None else min(params.max_tokens, MOST_OUTPUT_TOKENS)
    return num_prompt_tokens + params.n * asked
