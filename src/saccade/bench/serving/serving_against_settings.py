"""Settings of `saccade bench serve --against`. Imports no torch: the command line builds flags from them."""

import re
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from saccade.bench.load.load_settings import BACKENDS, TargetSettings
from saccade.config import check_at_least, setting
from saccade.errors import ConfigError

WRITTEN = re.compile(r"(?:(?P<name>[^=/@:]+)=)?(?:(?P<backend>[\w-]+)@)?(?P<url>https?://.+)")
FORM = "[NAME=][BACKEND@]URL, such as http://127.0.0.1:8001 or vllm=http://127.0.0.1:8001"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstSettings:
    """Other servers that get the same requests, in turn with the first."""

    against: tuple[str, ...] = setting((), f"server to compare with that of --base-url (or --host, --port): {FORM}")
    against_api_key: str = setting("", "key for the servers of --against; by default that of --api-key")
    rounds: int = setting(6, "with --against: number of rounds; each server gets one turn per round, with new content")
    settle_s: float = setting(1.0, "with --against: seconds of pause before each turn")

    def __post_init__(self) -> None:
        check_at_least(self, {"rounds": 2, "settle_s": 0})
        for text in self.against:
            _parse(text)

    def names(self) -> list[str]:
        """The names that the user gave, empty for servers without one."""
        return [_parse(text)[0] for text in self.against]

    def targets(self, first: TargetSettings) -> list[TargetSettings]:
        """The other servers, with the first one's settings otherwise."""
        found = []
        seen = {first.url}
        for text in self.against:
            _, backend, url = _parse(text)
            target = replace(
                first,
                base_url=url,
                backend=backend or first.backend,
                model="",
                api_key=self.against_api_key or first.api_key,
            )
            if target.url in seen:
                raise ConfigError(
                    f"{target.url} is named twice; its second turn would find the content of the first in its caches "
                    "(--against, --base-url)"
                )
            seen.add(target.url)
            found.append(target)
        return found


def _parse(text: str) -> tuple[str, str, str]:
    """Returns name, backend and URL; the first two may be empty."""
    match = WRITTEN.fullmatch(text.strip())
    if match is None or not _is_address(match["url"]):
        raise ConfigError(f"against is {text!r}; write {FORM} (--against)")
    backend = match["backend"] or ""
    if backend and backend not in BACKENDS:
        raise ConfigError(f"against has the backend {backend!r}; allowed are {', '.join(BACKENDS)} (--against)")
    return (match["name"] or "").strip(), backend, match["url"]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
