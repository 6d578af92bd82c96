"""The routes, and what every request passes on its way to them."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade.server.auth import Keys
from saccade.server.chat import ChatRoute
from saccade.server.completions import CompletionRoute
from saccade.server.exchange import ID_HEADER, HttpExchange
from saccade.server.gate import Gate
from saccade.server.generate import GenerateRoute
from saccade.server.health import HealthRoute
from saccade.server.home import PageRoute
from saccade.server.http_errors import to_http
from saccade.server.openapi import OpenApiRoute
from saccade.server.ops import OpsRoutes
from saccade.server.service import Service
from saccade.server.tokens import TokenRoutes


def build_app(service: Service) -> Starlette:
    settings = service.settings
    routes = _routes(service)
    known = {route.path for route in routes}

    def note(path: str, exchange: HttpExchange) -> None:
        path = path.removeprefix(settings.root_path)
        service.metrics.note_http(path if path in known else "other", exchange.status or 499)

    gate = Middleware(
        Gate,
        keys=Keys(settings.api_key, settings.admin_api_key),
        root_path=settings.root_path,
        max_header_bytes=settings.max_header_bytes,
        on_end=note,
    )
    app = Starlette(
        routes=routes,
        middleware=[*_cors(settings.origins()), gate],
        exception_handlers={HTTPException: _refuse_route},
    )
    app.router.redirect_slashes = False
    return app


def _routes(service: Service) -> list[Route]:
    ops = OpsRoutes(service)
    tokens = TokenRoutes(service)
    return [
        Route("/v1/chat/completions", ChatRoute(service).create, methods=["POST"]),
        Route("/v1/chat/completions/render", tokens.render, methods=["POST"]),
        Route("/v1/completions", CompletionRoute(service).create, methods=["POST"]),
        Route("/generate", GenerateRoute(service).create, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
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
        Route("/server_info", ops.server_info),
        Route("/abort_request", ops.abort, methods=["POST"]),
        Route("/flush_cache", ops.flush_cache, methods=["GET", "POST"]),
        Route("/openapi.json", OpenApiRoute(service).show),
        Route("/", PageRoute().show),
    ]


def _cors(origins: list[str]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client for browsers sends many of its own
            expose_headers=[ID_HEADER.decode()],
        )
    ]


async def _refuse_route(request: Request, error: Exception) -> Response:
    found = to_http(error, HttpExchange.of(request).id)
    response = found.response()
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
