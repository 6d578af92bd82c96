"""Size limits of JSON schemas. llguidance's work can far exceed a schema's size. It grows with the square of an
object's optional properties, with the pairs of name patterns, and with the value of `multipleOf`, which needs one
automaton state per unit. Where several schemas apply at once (`allOf`, a `$ref` with siblings, `anyOf` next to
`properties`), it grows with the product of their alternatives and exponentially with their patterns. Each of these has
a limit here."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from math import isqrt, prod
from typing import Any

MAX_NESTING = 100
MAX_VALUES = 20_000  # objects, lists and plain values
MAX_PROPERTIES = 500  # of one object; for several objects, the root of the sum of squares
MAX_BRANCHES = 2000
MAX_NAME_PATTERNS = 32
MAX_MULTIPLE = 10_000  # product of all multipleOf, without their decimal points
MAX_FACTORS = 8  # schemas that apply at once
MAX_ALTERNATIVES = 1000  # combinations of their alternatives
MAX_CHAIN = 50  # references nested in definitions that are themselves referenced

Hold = Callable[[str, int, int], None]
Weight = tuple[int, int]  # factors, alternatives

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
# Keywords that constrain a value by themselves; a type alone multiplies nothing.
_OWN = frozenset({
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "enum", "const", "pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
})  # fmt: skip
_CHILD_MAPS = ("properties", "patternProperties")
_CHILDREN = ("items", "additionalProperties", "contains", "not")


def check_schemas(schemas: Sequence[Any], hold: Hold) -> None:
    """Calls `hold(what, count, limit)` for each limit of a grammar's schemas; `hold` raises if it is exceeded."""
    counts, multiples = Counter[str](), set[int]()
    for depth, value in walk(list(schemas)):
        counts["values"] += 1
        hold("levels", depth, MAX_NESTING)
        hold("values", counts["values"], MAX_VALUES)
        if isinstance(value, dict):
            counts["squares"] += len(mapped(value.get("properties"))) ** 2
            counts["name patterns"] += len(mapped(value.get("patternProperties")))
            counts["branches"] += sum(len(listed(value.get(key))) for key in _LISTS)
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float):
                digits = Decimal(str(multiple)).as_tuple().digits[:20]
                multiples.add(int("".join(map(str, digits))) or 1)
    hold("properties", isqrt(counts["squares"]), MAX_PROPERTIES)
    hold("patternProperties", counts["name patterns"], MAX_NAME_PATTERNS)
    hold("branches", counts["branches"], MAX_BRANCHES)
    hold("states of multipleOf", prod(multiples), MAX_MULTIPLE)
    for schema in schemas:
        _Scale(schema, hold).weigh(schema)


class _Scale:
    """Finds how many schemas apply at once, and with how many alternatives, at the worst place of a schema."""

    def __init__(self, root: Any, hold: Hold) -> None:
        self._root, self._hold = root, hold
        self._known: dict[str, Weight] = {}
        self._chain = 0

    def weigh(self, schema: Any) -> Weight:
        if not isinstance(schema, dict):
            return 1, 1
        parts = [*map(self.weigh, listed(schema.get("allOf")))]
        parts += [self._either(schema[key]) for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        if isinstance(schema.get("$ref"), str):
            parts.append(self._follow(schema["$ref"]))
        children = self._children(schema)
        if not _OWN.isdisjoint(schema):
            parts.append(_most(children))
        if not parts:
            return 1, 1
        factors, alternatives = sum(part[0] for part in parts), prod(part[1] for part in parts)
        if len(parts) > 1:
            self._hold("schemas that must hold at once", factors, MAX_FACTORS)
            self._hold("combinations of alternatives", alternatives, MAX_ALTERNATIVES)
        return factors, alternatives

    def _either(self, branches: list[Any]) -> Weight:
        weights = [self.weigh(branch) for branch in branches]
        return _most(weights)[0], sum(weight[1] for weight in weights)

    def _children(self, schema: dict[str, Any]) -> list[Weight]:
        found = [schema.get(key) for key in _CHILDREN] + listed(schema.get("prefixItems"))
        for key in (*_CHILD_MAPS, "$defs", "definitions"):
            found += mapped(schema.get(key)).values()
        return [self.weigh(child) for child in found]

    def _follow(self, pointer: str) -> Weight:
        """Weighs each definition once; a recursive reference adds nothing."""
        if pointer not in self._known:
            self._known[pointer] = (1, 1)
            self._chain += 1
            self._hold("references that lead to references", self._chain, MAX_CHAIN)
            self._known[pointer] = self.weigh(resolve(self._root, pointer))
            self._chain -= 1
        return self._known[pointer]


def walk(schema: Any) -> Iterator[tuple[int, Any]]:
    waiting = [(1, schema)]
    while waiting:
        depth, value = waiting.pop()
        yield depth, value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(depth + 1, part) for part in inner]


def resolve(root: Any, pointer: str) -> Any:
    """The target of a reference within the schema. llguidance refuses all other references."""
    value = root
    for step in pointer.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _most(weights: list[Weight]) -> Weight:
    return max((w[0] for w in weights), default=1), max((w[1] for w in weights), default=1)
