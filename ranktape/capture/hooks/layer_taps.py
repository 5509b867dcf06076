"""Taps on the layers of a model that go into what is made of it: compiled code, exported programs, traced modules.

A tap is a `forward` of the layer's own. The compiler looks for one in front of each call of compiled code, so that taps
that come after the first compilation, or go, are seen; of hooks it sees none of this. A copy of a model has taps of its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ranktape.capture.hooks.calls import tensor_in
from ranktape.capture.hooks.layers import check_layers
from ranktape.capture.hooks.stacks import survey, unwrapped
from ranktape.capture.hooks.states import hold, lose, reporting
from ranktape.capture.passes.passes import TRANSFORMED, is_jit_traced, is_traced, is_transformed
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.torch_private import tree_map
from ranktape.errors import UsageError

Forward = Callable[..., Any]


class _Kind(NamedTuple):
    """What a tap does."""

    is_first: bool
    """A pass begins with what enters it."""
    has_embedding: bool
    """That is held."""
    is_held: bool
    """What the layer gives is held."""


class LayerTaps:
    """The taps on a model, until `remove()` or the end of the context."""

    def __init__(self) -> None:
        self._put: list[tuple[nn.Module, Forward, Forward | None]] = []

    def put(self, module: nn.Module, kind: _Kind) -> None:
        """On one layer."""
        own = vars(module).get("forward")
        forward = MethodType((_shared_forward if own is None else _forward)(own, kind), module)
        module.forward = forward
        self._put.append((module, forward, own))

    def remove(self) -> None:
        """Take them off; programs that were exported or traced meanwhile keep theirs, and so do copies of the model."""
        for module, forward, own in reversed(self._put):
            if vars(module).get("forward") is not forward:
                continue
            del module.forward
            if own is not None:
                module.forward = own
        self._put.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def tap_layers(model: nn.Module, *, layers: Any = "all", layer_offset: int = 0) -> LayerTaps:
    """Have each forward pass of a model leave what its layers return to `get_layer_hidden_states()`, without a run.

    As it runs now, and in what is made of it while the taps are on: under `torch.compile`, before and after the first
    compilation, in a program of `torch.export`, in a module of `torch.jit.trace`. The model's results stay as they are.
    What fails in a tap is one line on stderr, and the pass has no list.

    Raises:
        UsageError: the model has no stack of layers, or not those that are asked for.
    """
    stacks = survey(model, layer_offset=layer_offset).stacks
    if not stacks:
        raise UsageError(f"{type(model).__name__} has no stack of layers: tap a model that holds a list of like layers")
    wanted = read_numbers("layers", layers)
    check_layers(wanted, model, stacks[0])
    taps = LayerTaps()
    for place, layer in enumerate(stacks[0].layers):
        is_first = place == 0
        kind = _Kind(is_first=is_first, has_embedding=is_first and layer.idx == 0, is_held=wanted.holds(layer.idx))
        if any(kind):
            taps.put(unwrapped(layer.module), kind)
    return taps


def _forward(own: Forward | None, kind: _Kind) -> Forward:
    """What takes the place of the forward that a layer has of its class, or of its own."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kind.is_first:
            args, kwargs = _enter(args, kwargs, has_embedding=kind.has_embedding)
        gives = type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        return _leave(gives) if kind.is_held else gives

    return forward


# One for all layers of a kind: the compiler takes another function for other code.
_shared_forward = functools.cache(_forward)


def _enter(args: tuple[Any, ...], kwargs: dict[str, Any], *, has_embedding: bool) -> Any:
    """A pass begins; the arguments to go on with."""
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)] if has_embedding else []
    tensor = next((one for one in given if one.is_floating_point()), None)
    return _tap((args, kwargs), tensor, is_first=True)


def _leave(gives: Any) -> Any:
    """A layer has returned; what to go on with."""
    return _tap(gives, tensor_in(gives, None), is_first=False)


def _tap(value: Any, tensor: torch.Tensor | None, *, is_first: bool) -> Any:
    """Hold a tensor of a value; gives the value to go on with."""
    if torch.compiler.is_compiling():
        _put_operator(tensor, is_first=is_first)
        return value
    with reporting:
        return _tap_now(value, tensor, is_first=is_first)
    return value


def _put_operator(tensor: torch.Tensor | None, *, is_first: bool) -> None:
    """Have the graph that is made of what runs hold a tensor."""
    is_whole = tensor is None or type(tensor) in _WHOLE
    if is_first or is_whole:
        torch.ops.ranktape.hold_layer(tensor.detach() if is_whole and tensor is not None else None, is_first)
    if not is_whole:
        torch.ops.ranktape.hold_layer(None, False)  # noqa: FBT003  (torch's operators have no keywords)


_WHOLE = (torch.Tensor, nn.Parameter, FakeTensor)
"""Tensors of which an operator of ours may be part of a graph: other subclasses refuse those that they do not know."""


def _tap_now(value: Any, tensor: torch.Tensor | None, *, is_first: bool) -> Any:
    if is_jit_traced() and tensor is not None:
        passed = torch.ops.ranktape.pass_layer(tensor, is_first)
        return tree_map(lambda one: passed if one is tensor else one, value)
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
