"""Records calls of functions with a role while an iteration is captured.

torch passes each call of its own functions to the function mode that is active on the thread, even if the function is
called through a list, a partial function or a closure. The hooks of the outermost module activate the mode, in the
forward pass and in recomputations. It is not active in compiled regions.

A Python function that does not dispatch to modes, such as those of flash_attn, runs other code while an iteration is
captured: its `__code__` is replaced, so the function keeps its identity. Any other callable is replaced only under its
dotted name. Functions that a registry returns are wrapped. Of nested calls of one kind, the outermost is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function

from ranktape.capture.hooks.calls import (
    OWN_FORWARD,
    WITHOUT_BIAS,
    HookContext,
    RunningRole,
    SourceRecorder,
    is_cached_by_autocast,
)
from ranktape.capture.hooks.hook import MODE, Around, as_itself, replace, resolve
from ranktape.capture.hooks.module_hooks import MULTIHEAD_CALL, MultiheadHooks, note_calls_linear
from ranktape.capture.hooks.owners import Owner
from ranktape.capture.hooks.written_attention import WrittenAttention
from ranktape.capture.passes.python_stack import innermost_direct_call
from ranktape.capture.passes.tracker import Arguments, Frame
from ranktape.capture.roles.known import (
    ADDMM,
    ATTENTION,
    ATTENTION_STEPS,
    LINEAR,
    PARAMETER_PRODUCTS,
    SOFTMAX,
    function_roles,
    role_of,
)
from ranktape.capture.roles.table import Argument, FunctionRole, Ports, ports_of, resolved
from ranktape.capture.source import Source
from ranktape.capture.torch_private import (
    base_of,
    functional,
    is_traced,
    is_transformed,
    parameters_of,
    without_transforms,
)

_OPERATORS = {
    "torch.nn.attention.flex_attention.flex_attention": ("higher_order.flex_attention", 0),
    "transformers.integrations.moe._grouped_mm": ("transformers.grouped_mm_fallback", None),
}
"""Functions that are operators in graphs, each with the operator and the index of the output in its result, or None."""

_SPARSE = 6
"""Position of `sparse` among the arguments of an embedding. A linear product has fewer arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownFunction:
    """A function with a role."""

    role: FunctionRole
    ports: Ports
    """The ports of the role, with the positions and names of this function's arguments."""


_HANDLER = "handler"


def _run_handler(*args: Any, **kwargs: Any) -> Any:
    handler: Any = "handler"  # the handler replaces this constant
    return handler(*args, **kwargs)


_TEMPLATE = _run_handler.__code__


def _copy(function: FunctionType) -> FunctionType:
    """A copy of a function with its present code."""
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_FUNCTIONAL = "torch.nn.functional."

_QUESTIONS = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})
"""The functions that torch's Python functions call to find out whether a mode or a tensor subclass handles them."""


def _has_torch_function(relevant_args: Any) -> bool:
    """The replacement of torch's own, which ignores `MODE`: otherwise, `nn.TransformerEncoder` computes other bits."""
    if is_traced():
        return has_torch_function(relevant_args)
    with MODE.suspended():
        return has_torch_function(relevant_args)


def _overloads(function: Any) -> Iterator[Any]:
    """The overloads of an operator of `torch.ops`, which modes receive besides the operator itself."""
    names = getattr(function, "overloads", None)
    yield from (getattr(function, name) for name in names()) if callable(names) else ()


