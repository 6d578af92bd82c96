"""From a body to a job for the engine: parse, check, fetch and decode media, tokenize. The event loop itself parses
bodies that are short without their images, and prepares short texts. Slow work runs in worker threads. Parsing has its
own, so that a request's deadline is known however many images are being decoded. So do media: text never waits behind
them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.media.media_loader import Hold
from saccade.inputs.placeholders import Prompt
from saccade.inputs.text.chat_messages import MediaRef, find_sources
from saccade.server.http.body_scan import Body
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import joined, without_urls
from saccade.server.http_errors import HttpError, too_late
from saccade.server.requests.protocol import Wire
from saccade.server.requests.reading import ignored_header, read_request
from saccade.server.requests.structure import structure_param
from saccade.server.service import Service
from saccade.server.sharing.admission import Place
from saccade.wire.grammar import check_grammar
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Terms, Turn

R = TypeVar("R", bound=Wire)

# Without images. The loop takes 0.5 ms for an ordinary text of this size, and 13 ms for the worst that we found.
SHORT_BYTES = 8 * 1024
MAX_LOOP_BYTES = 512 * 1024  # with its images: a scan of 300 KB takes 0.1 ms
TIMEOUT_HEADER, TIMINGS_HEADER = b"x-request-timeout", b"x-timings"


@dataclass(slots=True)
class RequestJob(Generic[R]):
    """`messages` are those that may have media, until the prompts are made from them. `seconds` has the duration of
    each stage. The two params are the names of the prompt and of the field that asks for structure, as errors use
    them."""

    request: R
    params: SamplingParams
    model: str
    public_id: str
    terms: Terms
    prompts: tuple[Prompt, ...] = ()
    wants_timings: bool = False
    ignored: tuple[str, ...] = ()
    prompt_param: str = "prompt"
    structure_param: str = "response_format"
    messages: list[Any] = field(default_factory=list)
    has_media: bool = False  # loaded or not
    needs_loading: bool = False
    is_thinking: bool = False  # the prompt ends inside a reasoning block
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def caller(self) -> str:
        return self.terms.turn.tenant


@dataclass(frozen=True, slots=True)
class ReadRequest(Generic[R]):
    """A checked request, the names of its ignored fields, and how long reading it took."""

    request: R
    ignored: tuple[str, ...]
    seconds: float


class PromptRoute(ABC, Generic[R]):
    """A route whose requests become prompts. With `is_count` nothing is run, so prompts may exceed the model's length.
    With `has_answer` a prompt must leave room for a token."""

    kind: type[R]
    prompt_param = "prompt"
    is_count = False
    has_answer = True

    def __init__(self, service: Service) -> None:
        self.service = service

    @property
    def may_continue(self) -> bool:
        """Whether a request may continue a stored conversation, so that a short body can stand for a long prompt."""
        return False

    @abstractmethod
    async def reply(self, exchange: HttpExchange, job: RequestJob[R]) -> Response: ...

    def params(self, request: R) -> SamplingParams:
        """The sampling parameters; also checks the request."""
        return SamplingParams()

    def messages(self, request: R) -> list[Any]:
        """The messages that may have media."""
        return []

    async def load(self, messages: list[Any], hold: Hold) -> list[Any]:
        """The messages with their media fetched."""
        loaded: list[Any] = await self.service.media.resolve(messages, hold)
        return loaded

    def is_simple(self, request: R) -> bool:
        """Whether it has one prompt and asks for no structure, so that a short body is little work except for media."""
        return False

    @abstractmethod
    def prompts(self, request: R, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]: ...

    def structure_param(self, request: R) -> str:
        """The field that asks for structured output; `tools` if no other does."""
        return structure_param(request) or "tools"

    def read(self, exchange: HttpExchange, body: Body) -> tuple[R, tuple[str, ...]]:
        """The checked request, and the names of its ignored fields."""
        return read_request(self.kind, body, self.service.settings.max_body_values)

    def rename(self, error: RequestError, request: R) -> None:
        """Changes the error to the name that this route's clients use for the field."""

    def settle(self, job: RequestJob[R]) -> None:
        """Decisions that need the prompts."""

    async def create(self, request: Request) -> Response:
        exchange = HttpExchange.of(request)
        job = await self._take_in(exchange)
        return await self.reply(exchange, job)

    @contextmanager
    def _naming(self, request: R) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self.rename(error, request)
            raise

    async def _take_in(self, exchange: HttpExchange) -> RequestJob[R]:
        """The job of an exchange. Its place is kept until the exchange ends."""
        service, settings = self.service, self.service.settings
        service.check_open()
        assert exchange.caller is not None, "its key was checked"
        place = exchange.exits.enter_context(service.admission.enter(exchange.caller))
        limit, timeout_s = settings.max_body_bytes, settings.body_timeout_s
        parts = await exchange.body(limit=limit, timeout_s=timeout_s, hold=place.hold, turns=service.read_turns)
        received = monotonic()
        place.prepare()
        job = await self._make_job(exchange, parts, place)
        job.seconds["receive"] = received - exchange.arrival
        job.seconds["prepare"] = monotonic() - received
        for stage, seconds in job.seconds.items():
            service.metrics.note_stage(stage, seconds)
        if settings.strict:
            exchange.extra_headers.append(ignored_header(job.ignored))
        place.pass_on()
        return job

    async def _make_job(self, exchange: HttpExchange, parts: list[Body], place: Place) -> RequestJob[R]:
        """Empties `parts`, so that the body can be freed early."""
        service, caller = self.service, place.caller
        if self.may_continue or not _is_short(parts, place.num_bytes):
            job = await service.workers.in_parser(caller, self._take_long, exchange, parts, place)
        else:
            taken = await service.workers.in_loop(caller, self._take_short, exchange, parts, place)
            if isinstance(taken, ReadRequest):
                taken = await service.workers.in_parser(caller, self._begin, exchange, taken, place)
            job = taken
        if not job.prompts:
            with self._naming(job.request):
                await self._prepare(job, place)
        return job

    def _take_long(self, exchange: HttpExchange, parts: list[Body], place: Place) -> RequestJob[R]:
        with place.working():
            read = self._read(exchange, parts)
        return self._begin(exchange, read, place)

    def _take_short(self, exchange: HttpExchange, parts: list[Body], place: Place) -> RequestJob[R] | ReadRequest[R]:
        """The job, with its prompt if it has no media; or the request as read, if the rest is work for a thread."""
        read = self._read(exchange, parts)
        if not self.is_simple(read.request):
            return read
        job = self._begin(exchange, read, place)
        if not job.has_media:
            if job.terms.deadline is not None and monotonic() > job.terms.deadline:
                raise too_late()
            with self._naming(read.request):
                self._make_prompts(job, place)
        return job

    def _read(self, exchange: HttpExchange, parts: list[Body]) -> ReadRequest[R]:
        begun = monotonic()
        request, ignored = self.read(exchange, joined(parts))
        return ReadRequest(request, ignored, monotonic() - begun)

    def _begin(self, exchange: HttpExchange, read: ReadRequest[R], place: Place) -> RequestJob[R]:
        begun = monotonic()
        with place.working(), self._naming(read.request):
            job = self._new_job(exchange, read.request, read.ignored)
            job.messages = self.messages(read.request)
            refs = [ref for _, _, ref in find_sources(job.messages)]
            job.has_media, job.needs_loading = bool(refs), not all(map(_is_inline, refs))
        job.seconds["parse"] = read.seconds + monotonic() - begun
        return job

    def _new_job(self, exchange: HttpExchange, request: R, ignored: tuple[str, ...]) -> RequestJob[R]:
        model = self.service.check_model(getattr(request, "model", None))
        wants_timings = bool(getattr(request, "timings", None)) or TIMINGS_HEADER in exchange.headers
        params = self.params(request)
        if wants_timings:
            params = replace(params, reports_passes=True)
        structure = "" if params.grammar is None else self.structure_param(request)
        if params.grammar is not None:
            check_grammar(params.grammar, param=structure)
        return RequestJob(
            request,
            params,
            model,
            _given_id(request) or exchange.id,
            Terms(
                _turn(exchange, getattr(request, "priority", None) or 0),
                _deadline(self.service, exchange, getattr(request, "timeout", None)),
                getattr(request, "cache_salt", None),
            ),
            wants_timings=wants_timings,
            ignored=ignored,
            prompt_param=self.prompt_param,
            structure_param=structure,
        )

    async def _prepare(self, job: RequestJob[R], place: Place) -> None:
        """Fetches and decodes media and makes the prompts, within the request's deadline."""
        begun = monotonic()
        left = None if job.terms.deadline is None else max(job.terms.deadline - begun, 0.0)
        if job.has_media:
            place.prepare_media()
        try:
            async with asyncio.timeout(left):
                if job.needs_loading:
                    job.messages = await self.load(job.messages, place.hold)
                    job.seconds["fetch"] = monotonic() - begun
                in_thread = self.service.workers.in_media_thread if job.has_media else self.service.workers.in_thread
                await in_thread(place.caller, self._make_prompts, job, place)
        except TimeoutError:
            raise too_late() from None

    def _make_prompts(self, job: RequestJob[R], place: Place) -> None:
        begun = monotonic()
        longest = self.service.max_model_len - self.has_answer
        allowance = Allowance(
            max_tokens=longest,
            is_count=self.is_count,
            has_answer=self.has_answer,
            hold=place.hold,
            check_cancelled=place.check_cancelled,
            waiting=partial(self.service.workers.waiting, place.caller),
            submit=self.service.workers.submit_parallel,
            caller=place.caller,
        )
        messages, job.messages = job.messages, []
        try:
            with place.working():
                job.prompts = self.prompts(job.request, messages, allowance)
                self.settle(job)
        except RecursionError:  # the JSON parser allows deeper nesting than recursive checks do
            raise RequestError("the body is nested too deeply", code="invalid_json") from None
        decoding = sum(media.decode_s for prompt in job.prompts for media in prompt.media)
        if decoding:
            job.seconds["decode_media"] = decoding
        job.seconds["preprocess"] = monotonic() - begun - decoding


