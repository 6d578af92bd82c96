"""Clusters need Ray, which is an extra: `make scale` installs it."""

from importlib.util import find_spec

if find_spec("ray") is None:
    collect_ignore = ["test_cluster.py", "test_remote_engine.py", "test_application.py", "long"]