class Handler:
    """Runs instead of the code of a function. Its pickle, as cloudpickle makes for code, is the original function."""

    def __init__(self, call: Callable[..., Any], function: FunctionType) -> None:
        """`call` is called with a copy of the function, which keeps its present code, and with the arguments."""
        self._call = call
        self._original = _copy(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function through `call`."""
        return self._call(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle as the original function."""
        return as_itself(self._original)


class Exchanged:
    """A function whose code is replaced until `remove()`."""

    def __init__(self, function: Any, call: Callable[..., Any]) -> None:
        """Have the function run `call` with a copy of the original function and the arguments."""
        self._function = function
        self._has_signature = "__signature__" in vars(function)
        if not self._has_signature:
            # Callers inspect the signature and omit arguments that the function does not take.
            function.__signature__ = inspect.signature(function)
        self.code: CodeType = function.__code__
        """The original code."""
        handler = Handler(call, function)
        self.replacement = _TEMPLATE.replace(
            co_consts=tuple(handler if one == _HANDLER else one for one in _TEMPLATE.co_consts),
            co_freevars=self.code.co_freevars,
            co_name=self.code.co_name,
            co_filename=self.code.co_filename,
            co_firstlineno=self.code.co_firstlineno,
        )
        """The replacement."""
        function.__code__ = self.replacement

    def remove(self) -> None:
        """Have the function run its own code again."""
        if self._function.__code__ is self.replacement:
            self._function.__code__ = self.code
        if not self._has_signature:
            vars(self._function).pop("__signature__", None)


class Wrapped:
    """Wraps a callable, and records its calls while an iteration is captured."""

    def __init__(self, original: Callable[..., Any], target: KnownFunction, *, is_named: bool = False) -> None:
        """`is_named` tells whether it replaces the original under its name in torch, which tensor subclasses know."""
        self._is_named = is_named
        self.original = original
        self.target = target
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original."""
        hooks = MODE.hooks
        if hooks is None or is_traced():
            return self.original(*args, **kwargs)
        if self._is_named and has_torch_function((*args, *kwargs.values())):
            with hooks.originals():
                return hooks.call(self.target, self.original, args, kwargs)
        return hooks.call(self.target, self.original, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle as the original, so that a model that refers to it can be pickled."""
        return as_itself(self.original)


class FunctionHooks:
    """Records the functions with a role in one iteration."""

    def __init__(
        self,
        context: HookContext,
        *,
        is_wanted: Callable[[str, str], bool],
        multihead: MultiheadHooks | None,
    ) -> None:
        """`is_wanted` tells from a layer type and the path of a module whether to record it."""
        self._context = context
        self._owners = context.owners
        self._recorder = context.recorder
        self._tracker = context.tracker
        self._running = context.running
        self._is_wanted = is_wanted
        self._multihead = multihead
        self._written = WrittenAttention(
            context, current_frame=self._current_frame, source=functools.partial(self._source, ATTENTION)
        )
        self.targets: dict[Any, KnownFunction] = {}
        """The role of each function."""
        self._exchanged: dict[FunctionType, Exchanged] = {}
        """The functions whose code is replaced."""
        self.getters: list[tuple[Any, str, Callable[..., Any], Callable[..., Any], FunctionRole]] = []
        """The methods of registries: holder, attribute, original, replacement, and role of the returned function."""
        self._stands_in = False
        self._named: dict[tuple[ModuleType, str], tuple[Any, Callable[..., Any]]] = {}
        """The original and the replacement of functions in modules of torch, by module and name."""
        self._undo: list[Callable[[], None]] = []

    @property
    def roles(self) -> Iterator[FunctionRole]:
        """The roles for which a function was found."""
        yield from dict.fromkeys(target.role for target in self.targets.values())
        yield from (role for *_, role in self.getters)

    def begin(self) -> None:
        """Start recording all functions that have been loaded."""
        MODE.hooks = self
        for role in function_roles():
            for name in role.functions:
                if (location := resolve(name)) is not None:
                    self._add_function(role, name, *location)
        function: Any = torch.nn.functional.multi_head_attention_forward
        if self._multihead is not None and function not in self._exchanged:
            self._exchanged[function] = Exchanged(function, self._multihead_forward)
        self._named[torch.overrides, "has_torch_function"] = has_torch_function, _has_torch_function
        if self._stands_in:
            self.stand_in_functional()
        self._set_names(1)

    def remove(self) -> None:
        """Stop recording and restore all functions."""
        MODE.hooks = None
        MODE.reset()
        self._set_names(0)
        for undo in reversed(self._undo):
            undo()
        for exchanged in self._exchanged.values():
            exchanged.remove()
        self._undo.clear()
        self._exchanged.clear()
        self._named.clear()
        self.getters.clear()
        self._written.forget()

    def _add_function(self, role: FunctionRole, name: str, holder: Any, attribute: str) -> None:
        function = getattr(holder, attribute)
        if role.gives_function:
            if not any(getter is function for *_, getter, _ in self.getters):
                getter = self._wrap_getter(function, role)
                self._undo.append(functools.partial(setattr, holder, attribute, function))
                setattr(holder, attribute, getter)
                self.getters.append((holder, attribute, function, getter, role))
            return
        if name.startswith(_FUNCTIONAL):
            # The program may have put its own function there, which calls torch's.
            function = functional(attribute) or function
        if isinstance(function, Wrapped) or self._is_known(function):
            return
        target = KnownFunction(role, resolved(ports_of(role), function))
        if isinstance(function, FunctionType) and _QUESTIONS.isdisjoint(function.__code__.co_names):
            self.targets[function] = target
            self._exchanged[function] = Exchanged(function, functools.partial(self._called, target))
        elif name.startswith("torch."):
            for variant in (function, *_overloads(function)):
                self.targets[variant] = target
        else:
            self.targets[function] = target
            undo = replace(name, lambda original: Wrapped(original, target))
            if undo is not None:
                self._undo.append(undo)

    def _is_known(self, function: Any) -> bool:
        try:
            return function in self.targets
        except TypeError:
            return True  # cannot be a key

    def stand_in_functional(self) -> None:
        """Record functions in `torch.nn.functional` also in compiled regions, where the mode is not active.

        There, Python calls these functions after a graph break.
        """
        self._stands_in = True
        for function, target in self.targets.items():
            name = getattr(function, "__name__", "")
            current: Any = getattr(torch.nn.functional, name, None)
            if current == function and function not in self._exchanged and target.role not in ATTENTION_STEPS:
                self._named[torch.nn.functional, name] = function, Wrapped(function, target, is_named=True)
        self._set_names(1)

    def _set_names(self, index: int) -> None:
        """Put the originals (0) or the replacements (1) of functions into modules of torch."""
        for (holder, name), pair in self._named.items():
            if vars(holder)[name] is pair[1 - index]:
                setattr(holder, name, pair[index])

    @property
    def replacement_codes(self) -> Iterator[CodeType]:
        """All code that runs instead of the code of functions."""
        yield from (exchanged.replacement for exchanged in self._exchanged.values())
        yield from (Handler.__call__.__code__, Wrapped.__call__.__code__, _has_torch_function.__code__)

    @contextlib.contextmanager
    def originals(self) -> Iterator[None]:
        """Context in which all functions are the originals."""
        self._set_names(0)
        for function, exchanged in self._exchanged.items():
            function.__code__ = exchanged.code
        try:
            yield
        finally:
            self._set_names(1)
            for function, exchanged in self._exchanged.items():
                function.__code__ = exchanged.replacement

    @contextlib.contextmanager
    def with_getters(self, make: Callable[[Callable[..., Any], FunctionRole], Callable[..., Any]]) -> Iterator[None]:
        """Context in which each method of a registry is replaced by the result of `make` for the original and role."""
        for holder, name, original, _, role in self.getters:
            setattr(holder, name, make(original, role))
        try:
            yield
        finally:
            for holder, name, _, getter, _ in self.getters:
                setattr(holder, name, getter)

    def is_changed(self, value: Any) -> bool:
        """Whether an object is a replaced function or the replacement of one."""
        is_named = any(value is function for function, _ in self._named.values())
        return is_named or isinstance(value, Wrapped) or (isinstance(value, FunctionType) and value in self._exchanged)

    def _wrap_getter(self, original: Callable[..., Any], role: FunctionRole) -> Callable[..., Any]:
        """The replacement of a method that returns a function, which returns the function wrapped."""
        target = KnownFunction(role, resolved(ports_of(role), original))

        @functools.wraps(original)
        def getter(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not isinstance(result, Around):
                return Wrapped(result, target)
            if not isinstance(result.function, Wrapped):
                self._undo.append(functools.partial(setattr, result, "function", result.function))
                result.function = Wrapped(result.function, target)
            return result

        return getter

    def in_graphs(self) -> dict[Any, tuple[FunctionRole, Ports, int | None]]:
        """The role, the ports and the index of the output for each target of a call in a graph.

        For functions from a registry, the key is the name of the role, because graphs have marks around them.
        """
        targets: dict[Any, tuple[FunctionRole, Ports, int | None]] = {}
        for function, target in self.targets.items():
            role, ports = target.role, target.ports
            if role in {*PARAMETER_PRODUCTS, *ATTENTION_STEPS} or not self._is_wanted_in_graphs(role):
                continue
            targets[function] = role, ports, role.output if isinstance(role.output, int) else None
            for name in role.functions:
                for operator, element in _operators(name):
                    targets[operator] = role, ports, element
        for _, _, original, _, role in self.getters:
            if self._is_wanted_in_graphs(role):
                targets[role.name] = role, resolved(ports_of(role), original), None
        return targets

    def _is_wanted_in_graphs(self, role: FunctionRole) -> bool:
        options = self._recorder.options
        is_named = not options.wants_layers or options.names_layer_type(role.layer_type)
        return is_named and options.wants_layer_type(role.layer_type)

    def _called(self, target: KnownFunction, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the call of a function whose code is replaced."""
        if MODE.hooks is not self or is_traced():
            return original(*args, **kwargs)
        return self.call(target, original, args, kwargs)

    def _multihead_forward(self, original: FunctionType, *args: Any, **kwargs: Any) -> Any:
        """Run `multi_head_attention_forward` so that its products are recorded.

        With a mode, torch would dispatch the whole function to it, and none of the products. Therefore a copy of the
        function runs that does not dispatch to modes.
        """
        with MODE.suspended():
            is_overridden = has_torch_function((*args, *kwargs.values()))
        if MODE.hooks is not self or is_traced() or is_overridden or not self._tracker.is_active:
            return original(*args, **kwargs)
        names = {**original.__globals__, **dict.fromkeys(_QUESTIONS, lambda *_: False)}
        body = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
        body.__kwdefaults__ = original.__kwdefaults__
        with MODE.active():
            return body(*args, **kwargs)

    def call(
        self, target: KnownFunction, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and record the call if it is selected."""
        running = self._running
        if not self._tracker.is_active:
            with self._recorder.guarded():
                self._tracker.begin_direct_pass()
            if not self._tracker.is_active:
                return original(*args, **kwargs)
        role = target.role
        if role.owner:
            return self._product(target, original, args, kwargs)
        if running.has(role.layer_type):
            return original(*args, **kwargs)
        if role is SOFTMAX:
            return self._written.softmax(original, args, kwargs)
        if role in ATTENTION_STEPS:
            return self._multiply(target, original, args, kwargs)
        return self._call_recorded(target, original, self._source(role), args, kwargs)

    def _product(
        self, target: KnownFunction, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function that takes a parameter, inside a recorded module or on its own."""
        entries, role = self._running.entries, target.role
        weight = _owned(role).find(args, kwargs)
        if entries and OWN_FORWARD in entries[-1].metadata_keys and _is_product_of(entries[-1].owner, role, weight):
            # In this call, the module is recorded; in later calls, its products will be.
            note_calls_linear(entries[-1].owner)
        if entries and any(tensor is weight for tensor, _ in entries[-1].parameters_to_alias):
            # Without gradients, as inside an `autograd.Function`, the hook remains on the parameter itself.
            if torch.is_grad_enabled():
                args, kwargs = self._with_aliases(entries[-1], target.ports, args, kwargs)
            return original(*args, **kwargs)
        # A sparse gradient cannot pass through the alias of a weight.
        is_sparse = kwargs.get("sparse", any(args[_SPARSE : _SPARSE + 1]))
        layer = entries[-1] if entries and entries[-1].inner_products is not None else None
        is_part = layer is None and self._running.has(role.layer_type)
        if is_sparse or is_part or not _may_be_layer_product(role, weight, args):
            return original(*args, **kwargs)
        if layer is not None and role is LINEAR and _is_layer_product(weight, layer.owner):
            assert layer.inner_products is not None, "it is open"
            assert layer.source_recorder is not None, "what is open is recorded"
            # Inside an `autograd.Function`, the product has no gradients, so the module is recorded instead.
            is_hidden = layer.inner_products.has_gradients and not torch.is_grad_enabled()
            source = None if is_hidden else layer.source_recorder.source
            return self._call_recorded(target, original, source, args, kwargs, layer=layer)
        owner = self._owner(role, weight)
        if owner is None and role in PARAMETER_PRODUCTS:
            return self._multiply(target, original, args, kwargs)
        if owner is None or (role in PARAMETER_PRODUCTS and _is_layer_weight(owner)):
            return original(*args, **kwargs)
        source = self._source(role, owner)
        if source is not None:
            self._owners.recorded.add((owner.frame.module, owner.attribute))
        output = self._call_recorded(target, original, source, args, kwargs)
        if self._multihead is not None:
            self._multihead.record_product(owner, args, output)
        return output

    def _multiply(
        self, target: KnownFunction, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a product without a parameter, which may be a step of an attention that is written out."""
        if any(self._running.has(kind) for kind in (ATTENTION.layer_type, MULTIHEAD_CALL)):
            return original(*args, **kwargs)
        return self._written.multiply(target.role, target.ports, original, args, kwargs)

    def _owner(self, role: FunctionRole, weight: torch.Tensor) -> Owner | None:
        """The owner of a weight; None if it is not a parameter of a known module."""
        with self._recorder.guarded():
            frame = self._tracker.current()
            owner = self._owners.find(weight, frame, role=role)
            if owner is None and is_transformed():
                return self._owners.find(without_transforms(weight), frame, role=role)
            return owner
        return None

    def _with_aliases(
        self, entry: RunningRole, ports: Ports, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """The arguments with aliases of the parameters that the module awaits, except those that autocast caches."""
        for argument in ports.arguments:
            value = argument.find(args, kwargs)
            awaited_port = next((port for tensor, port in entry.parameters_to_alias if tensor is value), None)
            if (
                awaited_port is None
                or is_cached_by_autocast(value)
                or entry.source_recorder is None
                or entry.call is None
            ):
                continue
            entry.parameters_to_alias = [pair for pair in entry.parameters_to_alias if pair[1] is not awaited_port]
            args, kwargs = argument.replace(
                entry.source_recorder.alias_parameter(awaited_port, entry.call, value), args, kwargs
            )
        return args, kwargs

    def _call_recorded(
        self,
        target: KnownFunction,
        original: Callable[..., Any],
        source: Source | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        layer: RunningRole | None = None,
    ) -> Any:
        """Call the function and record it, as a product of the module in `layer` if that is not None."""
        role, ports = target.role, target.ports
        if source is not None and not self._recorder.follows(source, (port.value for port in ports.all)):
            return original(*args, **kwargs)
        entry = RunningRole(role.layer_type, role)
        if role in PARAMETER_PRODUCTS and role is not ADDMM:
            entry.metadata_keys = (WITHOUT_BIAS,)
        if source is not None:
            frame = self._current_frame()
            placement = None
            if frame is not None and not role.owner:
                placement = self._context.placement_finder(frame.module, ports_of(role))
            layer_recorder = None if layer is None else layer.source_recorder
            entry.source_recorder = source_recorder = SourceRecorder(
                context=self._context,
                source=source,
                ports=ports,
                placement=placement if layer_recorder is None else layer_recorder.placement,
                is_single_node=_is_fused if role is ATTENTION else None,
                quantised_to=None if layer_recorder is None else layer_recorder.quantised_to,
            )
            with self._recorder.guarded(source):
                operands = [argument.find(args, kwargs) for argument in ports.arguments]
                args, kwargs = source_recorder.begin(entry, args, kwargs)
                if layer is not None and entry.call is not None:
                    source_recorder.record_layer_operands(layer, entry.call, operands)
        self._running.entries.append(entry)
        try:
            output = original(*args, **kwargs)
        finally:
            self._running.leave(role)
        if entry.source_recorder is not None and entry.call is not None:
            with self._recorder.guarded(source):
                entry.source_recorder.record_result((args, kwargs), output, entry, element=role.output, name=role.name)
        return output

    def _current_frame(self) -> Frame | None:
        """The innermost running module, including those whose `forward` was called directly."""
        current, frames = self._tracker.current(), self._owners.frames
        module = innermost_direct_call(frames, None if current is None else current.module)
        return current if module is None else frames[module]

    def _source(self, role: FunctionRole, owner: Owner | None = None) -> Source | None:
        """The source of a call; None if it is not selected."""
        frame = self._current_frame() if owner is None else owner.frame
        path = owner.path if owner is not None else "" if frame is None else frame.path
        if not self._is_wanted(role.layer_type, path):
            return None
        layer_idx, stack = (-1, "") if frame is None else (frame.layer_idx, frame.layer_stack)
        return Source(path, role.layer_type, layer_idx, role.component, stack)


def _is_layer_product(weight: torch.Tensor, module: nn.Linear) -> bool:
    """Whether a product in the `forward` of a linear layer is that of the layer: with its weight or a computed one."""
    layer_weight, base = parameters_of(module).get("weight"), base_of(weight)
    if weight is layer_weight:
        return True
    is_other = isinstance(weight, nn.Parameter) or (isinstance(base, nn.Parameter) and base is not layer_weight)
    if layer_weight is not None and is_other:  # it is None if it is parametrized
        return False
    return tuple(weight.shape) == (module.out_features, module.in_features)


def _is_layer_weight(owner: Owner) -> bool:
    """Whether a parameter is the weight of a linear layer, which is recorded as a module."""
    role = role_of(type(owner.frame.module))
    return role is not None and role.layer_type == LINEAR.layer_type and owner.attribute == "weight"


def _is_product_of(owner: Any, role: FunctionRole, weight: Any) -> bool:
    """Whether a function is a product with the weight of a linear layer, or with a weight that its `forward` computes.

    False if gradients are disabled, because the call may be inside an `autograd.Function`, which has the gradients.
    """
    is_linear = role is LINEAR and isinstance(owner, nn.Linear) and isinstance(weight, torch.Tensor)
    return is_linear and torch.is_grad_enabled() and _is_layer_product(weight, owner)


def _may_be_layer_product(role: FunctionRole, weight: Any, args: tuple[Any, ...]) -> bool:
    """Whether a product may be that of a layer, which excludes sums with other activations and dot products."""
    if not isinstance(weight, torch.Tensor):
        return False
    if role not in PARAMETER_PRODUCTS:
        return True
    has_bias = role is not ADDMM or not args or args[0].ndim == 1
    return has_bias and weight.ndim > 1


def _operators(name: str) -> Iterator[tuple[Any, int | None]]:
    """The operators that graphs call for a function, if any, each with the index of the output in its result."""
    if name in _OPERATORS:
        path, element = _OPERATORS[name]
        operator = resolve(f"torch.ops.{path}")
        if operator is not None:
            yield getattr(*operator), element
            default = getattr(getattr(*operator), "default", None)
            if default is not None:
                yield default, element


def _is_fused(operands: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether torch computes this attention with a fused kernel, not as products and a softmax."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    options = {name: named[name] for name in _CHOICE if name in named}
    return choose is not None and choose(*operands, **options) > 0


_CHOICE = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""The arguments that determine the kernel of the attention."""


@functools.lru_cache(maxsize=64)
def _owned(role: FunctionRole) -> Argument:
    """The argument of a role with an owner. The built-in roles give both its position and its name."""
    return next(argument for argument in ports_of(role).arguments if argument.ports[0].name == role.owner)
