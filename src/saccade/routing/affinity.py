"""What a request shares with others, and how much work it is."""

from hashlib import blake2b

import numpy as np

from saccade.inputs.placeholders import Prompt
from saccade.wire.sampling_params import SamplingParams

KEY_BYTES = 16
HEAD_TOKENS = 128  # a KV block on a GPU: the least that two prompts must share for the prefix cache to help
MAX_OUTPUT_TOKENS = 256  # counted per output: most requests ask for far more than they use


def affinity_key(prompt: Prompt, cache_salt: str | None = None) -> bytes:
    """Requests with equal keys are best sent to one replica. The first image or video decides if there is one, because
    later turns of a conversation start with the same one. Caches with different salts share nothing."""
    hasher = blake2b(digest_size=KEY_BYTES, person=b"saccade.route")
    salt = None if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
    hasher.update(b"\0" if salt is None else b"\1" + len(salt).to_bytes(8, "little") + salt)
    if prompt.media:
        hasher.update(b"media" + prompt.media[0].digest)
    else:
        hasher.update(b"text" + np.ascontiguousarray(prompt.token_ids[:HEAD_TOKENS], dtype="<i4").tobytes())
    return hasher.digest()


def room_of(step_tokens: int) -> int:
    """The load up to which a replica does not count as busy: one step running and one waiting."""
    return 2 * step_tokens


def request_tokens(num_prompt_tokens: int, params: SamplingParams) -> int:
    """The tokens that a request adds to its replica's load: its prompt, and an estimate of its outputs."""
    asked = MAX_OUTPUT_TOKENS if params.max_tokens is None else min(params.max_tokens, MAX_OUTPUT_TOKENS)
    return num_prompt_tokens + params.n * asked
