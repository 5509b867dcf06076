"""Selects and names the captured modules of models, and attaches and detaches all hooks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ranktape.capture.hooks.attached import Attached
from ranktape.capture.hooks.calls import Watch
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
    Sight,
    explain_silence,
    explain_unmatched,
    find_coverage,
    is_attention,
    is_within,
)
from ranktape.capture.hooks.functions import FunctionHooks
from ranktape.capture.hooks.hook import MODE, Replacements, without_global_hooks
from ranktape.capture.hooks.layers import LayerHooks, check_layers
from ranktape.capture.hooks.module_hooks import MultiheadHooks
from ranktape.capture.passes.frameworks import framework_replacements, is_rehearsing, stage_prefix
from ranktape.capture.passes.python_stack import DirectCall, keyword_arguments, outermost_direct_call
from ranktape.capture.passes.tracker import Arguments, Frame
from ranktape.capture.rendezvous import keep_process_groups
from ranktape.capture.roles.known import registered_roles, role_of
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.settings.setting import is_given
from ranktape.capture.source import Source
from ranktape.capture.torch_private import in_backward, is_traced
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.capture.compiled.regions import Regions
    from ranktape.capture.recorder import Recorder


class ModelHooks(Attached):
    """Everything that is attached to the training while an iteration is captured.

    The models are the given ones. If none are given, each outermost module that a training forward enters is a model.
    """

    def __init__(self, recorder: Recorder, *, is_given: bool) -> None:
        """Starts without models. If `is_given`, models will be added, and no others are searched for."""
        super().__init__(recorder)
        self._is_given = self._is_direct = is_given
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.paths: set[str] = set()
        self._regions: Regions | None = None
        self._eager: EagerMode | None = None
        self._rests = False
        self._has_stack = False
        self._is_any_called = False
        """Whether a module with parameters was called while models were searched for."""
        self._coverage: tuple[Any, Coverage] | None = None
        """The coverage of the last iteration, with a key of everything that it depends on."""
        self._frameworks = Replacements(())
        self._is_rehearsing = False
        self._on_root: Callable[..., None] | None = None
        self.on_note: Callable[[str], None] = lambda _: None
        """Called with notes for the user."""
        self.on_compiled: Callable[[str | None], None] = lambda _: None
        """Called when compiled code starts, with the reason why it runs eagerly; None if its graphs are recorded."""
        self.on_mistake: Callable[[UsageError], None]
        """Called with a user's mistake that is detected when a model is found. The capture sets it before that."""

    def tell_of_roots(self, watch: Callable[..., None]) -> None:
        """Have `watch` called with each present and future model, and for a future one also with `is_running`."""
        self._on_root = watch
        for root, _ in self._living():
            watch(root)

    def add_root(self, root: nn.Module, *, is_running: bool = False) -> None:
        """Add a model, or a wrapper of a known model. `is_running` tells whether a call of it is in progress.

        Raises:
            UsageError: the model does not have the requested layers.
        """
        self._check_layers(root)
        stage = self._stage_prefixes.get(root, "")
        places = self._survey(root).places
        new = {stage + place.path for place in places if place.path and place.module not in self._known}
        is_alone = role_of(type(root)) is not None and bool(self._roots)
        prefix = (
            f"{type(getattr(root, '_orig_mod', root)).__name__}{len(self._roots)}."
            if is_alone or new & self.paths
            else ""
        )
        self._roots.append((weakref.ref(root), prefix))
        self.paths |= {prefix + path for path in new}
        self._known.update(root.modules())
        if self._on_root is not None:
            self._on_root(root, is_running=is_running)

    def meet_stage(self, module: nn.Module, stage: int) -> None:
        """Give a pipeline stage that is about to run names that no other stage has."""
        if module in self._stage_prefixes or (self._is_given and module not in self._known):
            return
        offset = self._options.layer_offset
        numbers = [place.layer_idx for place in self._survey(module).places]
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
            self.on_note(
                "the stages of the pipeline number their layers from 0: the paths of each later stage begin with its "
                "index, as in 'stage1.' (Capture(layer_offset=...) numbers the layers through)"
            )

    def explain_silence(self) -> str:
        """The reason why nothing was recorded, and the remedy."""
        if not self._is_given and not self._is_any_called:
            return NOTHING_CALLED
        return explain_silence(self._options, self._recorder, paths=self.paths, has_stack=self._has_stack)

    def await_model(self) -> None:
        """Attach when the first module runs, unless the training is compiled; then this iteration is not captured."""
        self.put_back()
        self._watch.handles += [IgnoredWarning(), register_module_forward_pre_hook(self._meet_first)]

    def _meet_first(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
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
            if module in self._attached:
                return (self.enter_late(module, (args, keyword_arguments(module))) or (None,))[0]
        return None if self._is_given else self._meet(module, args)

    def attach(self, *, keeps_weights: bool = False) -> None:
        """Put hooks on all known models, and on others when they run.

        If `keeps_weights`, weights that earlier iterations stored are not stored again.
        """
        tracker = self._tracker
        self._weights.begin(keeps=keeps_weights)
        if self._rests and self._may_stay():
            self._rests = False
            self._is_rehearsing = self._frameworks.refresh() and is_rehearsing()
            self._renew()
            self._watch_compiler()
            self._await_direct()
            return
        self._take_off()
        self._watch = watch = Watch(
            self._recorder, weights=self._weights, placements=self.placements, tell=self.on_note
        )
        self._frameworks = Replacements(framework_replacements(tracker, self._recorder.guarded(), self.meet_stage))
        watch.handles.append(self._frameworks)
        self._is_rehearsing = self._frameworks.refresh() and is_rehearsing()
        tracker.before_pass, tracker.find_direct = self._refresh, self._find_direct
        self._multihead = MultiheadHooks(watch) if self._wants("attention") else None
        self._layers = LayerHooks(watch) if self._options.wants_layers or self._wants("hidden") else None
        self._functions = FunctionHooks(watch, is_wanted=self._is_wanted_kind, multihead=self._multihead)
        watch.handles.append(self._functions)
        self._watch_compiler()
        self._attach_known()
        if not self._is_given:
            watch.handles.append(register_module_forward_pre_hook(self._meet))
        self._note_layout()
        self._await_direct()

    def _watch_compiler(self) -> None:
        """Handle compiled code in this iteration."""
        assert self._functions is not None, "only called while hooks are attached"
        handles, before = self._watch.handles, self._eager
        place = len(handles)
        if before is not None:
            place = handles.index(before)
            handles.pop(place).remove()
        self._regions = None
        begin = self._begin_regions if why_eager(self._options) is None else None
        self._eager = EagerMode(begin)
        handles.insert(place, self._eager)

    def _begin_regions(self) -> Any:
        """Record compiled code in its graphs."""
        from ranktape.capture.compiled.graph_calls import GraphCalls
        from ranktape.capture.compiled.regions import Regions

        functions = self._functions
        assert functions is not None, "only called while hooks are attached"
        self._regions = Regions(
            GraphCalls(self._watch, frames=self._attached, is_wanted=self._is_wanted_kind, layers=self._layers),
            targets=functions.in_graphs,
            modules=lambda: iter(self._attached),
            functions=functions,
            aside=self._aside,
            meet=self._meet_in_region,
            hidden=lambda: hidden_in_graphs(self._modules, self._attached, functions.roles),
            tell=self.on_note,
            begins=self.on_compiled,
        )
        return self._regions

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Context in which compiled code sees neither the global hooks nor the function mode of the capture."""
        with without_global_hooks(self), MODE.suspended():
            yield

    def compiled_way(self) -> str:
        """The way in which compiled code was recorded in the iteration; empty if none ran."""
        if self._regions is not None:
            return "; ".join(self._regions.ways)
        why = why_eager(self._options)
        return f"eagerly: {why}" if why is not None and has_compiled() else ""

    def _meet_in_region(self, module: nn.Module) -> None:
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
        self._enter(self._attached[module], args, kwargs)
        return self._modules[module].before(module, args, kwargs) if module in self._modules else None

    def detach(self) -> None:
        """Remove all hooks."""
        self._take_off()
        for backward in self._backwards:
            backward.remove()
        self._backwards.clear()
        MODE.reset()  # torch puts the mode back after a backward pass in which the iteration finished

    def rest(self, *, stays: bool) -> None:
        """Finish an iteration. If `stays`, leave the hooks on for the next one, unless a call is still running."""
        self._rests = stays and self._tracker.current() is None and not self._watch.running.entries
        if not self._rests:
            self._take_off()

    def put_back(self) -> None:
        """Remove the hooks that were left on, because they are not needed in this iteration."""
        if self._rests:
            self._take_off()
        MODE.reset()  # another thread may have finished the iteration

    def _take_off(self) -> None:
        """Remove all hooks except those on the functions that run backward passes."""
        self._rests, self._is_refused, self._layout = False, False, []
        self._watch.remove()
        self._watch = Watch(self._recorder, weights=self._weights, placements=self.placements)
        self._modules.clear()
        self._inside.clear()
        self._attached.clear()
        self._watch_idle_again()
        self._functions = self._multihead = self._layers = self._regions = self._eager = None
        self._tracker.before_pass = self._tracker.find_direct = None

    def _find_direct(self) -> tuple[Frame, DirectCall] | None:
        found = outermost_direct_call(self._attached.__contains__)
        return None if found is None else (self._attached[found.module], found)

    def _meet(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
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
            self.on_mistake(mistake)  # outside the guard, so that the user learns of it at once
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
        if self._frameworks.refresh():
            self._is_rehearsing = True
        self._is_rehearsing = self._is_rehearsing and is_rehearsing()
        return self._is_rehearsing

    def _attach_known(self) -> None:
        for root, prefix in self._living():
            self._attach_to(root, prefix)

    def find_coverage(self) -> Coverage | None:
        """The coverage of the models, or None if it is not of interest. Call it before the hooks are removed."""
        # With a selection, parts are left out on purpose.
        if not self._attached or not self._wants("linear") or is_given(self._options.select):
            return None
        # A walk through all parameters delays the training, so it is repeated only if hooks see something else.
        expected = self._recorder.expected
        sights = {module: self._sight_of(hooks.source) for module, hooks in self._modules.items()}
        others = frozenset((module, sight) for module, sight in sights.items() if sight is not Sight.SEEN)
        key = (len(self._roots), len(self._attached), len(self._modules), len(self._watch.owners.met), others)
        if self._coverage is None or self._coverage[0] != key:
            ran = expected.ran()
            self._coverage = (
                key,
                find_coverage(
                    self._attached.values(),
                    sight=lambda frame, name: self._sight(frame, name, sights.get(frame.module)),
                    attending=self._attention_that_ran({one.module for one in ran}) if self._wants("attention") else (),
                    sources=ran,
                ),
            )
        return self._coverage[1]

    def _attention_that_ran(self, paths: Collection[str]) -> Iterator[Frame]:
        """The attention modules that were called, or that contain a source that ran."""
        for module, frame in self._attached.items():
            is_wanted = is_attention(module) and self._is_wanted(frame.path)
            if is_wanted and (module in self._attending or any(is_within(path, frame.path) for path in paths)):
                yield frame

    def _sight_of(self, source: Source) -> Sight:
        expected = self._recorder.expected
        return Sight.SEEN if not expected.is_idle(source) else Sight.USED if expected.is_used(source) else Sight.IDLE

    def _sight(self, frame: Frame, name: str, of_module: Sight | None) -> Sight:
        """Whether hooks see a parameter. `of_module` is the result for its module; None if that is not recorded."""
        if (frame.module, name) in self._watch.owners.met:
            return Sight.SEEN
        if of_module is not None:
            return of_module
        role = role_of(type(frame.module))
        is_wanted = self._is_wanted(frame.path) if role is None else self._is_wanted_kind(role.layer_type, frame.path)
        return Sight.UNSEEN if is_wanted else Sight.LEFT_OUT

    def unmatched_roles(self) -> Iterator[str]:
        """The messages about registered roles that matched nothing."""
        kinds = {type(module) for root, _ in self._living() for module in root.modules()}
        missed = [role for role in registered_roles() if role not in self._matched and self._wants(role.layer_type)]
        return (explain_unmatched(role, kinds) for role in missed)
