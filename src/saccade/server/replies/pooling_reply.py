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

    vectors: list[NDArray[np.float32] | None]

    def take(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            if delta.pooled is None:  # aborted; an error would have been raised before
                raise aborted()
            self.vectors[index] = delta.pooled
        return b""

    async def response(self) -> Response:
        self.vectors = [None] * self.answer.num_choices
        async for _ in self._chunks():
            pass
        return Response(
            await self.service.workers.in_thread(self.job.caller, self._json), media_type="application/json"
        )

    def found(self) -> list[NDArray[np.float32]]:
        assert all(vector is not None for vector in self.vectors), "every prompt ends with its vector"
        return [vector for vector in self.vectors if vector is not None]

    def usage(self) -> dict[str, Any]:
        usage = self.answer.usage()
        del usage["completion_tokens"]
        return usage

    def timings(self) -> dict[str, Any]:
        return {"timings": self.answer.timings()} if self.job.wants_timings else {}

    def _json(self) -> bytes:
        return orjson.dumps(self.body(), option=orjson.OPT_SERIALIZE_NUMPY)
