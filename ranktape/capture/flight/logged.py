"""Sees the numbers that say how a training goes: the loss, the norm of its gradients, and what the program logs.

The loss is the single number from which a backward pass begins; the norm is what `clip_grad_norm_` returns. Neither
asks for a change of the script, and each is staged like a tensor: nobody waits for a device. What a gradient scaler
has scaled is called `scaled_loss`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ranktape.capture.hooks.hook import replace, replace_names, restore_names, table_of
from ranktape.capture.passes.passes import in_backward, is_traced

if TYPE_CHECKING:
    from ranktape.capture.recorder import Recorder

LOSS, SCALED_LOSS, GRAD_NORM = "loss", "scaled_loss", "grad_norm"


class LoggedNumbers:
    """Listens for them, from now on."""

    def __init__(self, recorder: Recorder) -> None:
        """Put replacements in place of the functions that show them."""
        self._recorder = recorder
        self._owner = os.getpid()
        self._is_scaled = False
        undone = [
            replace("torch.autograd.backward", self._around_backward),
            replace("torch.amp.grad_scaler.GradScaler.scale", self._around_scale),
        ]
        self._undo = [undo for undo in undone if undo is not None]
        clip = torch.nn.utils.clip_grad_norm_
        # A script has it under a name of its own.
        self._places = replace_names(table_of([(clip, self._around_clip(clip))]))

    def stop(self) -> None:
        """Put the functions back."""
        for undo in self._undo:
            undo()
        restore_names(self._places)

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Record numbers by their names: tensors of one element, or what Python calls a number."""
        for name, value in numbers.items():
            tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value)).double()
            self._recorder.record_number(name, tensor)

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() == self._owner and not (is_traced() or in_backward()):
                root = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
                if isinstance(root, torch.Tensor) and root.numel() == 1:
                    self._recorder.record_number(SCALED_LOSS if self._is_scaled else LOSS, root.detach())
            return original(tensors, *args, **kwargs)

        return backward

    def _around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_scaled |= scaler.is_enabled()
            return original(scaler, *args, **kwargs)

        return scale

    def _around_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            if os.getpid() == self._owner and isinstance(norm, torch.Tensor) and not is_traced():
                self._recorder.record_number(GRAD_NORM, norm.detach())
            return norm

        return clip_grad_norm_
