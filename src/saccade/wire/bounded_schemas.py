"""Makes JSON schemas finite: objects have only the properties that are named, and unbounded integers fit into 64 bits.
By default JSON Schema allows properties that a schema does not mention, and a model that may always add one more
property, or one more digit, may never stop. OpenAI's strict mode and vLLM close objects, too.

`additionalProperties` is honoured as written, and an object without `properties` or `patternProperties` stays open.
Where several schemas apply to one object (`allOf`, or a `$ref` or `anyOf` next to `properties`), closing one of them
would forbid the properties of the others, so the schema that combines them is closed around the names of all. Each
alternative is closed around its own names and those that apply together with it. Otherwise it would admit names of
another alternative with any value. (Alternatives inside a shared definition are not told apart: their names are
pooled.)
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from saccade.wire.schemas import MAX_NESTING, MAX_VALUES, listed, mapped, resolve, walk

Schema = dict[str, Any]

MAX_INTEGER = 2**63 - 1024  # llguidance computes with doubles: this is the largest one below 2**63
MAX_BOUNDED = 64  # integers of a schema: each bound is an expression, and hundreds of them exceed llguidance's fuel
_SPOKEN = frozenset({"additionalProperties", "unevaluatedProperties"})
_OBJECT = _SPOKEN | {"properties", "patternProperties", "required", "minProperties", "maxProperties"}
_COUNTED = frozenset({"enum", "const", "multipleOf", "$ref"})  # already finite, or not only about integers
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_CHILDREN = ("items", "additionalProperties")


def bound_schema(schema: Any) -> Any:
    """A closed copy of the schema. A schema that is too large or has unsupported references is returned unchanged."""
    try:
        for count, (depth, _) in enumerate(walk(schema)):
            if count > MAX_VALUES or depth > MAX_NESTING:
                raise _LeaveOpenError
        return _Closer(_copy(schema)).close()
    except _LeaveOpenError:
        return schema


class _LeaveOpenError(Exception):
    pass


class _Closer:
    """Closes a schema in place."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._parts: set[int] = set()  # ids of schemas that apply together with others and are not closed themselves
        self._fuel = 10 * MAX_VALUES  # schemas that may still be visited while collecting names

    def close(self) -> Any:
        schemas = self._reachable()
        for schema in schemas:
            if self._is_group(schema):
                for branch in self._branches(schema):
                    self._mark(branch)
        for schema in schemas:
            if id(schema) not in self._parts and not _SPOKEN & schema.keys():
                self._close(schema)
        integers = [schema for schema in schemas if _is_integer(schema)]
        for schema in integers if len(integers) <= MAX_BOUNDED else ():
            _bound_integer(schema)
        return self._root

    def _reachable(self) -> list[Schema]:
        found: dict[int, Schema] = {}
        waiting = [self._root]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            if "$id" in schema and schema is not self._root:
                raise _LeaveOpenError  # its references are relative to itself
            found[id(schema)] = schema
            waiting += [*_children(schema), *self._branches(schema)]
        return list(found.values())

    def _branches(self, schema: Schema, away: frozenset[int] = frozenset()) -> Iterator[Schema]:
        """Schemas that apply to the same value, except those whose ids are in `away`."""
        for key in ("allOf", "anyOf", "oneOf"):
            branches = (branch for branch in listed(schema.get(key)) if isinstance(branch, dict))
            yield from (branch for branch in branches if id(branch) not in away)
        if (target := self._target(schema)) is not None:
            yield target

    def _target(self, schema: Schema) -> Schema | None:
        if "$ref" not in schema:
            return None
        pointer = schema["$ref"]
        is_local = isinstance(pointer, str) and (pointer == "#" or pointer.startswith("#/"))
        found = resolve(self._root, pointer) if is_local else None
        if not isinstance(found, dict):
            raise _LeaveOpenError
        return found

    def _is_group(self, schema: Schema) -> bool:
        """Whether more than one schema applies to the same object."""
        ways = len(listed(schema.get("allOf"))) + sum(key in schema for key in ("anyOf", "oneOf", "$ref"))
        ways += not _OBJECT.isdisjoint(schema)
        return ways > 1 or ("oneOf" in schema and not self._is_disjoint(listed(schema["oneOf"])))

    def _is_disjoint(self, branches: list[Any]) -> bool:
        """Whether no object can match two branches, even if they are open. Closing branches could otherwise hide that
        an answer matches both, which `oneOf` forbids."""
        plain = [self._followed(branch) for branch in branches]
        tags = [_tags(branch) for branch in plain if "object" in _types(branch)]
        if len(tags) < 2:
            return True
        for name in set.intersection(*map(set, tags)):
            values = [value for branch in tags for value in branch[name]]
            if len(set(values)) == len(values):
                return True
        return False

    def _followed(self, schema: Any) -> Schema:
        for _ in range(MAX_NESTING):
            target = self._target(schema) if isinstance(schema, dict) else None
            if target is None:
                break
            schema = target
        return schema if isinstance(schema, dict) else {}

    def _mark(self, schema: Schema) -> None:
        waiting = [schema]
        while waiting:
            schema = waiting.pop()
            if id(schema) not in self._parts:
                self._parts.add(id(schema))
                waiting += self._branches(schema)

    def _close(self, schema: Schema) -> None:
        """Collects all names before changing anything, because closing a schema adds names to it."""
        whole = _Names.of(self._members(schema))
        if whole is None:
            return
        parts: list[tuple[Schema, _Names | None]] = []
        if self._is_group(schema):
            for branch, siblings in self._alternatives(schema):
                together = self._walk(schema, partial(self._branches, away=siblings))
                parts.append((branch, _Names.of(together)))
        for part, names in [(schema, whole), *parts]:
            if names is not None:
                names.close(part)

    def _alternatives(self, schema: Schema) -> Iterator[tuple[Schema, frozenset[int]]]:
        """Branches of which one has to match, each with the ids of the others. Definitions are left out, as other
        objects may use them too."""
        waiting = [schema]
        while waiting:
            found = waiting.pop()
            for key in ("allOf", "anyOf", "oneOf"):
                branches = [branch for branch in listed(found.get(key)) if isinstance(branch, dict)]
                waiting += branches
                if key == "anyOf" or (key == "oneOf" and self._is_disjoint(branches)):
                    ids = frozenset(map(id, branches))
                    yield from ((branch, ids - {id(branch)}) for branch in branches)

    def _members(self, schema: Schema) -> list[Schema]:
        """All schemas that apply to the same object, this one first, except those that are closed separately."""
        if not self._is_group(schema) and not self._is_open_reference(schema):
            return [schema]
        return self._walk(schema, self._branches)

    def _is_open_reference(self, schema: Schema) -> bool:
        """Whether the schema refers to one that is part of a group elsewhere. A recursive reference is left alone,
        because llguidance allows nothing next to it."""
        target = self._target(schema)
        if target is None or id(target) not in self._parts:
            return False
        inner = self._walk(target, lambda found: [*_children(found), *self._branches(found)])
        return not any(self._target(found) is target for found in inner)

    def _walk(self, schema: Schema, following: Callable[[Schema], Iterable[Any]]) -> list[Schema]:
        found: dict[int, Schema] = {}
        waiting: list[Any] = [schema]
        while waiting:
            member = waiting.pop()
            if isinstance(member, dict) and id(member) not in found:
                self._fuel -= 1
                if self._fuel < 0:
                    raise _LeaveOpenError
                found[id(member)] = member
                waiting += reversed([*following(member)])
        return list(found.values())


