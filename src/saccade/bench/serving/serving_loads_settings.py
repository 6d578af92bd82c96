"""Settings of `saccade bench serve --loads`. Imports no torch, because the command line builds its flags from them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from saccade.bench.load.load_settings import LoadSettings, WorkloadSettings
from saccade.bench.serving.serving_settings import ServingPlan
from saccade.config import setting
from saccade.errors import ConfigError

USUAL = "usual"
FIVE_SIZES = "mix:224x224,448x336,640x480,720x1280,1024x1024"
USUAL_LOADS: Mapping[str, Mapping[str, Any]] = {
    "560x560, 1 out, 32 at a time": {},
    "five sizes, 1 out, 32 at a time": {"image-resolution": FIVE_SIZES},
    "560x560, 1 out, one at a time": {"num-prompts": 40, "max-concurrency": 1},
    "560x560, 128 out, 32 at a time": {"num-prompts": 128, "random-output-len": 128, "random-range-ratio": 1},
    "text 512, 128 out, 64 at a time": {
        "dataset-name": "random",
        "random-input-len": 512,
        "random-output-len": 128,
        "random-range-ratio": 1,
        "max-concurrency": 64,
    },
    "1920x1080, 32 out, 16 at a time": {
        "num-prompts": 96,
        "image-resolution": "1920x1080",
        "random-output-len": 32,
        "random-range-ratio": 1,
        "max-concurrency": 16,
    },
}
"""The first is the load of sglang#15320, which the defaults of the flags describe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsSettings:
    """Several loads, one after the other, in one table."""

    loads: str = setting(
        "",
        "usual (single images, mixed sizes, one at a time, long answers, text, large images), or a YAML file of names, "
        "each with its flags; other flags apply to all loads",
    )

    def plans(self, plan: ServingPlan) -> dict[str, ServingPlan]:
        """The plan of each load, by name. The only one has no name if no loads were asked for. A malformed file is
        refused before anything runs."""
        if not self.loads:
            return {"": plan}
        found = USUAL_LOADS if self.loads == USUAL else _read(Path(self.loads))
        return {name: _with_flags(plan, name, flags) for name, flags in found.items()}


def _read(path: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a YAML file, or {USUAL} (--loads)") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path} is not YAML (--loads)") from None
    named = found if isinstance(found, dict) else {}
    if not named or not all(
        name and isinstance(name, str) and isinstance(own, dict | None) for name, own in named.items()
    ):
        raise ConfigError(f"{path} must map the name of each load to its flags (--loads)")
    return {name: own or {} for name, own in named.items()}


def _with_flags(plan: ServingPlan, name: str, flags: Mapping[str, Any]) -> ServingPlan:
    kinds: dict[str, tuple[type[Any], type]] = {
        one.name: (owner, type(one.default)) for owner in (WorkloadSettings, LoadSettings) for one in fields(owner)
    }
    changes: dict[type[Any], dict[str, Any]] = {WorkloadSettings: {}, LoadSettings: {}}
    for flag, value in flags.items():
        key = str(flag).replace("-", "_")
        if key not in kinds or key == "seed":
            raise ConfigError(f"the load {name!r} has {flag}, which is not a flag of a workload or load (--loads)")
        owner, kind = kinds[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(
                f"the load {name!r} has {flag}: {value!r}; the value must be of type {kind.__name__} (--loads)"
            )
        changes[owner][key] = value
    try:
        workload = replace(plan.workload, **changes[WorkloadSettings])
        return replace(plan, workload=workload, load=replace(plan.load, **changes[LoadSettings]))
    except ConfigError as error:
        raise ConfigError(f"the load {name!r}: {error}") from None
