"""From a body to a job for the engine: read, checked, its media fetched and decoded, its prompts tokenized.

Everything that takes long runs in worker threads, in one go where nothing has to be fetched.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.messages import MediaRef, find_media
from saccade.inputs.placeholders import Prompt
from saccade.server.admission import Place
from saccade.server.exchange import HttpExchange
from saccade.server.http_errors import HttpError, too_late
from saccade.server.protocol import Wire
from saccade.server.reading import check_content_type, ignored_header, read_request
from saccade.server.service import Service
from saccade.server.structure import structure_param
from saccade.wire.grammar import check_grammar
from saccade.wire.sampling_params import SamplingParams

R = TypeVar("R", bound=Wire)

TIMEOUT_HEADER, TIMINGS_HEADER = b"x-request-timeout", b"x-timings"


@dataclass(slots=True)
class RequestJob(Generic[R]):
    """A request on its way. `seconds` holds what each stage took. The two params are what errors call the prompt and
    the structure of the output."""

    request: R
    params: SamplingParams
    model: str
    public_id: str
    prompts: tuple[Prompt, ...] = ()
    deadline: float | None = None
    cache_salt: str | None = None
    priority: int = 0
    wants_timings: bool = False
    ignored: tuple[str, ...] = ()
    prompt_param: str = "prompt"
    structure_param: str = "response_format"
    is_thinking: bool = False  # the prompt ends inside of a reasoning block
    seconds: dict[str, float] = field(default_factory=dict)


class Recipe(ABC, Generic[R]):
    """How a route makes prompts of its requests. All of it runs in worker threads. `is_count`: nothing is run, so that
    prompts may be longer than what can be."""

    request: type[R]
    prompt_param = "prompt"
    is_count = False

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    def params(self, request: R) -> SamplingParams: ...

    @abstractmethod
    def messages(self, request: R) -> list[Any] | None:
        """Messages whose images and videos must be got before the prompts can be made; None where there are none."""

    @abstractmethod
    def prompts(self, request: R, messages: list[Any] | None, allowance: Allowance) -> tuple[Prompt, ...]: ...

    def structure_param(self, request: R) -> str:
        """The field that asks for structure; where none does, tools do."""
        return structure_param(request) or "tools"

    def param(self, param: str | None) -> str | None:
        """What a route's own clients call a field."""
        return param

    def allowance(self, place: Place) -> Allowance:
        longest = self.service.max_model_len - 1
        return Allowance(max_tokens=longest, is_count=self.is_count, hold=place.hold, go_on=place.go_on)

    def settle(self, job: RequestJob[R]) -> None:
        """What can be decided only with the prompts at hand."""


async def take_in(service: Service, exchange: HttpExchange, recipe: Recipe[R]) -> RequestJob[R]:
    """The job of an exchange. Its place is held until the exchange ends."""
    try:
        return await _take_in(service, exchange, recipe)
    except RequestError as error:
        error.param = recipe.param(error.param)
        raise


async def _take_in(service: Service, exchange: HttpExchange, recipe: Recipe[R]) -> RequestJob[R]:
    service.check_open()
    check_content_type(exchange.headers)
    place = exchange.exits.enter_context(service.admission.enter())
    settings = service.settings
    body = await exchange.body(limit=settings.max_body_bytes, timeout_s=settings.body_timeout_s, hold=place.hold)
    received = monotonic()
    place.prepare()
    job, messages = await service.in_thread(_read, exchange, recipe, body, place)
    del body
    if messages is not None:
        await _add_media(recipe, job, messages, place)
    job.seconds["receive"] = received - exchange.arrival
    job.seconds["prepare"] = monotonic() - received
    for stage, seconds in job.seconds.items():
        service.metrics.note_stage(stage, seconds)
    if settings.strict:
        exchange.extra_headers.append(ignored_header(job.ignored))
    place.pass_on()
    return job


