"""GET /health_generate: checks that the engine produces tokens by asking for one, or for a vector if the model has no
head."""

import asyncio
from contextlib import aclosing, suppress
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import CapacityError
from saccade.inputs.placeholders import text_prompt
from saccade.server.figures.running_requests import PreparedRequest
from saccade.server.http.json_body import json_reply
from saccade.server.http_errors import HttpError
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Terms, Turn

RECENT_S = 1.0  # no probe if an output is this recent
LIMIT_S = 20.0
POLL_S = 0.05
PROBE = "health_generate"
TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
VECTOR = SamplingParams(max_tokens=0, pooling="last")
FIRST = Terms(Turn(priority=-(2**31), tenant=PROBE), cache_salt=PROBE)


class HealthRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()

    async def generate(self, request: Request) -> Response:
        """200 if the engine just produced output for anyone. One probe at a time serves all callers."""
        self._service.check_open()
        try:
            async with asyncio.timeout(LIMIT_S), self._turn:
                if not self._has_output_since(monotonic() - RECENT_S):
                    await self._probe()
        except TimeoutError:
            raise _unhealthy(f"the engine produced no token within {LIMIT_S:g} s") from None
        return json_reply({"status": "ok"})

    async def _probe(self) -> None:
        """Returns when the engine has produced output, for this probe or any request."""
        begun = monotonic()
        probe = asyncio.create_task(self._compute_one())
        try:
            while not self._has_output_since(begun):
                if probe.done():
                    probe.result()
                    await asyncio.sleep(POLL_S)
                else:
                    await asyncio.wait({probe}, timeout=POLL_S)
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def _compute_one(self) -> None:
        service = self._service
        params = TOKEN if service.engine.ready.has_head else VECTOR
        with service.requests.inside(PreparedRequest(PROBE, monotonic(), {})) as engine_id:
            source = service.engine.generate(engine_id, text_prompt([0]), params, FIRST)
            with suppress(CapacityError):  # then other requests wait for tokens, which count too
                async with aclosing(source):
                    async for delta in source:
                        if delta.finish_reason == "error":
                            raise _unhealthy("the engine failed to compute a token")
                        if delta.token_ids or delta.pooled is not None:
                            service.note_output()

    def _has_output_since(self, moment: float) -> bool:
        last = self._service.last_output
        return last is not None and last >= moment


def _unhealthy(text: str) -> HttpError:
    return HttpError(503, text, code="unhealthy")
