"""Settings of `saccade bench soak`. Imports no torch, because the command line builds its flags from them."""

from dataclasses import dataclass

from saccade.config import check_at_least, check_sent_key, refused, setting

MAX_CYCLES, MIN_CYCLE_S, CYCLE_S = 500, 1.0, 30.0
MAX_SAMPLES = 5000
WARM_UP = 0.25  # of the time, in which pools fill, and allocators and caches reach their size


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakSettings:
    """What `saccade bench soak` sends, for how long, and what counts as flat."""

    minutes: float = setting(10.0, "how long requests are sent; the first quarter is warm-up")
    url: str = setting("", "address of a running server without other users; by default one is started")
    serve_args: str = setting("", "flags of the server that is started, as for `saccade serve`")
    concurrency: int = setting(8, "requests sent at a time")
    image_sizes: int = setting(500, "different sizes of images")
    sample_s: float = setting(5.0, "seconds between two samples of the server under load")
    rss_allowance_mib: float = setting(64.0, "resident memory that server and engine may gain each, in MiB")
    gpu_is_shared: bool = setting(
        False, "others use the GPU too: the memory of the whole device is shown but not judged"
    )
    seed: int = setting(0, "request N of a seed is always the same")
    request_timeout_s: float = setting(300.0, "seconds after which an unfinished request counts as unexpected")
    start_timeout_s: float = setting(900.0, "seconds until a server that is started must be ready")
    api_key: str = setting("", "key for the server, sent as Authorization: Bearer; by default OPENAI_API_KEY")
    json: str = setting("", "file to write the report to")

    def __post_init__(self) -> None:
        check_at_least(self, {"minutes": 0.05, "concurrency": 1, "image_sizes": 1, "sample_s": 0.1})
        check_at_least(self, {"rss_allowance_mib": 0, "seed": 0, "request_timeout_s": 1, "start_timeout_s": 1})
        check_sent_key(self.api_key, "--api-key")
        for name, high in {"minutes": 1e5, "concurrency": 1024, "image_sizes": 10_000}.items():
            if not (value := getattr(self, name)) <= high:
                raise refused(name, value, f"it must be at most {high:g}")

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    @property
    def cycle_s(self) -> float:
        """Seconds of load between two idle moments. Long runs have longer cycles, which limits the samples."""
        return max(self.seconds / MAX_CYCLES, min(CYCLE_S, max(MIN_CYCLE_S, self.seconds / 20)))

    @property
    def look_s(self) -> float:
        return max(self.sample_s, self.seconds / MAX_SAMPLES)
