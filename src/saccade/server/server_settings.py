"""Where the server listens, who may use it, and its limits."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from saccade.config import Word, refused, setting
from saccade.errors import ConfigError
from saccade.wire.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS

MAX_BODY_VALUES = 5 * 2**18


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Only this machine can reach the default address. A time limit of 0 is off."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one")
    uds: str = setting("", "Unix socket to listen on instead of an address")
    root_path: str = setting("", "path prefix under which a proxy serves this server")
    ssl_keyfile: str = setting("", "TLS key file")
    ssl_certfile: str = setting("", "TLS certificate file; it is reloaded when it, the key or the CA file changes")
    ssl_ca_certs: str = setting("", "file of CA certificates; clients must then have a certificate from one of them")
    ssl_cert_reqs: str = setting(
        "", "client certificates, with --ssl-ca-certs: none, optional or required (or 0, 1, 2); by default required"
    )
    allowed_hosts: tuple[Word, ...] = setting(
        (),
        "host names that clients may use, such as api.example.com or *.example.com; * allows any. Always allowed: "
        "addresses, localhost, names ending in .local or .internal. If other machines can reach the server, names "
        "without a dot are allowed too, and with --api-key any name, unless names are given here",
    )
    max_connections: int = setting(
        0, "most connections at once; others get a 503. 0 means 16384, or fewer if the process may open fewer files"
    )
    api_key: tuple[str, ...] = setting(
        (),
        "key that clients must send; if there are several, any of them; without one the server answers everybody; "
        'SACCADE_API_KEY holds one key, or several as ["a", "b"]',
    )
    admin_api_key: str = setting("", "key for the administrative routes; without one they are closed")
    limits: str = setting(
        "", "YAML file with the limits of each key: requests, tokens a minute, share of the queue, weight"
    )
    allow_priority: bool = setting(
        False, "let everybody go ahead of others with a priority below 0; --limits can allow that for single keys"
    )
    allowed_origins: str = setting("", 'origins of web pages that may call this server, such as ["https://a.example"]')
    served_model_name: tuple[str, ...] = setting((), "name of the model in the API; by default MODEL as it was given")
    reasoning_parser: str = setting(
        "", "qwen3 turns <think>...</think> before an answer into reasoning_content; empty leaves it in the text"
    )
    generation_config: str = setting("auto", "sampling defaults: auto (the checkpoint's), none or vllm (neutral)")
    data_parallel_size: int = setting(
        1, "engines behind this server, each with the whole model on its own GPUs (on a CPU, in its own process)"
    )
    routing: str = setting(
        "affinity",
        "which of several engines takes a request: affinity (where its first image or its beginning is cached, within "
        "1.25 times the mean load), least-loaded or round-robin",
    )
    max_body_bytes: int = setting(64 * 2**20, "largest request body")
    max_body_values: int = setting(
        MAX_BODY_VALUES, "most values in a request body; a string counts as two of them, a list or an object as eight"
    )
    max_header_bytes: int = setting(64 * 2**10, "largest head of a request")
    max_reading_requests: int = setting(4096, "requests whose bodies are still arriving before new ones are refused")
    max_pending_requests: int = setting(
        768, "requests being prepared before new ones are refused; at most three quarters may have media"
    )
    max_pending_bytes: int = setting(
        4 * 2**30,
        "bytes of bodies and decoded images being prepared before requests are refused; an eighth is for small ones",
    )
    preprocess_threads: int = setting(0, "threads that decode images and tokenize; 0 means one per core, 4 to 16")
    media_processes: int = setting(
        0, "processes for images and videos that may be slow to decode, at least 2; 0 means one per core, 2 to 8"
    )
    response_store_bytes: int = setting(
        0, "bytes of conversations kept in memory for previous_response_id of /v1/responses; 0 keeps none"
    )
    max_n: int = setting(16, "most outputs of one request")
    max_prompts: int = setting(
        1024, "most prompts of a completion request, and most outputs with n; most texts to embed or documents to rank"
    )
    max_stop_strings: int = setting(16, "most stop strings of one request")
    max_logprobs: int = setting(MAX_LOGPROBS, "most alternatives per token")
    request_timeout_s: float = setting(
        3600.0, "seconds a request may take; requests can only ask for less; 0 means no limit"
    )
    body_timeout_s: float = setting(
        60.0, "seconds a client may take to send a head or a body, or go without reading its reply"
    )
    keep_alive_s: float = setting(75.0, "seconds an idle connection is kept")
    sse_ping_s: float = setting(15.0, "seconds of silence after which a stream sends a comment")
    shutdown_timeout_s: float = setting(30.0, "seconds that running requests have to finish after SIGTERM")
    restart_engine: bool = setting(
        False, "restart an engine that died instead of ending, after 1 s, 2 s, 4 s and so on, up to five times in a row"
    )
    dead_engine_s: float = setting(
        30.0,
        "seconds that the server still answers (503) after its engine died, before it exits with code 1; 0 is forever",
    )
    metrics_style: str = setting("own", "names of metrics: own (ours and vLLM's), vllm or sglang")
    otlp_traces_endpoint: str = setting(
        "", "URL of an OTLP collector, such as http://127.0.0.1:4318/v1/traces, that gets a span for each request"
    )
    profile_folder: str = setting("", "folder for the profiles of /start_profile; without one that route is closed")
    profile_max_s: float = setting(10.0, "seconds after which a profile stops by itself, at most 30")
    strict: bool = setting(False, "name unknown request fields in the header x-ignored-fields")
    log_stats: bool = setting(True, "log throughput, load and cache use after every ten seconds of work")
    access_log: bool = setting(False, "log every request")

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise refused(name, getattr(self, name), f"allowed are {low}..{high}")
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                words = ", ".join(word or '"" (off)' for word in allowed)
                raise refused(name, getattr(self, name), f"allowed are {words}")
        if any(not key for key in self.api_key):
            raise ConfigError("an API key is empty; leave it out to let everybody in (--api-key)")
        if self.root_path and not self.root_path.startswith("/"):
            raise refused("root_path", self.root_path, "it must begin with /")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise refused("allowed_hosts", host, "write a name without scheme and port, *.name, or *")
        self._check_tls()
        self.origins()

    def _check_tls(self) -> None:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("TLS needs both a key and a certificate (--ssl-keyfile, --ssl-certfile)")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("--ssl-ca-certs needs TLS; set --ssl-keyfile and --ssl-certfile too")
        if self.ssl_cert_reqs not in ("", "none", "0") and not self.ssl_ca_certs:
            raise ConfigError(f"ssl_cert_reqs is {self.ssl_cert_reqs}; it needs CA certificates (--ssl-ca-certs)")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            if getattr(self, name) and not Path(getattr(self, name)).is_file():
                raise refused(name, getattr(self, name), "there is no such file")

    def origins(self) -> list[str]:
        """The allowed origins: a JSON list, or names separated by commas."""
        text = self.allowed_origins.strip()
        if not text.startswith("["):
            return [part.strip() for part in text.split(",") if part.strip()]
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(origin, str) for origin in found):
            raise refused("allowed_origins", text, "it must be a JSON list of strings")
        return found

    @property
    def is_local(self) -> bool:
        return bool(self.uds) or self.host in ("localhost", "::1") or self.host.startswith("127.")


_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_WORDS = {
    "ssl_cert_reqs": ("", "none", "optional", "required", "0", "1", "2"),
    "metrics_style": ("own", "vllm", "sglang"),
    "generation_config": ("auto", "none", "vllm"),
    "reasoning_parser": ("", "qwen3"),
    "routing": ("affinity", "least-loaded", "round-robin"),  # routing.POLICIES, which is slow to import
}
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "data_parallel_size": (1, 256),
    "max_body_bytes": (1024, 2**31),
    "max_body_values": (1024, 2**31),
    "max_header_bytes": (1024, 2**24),
    "max_connections": (0, 2**20),
    "max_reading_requests": (1, 2**20),
    "max_pending_requests": (1, 2**20),
    "max_pending_bytes": (1024, 2**40),
    "preprocess_threads": (0, 1024),
    "media_processes": (0, 256),
    "response_store_bytes": (0, 2**40),
    "max_n": (1, MAX_N),
    "max_prompts": (1, 4096),
    "max_stop_strings": (1, MAX_STOP_STRINGS),
    "max_logprobs": (0, MAX_LOGPROBS),
    "keep_alive_s": (1, 10**6),
    "profile_max_s": (0.1, 30),  # writing a longer one would block steps until the watchdog sees a hang
    **dict.fromkeys(
        ("request_timeout_s", "body_timeout_s", "sse_ping_s", "shutdown_timeout_s", "dead_engine_s"), (0, 10**6)
    ),
}
