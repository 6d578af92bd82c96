"""The requests of a simulation: each asks a new question about one image, and some images are popular."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from saccade.bench.scale.scale_replica import IMAGE_ROWS
from saccade.bench.scale.scale_settings import ScaleSettings
from saccade.cache.prefix import Span
from saccade.inputs.placeholders import Media, Prompt
from saccade.inputs.plans import MediaPlan
from saccade.inputs.positions import FeatureRows, mrope_positions, rope_delta
from saccade.routing import affinity_key, request_tokens
from saccade.scheduling.request import Request
from saccade.scheduling.request_checks import spans_of
from saccade.wire.sampling_params import SamplingParams

HEAD_TOKENS = 14  # of the chat template, before the image
TEXT_TOKENS = (12, 128)  # fewest and most after the image, as in sglang#15320
IMAGE_PLAN = MediaPlan((576, 576), (1, 36, 36), 1296, IMAGE_ROWS)
_NO_PIXELS = np.zeros((1, 1, 3), np.uint8)
_NO_DIGEST = bytes(32)
_IMAGES_KEPT = 2**16


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """The part that all requests about an image share."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    affinity_key: bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    time: float
    request: Request
    affinity_key: bytes
    tokens: int
    router: int


def arrivals(settings: ScaleSettings, num_replicas: int) -> Iterator[Arrival]:
    """Yields requests in order of time. Image 0 is the hot one."""
    random = np.random.default_rng((settings.seed, num_replicas))
    num_requests = num_replicas * settings.requests_per_replica
    times = np.cumsum(random.exponential(1 / (settings.request_rate * num_replicas), num_requests))
    images = _images(settings, num_replicas, num_requests, random)
    lengths = random.integers(TEXT_TOKENS[0], TEXT_TOKENS[1] + 1, num_requests)
    routers = random.integers(0, settings.routers, num_requests)
    answers = random.integers(1, 2 * settings.output_tokens, num_requests)
    for at in range(num_requests):
        image = image_prompt(int(images[at]))
        text = random.integers(0, 150_000, lengths[at]).tolist()
        params = _params(int(answers[at]))
        request = Request(
            id=str(at),
            prompt_ids=(*image.token_ids, *text),
            params=params,
            spans=image.spans,
            arrival=float(times[at]),
        )
        tokens = request_tokens(len(request.prompt_ids), params)
        yield Arrival(request.arrival, request, image.affinity_key, tokens, int(routers[at]))


def _images(
    settings: ScaleSettings, num_replicas: int, num_requests: int, random: np.random.Generator
) -> npt.NDArray[np.int64]:
    weights = np.arange(1, num_replicas * settings.images_per_replica + 1) ** -float(settings.zipf)
    shares = np.cumsum(weights) / weights.sum()
    liked = 1 + np.minimum(np.searchsorted(shares, random.random(num_requests)), len(shares) - 1)
    return np.where(random.random(num_requests) < settings.hot_share, 0, liked)


@lru_cache(4096)
def _params(num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)


@lru_cache(_IMAGES_KEPT)
def image_prompt(image: int) -> ImagePrompt:
    shared, spans, token_ids = _shared_parts()
    digest = blake2b(image.to_bytes(8, "little"), digest_size=32).digest()
    prompt = replace(shared, media=(replace(shared.media[0], digest=digest),))
    spans = tuple(replace(span, digest=digest) for span in spans)
    return ImagePrompt(token_ids, spans, affinity_key(prompt))


@lru_cache(1)
def _shared_parts() -> tuple[Prompt, tuple[Span, ...], tuple[int, ...]]:
    """Template and image without a digest, its spans and its tokens; positions are the same for all images."""
    rows = FeatureRows(HEAD_TOKENS, (1, 18, 18))
    positions = mrope_positions(HEAD_TOKENS + IMAGE_ROWS, [rows])
    prompt = Prompt(
        token_ids=np.zeros(HEAD_TOKENS + IMAGE_ROWS, dtype=np.int32),
        positions_3T=positions,
        rope_delta=rope_delta(positions),
        media=(Media("image", _NO_PIXELS, IMAGE_PLAN, _NO_DIGEST),),
        spans=(rows,),
    )
    return prompt, spans_of(prompt, is_whole=False), tuple(prompt.token_ids.tolist())
