"""The reply to a request for vectors or scores: all of them at once, in order."""

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.responses import Response

from saccade.client.stream import Delta
from saccade.server.http_errors import aborted
from saccade.server.replies.reply import Reply


class VectorReply(Reply):
    """Subclasses make the body from `vectors`. It is written in a thread, because it has many numbers."""

    _found: dict[int, NDArray[np.float32]]

    def take(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            if delta.pooled is None:  # aborted; an error would have been raised before
                raise aborted()
            self._found[index] = delta.pooled
        return b""

    async def response(self) -> Response:
        self._found = {}
        async for _ in self._chunks():
            pass
        return Response(
            await self.service.workers.in_thread(self.job.caller, self._json), media_type="application/json"
        )

    @property
    def vectors(self) -> list[NDArray[np.float32]]:
        return [self._found[index] for index in range(self.answer.num_choices)]

    def usage(self) -> dict[str, Any]:
        usage = self.answer.usage()
        del usage["completion_tokens"]
        return usage

    def _json(self) -> bytes:
        return orjson.dumps(self.body(), option=orjson.OPT_SERIALIZE_NUMPY)
