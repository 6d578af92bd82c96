"""The front end of a real server, beside its engine."""

import sys
from pathlib import Path

import httpx2
import pytest

from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import ServerProcess

LIBRARIES = ("libtorch", "libtriton")
JSON = {"type": "json_object"}


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has mapped is read from /proc")
def test_a_front_end_that_answered_requests_with_images_has_not_loaded_torch(
    server: ServerProcess, http: httpx2.Client
) -> None:
    messages = asked(image_part(encoded(picture(7))))
    for wanted in ({}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}, {"response_format": JSON}):
        body = {"messages": messages, "max_tokens": 4, **wanted}
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
    assert http.get("/metrics").status_code == 200
    assert "libtorch" in loaded(server.engine_pid()), "the engine computes with it"
    assert not loaded(server.popen.pid)


def loaded(pid: int) -> set[str]:
    """Which of the libraries a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in LIBRARIES if name in maps}
