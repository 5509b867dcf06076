"""Hooks that record the outputs of a model's layers, and keep those of the last forward pass of each thread.

    embedding, forward post   output         the input of the first layer
    hidden, forward post      output         the first tensor that a layer returns
    both, backward pre        grad_output    its gradient, from everything that uses it

The outputs of the model are not changed. Under a reentrant checkpoint, the gradient of a layer's output is seen in the
recomputation, and that of the first layer's input outside of it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from ranktape.capture.hooks.calls import HookContext, SourceRecorder
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.hooks.stacks import Stack, embedding_path, module_path
from ranktape.capture.hooks.states import holding, is_imported, thread_states
from ranktape.capture.roles.table import OUTPUT, Ports, port_of
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.source import Source
from ranktape.capture.tensors.parts import first_floating, tensor_in
from ranktape.capture.torch_private import in_backward, is_traced

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
        thread_states().begin(self, is_held=self._context.tracker.is_active)

    def hold(self, tensor: torch.Tensor | None) -> None:
        """Keep a copy of the output of a layer or the input of the first one; None if there is no tensor to copy.

        Copies of all layers may not fit on an accelerator, so there they are kept only if the program uses them.
        """
        is_kept = tensor is not None and (tensor.is_cpu or is_imported())
        thread_states().hold(self, tensor if is_kept else None)
        holding.add(thread_states())

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
        thread_states().hold(self, None)

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
        thread_states().hold(self, None)

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
        thread_states().begin(None, is_held=False)
        holding.discard(thread_states())
        if not holding:
            handle.remove()

    handle = module.register_forward_pre_hook(Hook(hook))
