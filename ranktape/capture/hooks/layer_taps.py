"""Taps on the layers of a model that also work in compiled code, exported programs and traced modules.

A tap is a `forward` in the instance dictionary of the layer. The compiler guards on that attribute before each call of
compiled code, so it notices taps that are added or removed after the first compilation, unlike hooks. A copy of a model
has taps of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ranktape.capture.expected import TRANSFORMED
from ranktape.capture.hooks.calls import tensor_in
from ranktape.capture.hooks.layers import check_layers
from ranktape.capture.hooks.stacks import survey, unwrapped
from ranktape.capture.hooks.states import hold, lose, reporting
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.torch_private import is_jit_traced, is_traced, is_transformed, tree_map
from ranktape.errors import UsageError

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
        self._put: list[tuple[nn.Module, Forward, Forward | None]] = []

    def put(self, module: nn.Module, kind: _Kind) -> None:
        """Put a tap on a layer."""
        own = vars(module).get("forward")
        forward = MethodType((_shared_forward if own is None else _forward)(own, kind), module)
        module.forward = forward
        self._put.append((module, forward, own))

    def remove(self) -> None:
        """Remove the taps. Programs that were exported or traced with taps keep them, and so do copies of the model."""
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
    for place, layer in enumerate(stacks[0].layers):
        is_first = place == 0
        kind = _Kind(is_first=is_first, has_embedding=is_first and layer.idx == 0, is_held=wanted.holds(layer.idx))
        if any(kind):
            taps.put(unwrapped(layer.module), kind)
    return taps


def _forward(own: Forward | None, kind: _Kind) -> Forward:
    """The replacement of a layer's `forward`, which is `own` or, if that is None, the one of the class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kind.is_first:
            args, kwargs = _enter(args, kwargs, has_embedding=kind.has_embedding)
        gives = type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
        return _leave(gives) if kind.is_held else gives

    return forward


# One function for all layers of a kind, because the compiler would compile again for another function.
_shared_forward = functools.cache(_forward)


def _enter(args: tuple[Any, ...], kwargs: dict[str, Any], *, has_embedding: bool) -> Any:
    """Start a pass. Returns the arguments to continue with."""
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)] if has_embedding else []
    tensor = next((one for one in given if one.is_floating_point()), None)
    return _tap((args, kwargs), tensor, is_first=True)


def _leave(gives: Any) -> Any:
    """Keep the output of a layer. Returns the result to continue with."""
    return _tap(gives, tensor_in(gives, None), is_first=False)


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
    is_whole = tensor is None or type(tensor) in _WHOLE
    if is_first or is_whole:
        torch.ops.ranktape.hold_layer(tensor.detach() if is_whole and tensor is not None else None, is_first)
    if not is_whole:
        torch.ops.ranktape.hold_layer(None, False)  # noqa: FBT003  (torch's operators have no keywords)


_WHOLE = (torch.Tensor, nn.Parameter, FakeTensor)
"""The types of tensors that a custom operator accepts in a graph. Other subclasses reject unknown operators."""


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
