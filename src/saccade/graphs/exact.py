"""Graphs of one structure each: which layouts are hot, and which graphs are kept."""

from collections import OrderedDict
from collections.abc import Callable

from saccade.config import GraphSettings
from saccade.graphs.arena import Batch
from saccade.graphs.capture import CapturedGraph
from saccade.graphs.key import GraphKey

MAX_CANDIDATES = 1024  # layouts whose sightings are counted; the longest unseen is forgotten first
MAX_PENDING = 64  # hot layouts that wait for an idle moment, with their metadata


class ExactGraphs:
    """Least recently used first, bounded by count and bytes. Nothing is captured on the path of a request.

    A layout seen `exact_after` times becomes pending; the owner captures pending layouts when it is idle.
    """

    def __init__(self, settings: GraphSettings) -> None:
        self._settings = settings
        self._graphs: OrderedDict[GraphKey, CapturedGraph] = OrderedDict()
        self._sightings: OrderedDict[GraphKey, int] = OrderedDict()
        self._pending: dict[GraphKey, Batch] = {}
        self._refused: OrderedDict[GraphKey, None] = OrderedDict()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs.values())

    @property
    def is_full(self) -> bool:
        return len(self._graphs) >= self._settings.exact_max_graphs

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        return tuple(self._graphs.values())

    def get(self, key: GraphKey) -> CapturedGraph | None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def see(self, key: GraphKey, batch: Batch) -> None:
        """Count a layout that has no graph; from its boundaries alone it can be captured later. Whatever else a batch
        brings may say where its results go: a capture runs the body, and must not write there again."""
        if key in self._refused:
            return
        self._sightings[key] = self._sightings.pop(key, 0) + 1
        while len(self._sightings) > MAX_CANDIDATES:
            self._pending.pop(self._sightings.popitem(last=False)[0], None)
        is_hot = self._sightings[key] >= self._settings.exact_after and key not in self._pending
        if is_hot and len(self._pending) < MAX_PENDING:
            structure = {name: array.copy() for name, array in batch.structure.items()}
            self._pending[key] = Batch({}, structure, batch.sizes, structure)

    def capture_pending(self, capture: Callable[[GraphKey, Batch], CapturedGraph], limit: int) -> list[GraphKey]:
        """Capture up to `limit` hot layouts, hottest first, and let go of what no longer fits the bounds. One that is
        too large, or whose capture fails, is not tried again."""
        hottest = sorted(self._pending, key=lambda key: -self._sightings.get(key, 0))[:limit]
        for key in hottest:
            self.add(key, self._pending.pop(key), capture)
        return hottest

    def add(self, key: GraphKey, batch: Batch, capture: Callable[[GraphKey, Batch], CapturedGraph]) -> None:
        self._sightings.pop(key, None)
        self._refuse(key)
        graph = capture(key, batch)
        if graph.nbytes <= self._settings.exact_max_bytes:
            del self._refused[key]
            self._graphs[key] = graph
        self._shrink()

    def _refuse(self, key: GraphKey) -> None:
        self._refused[key] = None
        if len(self._refused) > MAX_CANDIDATES:
            self._refused.popitem(last=False)

    def _shrink(self) -> None:
        limits = self._settings
        while len(self._graphs) > limits.exact_max_graphs or self.nbytes > limits.exact_max_bytes:
            self._graphs.popitem(last=False)