def _read(
    exchange: HttpExchange, recipe: Recipe[R], body: bytes, place: Place
) -> tuple[RequestJob[R], list[Any] | None]:
    with place.working():
        begun = monotonic()
        request, ignored = read_request(recipe.request, body)
        job = _new_job(exchange, recipe, request, ignored)
        messages = recipe.messages(request)
        job.seconds["parse"] = monotonic() - begun
        if messages is None:
            _make_prompts(recipe, job, None, place)
        return job, messages


def _new_job(exchange: HttpExchange, recipe: Recipe[R], request: R, ignored: tuple[str, ...]) -> RequestJob[R]:
    service = recipe.service
    model = service.check_model(getattr(request, "model", None))
    params = recipe.params(request)
    structure = "" if params.grammar is None else recipe.structure_param(request)
    if params.grammar is not None:
        check_grammar(params.grammar, param=structure)
    return RequestJob(
        request,
        params,
        model,
        _first(request, ("request_id", "rid")) or exchange.id,
        deadline=_deadline(service, exchange, getattr(request, "timeout", None)),
        cache_salt=getattr(request, "cache_salt", None),
        priority=getattr(request, "priority", None) or 0,
        wants_timings=bool(getattr(request, "timings", None)) or TIMINGS_HEADER in exchange.headers,
        ignored=ignored,
        prompt_param=recipe.prompt_param,
        structure_param=structure,
    )


async def _add_media(recipe: Recipe[R], job: RequestJob[R], messages: list[Any], place: Place) -> None:
    service = recipe.service
    begun = monotonic()
    left = None if job.deadline is None else max(job.deadline - begun, 0.0)
    try:
        async with asyncio.timeout(left):
            resolved = await service.media.resolve(messages, place.hold)
            job.seconds["fetch"] = monotonic() - begun
            await service.in_thread(_work, recipe, job, resolved, place)
    except TimeoutError:
        raise too_late() from None


def _work(recipe: Recipe[R], job: RequestJob[R], messages: list[Any], place: Place) -> None:
    with place.working():
        _make_prompts(recipe, job, messages, place)


def _make_prompts(recipe: Recipe[R], job: RequestJob[R], messages: list[Any] | None, place: Place) -> None:
    begun = monotonic()
    try:
        job.prompts = recipe.prompts(job.request, messages, recipe.allowance(place))
        recipe.settle(job)
    except RecursionError:  # whoever looks into all of a request stops at some depth, if the JSON parser did not
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    decoding = sum(media.decode_s for prompt in job.prompts for media in prompt.media)
    if decoding:
        job.seconds["decode_media"] = decoding
    job.seconds["preprocess"] = monotonic() - begun - decoding


def needs_loading(messages: Sequence[Any]) -> bool:
    """Whether a source must be fetched or is not an image's data URL, which the processor reads itself, in the thread
    that decodes it. What is no message at all is left for the processor to refuse."""
    refs = (
        find_media(part, f"messages[{i}].content[{j}]")
        for i, message in enumerate(messages)
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
    )
    return any(ref is not None and ref.source is not None and not _is_inline(ref) for ref in refs)


def _is_inline(ref: MediaRef) -> bool:
    return ref.kind == "image" and isinstance(ref.source, str) and ref.source[:5].lower() == "data:"


def _deadline(service: Service, exchange: HttpExchange, asked: float | None) -> float | None:
    """A time of the monotonic clock: what the request asks for, within what the server allows."""
    if asked is None and (header := exchange.headers.get(TIMEOUT_HEADER)) is not None:
        asked = _seconds(header)
    limits = [value for value in (asked, service.settings.request_timeout_s) if value]
    return exchange.arrival + min(limits) if limits else None


def _seconds(header: bytes) -> float:
    try:
        value = float(header)
    except ValueError:
        value = 0.0
    if not 0 < value <= 10**6:
        raise HttpError(400, "the header X-Request-Timeout must be a number of seconds", code="invalid_value")
    return value


def _first(request: Wire, names: Sequence[str]) -> str | None:
    found = [value for name in names if (value := getattr(request, name, None)) is not None]
    if len(set(found)) > 1:
        raise RequestError(f"{' and '.join(names)} differ; send one of them", param=names[1])
    return found[0] if found else None
