"""Chooses the modules of a model that are captured, names them, and puts the hooks on and takes them off."""

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
from ranktape.capture.passes.passes import (
    Arguments,
    DirectCall,
    Frame,
    in_backward,
    is_traced,
    keyword_arguments,
    outermost_direct_call,
)
from ranktape.capture.rendezvous import keep_process_groups
from ranktape.capture.roles.known import registered_roles, role_of
from ranktape.capture.settings.rules import read_numbers
from ranktape.capture.settings.setting import is_given
from ranktape.capture.source import Source
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.capture.compiled.regions import Regions
    from ranktape.capture.recorder import Recorder


class ModelHooks(Attached):
    """Everything that is attached to the training while an iteration is captured, and nothing besides.

    The models are those given, or those found: the outermost module that a training forward enters.
    """

    def __init__(self, recorder: Recorder, *, is_given: bool) -> None:
        """Know no model yet; where it `is_given` it will be added, and no others are looked for."""
        super().__init__(recorder)
        self._is_given = self._is_direct = is_given
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.paths: set[str] = set()
        self._regions: Regions | None = None
        self._eager: EagerMode | None = None
        self._rests = False
        self._has_stack = False
        self._is_any_called = False
        """Whether a module with parameters was called while a model was looked for."""
        self._coverage: tuple[Any, Coverage] | None = None
        """What the last iteration saw of the models, and what that depends on."""
        self._frameworks = Replacements(())
        self._is_rehearsing = False
        self._on_root: Callable[..., None] | None = None
        self.on_note: Callable[[str], None] = lambda _: None
        """Called with what a person should know of the names that are given."""
        self.on_compiled: Callable[[str | None], None] = lambda _: None
        """Called when compiled code begins: with why it runs eagerly, or with None where its graphs are recorded."""
        self.on_mistake: Callable[[UsageError], None]
        """Called with a mistake of the user's that a model shows; set by the capture, before one is met."""

    def tell_of_roots(self, watch: Callable[..., None]) -> None:
        """Have `watch` called with every model that is known or will be, and `is_running` where it runs already."""
        self._on_root = watch
        for root, _ in self._living():
            watch(root)

    def add_root(self, root: nn.Module, *, is_running: bool = False) -> None:
        """Know a model, or what wraps a model that is known; `is_running` where this is found in a call of it.

        Raises:
            UsageError: it has not the layers that were asked for.
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
        """A stage of a pipeline is about to run: give it names that no other stage has."""
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
            self.detach()  # it was attached under other names
            self.attach()
        self._attach_known()
        if prefix:
            self.on_note(
                "the stages of the pipeline number their layers from 0: the paths of each later stage begin with its "
                "index, as in 'stage1.' (Capture(layer_offset=...) numbers the layers through)"
            )

    def explain_silence(self) -> str:
        """Why nothing was recorded, and the way out."""
        if not self._is_given and not self._is_any_called:
            return NOTHING_CALLED
        return explain_silence(self._options, self._recorder, paths=self.paths, has_stack=self._has_stack)

    def await_model(self) -> None:
        """Attach with the first module that runs, unless the training is compiled by then: no iteration is watched."""
        self.put_back()
        self._watch.handles += [IgnoredWarning(), register_module_forward_pre_hook(self._meet_first)]

    def _meet_first(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """A global pre-hook; what it returns replaces the arguments, though torch's type says that nothing does."""
        if is_traced() or in_backward():
            return None
        self.detach()
        if is_left_compiled(self._options):
            self._recorder.tally = None
            return None
        with self._recorder.guarded():
            self.attach()
            # What is attached in a call comes too late for it.
            if module in self._attached:
                return (self.enter_late(module, (args, keyword_arguments(module))) or (None,))[0]
        return None if self._is_given else self._meet(module, args)

    def attach(self, *, keeps_weights: bool = False) -> None:
        """Put the hooks on all known models, and wait for others; weights of earlier iterations may be relied on."""
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
        """Meet compiled code in this iteration."""
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
        """Record compiled code inside of its graphs."""
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
        """In it nothing of ours is seen by code that is compiled."""
        with without_global_hooks(self), MODE.suspended():
            yield

    def compiled_way(self) -> str:
        """How compiled code was recorded in the iteration that ends; empty where none ran."""
        if self._regions is not None:
            return "; ".join(self._regions.ways)
        why = why_eager(self._options)
        return f"eagerly: {why}" if why is not None and has_compiled() else ""

    def _meet_in_region(self, module: nn.Module) -> None:
        """Know a model that compiled code is about to run, and of which no hook will tell."""
        if self._is_given or module in self._known or self._tracker.current() is not None or in_backward():
            return
        with self._recorder.guarded():
            if self._tracker.records(module) and not self._refresh():
                self.add_root(module, is_running=False)
                self._attach_to(module, self._roots[-1][1])

    def enter_late(self, module: nn.Module, arguments: Arguments) -> Arguments | None:
        """Do what a model's own pre-hooks would, in the call in which they were attached; the arguments after that."""
        args, kwargs = arguments
        self._enter(self._attached[module], args, kwargs)
        return self._modules[module].before(module, args, kwargs) if module in self._modules else None

    def detach(self) -> None:
        """Take everything off again."""
        self._take_off()
        for backward in self._backwards:
            backward.remove()
        self._backwards.clear()
        MODE.reset()  # torch put it back after a backward pass in which the iteration ended

    def rest(self, *, stays: bool) -> None:
        """The iteration has ended: leave on what the next one may want, too; where all that `stays`, the hooks."""
        self._rests = stays and self._tracker.current() is None and not self._watch.running.entries
        if not self._rests:
            self._take_off()

    def put_back(self) -> None:
        """What was left on is not wanted in this iteration."""
        if self._rests:
            self._take_off()
        MODE.reset()  # another thread may have ended the iteration

    def _take_off(self) -> None:
        """As `detach`."""
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
        """A global pre-hook: a module that is entered first and is not known is a model, or part of one.

        Where a script calls the forward of its model directly, the first module that is entered is inside of it.
        """
        if is_traced() or module in self._known or self._tracker.current() is not None or in_backward():
            return None
        with self._recorder.guarded():
            # A loss is a module, too.
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
                # Its own pre-hooks came too late for this call, and torch gives a global one no keywords.
                changed = self.enter_late(module, (args, keyword_arguments(module)))
                return None if changed is None else changed[0]
        if mistake is not None:
            self.on_mistake(mistake)  # it is the user's, who should know at once
        return None

    def _check_layers(self, root: nn.Module) -> None:
        """Look for the layers that were asked for in the first model that has a stack.

        Raises:
            UsageError: it has not all of them.
        """
        stacks = [] if self._has_stack else self._survey(root).stacks
        if stacks:
            self._has_stack = True
            if self._options.wants_layers:
                check_layers(read_numbers("layers", self._options.layers), root, stacks[0])

    def _refresh(self) -> bool:
        """Meet frameworks and process groups that came since; whether a pipeline schedule is rehearsing."""
        keep_process_groups()
        if self._frameworks.refresh():
            self._is_rehearsing = True
        self._is_rehearsing = self._is_rehearsing and is_rehearsing()
        return self._is_rehearsing

    def _attach_known(self) -> None:
        for root, prefix in self._living():
            self._attach_to(root, prefix)

    def find_coverage(self) -> Coverage | None:
        """What the hooks see of the models, where linear layers are recorded; asked before they are taken off."""
        # What a selection leaves out is left out on purpose.
        if not self._attached or not self._wants("linear") or is_given(self._options.select):
            return None
        # To walk through all parameters takes the training's time: once, and again where something else is seen.
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
        """The modules of attention in which something ran that is recorded, or that were called themselves."""
        for module, frame in self._attached.items():
            is_wanted = is_attention(module) and self._is_wanted(frame.path)
            if is_wanted and (module in self._attending or any(is_within(path, frame.path) for path in paths)):
                yield frame

    def _sight_of(self, source: Source) -> Sight:
        expected = self._recorder.expected
        return Sight.SEEN if not expected.is_idle(source) else Sight.USED if expected.is_used(source) else Sight.IDLE

    def _sight(self, frame: Frame, name: str, of_module: Sight | None) -> Sight:
        """What hooks see of a parameter; `of_module` is what they see of its module, where that is recorded."""
        if (frame.module, name) in self._watch.owners.met:
            return Sight.SEEN
        if of_module is not None:
            return of_module
        role = role_of(type(frame.module))
        is_wanted = self._is_wanted(frame.path) if role is None else self._is_wanted_kind(role.layer_type, frame.path)
        return Sight.UNSEEN if is_wanted else Sight.LEFT_OUT

    def unmatched_roles(self) -> Iterator[str]:
        """The messages about registered roles that have matched nothing."""
        kinds = {type(module) for root, _ in self._living() for module in root.modules()}
        missed = [role for role in registered_roles() if role not in self._matched and self._wants(role.layer_type)]
        return (explain_unmatched(role, kinds) for role in missed)
