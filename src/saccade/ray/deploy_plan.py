"""All settings of an application, read once from a plain mapping and sent to the replicas as msgpack."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import Struct

from saccade import bundled
from saccade.errors import ConfigError
from saccade.inputs.media.media_loader import MediaSettings
from saccade.ray.deploy_settings import DeploySettings
from saccade.routing import room_of
from saccade.server.lifecycle import Launch
from saccade.server.server_settings import ServerSettings
from saccade.wire.engine_settings import CPU_LIMITS, GPU_LIMITS, EngineSettings, SchedulerSettings

_PARTS = (ServerSettings, EngineSettings, SchedulerSettings, MediaSettings, DeploySettings)
# Settings that only a server without Ray has, and what replaces them here.
_ELSEWHERE = {
    "data_parallel_size": "use --replicas for the number of engines",
    "restart_engine": "engines that die are always replaced",
    **dict.fromkeys(
        ("host", "port"), "Ray Serve's proxies listen: --host and --port of `saccade deploy`, or http_options"
    ),
    **dict.fromkeys(
        ("uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), "Ray Serve's proxies listen; end TLS in front of them"
    ),
}


class DeployPlan(Struct, frozen=True, kw_only=True):
    model: str  # empty for the bundled one
    server: ServerSettings
    engine: EngineSettings
    limits: SchedulerSettings
    media: MediaSettings
    deploy: DeploySettings

    @property
    def num_gpus(self) -> float:
        """GPUs per replica."""
        if self.deploy.replica_gpus >= 0:
            return self.deploy.replica_gpus
        on_cpu = self.engine.device == "cpu" or (self.engine.device == "auto" and not self.model)
        return 0 if on_cpu else self.engine.tensor_parallel_size

    @property
    def most_inside(self) -> int:
        """The most requests that one replica runs and queues."""
        return self._limit("max_num_seqs") + self.limits.max_queued_requests

    @property
    def room_tokens(self) -> int:
        return room_of(self._limit("max_num_batched_tokens"))

    def _limit(self, name: str) -> int:
        found: int = getattr(self.limits, name)
        return found or (GPU_LIMITS if self.num_gpus else CPU_LIMITS)[name]

    def launch(self) -> Launch:
        return Launch(self.model or str(bundled.path()), self.engine, self.limits, self.media)


def read_plan(given: Mapping[str, Any], *, has_proxies: bool = False) -> DeployPlan:
    """Reads `model` and the flags of `saccade serve` and `saccade deploy`, with - or _ in their names. Text is
    converted to the setting's type, so that `serve run saccade.ray:app replicas=2` works. With `has_proxies`, host and
    port are those of Ray Serve's proxies."""
    values = {str(name).replace("-", "_"): value for name, value in given.items()}
    model = str(values.pop("model", "") or "")
    known = {field.name: part for part in _PARTS for field in fields(part)}
    _check_names([name for name in values if not (has_proxies and name in ("host", "port"))], known)
    values = {**({} if model else bundled.SERVED), **values}
    parts = [_read(part, {n: v for n, v in values.items() if known[n] is part}) for part in _PARTS]
    server, engine, limits, media, deploy = parts
    return DeployPlan(model=model, server=server, engine=engine, limits=limits, media=media, deploy=deploy)


def _check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises for names that are not settings, or not settings of an application on a cluster."""
    for name in names:
        if name in _ELSEWHERE:
            raise ConfigError(f"{name} is not a setting on a Ray cluster: {_ELSEWHERE[name]}")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(f"unknown setting {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _read(part: type[Any], values: dict[str, Any]) -> Any:
    try:
        return msgspec.convert(values, part, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a setting of the application is wrong: {error}") from None


encode_plan = msgspec.msgpack.Encoder().encode
decode_plan = msgspec.msgpack.Decoder(DeployPlan).decode
