"""The reply to a request for vectors or scores: all of them at once, in order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.client.stream import Delta
from saccade.server.http.exchange import HttpExchange
from saccade.server.http_errors import aborted
from saccade.server.replies.reply import Reply
from saccade.server.requests.intake import RequestJob
from saccade.server.service import Service


class VectorReply(Reply):
    """Subclasses make the body from `vectors`."""

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[Any]) -> None:
        super().__init__(service, exchange, job)
        self._found: dict[int, NDArray[np.float32]] = {}

    def take(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason is not None:
            if delta.pooled is None:  # aborted; an error would have been raised before
                raise aborted()
            self._found[index] = delta.pooled
        return b""

    @property
    def vectors(self) -> list[NDArray[np.float32]]:
        return [self._found[index] for index in range(self.answer.num_choices)]

    def usage(self) -> dict[str, Any]:
        usage = self.answer.usage()
        del usage["completion_tokens"]
        return usage
