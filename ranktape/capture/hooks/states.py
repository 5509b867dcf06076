"""What the layers gave in the last forward pass of a thread, and the operators that hold it from inside of a graph.

    ranktape::hold_layer   gives nothing: stands in what torch.compile and torch.export make of a model
    ranktape::pass_layer   gives the tensor on, so that torch.jit.trace keeps it

A program with one of them in it is loaded where this file has been imported.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from ranktape.capture.console import write_line
from ranktape.capture.guard import Guard, failure_text
from ranktape.capture.passes.passes import TRANSFORMED, in_backward
from ranktape.capture.source import Source, TensorRole


class LayerStates:
    """Copies of what one forward pass gave."""

    def __init__(self) -> None:
        self.owner: object = None
        """Who began them; others that see the same pass add nothing."""
        self.tensors: list[torch.Tensor] | None = None

    def begin(self, owner: object, *, is_held: bool = True) -> None:
        """A forward pass enters the stack of layers."""
        self.owner = owner
        self.tensors = [] if is_held else None

    def hold(self, owner: object, tensor: torch.Tensor | None) -> None:
        """Take a copy where that owner's pass is held; what cannot be taken, None, ends that: a part is no list."""
        if self.tensors is None or self.owner is not owner:
            return
        if tensor is None:
            self.tensors = None
        else:
            self.tensors.append(tensor.detach().clone())


class _LayerThread(threading.local):
    """Of each thread its own."""

    def __init__(self) -> None:
        self.states = LayerStates()


_thread = _LayerThread()
holding: weakref.WeakSet[LayerStates] = weakref.WeakSet()
"""Those whose copies a capture has taken."""


def states_here() -> LayerStates:
    """Those of this thread."""
    return _thread.states


def get_layer_hidden_states() -> list[torch.Tensor] | None:
    """What the layers gave in the last forward pass on this thread: the embedding first, then the chosen layers.

    Detached copies; the list is empty before the first layer. None where the last pass was not captured, or no capture
    records layers, or one of them could not be taken; and, of a model on an accelerator, until the program has imported
    this function: copies of all layers may not fit there. A later stage of a pipeline has no embedding.

    The last forward pass is the last one that entered the layers of a model that a capture or `tap_layers` knows. What
    has no layers, as a loss module, leaves the list as it is, and so does a model that neither follows: read the list
    before you run one. After a captured iteration the copies stay until that model runs on this thread.
    """
    tensors = _thread.states.tensors
    return None if tensors is None else list(tensors)


def is_asked_for() -> bool:
    """Whether the program has taken `get_layer_hidden_states` from `ranktape.capture`."""
    return "get_layer_hidden_states" in vars(sys.modules["ranktape.capture"])


TAPS = object()
"""The owner of what the operators hold."""


def hold(tensor: torch.Tensor | None, *, is_first: bool) -> None:
    """Take a copy of what a layer gave, or of what enters the first: that begins the pass, of a later stage with None.

    None from a layer is what cannot be taken: the pass has no list. A recomputation for the backward pass adds nothing.
    Raises nothing.
    """
    if in_backward():
        return
    with reporting:
        if is_first:
            _thread.states.begin(TAPS)
        if not (is_first and tensor is None):
            _thread.states.hold(TAPS, tensor)


def lose(reason: str) -> None:
    """The pass that a tap has begun has no list; says so once."""
    _thread.states.hold(TAPS, None)
    if reason not in _told:
        _told.add(reason)
        write_line(f"warning: a forward pass has no list of hidden states: {reason}")


_told: set[str] = set()


def _on_failure(error: Exception, _source: Source | None, _role: TensorRole | None) -> None:
    lose(failure_text(error))


reporting = Guard(_on_failure)
"""A context in which what fails is one line on stderr, and the pass has no list."""

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
    # CUDA graphs replay no Python: inductor splits its graphs at what has the tag, which torch 2.6 does not know.
    tags: Sequence[torch.Tag] = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
    _LIBRARY.define("hold_layer(Tensor? tensor, bool is_first) -> ()", tags=tags)
    _LIBRARY.define("pass_layer(Tensor tensor, bool is_first) -> Tensor", tags=tags)
    _LIBRARY.impl("hold_layer", _hold_layer, "CompositeExplicitAutograd")
    _LIBRARY.impl("pass_layer", _pass_layer, "CompositeImplicitAutograd")
    torch.library.register_fake(_HOLD, lambda _tensor, _is_first: None, lib=_LIBRARY)
    torch.library.register_vmap(_HOLD, _hold_batched, lib=_LIBRARY)
    # In its order, and never left out, though nothing uses what it gives.
    _register_effectful_op(torch.ops.ranktape.hold_layer.default, _EffectType.ORDERED)


_define()
