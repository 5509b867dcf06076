"""Replacements that see functions with a role, while an iteration is captured.

They are replaced while an iteration is captured, under every name by which loaded modules and the model know them
(`references.py`), and put back after it: outside of captured iterations nothing costs anything. Of functions that call
one another (a framework's, torch's) the outermost one is recorded. What a registry gives is wrapped.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.overrides import has_torch_function

from ranktape.capture.hooks.calls import Running, RunningRole, Taking, tensor_in
from ranktape.capture.hooks.compiled import forget_replacements
from ranktape.capture.hooks.hook import as_itself
from ranktape.capture.hooks.owners import Owner, Owners
from ranktape.capture.hooks.ports import Ports, ports_of, resolved
from ranktape.capture.hooks.references import (
    Places,
    Table,
    put_back,
    replace_in_model,
    replace_names,
    resolve,
    restore_names,
    table_of,
)
from ranktape.capture.hooks.weights import Leaves, is_cached_by_autocast
from ranktape.capture.passes.circumstances import is_traced, is_transformed
from ranktape.capture.passes.passes import Call
from ranktape.capture.roles.known import ATTENTION, function_roles
from ranktape.capture.roles.table import operand_of
from ranktape.capture.source import Source

if TYPE_CHECKING:
    from ranktape.capture.hooks.calls import Placement
    from ranktape.capture.hooks.multihead import MultiheadHooks
    from ranktape.capture.hooks.weights import Weights
    from ranktape.capture.passes.forwards import Arguments
    from ranktape.capture.passes.tracker import Tracker
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.roles.table import FunctionRole


_SPARSE = 6
"""Place of `sparse` among the arguments of an embedding; a linear product has fewer."""


class StandIn:
    """Stands for a function while an iteration is captured, and passes through at other times."""

    def __init__(self, original: Callable[..., Any], role: FunctionRole, name: str) -> None:
        self.original = original
        self.role = role
        self.name = name
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the original gives."""
        hooks = _Active.hooks
        if hooks is None or is_traced():
            return self.original(*args, **kwargs)
        return hooks.call(self.role, functools.partial(self._compute, hooks), args, kwargs)

    def _compute(self, hooks: FunctionHooks, *args: Any, **kwargs: Any) -> Any:
        """What the original gives; classes of tensors that have their own idea of it know it by itself and by name."""
        if not has_torch_function((*args, *kwargs.values())):
            return self.original(*args, **kwargs)
        with hooks.originals():
            return self.original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """By name, so that a model which has it can be pickled, and unpickled where we are not installed."""
        return pkgutil.resolve_name, (self.name,)


class _Active:
    """The hooks of the iteration that is captured; None outside of one."""

    hooks: ClassVar[FunctionHooks | None] = None
    replacements: ClassVar[dict[str, StandIn]] = {}


