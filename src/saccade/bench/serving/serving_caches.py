"""Finds out from the server's counters whether its caches already had the content of a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf

from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.workload import WorkloadPrompt
from saccade.bench.serving.serving_target import Reading

PREFIXES = ("saccade:", "vllm:", "sglang:", "vllm_", "sglang_")
TOKEN_COUNTERS = (("prefix_cache_hits", "prefix_cache_queries"), ("cached_tokens", "prompt_tokens"))
IMAGE_COUNTERS = (("mm_cache_hits", "mm_cache_queries"),)
UNKNOWN_TEMPLATE_TOKENS = 64  # more than chat templates without a system prompt add
CHANCE_TOKENS = 2  # prompts of random words may share their first tokens by chance
SHOWN_SHARE = 0.01  # less is noise, such as images looked up again after a preemption


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Cache lookups and hits; None if the server does not report them. `own` is the most hits that the run itself can
    explain: the chat template, and images that it repeats."""

    tokens: float | None = None
    hit_tokens: float = 0.0
    own_tokens: float = 0.0
    images: float | None = None
    hit_images: float = 0.0
    own_images: float = 0.0

    def __add__(self, other: "CacheUse") -> "CacheUse":
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return CacheUse(*(None if a is None or b is None else a + b for a, b in pairs))  # type: ignore[arg-type]

    def as_data(self) -> dict[str, float | None]:
        """Replaces infinity, which JSON lacks, by None."""
        return {name: None if value == inf else value for name, value in asdict(self).items()}

    @property
    def summary(self) -> str:
        parts = []
        if self.tokens:
            parts.append(f"{self.hit_tokens / self.tokens:.1%} of {self.tokens:.0f} prompt tokens")
        if self.images:
            parts.append(f"{self.hit_images / self.images:.1%} of {self.images:.0f} images")
        if parts:
            return f"found in the server's caches: {', '.join(parts)}"
        is_told = self.tokens is not None or self.images is not None
        return "" if is_told else "the server does not count cache hits, so warm caches cannot be ruled out"

    def warnings(self, remedy: str) -> list[str]:
        found = (
            ("prompt tokens", "prefix cache", self.tokens, self.hit_tokens, self.own_tokens),
            ("images", "image cache", self.images, self.hit_images, self.own_images),
        )
        lines = []
        for what, cache, asked, hits, own in found:
            if not asked or hits - own < max(SHOWN_SHARE * asked, 1):
                continue
            lines.append(
                f"WARM CACHE: {hits / asked:.1%} of the {what} ({hits:.0f} of {asked:.0f}) came from the {cache}; "
                f"the run's own content accounts for {min(own / asked, 1):.1%} at most. {remedy}"
            )
        return lines


def cache_use(
    before: Reading,
    after: Reading,
    outcomes: Sequence[Outcome],
    prompts: Sequence[WorkloadPrompt],
    template: int | None,
) -> CacheUse:
    """`template` is the number of tokens that the chat template adds to a prompt; None if unknown."""
    tokens = _counted(before, after, TOKEN_COUNTERS) or _tokens_of_replies(outcomes)
    images = _counted(before, after, IMAGE_COUNTERS)
    hit_tokens, asked_tokens = tokens or (0.0, None)
    hit_images, asked_images = images or (0.0, None)
    units = [unit for prompt in prompts for unit in prompt.images]
    own_tokens = _own_tokens(outcomes, prompts, template)
    return CacheUse(asked_tokens, hit_tokens, own_tokens, asked_images, hit_images, len(units) - len(set(units)))


def _own_tokens(outcomes: Sequence[Outcome], prompts: Sequence[WorkloadPrompt], template: int | None) -> float:
    """The most prompt tokens that may hit because of the run itself. Requests that start with the same image may share
    all their images."""
    own = len(prompts) * ((_likely_template(outcomes, prompts) if template is None else template) + CHANCE_TOKENS)
    first_images = Counter(prompt.images[0] for prompt in prompts if prompt.images)
    total = float(own)
    for outcome in outcomes:
        images = prompts[outcome.index].images
        if images and first_images[images[0]] > 1:
            total += inf if outcome.image_tokens is None else outcome.image_tokens
    return total


def _likely_template(outcomes: Sequence[Outcome], prompts: Sequence[WorkloadPrompt]) -> int:
    """An upper bound: the fewest tokens that any prompt has besides its images and one token per word."""
    found = [UNKNOWN_TEMPLATE_TOKENS]
    for outcome in outcomes:
        prompt = prompts[outcome.index]
        if outcome.prompt_tokens is None or prompt.messages or (prompt.sizes and outcome.image_tokens is None):
            continue
        text = prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["text"]
        found.append(max(outcome.prompt_tokens - (outcome.image_tokens or 0) - len(text.split()), 0))
    return min(found)


def _counted(before: Reading, after: Reading, names: Sequence[tuple[str, str]]) -> tuple[float, float] | None:
    """How much the counters of hits and lookups grew, for the first pair of counters that the server has."""
    for prefix in PREFIXES:
        for hits, asked in names:
            grown = [_growth(before.metrics, after.metrics, prefix + name) for name in (hits, asked)]
            if grown[0] is not None and grown[1] is not None:
                return grown[0], grown[1]
    return None


def _growth(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """The growth of a counter over all labels; None if the server lacks it, or restarted in between."""
    keys = [key for key in after if key.partition("{")[0] in (name, f"{name}_total")]
    grown = sum(after[key] - before.get(key, 0.0) for key in keys)
    return grown if keys and grown >= 0 else None


def _tokens_of_replies(outcomes: Sequence[Outcome]) -> tuple[float, float] | None:
    told = [outcome for outcome in outcomes if outcome.cached_tokens is not None and outcome.prompt_tokens]
    if not told:
        return None
    cached, asked = (sum(getattr(each, name) or 0 for each in told) for name in ("cached_tokens", "prompt_tokens"))
    return float(cached), float(asked)
