"""Exact graphs, each for one structure: which layouts are hot, and which graphs are kept."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.choice.key import Capacity, GraphKey
from saccade.config import GraphSettings

Structure = Mapping[str, np.ndarray[Any, np.dtype[Any]]]

MAX_CANDIDATES = 1024  # layouts whose uses are counted; the least recently seen is forgotten first
MAX_PENDING = 64  # hot layouts that wait until the engine is idle, with their boundaries
WINDOW = 1024  # batches after which every count is halved, so that old layouts cool down
REPLACE_FACTOR = 2  # a layout must be used more than twice as often as the graph it replaces, or they would thrash


@dataclass(frozen=True, slots=True)
class ExactLayout:
    """A structure to capture, and the graphs to drop first, whose memory the new one reuses."""

    key: GraphKey
    sizes: Capacity
    structure: Structure
    dropped: tuple[GraphKey, ...] = ()


class ExactIndex:
    """The most frequent layouts, bounded by count and bytes. None is captured on the path of a request. A layout seen
    `exact_after` times becomes pending if there is room for its graph, or if some graph is used far less often. The
    owner captures pending layouts when idle."""

    def __init__(self, settings: GraphSettings) -> None:
        self._settings = settings
        self.graphs: OrderedDict[GraphKey, int] = OrderedDict()  # bytes of each, most recently used last
        self._uses: OrderedDict[GraphKey, int] = OrderedDict()  # of graphs and candidates, most recently seen last
        self._num_seen = 0
        self._pending: dict[GraphKey, ExactLayout] = {}
        self._refused: OrderedDict[GraphKey, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(self.graphs.values())

    @property
    def is_full(self) -> bool:
        return len(self.graphs) >= self._settings.exact_max_graphs

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def use(self, key: GraphKey) -> None:
        """Count a batch that ran in its exact graph."""
        self.graphs.move_to_end(key)
        self._count(key)

    def see(self, key: GraphKey, sizes: Capacity, structure: Structure) -> None:
        """Count a batch whose layout has no graph. Its boundaries are all that a later capture needs."""
        if key in self._refused:
            return
        self._count(key)
        if key not in self._pending and len(self._pending) < MAX_PENDING and self._is_hot(key):
            self._pending[key] = ExactLayout(key, sizes, {name: array.copy() for name, array in structure.items()})

    def next_pending(self) -> ExactLayout | None:
        """Begin with the hottest pending layout. Those that are no longer hot are dropped."""
        while self._pending:
            layout = self._pending.pop(max(self._pending, key=lambda key: self._uses.get(key, 0)))
            if self._is_hot(layout.key):
                return self.begin(layout)
        return None

    def begin(self, layout: ExactLayout) -> ExactLayout:
        """Drop the coldest graphs until one more fits. The layout is not tried again unless `add` accepts its graph."""
        self._pending.pop(layout.key, None)
        self._refused[layout.key] = None
        if len(self._refused) > MAX_CANDIDATES:
            self._refused.popitem(last=False)
        dropped = []
        while self.is_full:
            dropped.append(self._drop_coldest())
        return ExactLayout(layout.key, layout.sizes, layout.structure, tuple(dropped))

    def add(self, key: GraphKey, nbytes: int) -> tuple[GraphKey, ...]:
        """Accept a captured graph. Returns the graphs to drop: the coldest, or the new one if it alone is too large."""
        if nbytes > self._settings.exact_max_bytes:
            return (key,)
        dropped = []
        while self.nbytes + nbytes > self._settings.exact_max_bytes:
            dropped.append(self._drop_coldest())
        self._refused.pop(key, None)
        self.graphs[key] = nbytes
        self._uses.setdefault(key, 0)
        return tuple(dropped)

    def _count(self, key: GraphKey) -> None:
        self._uses[key] = self._uses.pop(key, 0) + 1
        self._num_seen += 1
        if self._num_seen % WINDOW == 0:
            for each in self._uses:
                self._uses[each] //= 2
        if len(self._uses) > MAX_CANDIDATES + len(self.graphs):
            unseen = next(each for each in self._uses if each not in self.graphs)
            del self._uses[unseen]

    def _is_hot(self, key: GraphKey) -> bool:
        uses = self._uses.get(key, 0)
        if uses < self._settings.exact_after:
            return False
        return not self.is_full or uses > REPLACE_FACTOR * self._uses[self._coldest()]

    def _coldest(self) -> GraphKey:
        """The least used graph; of equals, the least recently used."""
        return min(self.graphs, key=self._uses.__getitem__)

    def _drop_coldest(self) -> GraphKey:
        key = self._coldest()
        del self.graphs[key]
        return key
