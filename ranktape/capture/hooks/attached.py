"""Puts hooks on the modules of known models, and leaves them on if the next iteration needs the same ones."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ranktape.capture.hooks.calls import Watch
from ranktape.capture.hooks.coverage import is_attention
from ranktape.capture.hooks.functions import Exchanged, FunctionHooks
from ranktape.capture.hooks.hook import MODE, Hook
from ranktape.capture.hooks.layers import LayerHooks
from ranktape.capture.hooks.module_hooks import ModuleHooks, MultiheadHooks, is_hidden, is_seen_inside, may_open
from ranktape.capture.hooks.stacks import survey
from ranktape.capture.hooks.weights import Weights
from ranktape.capture.passes.tracker import Frame
from ranktape.capture.roles.known import registered_roles, role_of
from ranktape.capture.roles.table import FunctionRole, ModuleRole, ports_of
from ranktape.capture.source import Source
from ranktape.capture.tensors.placement import Placements
from ranktape.capture.torch_private import global_forward_pre_hooks, in_backward, is_traced, parameters_of

if TYPE_CHECKING:
    from ranktape.capture.recorder import Recorder


class Attached:
    """The hooks on the modules of known models, and their shared state."""

    def __init__(self, recorder: Recorder) -> None:
        self._options = options = recorder.options
        self._wants = options.wants_layer_type
        self._is_wanted = options.wants_module
        self._recorder = recorder
        self._tracker = recorder.tracker
        self._survey = functools.partial(survey, layer_offset=options.layer_offset)
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._attached: dict[nn.Module, Frame] = {}
        self._modules: dict[nn.Module, ModuleHooks] = {}
        self._inside: dict[nn.Module, Source] = {}
        self._unasked: list[nn.Module] = []
        """The recorded modules that have not been checked for a call at the end of a pass."""
        self._idle: list[Any] = []
        """The hooks on the weights of modules that had not been called when a pass ended."""
        self._attending: dict[nn.Module, Frame] = {}
        """The modules that were called and compute attention according to the names of their classes."""
        self._weights = Weights()
        self.placements = Placements()
        self._watch = Watch(recorder, weights=self._weights, placements=self.placements)
        self._functions: FunctionHooks | None = None
        self._multihead: MultiheadHooks | None = None
        self._layers: LayerHooks | None = None
        self._matched: set[ModuleRole | FunctionRole] = set()
        self._wanted: dict[tuple[str, str], bool] = {}
        self._stage_prefixes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._is_direct = False
        """Whether the `forward` of a model may be called directly, without its hooks."""
        self._was_direct = False
        """Whether any model's `forward` has been called directly."""
        self._was_called = False
        """Whether any model has been called with its hooks."""
        self._backwards: list[Exchanged] = []
        """The replaced functions that run backward passes; empty until a `forward` may be called directly."""
        self._is_refused = False
        """Whether a parameter was refused when the hooks were attached."""
        self._layout: list[Any] = []
        """The layout of the models after all hooks were attached; empty if the hooks must not stay."""

    def _living(self) -> Iterator[tuple[nn.Module, str]]:
        """The models that are still alive, each with the prefix of the paths of its modules."""
        yield from ((root, prefix) for reference, prefix in self._roots if (root := reference()) is not None)

    def weights(self) -> Iterator[tuple[Source, nn.Module, str, str]]:
        """The parameters of recorded modules: the source, the module, the name in the module, the name in records."""
        for module, hooks in self._modules.items():
            yield from ((hooks.source, module, *names) for names in hooks.parameters.items())
        for module, source in self._inside.items():
            yield from ((source, module, name, name) for name in ("weight", "bias"))

    def _note_layout(self) -> None:
        """Note the layout after all hooks are attached. They may stay on as long as it does not change."""
        is_plain = self._layers is None and not self._stage_prefixes and not self._is_refused
        self._layout = self._present_layout() if is_plain else []

    def _may_stay(self) -> bool:
        """Whether the attached hooks are the same as would be attached now."""
        return bool(self._layout) and self._layout == self._present_layout()

    def _present_layout(self) -> list[Any]:
        """Everything that determines the hooks, including the order of other hooks on the modules."""
        hooks = tuple(global_forward_pre_hooks())
        layout: list[Any] = [hooks, registered_roles(), dist.is_available() and dist.is_initialized()]
        for root, prefix in self._living():
            layout.append(prefix)
            for name, module in root.named_modules():
                own = module._forward_pre_hooks, module._forward_hooks  # noqa: SLF001  (as above)
                parameters = tuple(map(id, parameters_of(module).values()))
                layout.append((name, module, type(module), *map(tuple, own), parameters))
        return layout

    def _renew(self) -> None:
        """Start an iteration with the hooks that stayed on."""
        assert self._functions is not None, "only called while hooks are attached"
        self._watch.renew()
        self._watch_idle_again()
        for root, _ in self._living():
            if dist.is_available() and dist.is_initialized():
                self.placements.learn(root)
        self._functions.begin()
        for module, hooks in self._modules.items():
            with self._recorder.guarded(hooks.source):
                hooks.begin(module)

    def _attach_to(self, root: nn.Module, prefix: str) -> None:
        assert self._functions is not None, "only called while hooks are attached"
        if dist.is_available() and dist.is_initialized():
            self.placements.learn(root)
        self._functions.begin()
        self._matched.update(self._functions.roles)
        stage = self._stage_prefixes.get(root, "")
        found = self._survey(root)
        leave = Hook(self._on_leave, keeps_mode=True)
        for place in found.places:
            module = place.module
            if module in self._attached:
                continue
            before = self._stage_prefixes.get(module, "") + prefix
            layer_stack = (before + place.layer_stack).rstrip(".") if place.layer_idx >= 0 else ""
            frame = place._replace(path=(before + place.path).rstrip("."), layer_stack=layer_stack)
            self._attached[module] = frame
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks, and its code does not run in Python
            self._watch.owners.add(frame)
            enter = Hook(functools.partial(self._on_enter, frame), keeps_mode=True)
            self._watch.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._watch.handles.append(module.register_forward_hook(leave, always_call=True))
            with self._recorder.guarded(_source(frame, "module", "unknown")):
                self._attach_role(frame)
            if module in self._modules:
                self._unasked.append(module)
        if self._layers is not None and found.stacks:
            self._layers.attach(root, found.stacks[0], prefix=stage + prefix)

    def _attach_role(self, frame: Frame) -> None:
        """Put hooks on a module if it has a role."""
        module, role = frame.module, role_of(type(frame.module))
        if self._multihead is not None and isinstance(module, nn.MultiheadAttention) and self._is_wanted(frame.path):
            self._multihead.attach(module, _source(frame, "attention", "FA"))
        if role is None:
            return
        self._matched.add(role)
        if not self._is_wanted_kind(role.layer_type, frame.path):
            return
        source = _source(frame, role.layer_type, role.component)
        for attribute, port in ports_of(role).parameters:
            if is_hidden(module, attribute) and not may_open(module, role):
                reason = f"its {attribute} is not a plain parameter (parametrized, or not made yet)"
                self._recorder.refuse(source, port.value, reason)
                self._is_refused = True
                if not port.is_optional:
                    return
        if is_seen_inside(module, role):
            self._inside[module] = source
            return
        self._modules[module] = ModuleHooks(module, role, source, self._watch)

    def _on_enter(
        self,
        frame: Frame,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        # If the hook was removed during the call of its module, torch calls it without keyword arguments.
        if kwargs is None or is_traced():
            return
        with self._recorder.guarded():
            self._enter(frame, args, kwargs)
            if is_attention(module) and self._tracker.is_active:
                self._attending[module] = frame

    def _enter(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow a call of a module and the functions that are called in it."""
        tracker = self._tracker
        tracker.enter(frame, args, kwargs)
        if tracker.is_outermost and not in_backward():
            MODE.reset()  # it may be active after an interrupt, or for direct calls
            self._is_direct = self._was_direct
        if tracker.is_active:
            if tracker.is_direct:
                if self._was_called and not self._is_direct:
                    self._watch.tell(_LATE)
                self._is_direct = self._was_direct = True
                self._await_direct()
            self._was_called |= not tracker.is_direct
            MODE.enter(frame.module)

    def _on_leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if is_traced():
            return
        MODE.leave(module)
        with self._recorder.guarded():
            is_recorded = bool(self._unasked) and self._tracker.is_active
            self._tracker.leave(module, output)
            if is_recorded and self._tracker.current() is None and not in_backward():
                self._watch_idle()
            if self._tracker.current() is None and not in_backward():
                self._await_direct()

    def _await_direct(self) -> None:
        """Keep the function mode active for forwards that are called directly, until a model is called with its hooks.

        An optimizer that steps in a backward pass may end the iteration. The call of the backward pass itself goes
        through the mode, and torch puts the mode back afterwards. Therefore the mode is removed before the call.
        """
        if self._is_direct and self._functions is not None:
            MODE.stay()
            if MODE.is_active and not self._backwards:  # not active inside a compiled region
                self._backwards = [
                    Exchanged(function, self._in_backward) for function in (torch.Tensor.backward, torch.autograd.grad)
                ]

    def _in_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass without the function mode."""
        before = self._functions
        try:
            with MODE.inactive():
                return backward(*args, **kwargs)
        finally:
            if self._functions is not before and not in_backward():
                self._await_direct()  # an iteration started in the backward pass

    def _watch_idle(self) -> None:
        """After a pass, watch the gradients of weights whose modules were not called: such a weight was used elsewhere.

        Shared weights are not watched.
        """
        unasked, self._unasked = self._unasked, []
        expected, met = self._recorder.expected, self._watch.owners.met
        idle = [module for module in unasked if expected.is_idle(self._modules[module].source)]
        counts = Counter(id(one) for module in self._attached if idle for one in parameters_of(module).values())
        for module in idle:
            note = functools.partial(expected.used, self._modules[module].source)
            for name, weight in parameters_of(module).items():
                is_own = weight is not None and counts[id(weight)] == 1 and (module, name) not in met
                if is_own and weight.ndim > 1 and weight.requires_grad:
                    self._idle.append(weight.register_hook(Hook(lambda _, note=note: note())))

    def _watch_idle_again(self) -> None:
        """Start an iteration, in which no module has been called yet."""
        for handle in self._idle:
            handle.remove()
        self._idle.clear()
        self._attending.clear()
        self._unasked = list(self._modules)

    def _is_wanted_kind(self, layer_type: str, path: str) -> bool:
        if (layer_type, path) not in self._wanted:
            # With `layers` alone, an embedding is recorded only as the input of the stack.
            is_named = not self._options.wants_layers or self._options.names_layer_type(layer_type)
            self._wanted[layer_type, path] = is_named and self._wants(layer_type) and self._is_wanted(path)
        return self._wanted[layer_type, path]


_LATE = (
    "the forward of a model is called directly: of its first call, functions before its first module are not recorded, "
    "and those of later calls are"
)
"""The message if the function mode was inactive because the model had been called as a module before."""


def _source(frame: Frame, layer_type: str, component: str) -> Source:
    return Source(frame.path, layer_type, frame.layer_idx, component, frame.layer_stack)
