"""The hidden states of the last forward pass of each thread, and the operators that keep them from inside a graph.

    ranktape::hold_layer   returns nothing; for graphs of torch.compile and torch.export
    ranktape::pass_layer   returns a copy of the tensor, so that torch.jit.trace does not eliminate it

A program with one of these operators can only be loaded after this module has been imported.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from ranktape.capture.console import write_line
from ranktape.capture.expected import TRANSFORMED
from ranktape.capture.guard import Guard, failure_text
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.torch_private import in_backward


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


def states_here() -> LayerStates:
    """The hidden states of this thread."""
    return _thread.states


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


def is_asked_for() -> bool:
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
    if reason not in _told:
        _told.add(reason)
        write_line(f"warning: a forward pass has no list of hidden states: {reason}")


_told: set[str] = set()


def _on_failure(error: Exception, _source: Source | None, _role: TensorRole | None) -> None:
    lose(failure_text(error))


reporting = Guard(_on_failure)
"""A context that turns an exception into one line on stderr; the pass then has no list."""

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
    # Keeps the order of the calls, and keeps them from being eliminated as dead code.
    _register_effectful_op(torch.ops.ranktape.hold_layer.default, _EffectType.ORDERED)


_define()
