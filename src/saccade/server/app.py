"""The routes, and the middleware in front of them."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.errors import contained
from saccade.server.http.auth import Keys
from saccade.server.http.exchange import ID_HEADER, SCOPE_KEY, HttpExchange
from saccade.server.http.origins import OriginRules
from saccade.server.http_errors import ClientGoneError, HttpError, explain, no_method, no_route
from saccade.server.operators.health import HealthRoute
from saccade.server.operators.ops import OpsRoutes
from saccade.server.operators.watching import WatchRoutes
from saccade.server.page import page_files
from saccade.server.routes.chat import ChatRoute
from saccade.server.routes.completions import CompletionRoute
from saccade.server.routes.embeddings import EmbeddingRoute
from saccade.server.routes.generate import GenerateRoute
from saccade.server.routes.messages_api import PATH as MESSAGES_PATH
from saccade.server.routes.messages_api import CountTokensRoute, MessagesRoute, is_messages_path, use_messages_errors
from saccade.server.routes.ranking import RerankRoute, ScoreRoute
from saccade.server.routes.responses_api import InputTokensRoute, ResponsesRoute
from saccade.server.routes.tokens import DetokenizeRoute, RenderRoute, TokenizeRoute
from saccade.server.service import Service

SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # Jina's, Cohere's, vLLM's
_log = logging.getLogger(__name__)


def build_app(service: Service) -> Starlette:
    settings, routes = service.settings, _routes(service)
    known = frozenset(route.path for route in routes)
    admission = Middleware(AdmissionMiddleware, service=service, known=known)
    log = [Middleware(AccessLog)] if settings.access_log else []
    app = Starlette(
        routes=routes,
        middleware=[*log, *_cors(settings.origins()), admission],
        exception_handlers={HTTPException: _route_refuser(sorted(known))},
    )
    app.router.redirect_slashes = False
    return app


class AccessLog:
    """A line for each request when it ends. This comes before everything else: CORS answers preflight requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent: int | None = None

        async def note(message: Message) -> None:
            nonlocal sent
            sent = message.get("status", sent)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            exchange: HttpExchange | None = scope.get(SCOPE_KEY)
            status, request_id = (sent, "-") if exchange is None else (exchange.status, exchange.id)
            caller = ":".join(map(str, scope.get("client") or ("-",)))
            # Without the query: some clients put their key there.
            _log.info('%s - "%s %s" %d %s', caller, scope["method"], quote(scope["path"]), status or 499, request_id)


class AdmissionMiddleware:
    """Gives every request an id, checks its key, origin and header size, and turns errors into replies in one place.
    Paths come from the scope, so no header influences who may call what."""

    def __init__(self, app: ASGIApp, *, service: Service, known: frozenset[str]) -> None:
        """Replies are counted by path for those that are `known`."""
        self._app, self._service, self._known = app, service, known
        keys, self._settings = service.callers.keys, service.settings
        self._keys = Keys(keys, self._settings.admin_api_key)
        self._origins = OriginRules(self._settings, has_keys=bool(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        exchange, path = HttpExchange(scope, receive, send), scope["path"].removeprefix(self._settings.root_path)
        try:
            async with exchange:
                try:
                    if is_messages_path(path):
                        use_messages_errors(exchange)
                    self._check(path, scope, exchange)
                    with contained():
                        await self._app(scope, exchange.receive, exchange.send)
                except Exception as error:
                    await self._fail(error, scope, exchange)
        except ClientGoneError:
            exchange.status = 499
        finally:
            self._service.metrics.note_http(path if path in self._known else "other", exchange.status or 499)

    def _check(self, path: str, scope: Scope, exchange: HttpExchange) -> None:
        key_name = self._keys.check(path, exchange.headers)
        self._origins.check(scope["method"], path, exchange.headers)
        exchange.caller = self._service.callers.find(key_name, (scope.get("client") or ("",))[0])
        size, limit = sum(len(name) + len(value) for name, value in scope["headers"]), self._settings.max_header_bytes
        if size > limit:
            text = f"the headers have {size} bytes; the limit is {limit} (--max-header-bytes)"
            raise HttpError(431, text, code="headers_too_large")

    async def _fail(self, error: Exception, scope: Scope, exchange: HttpExchange) -> None:
        if isinstance(error, ClientGoneError):
            raise error
        found = explain(error, exchange.id)
        if exchange.status is not None:  # too late for an error reply: close the connection
            raise error
        await found.response(exchange.envelope(found))(scope, exchange.receive, exchange.send)


def _routes(service: Service) -> list[Route]:
    ops, watch = OpsRoutes(service), WatchRoutes(service)
    return [
        Route("/v1/chat/completions", ChatRoute(service).create, methods=["POST"]),
        Route("/v1/chat/completions/render", RenderRoute(service).create, methods=["POST"]),
        Route("/v1/completions", CompletionRoute(service).create, methods=["POST"]),
        Route("/v1/responses", ResponsesRoute(service).create, methods=["POST"]),
        Route("/v1/responses/input_tokens", InputTokensRoute(service).create, methods=["POST"]),
        Route(MESSAGES_PATH, MessagesRoute(service).create, methods=["POST"]),
        Route(f"{MESSAGES_PATH}/count_tokens", CountTokensRoute(service).create, methods=["POST"]),
        Route("/v1/embeddings", EmbeddingRoute(service).create, methods=["POST"]),
        *(Route(path, ScoreRoute(service).create, methods=["POST"]) for path in SCORE_PATHS),
        *(Route(path, RerankRoute(service).create, methods=["POST"]) for path in RERANK_PATHS),
        Route("/generate", GenerateRoute(service).create, methods=["POST"]),
        Route("/tokenize", TokenizeRoute(service).create, methods=["POST"]),
        Route("/detokenize", DetokenizeRoute(service).create, methods=["POST"]),
        Route("/v1/models", ops.models),
        Route("/v1/models/{name:path}", ops.model),
        Route("/health", ops.health),
        Route("/health_generate", HealthRoute(service).generate),
        Route("/ready", ops.ready),
        Route("/ping", ops.health, methods=["GET", "POST"]),
        Route("/load", ops.load),
        Route("/metrics", ops.metrics),
        Route("/version", ops.version),
        Route("/graphs", ops.graphs),
        Route("/live", ops.live),
        Route("/server_info", ops.server_info),
        Route("/abort_request", ops.abort, methods=["POST"]),
        Route("/flush_cache", ops.flush_cache, methods=["GET", "POST"]),
        Route("/trace", watch.trace),
        Route("/start_profile", watch.start_profile, methods=["POST"]),
        Route("/stop_profile", watch.stop_profile, methods=["POST"]),
        Route("/openapi.json", ops.openapi),
        Route("/docs", page_files.docs),
        Route("/", page_files.index),
        Route("/page/{name}", page_files.page_file),
    ]


def _cors(origins: list[str]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's browser client sends many custom ones
            expose_headers=[ID_HEADER.decode()],
        )
    ]


def _route_refuser(known: Sequence[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler of 404 and 405 errors; its replies list the routes or methods that exist."""

    async def refuse(request: Request, error: Exception) -> Response:
        exchange = HttpExchange.of(request)
        headers = (error.headers if isinstance(error, HTTPException) else None) or {}
        allowed = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        path = request.scope["path"]
        found = no_method(request.method, path, allowed) if allowed else no_route(path, known)
        response = found.response(exchange.envelope(found))
        if allowed:
            response.headers["allow"] = allowed
        return response

    return refuse
