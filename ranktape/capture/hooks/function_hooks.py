"""Replacements that see functions with a role, while an iteration is captured.

They are replaced while an iteration is captured, under every name by which loaded modules and the model know them
(`stand_ins.py`), and put back where the next one is not: outside of captured iterations nothing costs anything. Of
functions that call one another (a framework's, torch's) the outermost one is recorded. What a registry gives is
wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ranktape.capture.hooks.calls import OWN_FORWARD, RunningRole, Taking, Watch
from ranktape.capture.hooks.hook import put_back, replace_in_model, resolve
from ranktape.capture.hooks.module_hooks import MultiheadHooks, learn_linear
from ranktape.capture.hooks.stand_ins import MakeGiver, StandIn, StandIns
from ranktape.capture.hooks.weights import Owner, is_cached_by_autocast
from ranktape.capture.passes.passes import (
    Arguments,
    Frame,
    innermost_direct_call,
    is_transformed,
    without_transforms,
)
from ranktape.capture.roles.known import ATTENTION, LINEAR, function_roles
from ranktape.capture.roles.table import Argument, FunctionRole, Ports, ports_of
from ranktape.capture.source import Source

_OPERATORS = {
    "torch.nn.attention.flex_attention.flex_attention": ("higher_order.flex_attention", 0),
    "transformers.integrations.moe._grouped_mm": ("transformers.grouped_mm_fallback", None),
}
"""Functions that stand in graphs as operators of their own, and which element of these results is the output."""

_SPARSE = 6
"""Place of `sparse` among the arguments of an embedding; a linear product has fewer."""


class FunctionHooks:
    """The replacements of all functions with a role for one iteration."""

    def __init__(
        self,
        watch: Watch,
        stand_ins: StandIns,
        *,
        is_wanted: Callable[[str, str], bool],
        multihead: MultiheadHooks | None,
    ) -> None:
        """Prepare; `is_wanted` says for a kind of layer and a module's path whether it is recorded."""
        self._watch = watch
        self._owners = watch.owners
        self._recorder = watch.recorder
        self._tracker = watch.tracker
        self._running = watch.running
        self._is_wanted = is_wanted
        self._multihead = multihead
        self._stand_ins = stand_ins
        self._undo: list[Callable[[], None]] = []

    def originals(self) -> AbstractContextManager[None]:
        """For a moment have the functions themselves under the names of modules."""
        return put_back(self._stand_ins.places)

    @property
    def givers(self) -> Iterator[str]:
        """The names of registries' methods, in their classes."""
        return (name for _, name, *_ in self._stand_ins.givers)

    def with_givers(self, make: MakeGiver) -> AbstractContextManager[None]:
        """For a moment have in the places of registries' methods what is made of them."""
        return self._stand_ins.with_givers(make)

    def is_replaced(self, value: Any) -> bool:
        """Whether something stands for a function."""
        return id(value) in self._stand_ins.table

    def in_graphs(self) -> dict[Any, tuple[FunctionRole, Ports, int | None]]:
        """What compiled graphs call for each function with a role, and which element of its result is the output.

        Of a registry's it is the name of the role: graphs have marks around them.
        """
        found: dict[Any, tuple[FunctionRole, Ports, int | None]] = {}
        options = self._recorder.options
        for role in function_roles():
            is_named = not options.wants_layers or options.names_layer_type(role.layer_type)
            is_wanted = is_named and options.wants_layer_type(role.layer_type)
            for name in role.functions if is_wanted else ():
                holder = resolve(name)
                if holder is not None and role in self._stand_ins.ports:
                    if role.gives_function:
                        found[role.name] = role, self._stand_ins.ports[role], None
                        continue
                    function = getattr(*holder)
                    original = function.original if isinstance(function, StandIn) else function
                    element = role.output if isinstance(role.output, int) else None
                    found[original] = role, self._stand_ins.ports[role], element
                    for operator, at in _operators(name):
                        found[operator] = role, self._stand_ins.ports[role], at
        return found

    def learn(self, root: nn.Module) -> None:
        """Know a model, which may hold functions; with the first one, replace them, as all is loaded that it needs."""
        if StandIn.hooks is not self:
            self._stand_ins.put()
            StandIn.hooks = self
        self._undo += replace_in_model(root, self._stand_ins.table)

    def remove(self) -> None:
        """Record nothing more, and put the originals back in the models; under names others still stand for them."""
        StandIn.hooks = None
        for undo in reversed(self._undo):
            undo()
        self._stand_ins.forget()

    def call(
        self, role: FunctionRole, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the function gives for these arguments, recorded where it is wanted."""
        running = self._running
        if not self._tracker.is_active:
            with self._recorder.guarded():
                self._tracker.meet_direct()
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
        weight = _owned(role).find(args, kwargs)
        if entries and OWN_FORWARD in entries[-1].words and _is_product_of(entries[-1].owner, role, weight):
            # The module is recorded in this call, and its products in later ones.
            learn_linear(entries[-1].owner)
        if entries and any(tensor is weight for tensor, _ in entries[-1].awaited):
            # Else the gradient is seen on the parameter itself: inside of an `autograd.Function` an alias has none.
            if torch.is_grad_enabled():
                args, kwargs = self._with_aliases(entries[-1], role, args, kwargs)
            return original(*args, **kwargs)
        # A sparse gradient cannot pass through the alias of a weight.
        is_sparse = kwargs.get("sparse", any(args[_SPARSE : _SPARSE + 1]))
        layer = entries[-1] if entries and entries[-1].opened is not None else None
        is_part = layer is None and self._running.has(role.layer_type)
        if is_sparse or is_part or not isinstance(weight, torch.Tensor):
            return original(*args, **kwargs)
        if layer is not None and role is LINEAR and _is_of_layer(weight, layer.owner):
            assert layer.opened is not None, "it is open"
            assert layer.taking is not None, "what is open is recorded"
            # Inside of an `autograd.Function` it has no gradients: those of the module are recorded.
            is_hidden = layer.opened.has_gradients and not torch.is_grad_enabled()
            source = None if is_hidden else layer.taking.source
            return self._recorded(role, original, source, args, kwargs, layer=layer)
        owner = None
        with self._recorder.guarded():
            frame = self._tracker.current()
            owner = self._owners.find(weight, frame, role=role)
            if owner is None and is_transformed():
                owner = self._owners.find(without_transforms(weight), frame, role=role)
        if owner is None:
            return original(*args, **kwargs)
        source = self._source(role, owner)
        if source is not None:
            self._owners.met.add((owner.frame.module, owner.attribute))
        output = self._recorded(role, original, source, args, kwargs)
        if self._multihead is not None:
            self._multihead.see(owner, args, output)
        return output

    def _with_aliases(
        self, entry: RunningRole, role: FunctionRole, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """The arguments with aliases of the parameters that a module awaits, but those that autocast keeps."""
        for argument in self._stand_ins.ports[role].arguments:
            value = argument.find(args, kwargs)
            found = next((port for tensor, port in entry.awaited if tensor is value), None)
            if found is None or is_cached_by_autocast(value) or entry.taking is None or entry.call is None:
                continue
            entry.awaited = [one for one in entry.awaited if one[1] is not found]
            args, kwargs = argument.put(entry.taking.alias(found, entry.call, value), args, kwargs)
        return args, kwargs

    def _recorded(
        self,
        role: FunctionRole,
        original: Callable[..., Any],
        source: Source | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        layer: RunningRole | None = None,
    ) -> Any:
        """What the function gives, recorded; with `layer` as what that module computes in its own forward."""
        ports = self._stand_ins.ports[role]
        if source is not None and not self._recorder.follows(source, (port.value for port in ports.all)):
            return original(*args, **kwargs)
        entry = RunningRole(role.layer_type, role)
        if source is not None:
            frame = self._computing()
            place = None if role.owner or frame is None else self._watch.place(frame.module, ports_of(role))
            within = None if layer is None else layer.taking
            entry.taking = taking = Taking(
                watch=self._watch,
                source=source,
                ports=ports,
                placement=place if within is None else within.placement,
                is_one_node=_is_fused if role is ATTENTION else None,
                quantised_to=None if within is None else within.quantised_to,
            )
            with self._recorder.guarded(source):
                operands = [argument.find(args, kwargs) for argument in ports.arguments]
                args, kwargs = taking.begin(entry, args, kwargs)
                if layer is not None and entry.call is not None:
                    taking.beside(layer, entry.call, operands)
        self._running.entries.append(entry)
        try:
            output = original(*args, **kwargs)
        finally:
            self._running.leave(role)
        if entry.taking is not None and entry.call is not None:
            with self._recorder.guarded(source):
                entry.taking.result((args, kwargs), output, entry, at=role.output, of=role.name)
        return output

    def _computing(self) -> Frame | None:
        """The innermost module that was called, or whose forward was called directly inside of that."""
        current, frames = self._tracker.current(), self._owners.frames
        module = innermost_direct_call(frames, None if current is None else current.module)
        return current if module is None else frames[module]

    def _source(self, role: FunctionRole, owner: Owner | None = None) -> Source | None:
        """What a call's tensors come from; None where it is not wanted."""
        of = self._computing() if owner is None else owner.frame
        path = owner.path if owner is not None else "" if of is None else of.path
        if not self._is_wanted(role.layer_type, path):
            return None
        layer_idx, stack = (-1, "") if of is None else (of.layer_idx, of.layer_stack)
        return Source(path, role.layer_type, layer_idx, role.component, stack)


def _is_of_layer(weight: torch.Tensor, module: nn.Linear) -> bool:
    """Whether a product in the forward of a linear layer is that of the layer: with its weight or a computed one."""
    own, base = module._parameters.get("weight"), weight._base  # noqa: SLF001  (there is no public name)
    if weight is own:
        return True
    if own is None:  # parametrized
        return tuple(weight.shape) == (module.out_features, module.in_features)
    is_other = isinstance(weight, nn.Parameter) or (isinstance(base, nn.Parameter) and base is not own)
    return not is_other and tuple(weight.shape) == (module.out_features, module.in_features)


def _is_product_of(owner: Any, role: FunctionRole, weight: Any) -> bool:
    """Whether a function of that role multiplies with a weight of a linear layer, or one computed by its forward.

    Not without gradients: it may be inside of an `autograd.Function`, whose gradients are those of the module.
    """
    is_linear = role is LINEAR and isinstance(owner, nn.Linear) and isinstance(weight, torch.Tensor)
    return is_linear and torch.is_grad_enabled() and _is_of_layer(weight, owner)


def _operators(name: str) -> Iterator[tuple[Any, int | None]]:
    """What stands in graphs for the function of that name, if it is an operator; each as graphs may call it."""
    if name in _OPERATORS:
        path, element = _OPERATORS[name]
        operator = resolve(f"torch.ops.{path}")
        if operator is not None:
            yield getattr(*operator), element
            default = getattr(getattr(*operator), "default", None)
            if default is not None:
                yield default, element


def _is_fused(operands: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether torch computes this attention with one operation, and not as products and a softmax."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    options = {name: named[name] for name in _CHOICE if name in named}
    return choose is not None and choose(*operands, **options) > 0


_CHOICE = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""The arguments that decide what computes attention."""


@functools.lru_cache(maxsize=64)
def _owned(role: FunctionRole) -> Argument:
    """The argument that has an owner; our own roles give its place and its name."""
    return next(argument for argument in ports_of(role).arguments if argument.ports[0].name == role.owner)
