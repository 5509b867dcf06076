"""What stands for functions with a role, under every name by which loaded modules know them."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch.overrides import has_torch_function

from ranktape.capture.hooks.compiled import forget_replacements
from ranktape.capture.hooks.hook import (
    Around,
    Places,
    Table,
    as_itself,
    replace_names,
    resolve,
    restore_names,
    table_of,
)
from ranktape.capture.passes.passes import is_traced
from ranktape.capture.roles.known import function_roles
from ranktape.capture.roles.table import FunctionRole, Ports, ports_of, resolved

MakeGiver = Callable[[Callable[..., Any], FunctionRole], Callable[..., Any]]
"""Makes from a registry's method, and the role of what it gives, what takes its place."""


class StandIn:
    """Stands for a function while an iteration is captured, and passes through at other times."""

    hooks: ClassVar[Any] = None
    """The `FunctionHooks` of the iteration that is captured; None outside of one."""
    known: ClassVar[dict[str, StandIn]] = {}
    """All that have a dotted name."""

    def __init__(self, original: Callable[..., Any], role: FunctionRole, name: str = "") -> None:
        self.original = original
        self.role = role
        self._name = name
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the original gives."""
        hooks = StandIn.hooks
        if hooks is None or is_traced():
            return self.original(*args, **kwargs)
        compute = functools.partial(self._compute, hooks) if self._name else self.original
        return hooks.call(self.role, compute, args, kwargs)

    def _compute(self, hooks: Any, *args: Any, **kwargs: Any) -> Any:
        """What the original gives; classes of tensors that have their own idea of it know it by itself and by name."""
        if not has_torch_function((*args, *kwargs.values())):
            return self.original(*args, **kwargs)
        with hooks.originals():
            return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """By name, so that a model which has it can be pickled, and unpickled where we are not installed."""
        return (pkgutil.resolve_name, (self._name,)) if self._name else as_itself(self.original)


class StandIns:
    """The replacements of all functions with a role: between two iterations that are captured they stay."""

    def __init__(self) -> None:
        """Put nothing in place yet."""
        self.table: Table = {}
        self.places: Places = ()
        """Where functions were replaced under the names of modules."""
        self.ports: dict[FunctionRole, Ports] = {}
        """Of the roles of which a function was found."""
        self._undo: list[Callable[[], None]] = []
        self._loaded: frozenset[str] = frozenset()
        self._roles: tuple[FunctionRole, ...] | None = None
        """Those for which functions were looked for; None while nothing is in place."""
        self.givers: list[tuple[Any, str, Callable[..., Any], Callable[..., Any], FunctionRole]] = []
        """The methods of registries: where each one is, itself, what wraps what it gives, and the role of that."""
        self._absent: list[str] = []

    def put(self) -> None:
        """Put them in place, unless they are, and nothing was loaded or replaced since."""
        if self.is_in_place:
            return
        self.remove()
        pairs = []
        self._roles = function_roles()
        self.ports.clear()
        for role in self._roles:
            for name in role.functions:
                found = resolve(name)
                if found is None:
                    self._absent.append(name)
                else:
                    pairs += self._replace(role, name, *found)
        self.table = table_of(pairs)
        self._loaded = frozenset(sys.modules)
        self.places = replace_names(self.table)

    def remove(self) -> None:
        """Put the originals back; what else has got hold of a replacement passes through it from now on."""
        if self._roles is None:
            return
        self._roles = None
        for undo in reversed(self._undo):
            undo()
        restore_names(self.places)
        # A module that was loaded meanwhile may have got hold of them.
        replace_names(table_of((new, old) for old, new in self.table.values()), but=self._loaded)
        self.forget()
        for kept in (self._undo, self.givers, self._absent):
            kept.clear()
        self.table, self.places = {}, ()

    @contextlib.contextmanager
    def with_givers(self, make: MakeGiver) -> Iterator[None]:
        """For a moment have in the places of registries' methods what is made of them."""
        for holder, name, original, _, role in self.givers:
            setattr(holder, name, make(original, role))
        try:
            yield
        finally:
            for holder, name, _, give, _ in self.givers:
                setattr(holder, name, give)

    def forget(self) -> None:
        """Have the compiler know torch's own functions, should it have met these."""
        forget_replacements(new for _, new in self.table.values())

    @property
    def is_in_place(self) -> bool:
        """Whether a search through all modules would find nothing else."""
        return (
            self._roles == function_roles()
            and sys.modules.keys() == self._loaded
            and all(namespace.get(name) is new for namespace, name, _, new in self.places)
            and all(getattr(holder, name) is give for holder, name, _, give, _ in self.givers)
            and not any(map(resolve, self._absent))
        )

    def _replace(
        self, role: FunctionRole, name: str, holder: Any, attribute: str
    ) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        original = getattr(holder, attribute)
        self.ports[role] = resolved(ports_of(role), original)
        if role.gives_function:
            self._undo.append(functools.partial(setattr, holder, attribute, original))
            give = self._giver(original, role)
            setattr(holder, attribute, give)
            self.givers.append((holder, attribute, original, give, role))
            return []
        if isinstance(original, Around):
            self._stand_inside(original, role)
            return []
        known = StandIn.known.get(name)
        if isinstance(original, StandIn):
            return []
        if known is None or known.original is not original or known.role is not role:
            known = StandIn.known[name] = StandIn(original, role, name)
        return [(original, known)]

    def _giver(self, original: Callable[..., Any], role: FunctionRole) -> Callable[..., Any]:
        """In place of a method that gives a function: gives it wrapped."""

        @functools.wraps(original)
        def give(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not isinstance(found, Around):
                return StandIn(found, role)
            self._stand_inside(found, role)
            return found

        return give

    def _stand_inside(self, around: Around, role: FunctionRole) -> None:
        """See what a function computes for which another one prepares the operands."""
        if not isinstance(around.function, StandIn):
            self._undo.append(functools.partial(setattr, around, "function", around.function))
            around.function = StandIn(around.function, role)
