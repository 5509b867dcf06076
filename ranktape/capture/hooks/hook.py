"""What a capture puts on a model: hooks whose copies do nothing, and functions in the place of others.

Between two optimizer steps a training copies, pickles or averages its model as it likes, and the hooks of the iteration
that is captured are on it then. A closure would be shared with the copy, and record it under the original's names; what
holds the capture itself cannot be copied. So all that is put on modules and tensors is a `Hook`.

A framework's own function is replaced where it is. Any other is found under every module-level name of all modules that
are loaded, but those of the standard library and of the packages beneath torch; in the attributes of a model's modules;
in the default arguments and the closures of their methods and of the functions beside them. What a list, a dictionary
or a partial function holds is not found, and neither is a local name.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch import nn


Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes from a function what takes its place."""


class Hook:
    """A hook on a module or a tensor; its copies and pickles do nothing, and name nothing of ours."""

    __slots__ = ("_call",)

    __torch_unserializable__ = True
    """Torch's word for tensor hooks that are not missed in a pickle: without it there is a warning."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook returns."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The exit of a context that is none takes any arguments and returns nothing, which changes nothing.

        It holds a handle that was issued after ours: where it is unpickled, torch numbers later hooks after it, so that
        none takes the place, and with it the signature, of what is left of ours.
        """
        last = RemovableHandle(OrderedDict())
        return getattr, (contextlib.nullcontext(last), "__exit__")


class Around:
    """A function that prepares operands for another one, which computes with them: that one is captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        """The other one."""


def as_itself(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """For `__reduce__` of what stands for something else: a copy of it is a copy of that, without our name in it."""
    return operator.getitem, ((value,), 0)


def replace(name: str, make: Make) -> Callable[[], None] | None:
    """Have another function, or method of a class, under the dotted name of one; what puts the original back.

    Where somebody has replaced the replacement, that does nothing. None where the name is not loaded.
    """
    found = resolve(name)
    if found is None:
        return None
    owner, attribute = found
    original = getattr(owner, "__dict__", {}).get(attribute)
    if original is None:
        return lambda: None
    is_static = isinstance(original, staticmethod)
    new = staticmethod(make(original.__func__)) if is_static else make(original)
    setattr(owner, attribute, new)

    def undo() -> None:
        if owner.__dict__.get(attribute) is new:
            setattr(owner, attribute, original)

    return undo


class Replacements:
    """Functions of frameworks under whose names others stand, each from when its module is loaded."""

    def __init__(self, wanted: Iterable[tuple[str, Make]]) -> None:
        """Know the dotted names, and what makes the replacements; `refresh` puts them in place."""
        self._wanted = list(wanted)
        self._undo: list[Callable[[], None]] = []

    def refresh(self) -> bool:
        """Put in place those that were loaded since; whether there were any."""
        wanted, self._wanted = self._wanted, []
        for name, make in wanted:
            undo = replace(name, make)
            if undo is None:
                self._wanted.append((name, make))
            else:
                self._undo.append(undo)
        return len(self._wanted) < len(wanted)

    def remove(self) -> None:
        """Put the originals back; nothing takes their places after that."""
        self._wanted.clear()
        for undo in self._undo:
            undo()


_LEFT_ALONE = ("torch._dynamo", "torch._inductor", "torch.overrides", "ranktape.")
"""Beginnings of modules that hold functions to compare with them, not to call them."""

_BENEATH = frozenset({"numpy", "sympy", "mpmath"})
"""Packages on which torch is built: half of all names there are, and none of them is a function of torch."""

_WITHOUT_FILES = ("built-in", "frozen")
"""Where modules of the standard library come from that have no file."""

_STDLIB = f"{Path(os.__file__).parent}{os.sep}"
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"

Table = Mapping[int, tuple[Any, Any]]
"""By the identity of a function: itself, and what takes its place."""


def table_of(pairs: Iterable[tuple[Any, Any]]) -> Table:
    """What takes the place of what."""
    return {id(old): (old, new) for old, new in pairs}


Place = tuple[dict[str, Any], str, Any, Any]
"""Where a function was replaced: the names of a module, the name, the function, and what takes its place."""

Places = Sequence[Place]
"""Where functions were replaced."""


def replace_names(table: Table, *, but: Collection[str] = ()) -> Places:
    """Under every module-level name, but in those modules; where that was."""
    places: list[Place] = []
    for name, module in sys.modules.copy().items():
        namespace = getattr(module, "__dict__", None)
        if name in but or not isinstance(namespace, dict) or _is_left_alone(name, namespace):
            continue
        places += _replace_in(namespace, table)
    return places


def _is_left_alone(name: str, namespace: dict[str, Any]) -> bool:
    package = name.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return package in _BENEATH or name.startswith(_LEFT_ALONE)
    # A program may have a module of its own under such a name, with a file or without one.
    file = namespace.get("__file__")
    if not isinstance(file, str):
        return getattr(namespace.get("__spec__"), "origin", None) in _WITHOUT_FILES
    return file.startswith(_STDLIB) and _SITE_PACKAGES not in file


def restore_names(places: Places) -> None:
    """The functions themselves again, where others were put in their place."""
    for namespace, name, old, new in places:
        if namespace.get(name) is new:
            namespace[name] = old


@contextlib.contextmanager
def put_back(places: Places) -> Iterator[None]:
    """For a moment have the functions themselves under their names."""
    changed = [place for place in places if place[0].get(place[1]) is place[3]]
    restore_names(changed)
    try:
        yield
    finally:
        for namespace, name, _, new in changed:
            namespace[name] = new


@contextlib.contextmanager
def without_global_hooks(owner: object) -> Iterator[None]:
    """In it no method of an object is among torch's hooks that are called before each module."""
    hooks = torch.nn.modules.module._global_forward_pre_hooks  # noqa: SLF001  (there is no public name)
    own = {key: hook for key, hook in hooks.items() if getattr(hook, "__self__", None) is owner}
    for key in own:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(own)


