"""OpenTelemetry: a span for each request, with the attributes of the semantic conventions for generative AI and vLLM's
latency attributes. The packages are optional (`pip install "saccade-vlm[otel]"`) and imported only with an endpoint."""

from time import time_ns
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from saccade import __version__
from saccade.errors import ConfigError
from saccade.server.figures.metrics import EndedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SEND_S = 5.0  # timeout of one batch
PATH = "/v1/traces"
PARENT = ("traceparent", "tracestate")  # W3C's headers
_LATENCIES = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}


class Telemetry:
    """Sends spans in batches from its own thread. Spans that do not fit its queue are dropped."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = Resource.create({"service.name": "saccade", "service.version": __version__})
        self._provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("saccade", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def note_end(self, ended: EndedRequest) -> None:
        """Records the span of a request that ends now, as a child of the client's span if the headers name one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time_ns()
        sent = {name: ended.headers.get(name.encode(), b"").decode("latin-1") for name in PARENT}
        span = self._tracer.start_span(
            f"{ended.operation} {ended.model}",
            context=self._propagator.extract({name: text for name, text in sent.items() if text}),
            kind=SpanKind.SERVER,
            attributes=attributes_of(ended),
            start_time=end_ns - int(ended.total_s * 1e9),
        )
        if "error" in ended.finish_reasons:
            span.set_attribute("error.type", "engine_error")
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Sends the remaining spans, waiting for the collector for a bounded time."""
        self._provider.shutdown()


def new_telemetry(endpoint: str) -> Telemetry | None:
    """None without an endpoint. Raises a ConfigError if the endpoint cannot be used."""
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint}; it must be the URL of a collector for OTLP over HTTP, such as "
            "http://127.0.0.1:4318/v1/traces (--otlp-traces-endpoint)"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as _  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'spans need OpenTelemetry, but {error.name} is missing: pip install "saccade-vlm[otel]" '
            "(--otlp-traces-endpoint)"
        ) from None
    address = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH
    return Telemetry(OTLPSpanExporter(endpoint=address, timeout=SEND_S))


def attributes_of(ended: EndedRequest) -> dict[str, Any]:
    params, num_output_tokens = ended.params, sum(ended.num_output_tokens)
    found: dict[str, Any] = {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.provider.name": "saccade",
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.request.id": ended.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.finish_reasons": tuple(ended.finish_reasons),
        "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": ended.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_output_tokens,
        "gen_ai.latency.e2e": ended.total_s,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if ended.first_s is not None:
        found["gen_ai.latency.time_to_first_token"] = ended.first_s
        found["gen_ai.response.time_to_first_chunk"] = ended.first_s
    found |= {
        f"gen_ai.latency.{name}": ended.timings[stage] for stage, name in _LATENCIES.items() if stage in ended.timings
    }
    if ended.inference_s is not None:
        found["gen_ai.latency.time_in_model_inference"] = ended.inference_s
    return found
