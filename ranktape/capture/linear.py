"""Which hooks see a linear layer's input, weight, output and their gradients, without changing them?

    forward pre     input, weight     a forward pre-hook
    forward post    output            a forward hook
    backward pre    grad_output       a tensor hook on the output
    backward post   grad_input        a tensor hook on an alias of the input: this layer's share alone
                    grad_weight       a tensor hook on the weight: this pass's increment alone

Module backward hooks are not used: they break in-place consumers, cost more than the layer, and change bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ranktape.capture.recorder import Role
from ranktape.capture.tracker import Call, in_backward
from ranktape.storage.record import Operation

if TYPE_CHECKING:
    from ranktape.capture.recorder import Recorder, Source
    from ranktape.capture.tracker import Tracker

INPUT = Role(operation=Operation.FORWARD, phase="pre", tensor_name="input")
WEIGHT = Role(operation=Operation.FORWARD, phase="pre", tensor_name="weight", has_samples=False)
OUTPUT = Role(operation=Operation.FORWARD, phase="post", tensor_name="output")
GRAD_OUTPUT = Role(operation=Operation.BACKWARD, phase="pre", tensor_name="grad_output")
GRAD_INPUT = Role(operation=Operation.BACKWARD, phase="post", tensor_name="grad_input")
GRAD_WEIGHT = Role(operation=Operation.BACKWARD, phase="post", tensor_name="grad_weight", has_samples=False)


class LinearHooks:
    """The hooks on one linear layer for one iteration."""

    def __init__(self, module: nn.Linear, *, source: Source, recorder: Recorder, tracker: Tracker) -> None:
        self._source = source
        self._recorder = recorder
        self._tracker = tracker
        self._call: Call | None = None
        self._backward_call: Call | None = None
        self._weight_is_recorded = False
        self._handles = [
            # Appended last and first: innermost, so that wrappers' own hooks have done their part.
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True, prepend=True),
        ]

    def remove(self) -> None:
        """Detach everything."""
        for handle in self._handles:
            handle.remove()

    def call_before(self, module: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the pre-hook does, for the call in which it was attached too late."""
        return self._before(module, args, {})[0]

    def _before(
        self, module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with self._recorder.guarded():
            return self._take(module, args, kwargs)
        return args, kwargs

    def _take(
        self, module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        value = args[0] if args else kwargs.get("input")
        if not isinstance(value, torch.Tensor) or not (self._tracker.is_active or in_backward()):
            self._call = None
            return args, kwargs
        call = self._tracker.begin_call(
            f"linear {self._source.module}", dtype=value.dtype, device_type=value.device.type
        )
        self._call = call
        if not in_backward():
            self._recorder.record(self._source, INPUT, value, call=call)
            if not self._weight_is_recorded:
                # One step has one weight: it is recorded with the first call only.
                self._weight_is_recorded = True
                # Read here and not when we were attached: under FSDP2 this is the weight that is computed with.
                weight = module.weight
                self._recorder.record(self._source, WEIGHT, weight, call=call)
                if weight.requires_grad:
                    self._handles.append(weight.register_hook(self._on_grad_weight))
        if not (value.requires_grad and torch.is_grad_enabled()):
            return args, kwargs
        alias = value.view_as(value)
        self._recorder.record_grad(self._source, GRAD_INPUT, alias, call=call)
        return ((alias, *args[1:]), kwargs) if args else (args, {**kwargs, "input": alias})

    def _after(self, module: nn.Linear, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002  (torch's signature)
        call, self._call = self._call, None
        if call is None or not isinstance(output, torch.Tensor):
            return
        with self._recorder.guarded():
            if not in_backward():
                self._recorder.record(self._source, OUTPUT, output, call=call)
            if output.requires_grad:
                self._recorder.record_grad(
                    self._source,
                    GRAD_OUTPUT,
                    _before_views(output),
                    call=call,
                    shape=output.shape,
                    on_grad=self._on_grad_output,
                )

    def _on_grad_output(self, call: Call) -> None:
        self._backward_call = call

    def _on_grad_weight(self, grad: torch.Tensor) -> None:
        # The hook of a leaf knows no call: the gradient of this layer's output came just before.
        call, self._backward_call = self._backward_call, None
        if call is not None:
            self._recorder.record(self._source, GRAD_WEIGHT, grad, call=call)
        else:
            self._recorder.refuse(self._source, GRAD_WEIGHT, "no gradient of the layer's output came before it")


def _before_views(output: torch.Tensor) -> torch.Tensor:
    """The tensor whose hook sees the output's gradient, whatever is done to the output in place.

    With a bias and three dimensions the output is a view of the product. An operation in place on a view
    takes its hooks out of the graph; those of what it is a view of stay.
    """
    base = output._base  # noqa: SLF001  (torch has no public name for it)
    if base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous():
        return base
    return output