@dataclass(frozen=True, slots=True)
class _Names:
    """The property names that a group of schemas allows in an object, each mapped to an unrestricted schema."""

    properties: Schema
    patterns: Schema

    @classmethod
    def of(cls, members: list[Schema]) -> "_Names | None":
        """None if a member sets `additionalProperties` itself, or if no member names properties."""
        patterns = _keys(members, "patternProperties")
        if not patterns and not any(isinstance(member.get("properties"), dict) for member in members):
            return None
        properties = _keys(members, "properties") | {name: {} for name in _required(members)}
        fewest = max((n for member in members if isinstance(n := member.get("minProperties"), int)), default=0)
        if any(_SPOKEN & member.keys() for member in members) or (fewest > len(properties) and not patterns):
            return None
        return cls(properties, patterns)

    def close(self, schema: Schema) -> None:
        if self.properties:
            schema["properties"] = self.properties | mapped(schema.get("properties"))
        if self.patterns:
            schema["patternProperties"] = self.patterns | mapped(schema.get("patternProperties"))
        schema["additionalProperties"] = False


def _is_integer(schema: Schema) -> bool:
    types = _types(schema)
    return "integer" in types and "number" not in types and _COUNTED.isdisjoint(schema)


def _bound_integer(schema: Schema) -> None:
    low, high = (schema.get(f"{side}imum", schema.get(f"exclusive{side.title()}imum")) for side in ("min", "max"))
    if low is None and (high is None or _is_below(-MAX_INTEGER, high)):
        schema["minimum"] = -MAX_INTEGER
    if high is None and (low is None or _is_below(low, MAX_INTEGER)):
        schema["maximum"] = MAX_INTEGER


def _is_below(low: Any, high: Any) -> bool:
    """False also for values that are not numbers; llguidance refuses those later."""
    return all(isinstance(value, int | float) for value in (low, high)) and low < high


def _children(schema: Schema) -> Iterator[Any]:
    for key in _MAPS:
        yield from mapped(schema.get(key)).values()
    for key in _LISTS:
        yield from listed(schema.get(key))
    yield from (schema[key] for key in _CHILDREN if key in schema)


def _keys(members: list[Schema], key: str) -> Schema:
    """The names that any member has, each mapped to an unrestricted schema."""
    return {name: {} for member in members for name in mapped(member.get(key))}


def _required(members: list[Schema]) -> list[str]:
    return [name for member in members for name in listed(member.get("required")) if isinstance(name, str)]


def _types(schema: Schema) -> list[Any]:
    given = schema.get("type", "object")
    return given if isinstance(given, list) else [given]


def _tags(schema: Schema) -> dict[str, list[str]]:
    """Required properties that only allow given strings, with these strings."""
    required = set(_required([schema]))
    kinds = {name: mapped(kind) for name, kind in mapped(schema.get("properties")).items() if name in required}
    words = {name: [kind["const"]] if "const" in kind else listed(kind.get("enum")) for name, kind in kinds.items()}
    return {name: found for name, found in words.items() if found and all(isinstance(word, str) for word in found)}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
