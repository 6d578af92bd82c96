"""The graphs of a phase as the composer sees them: which exist, and which one a batch runs in."""

from saccade.choice.costs import Curve, TierCosts
from saccade.choice.exact import ExactIndex, ExactLayout, Structure
from saccade.choice.key import Capacity, Decision, GraphKey, Reason, structure_digest
from saccade.choice.shape import PhaseShape
from saccade.config import GraphSettings, Tier
from saccade.errors import GraphError


class Catalogue:
    """Decides without touching a device. Code that captures a graph, or finds one wrong, updates the catalogue."""

    def __init__(self, shape: PhaseShape, settings: GraphSettings) -> None:
        self.shape, self.settings = shape, settings
        self.costs: TierCosts | None = None
        self.seconds: Curve | None = None  # per replay
        self.exact = ExactIndex(settings)
        self.retired: dict[GraphKey, str] = {}  # reasons by key
        self.captured: set[GraphKey] = set()  # bucket graphs only

    def key(self, capacity: Capacity, structure: Structure | None = None) -> GraphKey:
        """The key of a bucket's graph or, with a structure, of an exact graph."""
        digest = structure_digest(structure) if structure is not None else ""
        return GraphKey(self.shape.name, self.settings.mode, capacity, digest)

    def retire(self, key: GraphKey, reason: str) -> None:
        """Take a graph out of service for good. Its batches run in their other graph (exact or bucket), or eagerly."""
        self.retired[key] = reason

    def decide(self, sizes: Capacity, structure: Structure) -> Decision:
        return self._decide(sizes, structure)[0]

    def choose(self, sizes: Capacity, structure: Structure) -> Decision:
        """Decide for a batch that is about to run, and count its layout for the exact tier. With `--graphs-strict` a
        batch without a graph is an error."""
        decision, exact_key = self._decide(sizes, structure)
        if decision.key is None and self.settings.strict and decision.reason is not Reason.GRAPHS_OFF:
            raise GraphError(f"{self.shape.name} batch of {sizes} is not replayed: {decision} (--graphs-strict)")
        if exact_key is None:
            return decision
        if decision.tier is Tier.EXACT:
            self.exact.use(exact_key)
        elif self._is_worth_exact(exact_key, sizes):
            self.exact.see(exact_key, sizes, structure)
        return decision

    def layout(self, sizes: Capacity, structure: Structure) -> ExactLayout | None:
        """The exact graph to capture for a structure; None if it exists or no batch would use it."""
        key = self.key(sizes, structure)
        if not self._is_worth_exact(key, sizes):
            return None
        return self.exact.begin(ExactLayout(key, sizes, structure))

    def _decide(self, sizes: Capacity, structure: Structure) -> tuple[Decision, GraphKey | None]:
        """The decision, and the key of the batch's exact graph if that tier is on."""
        tiers, rows = self.settings.tiers, self.shape.rows
        exact_key = self.key(sizes, structure) if Tier.EXACT in tiers else None
        if not tiers:
            off = Decision(Tier.EAGER, Reason.GRAPHS_OFF, padded_to=self.shape.bucket_for(sizes))
            return off, exact_key
        options = self._options(sizes, exact_key)
        if not options:
            return self._explain_no_graph(sizes, exact_key), exact_key
        rows_by_tier = {tier: key.capacity[rows] for tier, key in options.items()}
        if self.costs is not None and not self.settings.strict:
            tier = self.costs.cheapest({**rows_by_tier, Tier.EAGER: sizes[rows]})
        else:
            tier = min(rows_by_tier, key=rows_by_tier.__getitem__)
        if tier is Tier.EAGER:
            return Decision(tier, Reason.EAGER_FASTER), exact_key
        reason = Reason.EXACT_GRAPH if tier is Tier.EXACT else Reason.FITS_BUCKET
        return Decision(tier, reason, options[tier]), exact_key

    def _options(self, sizes: Capacity, exact_key: GraphKey | None) -> dict[Tier, GraphKey]:
        options = {}
        if exact_key is not None and exact_key in self.exact.graphs:
            options[Tier.EXACT] = exact_key
        bucket = self.shape.bucket_for(sizes)
        if bucket is not None and (key := self.key(bucket)) in self.captured:
            options[Tier.CAPACITY] = key
        if self.retired:
            return {tier: key for tier, key in options.items() if key not in self.retired}
        return options

    def _explain_no_graph(self, sizes: Capacity, exact_key: GraphKey | None) -> Decision:
        bucket = self.shape.bucket_for(sizes)
        if Tier.CAPACITY in self.settings.tiers and self.shape.buckets and bucket is None:
            return Decision(Tier.EAGER, Reason.TOO_LARGE, detail=self.shape.misfit_in_largest(sizes))
        for key in (exact_key, None if bucket is None else self.key(bucket)):
            if key is not None and key in self.retired:
                return Decision(Tier.EAGER, Reason.OUT_OF_SERVICE, detail=self.retired[key], padded_to=bucket)
        return Decision(Tier.EAGER, Reason.NOT_CAPTURED)

    def _is_worth_exact(self, key: GraphKey, sizes: Capacity) -> bool:
        """Whether to capture an exact graph: it is new, its batch fits the buffers, and would run in it."""
        if key in self.exact.graphs or key in self.retired:
            return False
        if any(sizes[name] > limit for name, limit in self.shape.limits.sizes):
            return False
        if self.costs is None:
            return True
        rows = sizes[self.shape.rows]
        others = {tier: key.capacity[self.shape.rows] for tier, key in self._options(sizes, None).items()}
        return self.costs.cheapest({Tier.EXACT: rows, Tier.EAGER: rows, **others}) is Tier.EXACT