def replace_in_model(root: nn.Module, table: Table) -> list[Callable[[], None]]:
    """In the attributes and functions of a model; what puts everything back."""
    places: list[Place] = []
    kinds: set[type] = set()
    for module in root.modules():
        places += _replace_in(vars(module), table)
        kinds.update(type(module).__mro__)
    undo: list[Callable[[], None]] = [functools.partial(restore_names, places)] if places else []
    for function in _functions(kinds):
        undo += _replace_in_function(function, table)
    return undo


def resolve(name: str) -> tuple[Any, str] | None:
    """What holds the attribute of a dotted name, and the attribute; None where it is not loaded, or is not there."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        holder: Any = sys.modules.get(".".join(parts[:length]))
        if isinstance(holder, ModuleType):
            for part in parts[length:-1]:
                holder = getattr(holder, part, None)
            return (holder, parts[-1]) if hasattr(holder, parts[-1]) else None
    return None


def _replace_in(namespace: dict[str, Any], table: Table) -> Places:
    # Almost none has any: that is found out without a step of Python for each name.
    if table.keys().isdisjoint(map(id, list(namespace.values()))):
        return ()
    found = [(name, *table[id(value)]) for name, value in list(namespace.items()) if id(value) in table]
    places = [(namespace, name, old, new) for name, old, new in found if namespace.get(name) is old]
    namespace.update({name: new for _, name, _, new in places})
    return places


def _functions(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """The methods of classes that are not torch's, and the functions of the modules in which they are."""
    names: set[str] = set()
    for kind in kinds:
        if not kind.__module__.startswith(("torch.", "builtins", *_LEFT_ALONE)):
            names.add(kind.__module__)
            yield from (value for value in list(vars(kind).values()) if isinstance(value, FunctionType))
    for name in names:
        namespace = vars(sys.modules[name]) if name in sys.modules else {}
        yield from (value for value in list(namespace.values()) if isinstance(value, FunctionType))


def _replace_in_function(function: FunctionType, table: Table) -> Iterator[Callable[[], None]]:
    defaults, named = function.__defaults__, function.__kwdefaults__
    if defaults and any(id(value) in table for value in defaults):
        function.__defaults__ = tuple(table.get(id(value), (value, value))[1] for value in defaults)
        yield lambda: setattr(function, "__defaults__", defaults)
    if named and any(id(value) in table for value in named.values()):
        function.__kwdefaults__ = {name: table.get(id(value), (value, value))[1] for name, value in named.items()}
        yield lambda: setattr(function, "__kwdefaults__", named)
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # not filled yet
        if id(content) in table:
            cell.cell_contents = table[id(content)][1]
            yield lambda cell=cell, content=content: setattr(cell, "cell_contents", content)  # type: ignore[misc]
