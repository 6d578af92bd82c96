"""The HTTP front end as a Ray Serve deployment: the routes of `saccade serve`, with the engines in other actors."""

import asyncio
from time import monotonic
from typing import Any

from starlette.applications import Starlette

from saccade.ray.deploy_plan import decode_plan
from saccade.ray.remote_engine import RemoteEngine
from saccade.server.app import build_app
from saccade.server.lifecycle import Stages, open_service, prepare
from saccade.server.service import Service


class Ingress:
    """Ray Serve's proxies pass requests to the app unchanged: bodies, headers, addresses. They report clients that
    leave, and let running requests finish before they end this actor."""

    async def __init__(self, plan: bytes, engines: Any) -> None:  # type: ignore[misc]
        found = decode_plan(plan)
        launch = found.launch()
        self._service = Service(launch.model, found.server, found.limits, found.media)
        prepared = await prepare(self._service, launch, Stages(lambda text: None, "", monotonic()))
        await asyncio.to_thread(prepared.processor.tokenizer.warm_up)
        engine = await RemoteEngine.connect(engines, prepared.processor, plan, found.deploy.most_replicas)
        open_service(self._service, launch, prepared, engine)

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_app(self._service)

    async def __del__(self) -> None:
        if (service := getattr(self, "_service", None)) is not None:
            service.drain()
            await service.aclose()
