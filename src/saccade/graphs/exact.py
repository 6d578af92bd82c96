"""Graphs of one structure each: which layouts are hot, and which graphs are kept."""

from collections import OrderedDict
from collections.abc import Callable

from saccade.config import GraphSettings
from saccade.graphs.arena import Batch
from saccade.graphs.capture import CapturedGraph
from saccade.graphs.key import GraphKey

MAX_CANDIDATES = 1024  # layouts that are counted; the longest unseen is forgotten first
MAX_PENDING = 64  # hot layouts that wait for an idle moment, with their metadata
WINDOW = 1024  # batches after which every count is halved: what was hot cools down
HOTTER = 2  # times as often as the graph that gives way, so that layouts which come equally often do not take turns


class ExactGraphs:
    """Graphs of the layouts that come most, bounded by count and bytes. None is captured on the path of a request.

    A layout that came `exact_after` times becomes pending if there is room for its graph, or a graph that serves far
    fewer batches; the owner captures pending layouts when it is idle. The graph that gives way goes first: the new one
    finds its memory.
    """

    def __init__(self, settings: GraphSettings) -> None:
        self._settings = settings
        self._graphs: OrderedDict[GraphKey, CapturedGraph] = OrderedDict()  # the last used at the end
        self._uses: OrderedDict[GraphKey, int] = OrderedDict()  # of these and of others, the last seen at the end
        self._num_seen = 0
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
        return self._graphs.get(key)

    def use(self, key: GraphKey) -> None:
        """Count a batch that was run in its own graph."""
        self._graphs.move_to_end(key)
        self._count(key)

    def see(self, key: GraphKey, batch: Batch) -> None:
        """Count a layout that has no graph; from its boundaries alone it can be captured later. Whatever else a batch
        brings may say where its results go: a capture runs the body, and must not write there again."""
        if key in self._refused:
            return
        self._count(key)
        if key not in self._pending and len(self._pending) < MAX_PENDING and self._is_hot(key):
            structure = {name: array.copy() for name, array in batch.structure.items()}
            self._pending[key] = Batch({}, structure, batch.sizes, structure)

    def capture_pending(self, capture: Callable[[GraphKey, Batch], CapturedGraph], limit: int) -> list[GraphKey]:
        """Capture up to `limit` hot layouts, hottest first. One that is too large, or whose capture fails, is not tried
        again; one that another has overtaken meanwhile has to get hot anew."""
        captured = []
        for key in sorted(self._pending, key=lambda key: -self._uses.get(key, 0))[:limit]:
            batch = self._pending.pop(key)
            if self._is_hot(key):
                self.add(key, batch, capture)
                captured.append(key)
        return captured

    def add(self, key: GraphKey, batch: Batch, capture: Callable[[GraphKey, Batch], CapturedGraph]) -> None:
        self._refuse(key)
        while self.is_full:
            del self._graphs[self._coldest()]
        graph = capture(key, batch)
        if graph.nbytes > self._settings.exact_max_bytes:
            return
        while self.nbytes + graph.nbytes > self._settings.exact_max_bytes:
            del self._graphs[self._coldest()]
        del self._refused[key]
        self._graphs[key] = graph
        self._uses.setdefault(key, 0)

    def _count(self, key: GraphKey) -> None:
        self._uses[key] = self._uses.pop(key, 0) + 1
        self._num_seen += 1
        if self._num_seen % WINDOW == 0:
            for each in self._uses:
                self._uses[each] //= 2
        if len(self._uses) > MAX_CANDIDATES + len(self._graphs):
            unseen = next(each for each in self._uses if each not in self._graphs)
            del self._uses[unseen]
            self._pending.pop(unseen, None)

    def _is_hot(self, key: GraphKey) -> bool:
        uses = self._uses.get(key, 0)
        if uses < self._settings.exact_after:
            return False
        return not self.is_full or uses > HOTTER * self._uses[self._coldest()]

    def _coldest(self) -> GraphKey:
        """The graph that was used least; of several, the one that was not used for longest."""
        return min(self._graphs, key=self._uses.__getitem__)

    def _refuse(self, key: GraphKey) -> None:
        self._refused[key] = None
        if len(self._refused) > MAX_CANDIDATES:
            self._refused.popitem(last=False)
