"""Spans of requests, as a collector gets them over HTTP."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from threading import Thread
from time import time_ns
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from saccade.errors import ConfigError
from saccade.server.figures.telemetry import new_telemetry
from saccade.server.service import Service
from tests.server.fake import Caller, FakeEngine

Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


class Collector:
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                found = ExportTraceServiceRequest.FromString(body)
                collector.paths.append(self.path)
                collector.spans += [s for r in found.resource_spans for scope in r.scope_spans for s in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    thread = Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


async def timed(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    yield {"text": "two", "token_ids": (5,)}
    timings = {"queue": 0.25, "prefill": 0.5, "decode": 1.0}
    yield {"text": " words", "token_ids": (6,), "finish_reason": "stop", "timings": timings}


async def broken(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
    yield {"finish_reason": "error"}


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_of_the_clients_trace(scripted: Scripted, collector: Collector) -> None:
    caller, engine, service = scripted(timed, otlp_traces_endpoint=collector.url, served_model_name=("tiny",))
    trace_id, parent_id = token_hex(16), token_hex(8)
    before = time_ns()

    async def run() -> None:
        body = {"messages": HELLO, "max_tokens": 9, "temperature": 0.5, "request_id": "mine"}
        parent = f"00-{trace_id}-{parent_id}-01"
        assert (await caller.post("/v1/chat/completions", body, traceparent=parent)).status == 200
        assert (await caller.post("/v1/completions", {"prompt": "a"}, traceparent="nonsense")).status == 200
        await service.aclose()

    asyncio.run(run())
    assert set(collector.paths) == {"/v1/traces"}
    chat, text = sorted(collector.spans, key=lambda span: str(span.name))
    assert (chat.name, chat.trace_id.hex(), chat.parent_span_id.hex()) == ("chat tiny", trace_id, parent_id)
    assert before - 10**9 < chat.start_time_unix_nano < chat.end_time_unix_nano <= time_ns()
    found = attributes(chat)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.usage.input_tokens"] == len(engine.seen[0][0]) and found["gen_ai.usage.output_tokens"] == 2
    assert found["gen_ai.request.max_tokens"] == 9 and found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.response.finish_reasons"] == ["stop"] and found["gen_ai.response.id"] == "mine"
    latencies = {name: found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_prefill")}
    assert latencies == {"time_in_queue": 0.25, "time_in_model_prefill": 0.5}
    assert found["gen_ai.latency.time_in_model_inference"] == 1.5
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert (text.name, text.parent_span_id) == ("text_completion tiny", b"") and text.trace_id.hex() != trace_id


def test_a_failed_request_has_an_error_span(scripted: Scripted, collector: Collector) -> None:
    caller, _, service = scripted(broken, otlp_traces_endpoint=f"{collector.url}/some/where")

    async def run() -> None:
        assert (await caller.post("/v1/chat/completions", {"messages": HELLO})).status == 500
        await service.aclose()

    asyncio.run(run())
    [span] = collector.spans
    assert collector.paths == ["/some/where"] and span.status.code == 2
    assert attributes(span)["error.type"] == "engine_error"


def test_without_an_endpoint_there_is_no_telemetry(scripted: Scripted) -> None:
    assert scripted()[2].telemetry is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://a:4317", "http://"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"OTLP over HTTP.*--otlp-traces-endpoint"):
        new_telemetry(endpoint)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install \"saccade-vlm\[otel\]\""):
        new_telemetry("http://127.0.0.1:4318")
