"""Operators' routes: model, health, metrics."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from saccade import __version__, bundled
from saccade.client.served import EngineReport
from saccade.errors import RequestError, SaccadeError
from saccade.inputs.processor import Processor
from saccade.server.figures.metrics import Facts
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import json_reply
from saccade.server.http_errors import HttpError, engine_dead, starting
from saccade.server.operators.openapi import build_document
from saccade.server.operators.watching import answered
from saccade.server.requests.protocol import AbortRequest
from saccade.server.requests.reading import read_request
from saccade.server.service import ServerPhase, Service

STATS_S = 5.0  # for the engine to answer between two steps
SMALL_BODY_BYTES = 64 * 1024
MAX_DIGITS = 16


class OpsRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """OK also while the model loads and while requests drain; 503 only when the server must be restarted. Degraded
        if an engine found one of its graphs wrong, makes no steps or is being restarted, or if a queue is saturated."""
        if self._service.phase is ServerPhase.DEAD:
            raise engine_dead(self._service.death)
        if reasons := self._service.degraded:
            return json_reply({"status": "degraded", "reasons": reasons})
        return json_reply({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether requests should be sent here now."""
        self._service.check_open()
        return json_reply({"status": "ready"})

    async def openapi(self, request: Request) -> Response:
        return json_reply(await self._service.workers.in_thread("", build_document))

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._service.names]
        return json_reply({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_reply(self._card(self._service.check_model(name))) if name else await self.models(request)

    async def version(self, request: Request) -> Response:
        return json_reply({"version": __version__})

    async def load(self, request: Request) -> Response:
        return json_reply({"server_load": self._service.admission.inside})

    async def graphs(self, request: Request) -> Response:
        """The engine's graphs; with several engines those of the first, and those of each under `engines`."""
        found = {name: _graphs(engine) for name, engine in (await self._reports()).items()}
        if not found:
            raise self._no_reports()
        first = next(iter(found.values()))
        return json_reply({**first, "engines": found} if self._service.is_replicated else first)

    async def live(self, request: Request) -> Response:
        """What the engine is doing, and its latest passes: those with a number above `since`. With several engines, the
        one that `engine` names, or the first."""
        asked = request.query_params
        reports = await self._reports(_since(asked.get("since", "0")))
        if not reports:
            raise self._no_reports()
        chosen = _chosen(asked.get("engine"), reports)
        return json_reply(
            {
                "now": monotonic(),
                "scheduler": asdict(chosen.stats.scheduler),
                "pending": self._service.admission.pending,
                "kv_cache_tokens": chosen.ready.kv_cache_tokens,
                "gpu_bytes": chosen.stats.gpu_bytes,
                "passes": msgspec.to_builtins(chosen.stats.passes),
                "seconds": self._service.metrics.recent_load.seconds(),
                "engines": list(reports),
            }
        )

    async def metrics(self, request: Request) -> Response:
        service = self._service
        facts = Facts(
            engines=await self._reports(),
            num_pending=service.admission.pending,
            num_refused=service.admission.num_refused,
            time_to_ready_s=service.time_to_ready_s,
            is_ready=service.phase is ServerPhase.READY,
            is_replicated=service.is_replicated,
            media_jobs=service.media_jobs,
        )
        # Not in the pool that prepares requests: a scrape must not wait for them.
        accept = request.headers.get("accept", "")
        text, kind = await asyncio.to_thread(service.metrics.scrape, facts, accept)
        return Response(text, media_type=kind)

    async def server_info(self, request: Request) -> Response:
        service = self._service
        return json_reply(
            {
                "version": __version__,
                "model": service.model,
                "phase": service.phase.value,
                "time_to_ready_s": service.time_to_ready_s,
                "max_model_len": service.max_model_len,
                "kv_cache_tokens": service.engine.ready.kv_cache_tokens,
                "requests": {"inside": service.admission.inside, "pending": service.admission.pending},
                "tasks": len(asyncio.all_tasks()),
            }
        )

    async def abort(self, request: Request) -> Response:
        exchange = HttpExchange.of(request)
        parts = await exchange.body(limit=SMALL_BODY_BYTES, timeout_s=self._service.settings.body_timeout_s)
        body = b"".join(parts)
        asked, _ = read_request(AbortRequest, body, SMALL_BODY_BYTES)
        public_id = asked.rid or asked.request_id
        if not public_id and not asked.abort_all:
            raise RequestError("rid is missing (or abort_all: true)", param="rid", code="missing_parameter")
        return json_reply({"aborted": self._service.abort(None if asked.abort_all else public_id)})

    async def flush_cache(self, request: Request) -> Response:
        """Empties the prompt and image caches, like SGLang's route of this name."""
        async with answered(STATS_S):
            is_done = await self._service.engine.flush_cache()
        if not is_done:
            text = "requests are running or waiting; caches can be emptied only when there are none; try again"
            raise HttpError(400, text, code="not_idle")
        return json_reply({"status": "flushed"})

    def _card(self, name: str) -> dict[str, Any]:
        """Until the model is loaded, the fields that depend on it are empty."""
        service = self._service
        capabilities = []
        if service.has_engine:
            processor = service.engine.processor
            found = {"completion": True, "chat": processor.template, "multimodal": processor.images}
            capabilities = [name for name, what in found.items() if what is not None]
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "saccade",
            "root": service.names[0],
            "parent": None,
            "max_model_len": service.max_model_len if service.has_engine else None,
            "capabilities": capabilities,
            "vision": _vision(service.engine.processor) if service.has_engine else None,
            "is_bundled": Path(service.model) == bundled.path(),
            "permission": [],
        }

    async def _reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        try:
            async with asyncio.timeout(STATS_S):
                return await self._service.engine.reports(passes_since)
        except (HttpError, SaccadeError, TimeoutError):
            return {}

    def _no_reports(self) -> HttpError:
        return starting() if self._service.phase is ServerPhase.STARTING else engine_dead(self._service.death)


def _chosen(name: str | None, reports: Mapping[str, EngineReport]) -> EngineReport:
    if name is not None and name not in reports:
        known = ", ".join(reports)
        raise RequestError(f"there is no engine {name[:60]!r}, only {known}", param="engine", code="invalid_value")
    return reports[name] if name is not None else next(iter(reports.values()))


def _graphs(engine: EngineReport) -> dict[str, Any]:
    return {"phases": list(engine.stats.phases.values()), "ranks": msgspec.to_builtins(engine.ready.ranks)}


def _since(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < MAX_DIGITS):
        raise RequestError("since must be the number of a pass, such as 0", param="since", code="invalid_value")
    return int(text)


def _vision(processor: Processor) -> dict[str, Any] | None:
    """How images are resized, so that clients can map coordinates in an answer to the original image."""
    images = processor.images
    if images is None:
        return None
    return {
        "unit": images.patch * images.merge,
        "min_pixels": images.min_pixels,
        "max_pixels": images.max_pixels,
        "fixed_size": images.fixed_size,
        "has_video": processor.videos is not None,
        "has_pixel_places": processor.placeholders is not None and processor.placeholders.has_pixel_places,
    }
