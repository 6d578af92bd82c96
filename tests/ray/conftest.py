"""Clusters need Ray, which is an extra: `make scale` installs it."""

from importlib.util import find_spec

if find_spec("ray") is None:
    names = ("cluster", "remote_engine", "application", "prefix_router")
    collect_ignore = [*(f"test_{name}.py" for name in names), "long"]
