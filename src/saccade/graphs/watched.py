"""What a graph depends on outside its arena: the addresses of weights and caches, and the structure of modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

from torch import Tensor, nn

from saccade.errors import AddressError

Home = tuple[Any, Any]  # the container of an object (dictionary or list), and its key there

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MEMBERS = ("_parameters", "_buffers", "_modules")


class Watched(Mapping[str, Tensor]):
    """Named tensors, looked up in their containers each time, so that a replaced one is noticed. `links` are other
    objects that a capture relied on (submodules, a bias that is None, the training flag): each must stay the same
    object. `sizes` are containers whose length must not change, so that added parameters and hooks are noticed."""

    def __init__(
        self,
        homes: Mapping[str, Home],
        links: Mapping[str, Home] | None = None,
        sizes: Mapping[str, Sized] | None = None,
    ) -> None:
        self._homes, self._links, self._sizes = dict(homes), dict(links or {}), dict(sizes or {})
        self._tensor_homes = tuple(self._homes.values())
        self._link_homes = tuple(self._links.values())
        self._containers = tuple(self._sizes.values())
        self._alive = [home[key] for home, key in self._link_homes]  # else their ids could be reused

    @classmethod
    def of_module(cls, module: nn.Module, name: str = "") -> "Watched":
        """A module's parameters and buffers, and its submodules, training flag and hooks."""
        homes: dict[str, Home] = {}
        links: dict[str, Home] = {}
        sizes: dict[str, Sized] = {}
        for prefix, part in module.named_modules(prefix=name):
            start = f"{prefix}." if prefix else ""
            for members in (part._parameters, part._buffers):
                for key, tensor in members.items():
                    (homes if tensor is not None else links)[start + key] = (members, key)
            links |= {start + key: (part._modules, key) for key in part._modules}
            links[f"{start}training"] = (vars(part), "training")
            sizes |= {f"{start}{member}": getattr(part, member) for member in (*_MEMBERS, *_HOOKS)}
        return cls(homes, links, sizes)

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
                *[home[key].data_ptr() for home, key in self._tensor_homes],
                *[id(home[key]) for home, key in self._link_homes],
                *map(len, self._containers),
            ]
        except (AttributeError, KeyError, IndexError):
            addresses = (t.data_ptr() if isinstance(t, Tensor) else 0 for t in map(_look_up, self._tensor_homes))
            return [*addresses, *(id(_look_up(home)) for home in self._link_homes), *map(len, self._containers)]

    def changes(self, before: Sequence[int]) -> list[str]:
        """What changed since `marks` returned `before`."""
        found = []
        names = [*self._homes, *self._links, *self._sizes]
        for i, (name, was, now) in enumerate(zip(names, before, self.marks(), strict=True)):
            if was == now:
                continue
            if i < len(self._homes):
                found.append(f"{name!r} is gone" if now == 0 else f"{name!r} was at {was:#x} and is now at {now:#x}")
            elif i < len(self._homes) + len(self._links):
                found.append(f"{name!r} was replaced")
            else:
                found.append(f"{name!r} had {was} entries and now has {now}")
        return found

    def __or__(self, other: Mapping[str, Tensor]) -> "Watched":
        more = Watched.of(other)
        return Watched({**self._homes, **more._homes}, {**self._links, **more._links}, {**self._sizes, **more._sizes})

    def __getitem__(self, name: str) -> Tensor:
        home, key = self._homes[name]
        tensor: Tensor | None = home.get(key)
        if tensor is None:
            raise AddressError(f"{name!r} is gone; a captured graph reads it")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


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


def _look_up(home: Home) -> Any:
    try:
        return home[0][home[1]]
    except (KeyError, IndexError):
        return _GONE
