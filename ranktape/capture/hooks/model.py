"""Selects and names the captured modules of models, and attaches and detaches all hooks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ranktape.capture.hooks.calls import HookContext, Weights
from ranktape.capture.hooks.compiled import (
    EagerMode,
    IgnoredWarning,
    has_compiled,
    hidden_in_graphs,
    is_left_compiled,
    why_eager,
)
from ranktape.capture.hooks.coverage import (
    NOTHING_CALLED,
    Coverage,
    ModuleCalls,
    explain_silence,
    explain_unmatched,
    is_attention,
)
from ranktape.capture.hooks.functions import Exchanged, FunctionHooks
from ranktape.capture.hooks.hook import MODE, Hook, Replacements, without_global_hooks
from ranktape.capture.hooks.module_hooks import (
    ModuleHooks,
    MultiheadHooks,
    is_hidden,
    is_recorded_as_product,
    may_record_products,
)
from ranktape.capture.hooks.stacks import check_layers, survey
from ranktape.capture.hooks.states import LayerHooks
from ranktape.capture.passes.frameworks import framework_replacements, is_rehearsing, stage_prefix
from ranktape.capture.passes.python_stack import DirectCall, keyword_arguments, outermost_direct_call
from ranktape.capture.passes.tracker import Arguments, Frame
from ranktape.capture.rendezvous import keep_process_groups
from ranktape.capture.roles.known import registered_roles, role_of
from ranktape.capture.roles.table import FunctionRole, ModuleRole, ports_of
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.settings.setting import is_given
from ranktape.capture.source import Source
from ranktape.capture.tensors.placement import Placements
from ranktape.capture.torch_private import (
    forward_hooks_of,
    forward_pre_hooks_of,
    global_forward_pre_hooks,
    in_backward,
    is_traced,
    parameters_of,
)
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.capture.compiled.regions import Regions
    from ranktape.capture.recorder import Recorder


class ModelHooks:
    """Everything that is attached to the training while an iteration is captured.

    The models are the given ones. If none are given, each outermost module that a training forward enters is a model.
    Hooks are left on if the next iteration needs the same ones.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        is_given: bool,
        on_note: Callable[[str], None],
        on_compiled: Callable[[str | None], None],
        on_mistake: Callable[[UsageError], None],
    ) -> None:
        """Starts without models.

        Args:
            recorder: Records the tensors.
            is_given: Whether models will be added, and no others are searched for.
            on_note: Called with notes for the user.
            on_compiled: Called when compiled code starts, with the reason why it runs eagerly; None if its graphs are
                recorded.
            on_mistake: Called with a user's mistake that is detected when a model is found.
        """
        self._options = options = recorder.options
        self._wants_layer_type = options.wants_layer_type
        self._wants_module = options.wants_module
        self._wants_layer = functools.cache(self._is_wanted)
        """Tells from a layer type and the path of a module whether to record it."""
        self._recorder = recorder
        self._is_given = is_given
        self._on_note = on_note
        self._on_compiled = on_compiled
        self._on_mistake = on_mistake
        self._tracker = recorder.tracker
        self._survey = functools.partial(survey, layer_offset=options.layer_offset)
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._frames: dict[nn.Module, Frame] = {}
        self._hooks: dict[nn.Module, ModuleHooks] = {}
        self._inner_sources: dict[nn.Module, Source] = {}
        self._calls = ModuleCalls(recorder, frames=self._frames, hooks=self._hooks, is_wanted_layer=self._wants_layer)
        self._weights = Weights(recorder)
        self.placements = Placements()
        self._context = self._new_context()
        self._functions: FunctionHooks | None = None
        self._multihead: MultiheadHooks | None = None
        self._layers: LayerHooks | None = None
        self._matched_roles: set[ModuleRole | FunctionRole] = set()
        self._stage_prefixes: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._is_direct = is_given
        """Whether the `forward` of a model may be called directly, without its hooks."""
        self._was_direct = False
        """Whether any model's `forward` has been called directly."""
        self._was_called = False
        """Whether any model has been called with its hooks."""
        self._exchanged_backwards: list[Exchanged] = []
        """The replaced functions that run backward passes; empty until a `forward` may be called directly."""
        self._is_refused = False
        """Whether a parameter was refused when the hooks were attached."""
        self._layout: list[Any] = []
        """The layout of the models after all hooks were attached; empty if the hooks must not stay."""
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.paths: set[str] = set()
        self._regions: Regions | None = None
        self._eager: EagerMode | None = None
        self._are_hooks_kept = False
        self._has_stack = False
        self._is_any_called = False
        """Whether a module with parameters was called while models were searched for."""
        self._frameworks = Replacements(())
        self._is_rehearsing = False
        self._watch_root: Callable[..., None] | None = None

    def watch_roots(self, watch: Callable[..., None]) -> None:
        """Have `watch` called with each present and future model, and for a future one also with `is_running`."""
        self._watch_root = watch
        for root, _ in self._living():
            watch(root)

    def add_root(self, root: nn.Module, *, is_running: bool = False) -> None:
        """Add a model, or a wrapper of a known model. `is_running` tells whether a call of it is in progress.

        Raises:
            UsageError: the model does not have the requested layers.
        """
        self._check_layers(root)
        stage = self._stage_prefixes.get(root, "")
        frames = self._survey(root).frames
        new = {stage + frame.path for frame in frames if frame.path and frame.module not in self._known}
        is_single_layer = role_of(type(root)) is not None and bool(self._roots)
        name = type(getattr(root, "_orig_mod", root)).__name__
        prefix = f"{name}{len(self._roots)}." if is_single_layer or new & self.paths else ""
        self._roots.append((weakref.ref(root), prefix))
        self.paths |= {prefix + path for path in new}
        self._known.update(root.modules())
        if self._watch_root is not None:
            self._watch_root(root, is_running=is_running)

    def add_stage(self, module: nn.Module, stage: int) -> None:
        """Give a pipeline stage that is about to run names that no other stage has."""
        if module in self._stage_prefixes or (self._is_given and module not in self._known):
            return
        offset = self._options.layer_offset
        numbers = [frame.layer_idx for frame in self._survey(module).frames]
        prefix = "" if offset else stage_prefix(stage, numbers)
        for part in module.modules():
            self._stage_prefixes[part] = prefix
        if module not in self._known:
            self.add_root(module)
        elif prefix:
            self.detach()  # the stage was attached under other names
            self.attach()
        self._attach_known()
        if prefix:
            self._on_note(
                "the stages of the pipeline number their layers from 0: the paths of each later stage begin with its "
                "index, as in 'stage1.' (Capture(layer_offset=...) numbers the layers through)"
            )

    def explain_silence(self) -> str:
        """The reason why nothing was recorded, and the remedy."""
        if not self._is_given and not self._is_any_called:
            return NOTHING_CALLED
        return explain_silence(self._options, self._recorder, paths=self.paths, has_stack=self._has_stack)

    def attach_when_called(self) -> None:
        """Attach when the first module runs, unless the training is compiled; then this iteration is not captured."""
        self.remove_kept()
        self._context.handles += [IgnoredWarning(), register_module_forward_pre_hook(self._attach_first)]

    def _attach_first(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Global pre-hook of the first module. Its result replaces the arguments, despite torch's type."""
        if is_traced() or in_backward():
            return None
        self.detach()
        if is_left_compiled(self._options):
            self._recorder.tally = None
            return None
        with self._recorder.guarded():
            self.attach()
            # Hooks that are attached during a call do not run for it.
            if module in self._frames:
                return (self.enter_late(module, (args, keyword_arguments(module))) or (None,))[0]
        return None if self._is_given else self._add_unknown(module, args)

    def attach(self, *, keeps_weights: bool = False) -> None:
        """Put hooks on all known models, and on others when they run.

        If `keeps_weights`, weights that earlier iterations stored are not stored again.
        """
        tracker = self._tracker
        self._weights.begin(keeps=keeps_weights)
        if self._are_hooks_kept and self._layout and self._layout == self._present_layout():
            self._are_hooks_kept = False
            self._is_rehearsing = self._frameworks.refresh() and is_rehearsing()
            self._renew()
            self._watch_compiler()
            self._await_direct()
            return
        self._remove_hooks()
        self._context = context = self._new_context()
        self._frameworks = Replacements(framework_replacements(tracker, self._recorder.guarded(), self.add_stage))
        context.handles.append(self._frameworks)
        self._is_rehearsing = self._frameworks.refresh() and is_rehearsing()
        tracker.before_pass, tracker.find_direct = self._refresh, self._find_direct
        self._multihead = MultiheadHooks(context) if self._wants_layer_type("attention") else None
        self._layers = LayerHooks(context) if self._options.wants_layers or self._wants_layer_type("hidden") else None
        self._functions = FunctionHooks(context, is_wanted=self._wants_layer, multihead=self._multihead)
        context.handles.append(self._functions)
        self._watch_compiler()
        self._attach_known()
        if not self._is_given:
            context.handles.append(register_module_forward_pre_hook(self._add_unknown))
        may_stay = self._layers is None and not self._stage_prefixes and not self._is_refused
        self._layout = self._present_layout() if may_stay else []
        self._await_direct()

    def _watch_compiler(self) -> None:
        """Handle compiled code in this iteration."""
        assert self._functions is not None, "only called while hooks are attached"
        handles, previous = self._context.handles, self._eager
        index = len(handles)
        if previous is not None:
            index = handles.index(previous)
            handles.pop(index).remove()
        self._regions = None
        begin = self._begin_regions if why_eager(self._options) is None else None
        self._eager = EagerMode(begin)
        handles.insert(index, self._eager)

    def _begin_regions(self) -> Any:
        """Record compiled code in its graphs."""
        from ranktape.capture.compiled.graph_calls import GraphCalls
        from ranktape.capture.compiled.regions import Regions

        functions = self._functions
        assert functions is not None, "only called while hooks are attached"
        self._regions = Regions(
            GraphCalls(self._context, frames=self._frames, is_wanted_layer=self._wants_layer, layers=self._layers),
            targets=functions.in_graphs,
            modules=lambda: iter(self._frames),
            functions=functions,
            without_capture=self._without_capture,
            on_module=self._add_in_region,
            find_hidden=lambda: hidden_in_graphs(self._hooks, self._frames, functions.roles),
            on_note=self._on_note,
            on_begin=self._on_compiled,
        )
        return self._regions

    @contextlib.contextmanager
    def _without_capture(self) -> Iterator[None]:
        """Context in which compiled code sees neither the global hooks nor the function mode of the capture."""
        with without_global_hooks(self), MODE.suspended():
            yield

    def compiled_summary(self) -> str:
        """The way in which compiled code was recorded in the iteration; empty if none ran."""
        if self._regions is not None:
            return "; ".join(self._regions.summaries)
        why = why_eager(self._options)
        return f"eagerly: {why}" if why is not None and has_compiled() else ""

    def _add_in_region(self, module: nn.Module) -> None:
        """Add a model that compiled code is about to run, where no hook would find it."""
        if self._is_given or module in self._known or self._tracker.current() is not None or in_backward():
            return
        with self._recorder.guarded():
            if self._tracker.records(module) and not self._refresh():
                self.add_root(module, is_running=False)
                self._attach_to(module, self._roots[-1][1])

    def enter_late(self, module: nn.Module, arguments: Arguments) -> Arguments | None:
        """Do the work of a module's pre-hooks for the call in which they were attached.

        Returns the arguments to continue with; None if they are unchanged.
        """
        args, kwargs = arguments
        self._enter(self._frames[module], args, kwargs)
        return self._hooks[module].before(module, args, kwargs) if module in self._hooks else None

    def detach(self) -> None:
        """Remove all hooks."""
        self._remove_hooks()
        for backward in self._exchanged_backwards:
            backward.remove()
        self._exchanged_backwards.clear()
        MODE.reset()  # torch puts the mode back after a backward pass in which the iteration finished

    def end_iteration(self, *, keeps_hooks: bool) -> None:
        """Finish an iteration. If `keeps_hooks`, keep the hooks for the next one, unless a call is still running."""
        self._are_hooks_kept = keeps_hooks and self._tracker.current() is None and not self._context.running.entries
        if not self._are_hooks_kept:
            self._remove_hooks()

    def remove_kept(self) -> None:
        """Remove the hooks that were left on, because they are not needed in this iteration."""
        if self._are_hooks_kept:
            self._remove_hooks()
        MODE.reset()  # another thread may have finished the iteration

    def _remove_hooks(self) -> None:
        """Remove all hooks except those on the functions that run backward passes."""
        self._are_hooks_kept, self._is_refused, self._layout = False, False, []
        self._context.remove()
        self._context = self._new_context()
        self._hooks.clear()
        self._inner_sources.clear()
        self._frames.clear()
        self._calls.begin()
        self._functions = self._multihead = self._layers = self._regions = self._eager = None
        self._tracker.before_pass = self._tracker.find_direct = None

    def _find_direct(self) -> tuple[Frame, DirectCall] | None:
        direct = outermost_direct_call(self._frames.__contains__)
        return None if direct is None else (self._frames[direct.module], direct)

    def _add_unknown(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Global pre-hook: an unknown outermost module is a new model.

        If a script calls the `forward` of its model directly, the first module that is entered is inside the model.
        """
        if is_traced() or module in self._known or self._tracker.current() is not None or in_backward():
            return None
        with self._recorder.guarded():
            # A loss without parameters is a module, too.
            self._is_any_called = self._is_any_called or next(module.parameters(), None) is not None
        if not self._tracker.records(module):
            self._tracker.pass_over(module)
            return None
        mistake: UsageError | None = None
        with self._recorder.guarded():
            direct = outermost_direct_call(lambda outer: any(part is module for part in outer.modules()))
            model = module if direct is None else direct.module
            try:
                self._check_layers(model)
            except UsageError as error:
                mistake = error
            if mistake is None and not self._refresh():
                self.add_root(model, is_running=direct is None)
                self._attach_to(model, self._roots[-1][1])
                # The module's own pre-hooks do not run for this call, and torch passes no keywords to a global one.
                changed = self.enter_late(module, (args, keyword_arguments(module)))
                return None if changed is None else changed[0]
        if mistake is not None:
            self._on_mistake(mistake)  # outside the guard, so that the user learns of it at once
        return None

    def _check_layers(self, root: nn.Module) -> None:
        """Check that the first model with a stack has the requested layers.

        Raises:
            UsageError: a requested layer does not exist.
        """
        stacks = [] if self._has_stack else self._survey(root).stacks
        if stacks:
            self._has_stack = True
            if self._options.wants_layers:
                check_layers(read_numbers("layers", self._options.layers), root, stacks[0])

    def _refresh(self) -> bool:
        """Handle newly loaded frameworks and new process groups. Returns whether a pipeline schedule is rehearsing."""
        keep_process_groups()
        self._is_rehearsing = (self._frameworks.refresh() or self._is_rehearsing) and is_rehearsing()
        return self._is_rehearsing

    def _attach_known(self) -> None:
        for root, prefix in self._living():
            self._attach_to(root, prefix)

    def find_coverage(self) -> Coverage | None:
        """The coverage of the models, or None if it is not of interest. Call it before the hooks are removed."""
        # With a selection, parts are left out on purpose.
        if not self._frames or not self._wants_layer_type("linear") or is_given(self._options.select):
            return None
        return self._calls.find_coverage(self._context.owners.recorded, num_models=len(self._roots))

    def unmatched_roles(self) -> Iterator[str]:
        """The messages about registered roles that matched nothing."""
        kinds = {type(module) for root, _ in self._living() for module in root.modules()}
        unmatched = (role for role in registered_roles() if role not in self._matched_roles)
        return (explain_unmatched(role, kinds) for role in unmatched if self._wants_layer_type(role.layer_type))

    def _new_context(self) -> HookContext:
        return HookContext(self._recorder, weights=self._weights, placements=self.placements, on_note=self._on_note)

    def _living(self) -> Iterator[tuple[nn.Module, str]]:
        """The models that are still alive, each with the prefix of the paths of its modules."""
        yield from ((root, prefix) for reference, prefix in self._roots if (root := reference()) is not None)

    def weights(self) -> Iterator[tuple[Source, nn.Module, str, str]]:
        """The parameters of recorded modules: the source, the module, the name in the module, the name in records."""
        for module, hooks in self._hooks.items():
            yield from ((hooks.source, module, *names) for names in hooks.parameters.items())
        for module, source in self._inner_sources.items():
            yield from ((source, module, name, name) for name in ("weight", "bias"))

    def _present_layout(self) -> list[Any]:
        """Everything that determines the hooks, including the order of other hooks on the modules."""
        hooks = tuple(global_forward_pre_hooks())
        layout: list[Any] = [hooks, registered_roles(), dist.is_available() and dist.is_initialized()]
        for root, prefix in self._living():
            layout.append(prefix)
            for name, module in root.named_modules():
                module_hooks = forward_pre_hooks_of(module), forward_hooks_of(module)
                parameters = tuple(map(id, parameters_of(module).values()))
                layout.append((name, module, type(module), *map(tuple, module_hooks), parameters))
        return layout

    def _renew(self) -> None:
        """Start an iteration with the hooks that stayed on."""
        assert self._functions is not None, "only called while hooks are attached"
        self._context.begin()
        self._calls.begin()
        for root, _ in self._living():
            if dist.is_available() and dist.is_initialized():
                self.placements.learn(root)
        self._functions.begin()
        for module, hooks in self._hooks.items():
            with self._recorder.guarded(hooks.source):
                hooks.begin(module)

    def _attach_to(self, root: nn.Module, prefix: str) -> None:
        assert self._functions is not None, "only called while hooks are attached"
        if dist.is_available() and dist.is_initialized():
            self.placements.learn(root)
        self._functions.begin()
        self._matched_roles.update(self._functions.roles)
        stage = self._stage_prefixes.get(root, "")
        surveyed_model = self._survey(root)
        leave = Hook(self._on_leave, keeps_mode=True)
        for surveyed in surveyed_model.frames:
            module = surveyed.module
            if module in self._frames:
                continue
            path_prefix = self._stage_prefixes.get(module, "") + prefix
            layer_stack = (path_prefix + surveyed.layer_stack).rstrip(".") if surveyed.layer_idx >= 0 else ""
            frame = surveyed._replace(path=(path_prefix + surveyed.path).rstrip("."), layer_stack=layer_stack)
            self._frames[module] = frame
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks, and its code does not run in Python
            self._context.owners.add(frame)
            enter = Hook(functools.partial(self._on_enter, frame, is_attention(module)), keeps_mode=True)
            self._context.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._context.handles.append(module.register_forward_hook(leave, always_call=True))
            with self._recorder.guarded(_source(frame, "module", "unknown")):
                self._attach_role(frame)
            if module in self._hooks:
                self._calls.add(module)
        if self._layers is not None and surveyed_model.stacks:
            self._layers.attach(root, surveyed_model.stacks[0], prefix=stage + prefix)

    def _attach_role(self, frame: Frame) -> None:
        """Put hooks on a module if it has a role."""
        module, role = frame.module, role_of(type(frame.module))
        if self._multihead is not None and isinstance(module, nn.MultiheadAttention) and self._wants_module(frame.path):
            self._multihead.attach(module, _source(frame, "attention", "FA"))
        if role is None:
            return
        self._matched_roles.add(role)
        if not self._wants_layer(role.layer_type, frame.path):
            return
        source = _source(frame, role.layer_type, role.component)
        for attribute, port in ports_of(role).parameters:
            if is_hidden(module, attribute) and not may_record_products(module, role):
                reason = f"its {attribute} is not a plain parameter (parametrized, or not made yet)"
                self._recorder.refuse(source, port.value, reason)
                self._is_refused = True
                if not port.is_optional:
                    return
        if is_recorded_as_product(module, role):
            self._inner_sources[module] = source
            return
        self._hooks[module] = ModuleHooks(module, role, source, self._context)

    def _on_enter(
        self,
        frame: Frame,
        is_attention: bool,  # noqa: FBT001  (bound to each module)
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        # If the hook was removed during the call of its module, torch calls it without keyword arguments.
        if kwargs is None or is_traced():
            return
        with self._recorder.guarded():
            self._enter(frame, args, kwargs)
            if is_attention and self._tracker.is_active:
                self._calls.attention[frame.module] = frame

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
                    self._context.on_note(_LATE)
                self._is_direct = self._was_direct = True
                self._await_direct()
            self._was_called |= not tracker.is_direct
            MODE.enter(frame.module)

    def _on_leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if is_traced():
            return
        MODE.leave(module)
        with self._recorder.guarded():
            is_recorded = self._tracker.is_outermost and self._tracker.is_active
            self._tracker.leave(module, output)
            if self._tracker.current() is None and not in_backward():
                if is_recorded:
                    self._calls.check(self._context.owners.recorded)
                self._await_direct()

    def _await_direct(self) -> None:
        """Keep the function mode active for forwards that are called directly, until a model is called with its hooks.

        An optimizer that steps in a backward pass may end the iteration. The call of the backward pass itself goes
        through the mode, and torch puts the mode back afterwards. Therefore the mode is removed before the call.
        """
        if self._is_direct and self._functions is not None:
            MODE.activate()  # no hook runs after a `forward` that is called directly
            if MODE.is_active and not self._exchanged_backwards:  # not active inside a compiled region
                functions = torch.Tensor.backward, torch.autograd.grad
                self._exchanged_backwards = [Exchanged(function, self._in_backward) for function in functions]

    def _in_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass without the function mode."""
        functions = self._functions
        try:
            with MODE.inactive():
                return backward(*args, **kwargs)
        finally:
            if self._functions is not functions and not in_backward():
                self._await_direct()  # an iteration started in the backward pass

    def _is_wanted(self, layer_type: str, path: str) -> bool:
        # With `layers` alone, an embedding is recorded only as the input of the stack.
        is_named = not self._options.wants_layers or self._options.names_layer_type(layer_type)
        return is_named and self._wants_layer_type(layer_type) and self._wants_module(path)


_LATE = (
    "the forward of a model is called directly: of its first call, functions before its first module are not recorded, "
    "and those of later calls are"
)
"""The message if the function mode was inactive because the model had been called as a module before."""


def _source(frame: Frame, layer_type: str, component: str) -> Source:
    return Source(frame.path, layer_type, frame.layer_idx, component, frame.layer_stack)