def _is_short(parts: list[Body], num_bytes: int) -> bool:
    """Whether a body is short without its images. Joins its parts in place, unless it is too long to be scanned."""
    if num_bytes > MAX_LOOP_BYTES:
        return False
    body = joined(parts)
    parts.append(body)
    return len(without_urls(body)) <= SHORT_BYTES


def _is_inline(ref: MediaRef) -> bool:
    """Whether it is an image's data URL, which the processor reads in the thread that decodes it. All other media are
    loaded first."""
    return ref.kind == "image" and isinstance(ref.source, str) and ref.source[:5].lower() == "data:"


def _deadline(service: Service, exchange: HttpExchange, asked: float | None) -> float | None:
    """The request's deadline on the monotonic clock, within the server's limit."""
    header = exchange.headers.get(TIMEOUT_HEADER)
    if asked is None and header is not None:
        try:
            asked = float(header)
        except ValueError:
            asked = 0.0
        if not 0 < asked <= 10**6:
            raise HttpError(400, "the header X-Request-Timeout must be a number of seconds", code="invalid_value")
    limits = [value for value in (asked, service.settings.request_timeout_s) if value]
    return exchange.arrival + min(limits) if limits else None


def _turn(exchange: HttpExchange, priority: int) -> Turn:
    caller = exchange.caller
    assert caller is not None, "its key was checked"
    caller.check_priority(priority)
    return Turn(priority, caller.name, caller.limits.weight)


def _given_id(request: Wire) -> str | None:
    first, second = getattr(request, "request_id", None), getattr(request, "rid", None)
    if first and second and first != second:
        raise RequestError("request_id and rid differ; send one of them", param="rid")
    return first or second
