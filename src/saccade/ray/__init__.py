"""A model on a Ray cluster: `serve run saccade.ray:app`, `build_app({...})` or `saccade deploy`.

An ingress deployment runs the HTTP front end, an engine deployment runs the replicas of the model, and the router
between them is `saccade.routing` behind Ray Serve's interface. Ray's processes exchange pickles: whoever can reach the
ports of a cluster can run code there, so guard them like a shell. Data from clients is never unpickled."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.ray.application import app as app
    from saccade.ray.application import build_app as build_app


def __getattr__(name: str) -> Any:
    """Imports Ray on first use: the command line reads the settings without it."""
    if name in ("app", "build_app"):
        return getattr(import_module("saccade.ray.application"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
