"""What a graph depends on outside its arena: the addresses of weights and caches, and the structure of modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

from torch import Tensor, nn

from saccade.errors import AddressError

Location = tuple[Any, Any]  # the container of an object (dictionary or list), and its key there

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MEMBERS = ("_parameters", "_buffers", "_modules")


class Watched(Mapping[str, Tensor]):
    """Named tensors, looked up in their containers each time, so that a replaced one is noticed. `references` are other
    objects that a capture relied on (submodules, a bias that is None, the training flag): each must stay the same
    object. `sizes` are containers whose length must not change, so that added parameters and hooks are noticed."""

    def __init__(
        self,
        tensors: Mapping[str, Location],
        references: Mapping[str, Location] | None = None,
        sizes: Mapping[str, Sized] | None = None,
    ) -> None:
        self._tensors, self._references, self._sizes = dict(tensors), dict(references or {}), dict(sizes or {})
        self._tensor_locations = tuple(self._tensors.values())
        self._reference_locations = tuple(self._references.values())
        self._containers = tuple(self._sizes.values())
        self._alive = [container[key] for container, key in self._reference_locations]  # else their ids could be reused

    @classmethod
    def of_module(cls, module: nn.Module, name: str = "") -> "Watched":
        """A module's parameters and buffers, and its submodules, training flag and hooks."""
        tensors: dict[str, Location] = {}
        references: dict[str, Location] = {}
        sizes: dict[str, Sized] = {}
        for prefix, part in module.named_modules(prefix=name):
            start = f"{prefix}." if prefix else ""
            for members in (part._parameters, part._buffers):
                for key, tensor in members.items():
                    (tensors if tensor is not None else references)[start + key] = (members, key)
            references |= {start + key: (part._modules, key) for key in part._modules}
            references[f"{start}training"] = (vars(part), "training")
            sizes |= {f"{start}{member}": getattr(part, member) for member in (*_MEMBERS, *_HOOKS)}
        return cls(tensors, references, sizes)

    @classmethod
    def of_body(cls, body: Callable[..., Any]) -> "Watched":
        """The modules that a body is, is a method of, or closes over."""
        found = cls({})
        for i, module in enumerate(_modules_of(body)):
            found = found | cls.of_module(module, f"module {i}" if i else "")
        return found

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "Watched":
        return state if isinstance(state, Watched) else cls({name: (state, name) for name in state})

    def marks(self) -> list[int]:
        """Current addresses, identities and lengths. Equal lists mean that nothing moved or was replaced."""
        try:
            return [
                *[container[key].data_ptr() for container, key in self._tensor_locations],
                *[id(container[key]) for container, key in self._reference_locations],
                *map(len, self._containers),
            ]
        except (AttributeError, KeyError, IndexError):
            addresses = (t.data_ptr() if isinstance(t, Tensor) else 0 for t in map(_look_up, self._tensor_locations))
            return [
                *addresses,
                *(id(_look_up(location)) for location in self._reference_locations),
                *map(len, self._containers),
            ]

    def changes(self, before: Sequence[int]) -> list[str]:
        """What changed since `marks` returned `before`."""
        found = []
        names = [*self._tensors, *self._references, *self._sizes]
        for i, (name, was, now) in enumerate(zip(names, before, self.marks(), strict=True)):
            if was == now:
                continue
            if i < len(self._tensors):
                found.append(f"{name!r} is gone" if now == 0 else f"{name!r} was at {was:#x} and is now at {now:#x}")
            elif i < len(self._tensors) + len(self._references):
                found.append(f"{name!r} was replaced")
            else:
                found.append(f"{name!r} had {was} entries and now has {now}")
        return found

    def __or__(self, other: Mapping[str, Tensor]) -> "Watched":
        more = Watched.of(other)
        return Watched(
            {**self._tensors, **more._tensors}, {**self._references, **more._references}, {**self._sizes, **more._sizes}
        )

    def __getitem__(self, name: str) -> Tensor:
        container, key = self._tensors[name]
        tensor: Tensor | None = container.get(key)
        if tensor is None:
            raise AddressError(f"{name!r} is gone; a captured graph reads it")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _modules_of(body: Any) -> list[nn.Module]:
    if isinstance(body, nn.Module):
        return [body]
    if isinstance(body, partial):
        held = [body.func, *body.args, *body.keywords.values()]
        return [module for part in held for module in _modules_of(part)]
    cells = [cell.cell_contents for cell in getattr(body, "__closure__", None) or () if not _is_empty(cell)]
    found = [part for part in (getattr(body, "__self__", None), *cells) if isinstance(part, nn.Module)]
    return list(dict.fromkeys(found))


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


_GONE = object()


def _look_up(location: Location) -> Any:
    try:
        return location[0][location[1]]
    except (KeyError, IndexError):
        return _GONE
