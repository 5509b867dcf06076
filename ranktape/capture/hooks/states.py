"""Hooks that record the outputs of a model's layers, and taps that keep those of the last pass without a capture.

    embedding, forward post   output         the input of the first layer
    hidden, forward post      output         the first tensor that a layer returns
    both, backward pre        grad_output    its gradient, from everything that uses it

The outputs of the model are not changed. Under a reentrant checkpoint, the gradient of a layer's output is seen in the
recomputation, and that of the first layer's input outside of it. Each thread keeps copies of the outputs of its last
forward pass, which `get_layer_hidden_states` returns.

A tap is a `forward` in the instance dictionary of the layer. The compiler guards on that attribute before each call of
compiled code, so it notices taps that are added or removed after the first compilation, unlike hooks. A copy of a model
has taps of its own. In compiled code, exported programs and traced modules, taps are operators:

    ranktape::hold_layer   returns nothing; for graphs of torch.compile and torch.export
    ranktape::pass_layer   returns a copy of the tensor, so that torch.jit.trace does not eliminate it

A program with one of these operators can only be loaded after this module has been imported.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import MethodType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ranktape.capture.console import write_line
from ranktape.capture.expected import TRANSFORMED
from ranktape.capture.guard import Guard, failure_text
from ranktape.capture.hooks.calls import HookContext, SourceRecorder
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.stacks import Stack, check_layers, embedding_path, module_path, survey, unwrapped
from ranktape.capture.roles.table import OUTPUT, Ports, port_of
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.tensors.parts import first_floating, tensor_in
from ranktape.capture.torch_private import (
    in_backward,
    is_jit_traced,
    is_traced,
    is_transformed,
    keep_in_graphs,
    tree_map,
)
from ranktape.errors import UsageError


class LayerStates:
    """The copies of the hidden states of one forward pass."""

    def __init__(self) -> None:
        self.owner: object = None
        """The object that started the list. Others that see the same pass add nothing."""
        self.tensors: list[torch.Tensor] | None = None

    def begin(self, owner: object, *, is_held: bool = True) -> None:
        """Start a new list if `is_held`, when a forward pass enters the stack of layers."""
        self.owner = owner
        self.tensors = [] if is_held else None

    def hold(self, owner: object, tensor: torch.Tensor | None) -> None:
        """Add a copy to the list of the owner. None discards the list, because an incomplete list is not returned."""
        if self.tensors is None or self.owner is not owner:
            return
        if tensor is None:
            self.tensors = None
        else:
            self.tensors.append(tensor.detach().clone())


class _LayerThread(threading.local):
    """The hidden states of one thread."""

    def __init__(self) -> None:
        self.states = LayerStates()


_thread = _LayerThread()
holding: weakref.WeakSet[LayerStates] = weakref.WeakSet()
"""The states of all threads with copies that a capture made."""


def get_layer_hidden_states() -> list[torch.Tensor] | None:
    """The outputs of the layers in the last forward pass on this thread: the embedding, then the selected layers.

    The tensors are detached copies. The list is empty until the first layer has run. A later pipeline stage has no
    embedding. The result is None if the last pass was not captured, if no capture records layers, or if one of the
    outputs could not be copied. For a model on an accelerator, where the copies may not fit, it is also None until the
    program has imported this function.

    The last forward pass is the last one that entered the layers of a model that a capture or `tap_layers` follows.
    Other models, and modules without layers such as a loss, do not change the list. After a captured iteration, the
    copies remain until the model runs on this thread again.
    """
    tensors = _thread.states.tensors
    return None if tensors is None else list(tensors)


def is_imported() -> bool:
    """Whether the program has imported `get_layer_hidden_states` from `ranktape.capture`."""
    return "get_layer_hidden_states" in vars(sys.modules["ranktape.capture"])


TAPS = object()
"""The owner of the lists that the operators start."""


def hold(tensor: torch.Tensor | None, *, is_first: bool) -> None:
    """Keep a copy of the output of a layer, or, if `is_first`, start a list with the input of the first layer.

    On a later pipeline stage, that input is None and not added. If the output of a layer is None, the pass has no list.
    A recomputation in the backward pass adds nothing. Never raises.
    """
    if in_backward():
        return
    with reporting:
        if is_first:
            _thread.states.begin(TAPS)
        if not (is_first and tensor is None):
            _thread.states.hold(TAPS, tensor)


def lose(reason: str) -> None:
    """Discard the list of the current pass, and write a warning with the reason once."""
    _thread.states.hold(TAPS, None)
    if reason not in _reported:
        _reported.add(reason)
        write_line(f"warning: a forward pass has no list of hidden states: {reason}")


_reported: set[str] = set()


def _on_failure(error: Exception, _source: Source | None, _role: TensorRole | None) -> None:
    lose(failure_text(error))


reporting = Guard(_on_failure)
"""A context that turns an exception into one line on stderr; the pass then has no list."""

LAYER_PORTS = Ports(output=port_of(OUTPUT, {}))
_VALUE = LAYER_PORTS.output.value


class LayerHooks:
    """The hooks on the layers of all stacks for one iteration."""

    def __init__(self, context: HookContext) -> None:
        options = context.recorder.options
        self._wanted = read_numbers("layers", options.layers) if options.wants_layers else None
        self._context = context
        self._firsts: list[weakref.ref[nn.Module]] = []
        self.hooks: dict[Hook, nn.Module] = {}
        """The hooks on layers, each with its module."""
        self._sources: dict[tuple[str, bool], Source | None] = {}
        context.handles.append(self)

    def attach(self, root: nn.Module, stack: Stack, *, prefix: str) -> None:
        """Put hooks on the selected layers of a stack, and on the input of its first layer."""
        first = stack.layers[0]
        self._firsts.append(weakref.ref(first.module))
        source = None
        if first.idx == 0:
            path = prefix + embedding_path(root, stack)
            source = Source(module=path, layer_type="embedding", layer_idx=-1, component="hidden")
            self._context.recorder.attach(source, [_VALUE])
        self._sources[prefix + first.path, True] = source
        enter = Hook(functools.partial(self._on_enter, source))
        self.hooks[enter] = first.module
        self._context.handles.append(first.module.register_forward_pre_hook(enter, with_kwargs=True))
        path = (prefix + module_path(stack.name)).rstrip(".")
        for layer in stack.layers:
            if self._wanted is None or self._wanted.holds(layer.idx):
                source = Source(prefix + layer.path, "hidden", layer.idx, "hidden", path)
                self._context.recorder.attach(source, [_VALUE])
                self._sources[source.module, False] = source
                leave = Hook(functools.partial(self._on_leave, source))
                self.hooks[leave] = layer.module
                self._context.handles.append(layer.module.register_forward_hook(leave, with_kwargs=True))

    def remove(self) -> None:
        """Release the copies of hidden states at the next forward pass."""
        for reference in self._firsts:
            module = reference()
            if module is not None and holding:
                _release_at_next(module)
        self._firsts.clear()

    def source_in_graph(self, path: str, *, is_first: bool) -> Source | None:
        """The source of the output of a layer, or of the first layer's input; None if it is not recorded."""
        return self._sources.get((path, is_first))

    def begin(self) -> None:
        """Start a new list of hidden states, when a forward pass enters the first layer."""
        _thread.states.begin(self, is_held=self._context.tracker.is_active)

    def hold(self, tensor: torch.Tensor | None) -> None:
        """Keep a copy of the output of a layer or the input of the first one; None if there is no tensor to copy.

        Copies of all layers may not fit on an accelerator, so there they are kept only if the program uses them.
        """
        is_kept = tensor is not None and (tensor.is_cpu or is_imported())
        _thread.states.hold(self, tensor if is_kept else None)
        holding.add(_thread.states)

    def _on_leave(self, source: Source, _: nn.Module, *called: Any) -> None:
        if is_traced():
            return
        output = called[-1]
        with self._context.recorder.guarded(source):
            tensor = tensor_in(output, None)
            if tensor is not None:
                self._record(source, tensor, args=called[:-1])
                return
            reason = f"the layer gave a {type(output).__name__} without a tensor"
            self._context.recorder.refuse(source, _VALUE, reason)
        _thread.states.hold(self, None)

    def _on_enter(self, source: Source | None, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced() or in_backward():
            return
        self.begin()
        if source is None:
            return
        with self._context.recorder.guarded(source):
            if (tensor := first_floating(args, kwargs)) is not None:
                self._record(source, tensor, args=tensor)
            return
        _thread.states.hold(self, None)

    def _record(self, source: Source, tensor: torch.Tensor, *, args: Any) -> None:
        """Record the output of a layer, called with `args`. For the input of the first layer, `args` is that input.

        That input is a tensor of the outer graph, even if a checkpoint recomputes the layer.
        """
        recorder = self._context.recorder
        if not recorder.follows(source):
            return
        call = recorder.begin_call(source, tensor)
        SourceRecorder(context=self._context, source=source, ports=LAYER_PORTS).record_output(tensor, call, args=args)
        if not in_backward():
            self.hold(tensor)


def _release_at_next(module: nn.Module) -> None:
    """Release the copies of each thread when it enters the stack again."""

    def hook(_: nn.Module, args: Any) -> None:  # noqa: ARG001  (torch's signature)
        if is_traced() or in_backward():
            return
        _thread.states.begin(None, is_held=False)
        holding.discard(_thread.states)
        if not holding:
            handle.remove()

    handle = module.register_forward_pre_hook(Hook(hook))


_LIBRARY = torch.library.Library("ranktape", "FRAGMENT")
_HOLD, _PASS = "ranktape::hold_layer", "ranktape::pass_layer"


def _hold_layer(tensor: torch.Tensor | None, is_first: bool) -> None:  # noqa: FBT001  (called by torch)
    hold(tensor, is_first=is_first)


def _pass_layer(tensor: torch.Tensor, is_first: bool) -> torch.Tensor:  # noqa: FBT001  (called by torch)
    hold(tensor, is_first=is_first)
    return tensor.clone()


def _hold_batched(_info: object, _dims: object, _tensor: object, is_first: bool) -> tuple[None, None]:  # noqa: FBT001
    hold(None, is_first=is_first)
    lose(TRANSFORMED)
    return None, None


def _define() -> None:
    # CUDA graphs do not replay Python. With this tag, which torch 2.6 lacks, inductor splits graphs at the operator.
    tags: Sequence[torch.Tag] = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
    _LIBRARY.define("hold_layer(Tensor? tensor, bool is_first) -> ()", tags=tags)
    _LIBRARY.define("pass_layer(Tensor tensor, bool is_first) -> Tensor", tags=tags)
    _LIBRARY.impl("hold_layer", _hold_layer, "CompositeExplicitAutograd")
    _LIBRARY.impl("pass_layer", _pass_layer, "CompositeImplicitAutograd")
    torch.library.register_fake(_HOLD, lambda _tensor, _is_first: None, lib=_LIBRARY)
    torch.library.register_vmap(_HOLD, _hold_batched, lib=_LIBRARY)
    keep_in_graphs(torch.ops.ranktape.hold_layer.default)


_define()

Forward = Callable[..., Any]


class _Kind(NamedTuple):
    """The behaviour of a tap."""

    is_first: bool
    """Whether the layer is the first one, whose call starts a pass."""
    has_embedding: bool
    """Whether to keep the input of the layer."""
    is_held: bool
    """Whether to keep the output of the layer."""


class LayerTaps:
    """The taps on a model, until `remove()` or the end of the context."""

    def __init__(self) -> None:
        self._taps: list[tuple[nn.Module, Forward, Forward | None]] = []

    def add(self, module: nn.Module, kind: _Kind) -> None:
        """Put a tap on a layer."""
        original = vars(module).get("forward")
        forward = MethodType((_shared_forward if original is None else _forward)(original, kind), module)
        module.forward = forward
        self._taps.append((module, forward, original))

    def remove(self) -> None:
        """Remove the taps. Programs that were exported or traced with taps keep them, and so do copies of the model."""
        for module, forward, original in reversed(self._taps):
            if vars(module).get("forward") is not forward:
                continue
            del module.forward
            if original is not None:
                module.forward = original
        self._taps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def tap_layers(model: nn.Module, *, layers: Any = "all", layer_offset: int = 0) -> LayerTaps:
    """Keep the outputs of a model's layers in each forward pass for `get_layer_hidden_states()`, without a run.

    This works in eager mode; under `torch.compile`, even if it was compiled before; and in programs of `torch.export`
    and modules of `torch.jit.trace` that are made while the taps are on. The results of the model are not changed, but
    under inductor the last bits of bfloat16 and float16 may differ. If a tap fails, one line is written to stderr, and
    the pass has no list.

    Raises:
        UsageError: the model has no stack of layers, or not the requested layers.
    """
    stacks = survey(model, layer_offset=layer_offset).stacks
    if not stacks:
        raise UsageError(f"{type(model).__name__} has no stack of layers: tap a model that holds a list of like layers")
    wanted = read_numbers("layers", layers)
    check_layers(wanted, model, stacks[0])
    taps = LayerTaps()
    for index, layer in enumerate(stacks[0].layers):
        is_first = index == 0
        kind = _Kind(is_first=is_first, has_embedding=is_first and layer.idx == 0, is_held=wanted.holds(layer.idx))
        if any(kind):
            taps.add(unwrapped(layer.module), kind)
    return taps


def _forward(original: Forward | None, kind: _Kind) -> Forward:
    """The replacement of a layer's `forward`, which is `original` or, if that is None, the one of the class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kind.is_first:
            tensor = first_floating(args, kwargs) if kind.has_embedding else None
            args, kwargs = _tap((args, kwargs), tensor, is_first=True)
        output = type(self).forward(self, *args, **kwargs) if original is None else original(*args, **kwargs)
        return _tap(output, tensor_in(output, None), is_first=False) if kind.is_held else output

    return forward


# One function for all layers of a kind, because the compiler would compile again for another function.
_shared_forward = functools.cache(_forward)


def _tap(value: Any, tensor: torch.Tensor | None, *, is_first: bool) -> Any:
    """Keep a copy of a tensor in a value. Returns the value to continue with."""
    if torch.compiler.is_compiling():
        _put_operator(tensor, is_first=is_first)
        return value
    with reporting:
        return _tap_now(value, tensor, is_first=is_first)
    return value


def _put_operator(tensor: torch.Tensor | None, *, is_first: bool) -> None:
    """Put the operator that keeps a tensor into the graph that is being traced."""
    is_plain = tensor is None or type(tensor) in _PLAIN
    if is_first or is_plain:
        torch.ops.ranktape.hold_layer(tensor.detach() if is_plain and tensor is not None else None, is_first)
    if not is_plain:
        torch.ops.ranktape.hold_layer(None, False)  # noqa: FBT003  (torch's operators have no keywords)


_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""The types of tensors that a custom operator accepts in a graph. Other subclasses reject unknown operators."""


def _tap_now(value: Any, tensor: torch.Tensor | None, *, is_first: bool) -> Any:
    if is_jit_traced() and tensor is not None:
        passed = torch.ops.ranktape.pass_layer(tensor, is_first)
        return tree_map(lambda leaf: passed if leaf is tensor else leaf, value)
    if is_traced():
        _put_operator(tensor, is_first=is_first)
        return value
    is_lost = is_transformed()
    hold(None if is_lost else tensor, is_first=is_first)
    if is_lost:
        lose(TRANSFORMED)
    elif tensor is None and not is_first:
        lose("a layer gave no tensor")
    return value
