"""How is attention seen that is a function and no module?

`F.scaled_dot_product_attention` is replaced while an iteration is captured, under every name by which a
loaded module knows it, and put back after it. Outside of captured iterations the original is in place and
nothing costs anything. A reference that lies in an object (`self.attend = F.scaled_...`) is not found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from ranktape.capture.recorder import Role, Source
from ranktape.capture.tracker import Call, in_backward
from ranktape.storage.record import Operation

if TYPE_CHECKING:
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.tracker import Tracker

NAMES = ("query", "key", "value")
OUTPUT = Role(operation=Operation.FORWARD, phase="post", tensor_name="output")
GRAD_OUTPUT = Role(operation=Operation.BACKWARD, phase="pre", tensor_name="grad_output")
INPUTS = {name: Role(operation=Operation.FORWARD, phase="pre", tensor_name=name) for name in NAMES}
GRADS = {name: Role(operation=Operation.BACKWARD, phase="post", tensor_name=f"grad_{name}") for name in NAMES}

_ORIGINAL = F.scaled_dot_product_attention

_LEFT_ALONE = ("torch._dynamo", "torch._inductor", "torch.overrides", "ranktape.")
"""Beginnings of modules that hold the function to compare with it, not to call it."""


class AttentionHooks:
    """The replacement of scaled dot-product attention for one iteration."""

    def __init__(self, *, recorder: Recorder, tracker: Tracker, is_wanted: Callable[[str], bool]) -> None:
        """Put the replacement in place.

        Args:
            recorder: Takes the tensors.
            tracker: Knows the module that is running.
            is_wanted: Says for a module's path whether its attention is recorded.
        """
        self._recorder = recorder
        self._tracker = tracker
        self._is_wanted = is_wanted
        _Active.hooks = self
        _replace(_ORIGINAL, scaled_dot_product_attention)

    def remove(self) -> None:
        """Put the original back; what else has got hold of the replacement passes through it from now on."""
        _Active.hooks = None
        _replace(scaled_dot_product_attention, _ORIGINAL)

    def attend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The attention of these arguments, recorded where it is wanted."""
        named = dict(zip(NAMES, args, strict=False)) | {name: kwargs[name] for name in NAMES if name in kwargs}
        source = self._source()
        if source is None or set(named) != set(NAMES) or not (self._tracker.is_active or in_backward()):
            return _ORIGINAL(*args, **kwargs)
        call = None
        with self._recorder.guarded():
            query = named["query"]
            key = f"attention {source.module}"
            call = self._tracker.begin_call(key, dtype=query.dtype, device_type=query.device.type)
            seen = {name: self._take(source, name, tensor, call) for name, tensor in named.items()}
            args = (*(seen[name] for name in NAMES[: len(args)]), *args[len(NAMES) :])
            kwargs = kwargs | {name: seen[name] for name in NAMES if name in kwargs}
        output = _ORIGINAL(*args, **kwargs)
        if call is None:
            return output
        with self._recorder.guarded():
            if not in_backward():
                self._recorder.record(source, OUTPUT, output, call=call)
            if output.requires_grad:
                self._recorder.record_grad(source, GRAD_OUTPUT, output, call=call)
        return output

    def _take(self, source: Source, name: str, tensor: torch.Tensor, call: Call) -> torch.Tensor:
        if not in_backward():
            self._recorder.record(source, INPUTS[name], tensor, call=call)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        alias = tensor.view_as(tensor)
        self._recorder.record_grad(source, GRADS[name], alias, call=call)
        return alias

    def _source(self) -> Source | None:
        frame = self._tracker.current()
        path = "" if frame is None else frame.path
        if not self._is_wanted(path):
            return None
        layer_idx = -1 if frame is None else frame.layer_idx
        return Source(module=path, layer_type="attention", layer_idx=layer_idx, component="FA")


class _Active:
    """The hooks of the iteration that is captured; None outside of one."""

    hooks: ClassVar[AttentionHooks | None] = None


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands for torch's function of that name while an iteration is captured; passes through at other times.

    It has a name in a module, so that a model which has got hold of it can be pickled.
    """
    hooks = _Active.hooks
    return _ORIGINAL(*args, **kwargs) if hooks is None else hooks.attend(args, kwargs)


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Under every module-level name, in all modules that are loaded."""
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if module_name.startswith(_LEFT_ALONE) or not isinstance(namespace, dict):
            continue
        for name, value in list(namespace.items()):
            if value is old:
                namespace[name] = new