class FunctionHooks:
    """The replacements of all functions with a role for one iteration."""

    def __init__(
        self,
        *,
        owners: Owners,
        recorder: Recorder,
        tracker: Tracker,
        running: Running,
        weights: Weights,
        is_wanted: Callable[[str, str], bool],
        place: Callable[[nn.Module, Ports], Placement | None],
        multihead: MultiheadHooks | None,
    ) -> None:
        """Prepare.

        Args:
            owners: Whose parameter is a tensor?
            recorder: Takes the tensors.
            tracker: Knows the module that is running.
            running: What has a role and is running.
            weights: Those that were recorded.
            is_wanted: Says for a kind of layer and a module's path whether it is recorded.
            place: Gives for a module what says of its shards where they lie.
            multihead: Takes the attention of `nn.MultiheadAttention` that calls no function.
        """
        self._owners = owners
        self._recorder = recorder
        self._tracker = tracker
        self._running = running
        self._is_wanted = is_wanted
        self._place = place
        self._multihead = multihead
        self._weights = weights
        self._leaves = Leaves(recorder=recorder, tracker=tracker)
        self._undo: list[Callable[[], None]] = []
        self._table: Table = {}
        self._ports: dict[FunctionRole, Ports] = {}
        self.places: Places = ()
        """Where functions were replaced under the names of modules."""
        self._loaded: frozenset[str] = frozenset()
        self.matched: set[FunctionRole] = set()
        """The roles of which a function was found."""

    def _attach(self) -> None:
        """Put the replacements in place."""
        pairs = []
        for role in function_roles():
            for name in role.functions:
                found = resolve(name)
                if found is not None:
                    self.matched.add(role)
                    pairs += self._replace(role, name, *found)
        self._table = table_of(pairs)
        self._loaded = frozenset(sys.modules)
        self.places = replace_names(self._table)
        _Active.hooks = self

    def originals(self) -> AbstractContextManager[None]:
        """For a moment have the functions themselves under the names of modules."""
        return put_back(self.places)

    def learn(self, root: nn.Module) -> None:
        """Know a model, which may hold functions; with the first one, replace them, as all is loaded that it needs."""
        if _Active.hooks is not self:
            self._attach()
        self._undo += replace_in_model(root, self._table)

    def remove(self) -> None:
        """Put the originals back; what else has got hold of a replacement passes through it from now on."""
        _Active.hooks = None
        self._leaves.remove()
        for undo in reversed(self._undo):
            undo()
        restore_names(self.places)
        # A module that was loaded meanwhile may have got hold of them.
        replace_names(table_of((new, old) for old, new in self._table.values()), but=self._loaded)
        forget_replacements(new for _, new in self._table.values())

    def call(
        self, role: FunctionRole, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the function gives for these arguments, recorded where it is wanted."""
        running = self._running
        if not self._tracker.is_active:
            return original(*args, **kwargs)
        if role.owner:
            return self._product(role, original, args, kwargs)
        if running.has(role.layer_type):
            return original(*args, **kwargs)
        return self._recorded(role, original, self._source(role), args, kwargs)

    def _product(
        self, role: FunctionRole, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A product with a parameter: inside of a module that is recorded, or a bare one."""
        entries = self._running.entries
        position, keyword = _place(role)
        weight: Any = args[position] if len(args) > position else kwargs.get(keyword)
        if entries and any(one.tensor is weight for one in entries[-1].awaited):
            # Else the gradient is seen on the parameter itself: inside of an `autograd.Function` an alias has none.
            if torch.is_grad_enabled():
                args, kwargs = self._with_aliases(entries[-1], role, args, kwargs)
            return original(*args, **kwargs)
        # A sparse gradient cannot pass through the alias of a weight.
        is_sparse = kwargs.get("sparse", any(args[_SPARSE : _SPARSE + 1]))
        if is_sparse or self._running.has(role.layer_type) or not isinstance(weight, torch.Tensor):
            return original(*args, **kwargs)
        owner = None
        with self._recorder.guarded():
            owner = self._owners.find(weight, self._tracker.current(), is_grouped=role.is_grouped)
        if owner is None:
            return original(*args, **kwargs)
        source = self._source(role, owner)
        if source is not None:
            self._owners.met.add((owner.module, owner.attribute))
        names = () if self._multihead is None else self._multihead.names_of(owner)
        return self._recorded(role, original, source, args, kwargs, names=names)

    def _with_aliases(
        self, entry: RunningRole, role: FunctionRole, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """The arguments with aliases of the parameters that a module awaits, but those that autocast keeps."""
        for argument in self._ports[role].arguments:
            value = argument.find(args, kwargs)
            for one in [one for one in entry.awaited if one.tensor is value and not is_cached_by_autocast(one.tensor)]:
                entry.awaited.remove(one)
                args, kwargs = argument.put(one.alias(one.tensor), args, kwargs)
        return args, kwargs

    def _recorded(
        self,
        role: FunctionRole,
        original: Callable[..., Any],
        source: Source | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        names: tuple[str, ...] = (),
    ) -> Any:
        if source is not None and is_transformed():
            self._recorder.pass_by(source, [port.value for port in self._ports[role].all])
            return original(*args, **kwargs)
        entry = RunningRole(role.layer_type, role)
        taking = None
        if source is not None:
            taking = Taking(
                recorder=self._recorder,
                source=source,
                ports=self._ports[role],
                weights=self._weights,
                placement=self._placement(role),
                leaves=self._leaves,
                is_one_node=_is_fused if role is ATTENTION else None,
            )
            with self._recorder.guarded(source):
                args, kwargs = self._take(entry, taking, args, kwargs)
        self._running.entries.append(entry)
        try:
            output = original(*args, **kwargs)
        finally:
            self._running.leave(role)
        if taking is not None and entry.call is not None:
            with self._recorder.guarded(taking.source):
                self._take_output(role, entry.call, taking, output, given=(args, kwargs))
        if names and self._multihead is not None:
            self._multihead.record(names, given=args[0], output=output)
        return output

    def _replace(
        self, role: FunctionRole, name: str, holder: Any, attribute: str
    ) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        original = getattr(holder, attribute)
        self._ports[role] = resolved(ports_of(role), original)
        if role.gives_function:
            self._undo.append(functools.partial(setattr, holder, attribute, original))
            setattr(holder, attribute, _giver(original, role))
            return []
        known = _Active.replacements.get(name)
        if isinstance(original, StandIn):
            return []
        if known is None or known.original is not original or known.role is not role:
            known = _Active.replacements[name] = StandIn(original, role, name)
        return [(original, known)]

    def _source(self, role: FunctionRole, owner: Owner | None = None) -> Source | None:
        """What a call's tensors come from; None where it is not wanted."""
        frame = self._tracker.current()
        of = owner or frame
        path = "" if of is None else of.path
        if not self._is_wanted(role.layer_type, path):
            return None
        layer_idx, stack = (-1, "") if of is None else (of.layer_idx, of.layer_stack)
        return Source(path, role.layer_type, layer_idx, role.component, stack)

    def _placement(self, role: FunctionRole) -> Placement | None:
        frame = self._tracker.current()
        return None if role.owner or frame is None else self._place(frame.module, ports_of(role))

    def _take(
        self, entry: RunningRole, taking: Taking, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = [argument.find(args, kwargs) for argument in taking.ports.arguments]
        tensors = [one for one in found if isinstance(one, torch.Tensor)]
        first = next((one for one in tensors if one.is_floating_point()), tensors[0] if tensors else None)
        if first is None:
            for argument, value in zip(taking.ports.arguments, found, strict=True):
                taking.refuse(argument, value)
            return args, kwargs
        source = taking.source
        key = f"{source.layer_type} {source.module}"
        call = self._tracker.begin_call(key, dtype=first.dtype, device_type=first.device.type)
        entry.call = call
        self._recorder.called(source, call)
        return taking.arguments(args, kwargs, call)

    def _take_output(self, role: FunctionRole, call: Call, taking: Taking, output: Any, *, given: Any) -> None:
        found = tensor_in(output, role.output)
        if found is None:
            reason = f"{role.name} gave a {type(output).__name__} without a tensor at {role.output!r}"
            self._recorder.refuse(taking.source, taking.ports.output.value, reason, call=call)
            return
        taking.output(found, call, given=given, on_grad=self._leaves.on_grad_output(taking.source))


def _is_fused(operands: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether torch computes this attention with one operation, and not as products and a softmax."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    options = {name: named[name] for name in _CHOICE if name in named}
    return choose is not None and choose(*operands, **options) > 0


_CHOICE = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""The arguments that decide what computes attention."""


def _giver(original: Callable[..., Any], role: FunctionRole) -> Callable[..., Any]:
    """In place of a method that gives a function: gives it wrapped."""

    @functools.wraps(original)
    def give(*args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)

        return _Given(function, role)

    return give


class _Given:
    """Stands for a function that a registry gave while an iteration was captured."""

    def __init__(self, function: Callable[..., Any], role: FunctionRole) -> None:
        self._function = function
        self._role = role
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        hooks = _Active.hooks
        if hooks is None or is_traced():
            return self._function(*args, **kwargs)
        return hooks.call(self._role, self._function, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As the function, of which a model may have got hold."""
        return as_itself(self._function)


@functools.lru_cache(maxsize=64)
def _place(role: FunctionRole) -> tuple[int, str]:
    """Where among the arguments the operand is that has an owner."""
    operand = operand_of(role.operands[role.owner])
    assert operand.position is not None, "our own roles give both"
    return operand.position, operand.keyword
