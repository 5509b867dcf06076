"""Puts hooks on the modules of known models, and leaves them on where the next iteration would put on the same."""

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
from ranktape.capture.passes.passes import Frame, in_backward, is_traced
from ranktape.capture.roles.known import registered_roles, role_of
from ranktape.capture.roles.table import FunctionRole, ModuleRole, ports_of
from ranktape.capture.source import Source
from ranktape.capture.tensors.placement import Placements
from ranktape.capture.torch_private import global_forward_pre_hooks, parameters_of

if TYPE_CHECKING:
    from ranktape.capture.recorder import Recorder


class Attached:
    """The modules of known models that have hooks, the hooks, and what these share."""

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
        """Modules that are recorded and were not in `_modules` yet when the last pass ended."""
        self._idle: list[Any] = []
        """The hooks on the weights of modules that no pass had called when it ended."""
        self._attending: dict[nn.Module, Frame] = {}
        """The modules that compute attention, as their classes are called, and were called."""
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
        """Whether the forward of a model may be called directly, without its hooks."""
        self._was_direct = False
        """Whether one ever was."""
        self._was_called = False
        """Whether a model ever was, with its hooks."""
        self._backwards: list[Exchanged] = []
        """The functions that run backward passes, from the first forward that is called directly on."""
        self._is_refused = False
        """Whether something was refused as the hooks were put on."""
        self._layout: list[Any] = []
        """What the models were when all hooks were on; empty where the hooks must not stay."""

    def _living(self) -> Iterator[tuple[nn.Module, str]]:
        """The models that there still are, with what the paths of their modules begin with."""
        yield from ((root, prefix) for reference, prefix in self._roots if (root := reference()) is not None)

    def weights(self) -> Iterator[tuple[Source, nn.Module, str, str]]:
        """The parameters of the modules that hooks are on: source, module, name there, name in records."""
        for module, hooks in self._modules.items():
            yield from ((hooks.source, module, *names) for names in hooks.parameters.items())
        for module, source in self._inside.items():
            yield from ((source, module, name, name) for name in ("weight", "bias"))

    def _note_layout(self) -> None:
        """All hooks are on: they may stay for the next iteration, as far as nothing changes."""
        is_plain = self._layers is None and not self._stage_prefixes and not self._is_refused
        self._layout = self._present_layout() if is_plain else []

    def _may_stay(self) -> bool:
        """Whether all that is on is what would be put on now."""
        return bool(self._layout) and self._layout == self._present_layout()

    def _present_layout(self) -> list[Any]:
        """All that decides which hooks are put on, and where: none may have come between ours and the module."""
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
        """Have the hooks that are on begin an iteration."""
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
                continue  # takes no hooks; what it does inside is not Python either
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
        """Put hooks on a module that has a role."""
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
        # Without keywords: torch's word for a hook that was taken off while its module is called.
        if kwargs is None or is_traced():
            return
        with self._recorder.guarded():
            self._enter(frame, args, kwargs)
            if is_attention(module) and self._tracker.is_active:
                self._attending[module] = frame

    def _enter(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow a call of a module, and see the functions that are called in it."""
        tracker = self._tracker
        tracker.enter(frame, args, kwargs)
        if tracker.is_outermost and not in_backward():
            MODE.reset()  # what an interrupt left behind, or what was entered for direct calls
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
        """See the functions of a forward that is called directly, until a model is called by its hooks.

        An optimizer that steps in a backward pass may end the iteration. torch passes the call of the backward pass to
        the mode, too, and puts the mode back after it: so the mode is taken out before.
        """
        if self._is_direct and self._functions is not None:
            MODE.stay()
            if MODE.is_active and not self._backwards:  # it is not in a compiled region
                self._backwards = [
                    Exchanged(function, self._in_backward) for function in (torch.Tensor.backward, torch.autograd.grad)
                ]

    def _in_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns that runs a backward pass."""
        before = self._functions
        try:
            with MODE.inactive():
                return backward(*args, **kwargs)
        finally:
            if self._functions is not before and not in_backward():
                self._await_direct()  # an iteration began in it

    def _watch_idle(self) -> None:
        """A pass has ended: notice the gradients of weights whose modules it has not called, as these were used.

        Not of a weight that several modules have.
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
        """An iteration begins: every module may be one that is not called."""
        for handle in self._idle:
            handle.remove()
        self._idle.clear()
        self._attending.clear()
        self._unasked = list(self._modules)

    def _is_wanted_kind(self, layer_type: str, path: str) -> bool:
        if (layer_type, path) not in self._wanted:
            # What `layers` alone records of an embedding is what enters the stack.
            is_named = not self._options.wants_layers or self._options.names_layer_type(layer_type)
            self._wanted[layer_type, path] = is_named and self._wants(layer_type) and self._is_wanted(path)
        return self._wanted[layer_type, path]


_LATE = (
    "the forward of a model is called directly: of its first call, functions before its first module are not recorded, "
    "and those of later calls are"
)
"""Said where the mode was off, as the model had been called as a module before."""


def _source(frame: Frame, layer_type: str, component: str) -> Source:
    return Source(frame.path, layer_type, frame.layer_idx, component, frame.layer_stack)
