"""Runs compiled regions with taps in their graphs while an iteration is captured.

When a region starts, torch looks up the callback that compiles it. During a capture, this is a copy of the region's own
callback whose backend puts taps into each graph before inductor compiles it. torch caches compiled code by backend, so
the code with taps and the code without are cached side by side, and a capture recompiles neither of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FrameType
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch._C._dynamo import eval_frame as frames
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import CatchErrorsWrapper

from ranktape.capture.compiled.graph_calls import GraphCalls
from ranktape.capture.compiled.graph_taps import GraphPlan, Target, add_taps, erase_marks
from ranktape.capture.compiled.marks import mark_first_input, mark_output, with_marks
from ranktape.capture.hooks.functions import FunctionHooks
from ranktape.capture.hooks.hook import Hook

Targets = Mapping[Any, Target]
"""The role of each function in graphs."""


class Regions:
    """Puts taps into compiled regions, from its construction until `remove()`."""

    def __init__(
        self,
        calls: GraphCalls,
        *,
        targets: Callable[[], Targets],
        modules: Callable[[], Iterator[nn.Module]],
        functions: FunctionHooks,
        without_capture: Callable[[], contextlib.AbstractContextManager[None]],
        on_module: Callable[[nn.Module], None],
        find_hidden: Callable[[], str | None],
        on_note: Callable[[str], None],
        on_begin: Callable[[str | None], None],
    ) -> None:
        """Replace torch's lookup of callbacks.

        Args:
            calls: Records the calls of graphs.
            targets: Returns the functions that are recorded in graphs.
            modules: Returns the modules with hooks of a capture.
            functions: The replacements of functions.
            without_capture: A context without the capture's global module hooks.
            on_module: Called with each module that a region is seen to run.
            find_hidden: Names the part of the known models that graphs do not show; None if they show everything.
            on_note: Called with messages for the user.
            on_begin: Called when a region starts, with the reason why it runs eagerly; None if its graphs are recorded.
        """
        self._calls = calls
        self._without_capture = without_capture
        self.modules = modules
        """Returns the modules with hooks of a capture."""
        self.layer_hooks = calls.layer_hooks
        """The hooks on the outputs of layers and the input of the first one, each with its module."""
        self.functions = functions
        """The replacements of functions."""
        self.summaries: dict[str, None] = {}
        """The ways in which regions have been recorded so far: in their graphs, or eagerly for a reason."""
        self._on_module = on_module
        self._find_hidden = find_hidden
        self._thread = threading.local()
        self._on_begin = on_begin
        TappedBackend.targets = staticmethod(targets)
        TappedBackend.on_note = staticmethod(on_note)
        TappedCallback.regions = self
        GraphCalls.current = calls
        # These run inside regions, between graphs. Dynamo would compile them and everything that they call.
        never = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)  # noqa: SLF001
        for code in (Hook.__call__.__code__, *functions.replacement_codes):
            frames.set_code_exec_strategy(code, never)
        self._from_stance = eval_frame._callback_from_stance  # noqa: SLF001  (torch has no public way)
        eval_frame._callback_from_stance = self._callback  # noqa: SLF001
        eval_frame._maybe_set_eval_frame = self._enter_or_leave  # noqa: SLF001

    def remove(self) -> None:
        """Restore torch's lookup of callbacks."""
        eval_frame._callback_from_stance = self._from_stance  # noqa: SLF001
        GraphCalls.current = None
        if getattr(_forced, "stance", None) is None:  # else it is restored when the region that runs eagerly finishes
            eval_frame._maybe_set_eval_frame = _SET  # noqa: SLF001
        self._leave()
        self._calls.remove()

    def _callback(self, callback: Any) -> Any:
        original: Any = self._from_stance(callback)
        if original is None or original is False or isinstance(original, TappedCallback):
            return original
        for module in _modules_of(sys._getframe(1)):  # noqa: SLF001  (the modules may not have hooks yet)
            self._on_module(module)
        hidden = self._find_hidden()
        tapped = None if hidden else tapped_callback(original)
        if tapped is None:
            # Under the default stance, a region with `fullgraph=True` raises if nothing was compiled.
            _forced.stance = id(sys._getframe(1)), eval_frame._stance  # noqa: SLF001
            eval_frame._stance = eval_frame.DynamoStance(stance="force_eager")  # noqa: SLF001
            backend = eval_frame.innermost_backend(original)
            name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
            why = f"graphs do not show {hidden}" if hidden else f"the backend is {name!r}"
            self.summaries[f"eagerly: {why}"] = None
            self._on_begin(why)
            _forced.is_entered = False
            return None
        if _IN_GRAPHS not in self.summaries:
            self.summaries[_IN_GRAPHS] = None
            self.functions.stand_in_functional()
            self._on_begin(None)
        original_id = frames.get_eval_frame_isolate_recompiles_id()
        frames.set_eval_frame_isolate_recompiles_id(_isolation_id(original_id))
        return tapped

    def _enter_or_leave(self, callback: Any) -> Any:
        forced = getattr(_forced, "stance", None)
        if forced is not None and forced[0] == id(sys._getframe(1)):  # noqa: SLF001
            if _forced.is_entered:
                eval_frame._stance, _forced.stance = forced[1], None  # noqa: SLF001
                if GraphCalls.current is None:
                    eval_frame._maybe_set_eval_frame = _SET  # noqa: SLF001
            _forced.is_entered = True
        if getattr(_converting, "is_on", False):
            pass  # dynamo must see the hooks in the state that guards check when the region starts again
        elif callback is None or callback is False:
            self._leave()
        elif getattr(self._thread, "context", None) is None:
            self._thread.context = context = self._without_capture()
            context.__enter__()
        return _SET(callback)

    def _leave(self) -> None:
        context = getattr(self._thread, "context", None)
        if context is not None:
            self._thread.context = None
            context.__exit__(None, None, None)


_IN_GRAPHS = "in its graphs"


def _modules_of(frame: FrameType) -> Iterator[nn.Module]:
    """The modules that the region started in this frame runs, as far as they are in its arguments and variables."""
    function = frame.f_locals.get("fn")
    code = getattr(function, "__code__", None)
    closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    names = [getattr(function, "__globals__", {}).get(name) for name in getattr(code, "co_names", ())]
    for value in (getattr(function, "__self__", None), *frame.f_locals.get("args", ()), *closure, *names):
        if isinstance(value, nn.Module):
            yield value


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


_ISOLATION_IDS: dict[int, int] = {}


def _isolation_id(original: int) -> int:
    """The identifier under which torch caches and counts a region's code with taps, given that of its own code."""
    if original in _ISOLATION_IDS.values():
        return original
    if original not in _ISOLATION_IDS:
        _ISOLATION_IDS[original] = next(eval_frame._next_isolate_recompiles_id)  # noqa: SLF001
    return _ISOLATION_IDS[original]


_converting = threading.local()
_forced = threading.local()
_SET = eval_frame._maybe_set_eval_frame  # noqa: SLF001


class TappedCallback:
    """Compiles a frame of a region with taps."""

    regions: ClassVar[Regions]
    """The regions of the captured iteration."""

    def __init__(self, original: Any, backend: TappedBackend) -> None:
        inner = original._torchdynamo_orig_backend  # noqa: SLF001
        hooks = dataclasses.replace(original.hooks, guard_filter_fn=functools.partial(_guards_to_keep, original.hooks))
        self._torchdynamo_orig_backend = CatchErrorsWrapper(inner._clone_with_backend(backend), hooks)  # noqa: SLF001

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the region's own callback while the capture's module hooks and function replacements are removed."""
        _converting.is_on = True
        try:
            functions, modules = self.regions.functions, self.regions.modules()
            without_hooks = _without_hooks(modules, self.regions.layer_hooks)
            with functions.originals(), functions.with_getters(with_marks), without_hooks:
                return self._torchdynamo_orig_backend(*args, **kwargs)
        finally:
            _converting.is_on = False


def _guards_to_keep(hooks: Any, guards: Sequence[Any]) -> list[bool]:
    """Whether to keep each guard: those on objects that the capture replaces would fail at the next call.

    These objects are functions, attributes of registries' methods, and hooks of modules. If a module has no hooks when
    it is compiled, torch has no guard on its hooks either.
    """
    keep_guards = hooks.guard_filter_fn
    decisions = [True] * len(guards) if keep_guards is None else keep_guards(guards)
    functions = TappedCallback.regions.functions
    replaced = {guard.name for guard in guards if functions.is_changed(guard.value)}
    parts = tuple(f"{name}{after}" for name in replaced for after in (".", "["))
    ignored = (*_HOOKS, *(f"[{name!r}]." for _, name, *_ in functions.getters))
    return [
        bool(keep)
        and guard.name not in replaced
        and not guard.name.startswith(parts)
        and not any(name in guard.name for name in ignored)
        for keep, guard in zip(decisions, guards, strict=True)
    ]


_HOOKS = ("._forward_hooks", "._forward_pre_hooks")


_callbacks: dict[int, tuple[Any, TappedCallback | None]] = {}
_backends: list[TappedBackend] = []


def tapped_callback(original: Any) -> TappedCallback | None:
    """A copy of a region's own callback whose backend puts taps into graphs; None if the backend is not inductor."""
    entry = _callbacks.get(id(original))
    if entry is None:
        is_known = isinstance(original, CatchErrorsWrapper)
        backend = tapped_backend(eval_frame.innermost_backend(original)) if is_known else None
        entry = _callbacks[id(original)] = original, None if backend is None else TappedCallback(original, backend)
    return entry[1]


def tapped_backend(original: Any) -> TappedBackend | None:
    """The one backend with taps for a region's own backend; None if that is not inductor."""
    if type(original) is not torch._TorchCompileInductorWrapper:  # noqa: SLF001
        return None
    backend = next((known for known in _backends if known.original == original), None)
    if backend is None:
        backend = TappedBackend(original)
        _backends.append(backend)
    return backend


_MAX_REASON = 400
"""Maximum length of the reason why a graph has no taps, in characters."""


class TappedBackend:
    """Compiles graphs with taps for another backend, or without taps if that fails."""

    targets: Callable[[], Targets] = staticmethod(dict)
    on_note: Callable[[str], None] = staticmethod(lambda _: None)

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        from ranktape.capture.compiled.inductor import compile_tapped  # late: it needs the whole compiler

        plan = GraphPlan(calls=[])
        try:
            tapped = add_taps(graph, self.targets(), plan)
            erase_marks(graph)
            if not plan.calls:
                return self.original(graph, inputs)  # type: ignore[no-any-return]
            inputs_and_ticket = [*inputs, torch.tensor(0)]
            patches, name = self.original.config, self.original.name
            compiled = compile_tapped(tapped, inputs_and_ticket, patches=patches, name=name)
            return TappedGraph(compiled, plan)
        except Exception as error:  # noqa: BLE001  (no failure may stop the training)
            reason = f"its compiled graph takes no taps: {type(error).__name__}: {error}"[:_MAX_REASON]
            self.on_note(reason)
            plan.mark_missing(reason)
            erase_marks(graph)
            return TappedGraph(self.original(graph, inputs), plan, has_ticket=False)

    def reset(self) -> None:
        """Reset the backend, when torch clears its caches."""
        if hasattr(self.original, "reset"):
            self.original.reset()


class TappedGraph:
    """A compiled graph with its plan. It has taps unless compiling with them failed."""

    def __init__(self, compiled: Callable[..., Any], plan: GraphPlan, *, has_ticket: bool = True) -> None:
        self._compiled = compiled
        self._plan = plan
        self._has_ticket = has_ticket

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph, and record its taps if an iteration is being captured."""
        calls = GraphCalls.current
        if calls is None:
            return self._run(inputs, 0)
        with calls.running(self._plan, inputs) as ticket:
            return self._run(inputs, ticket)

    def _run(self, inputs: Sequence[Any], ticket: int) -> Any:
        return self._compiled(*inputs, *([torch.tensor(ticket)] if self._has_ticket else []))


@contextlib.contextmanager
def _without_hooks(modules: Iterator[nn.Module], layer_hooks: Mapping[Hook, nn.Module]) -> Iterator[None]:
    """Context in which modules have no hooks of the capture, and layers have the hooks that put marks instead."""
    saved: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in {*modules, *layer_hooks.values()}:
        for hooks, mark in ((module._forward_pre_hooks, mark_first_input), (module._forward_hooks, mark_output)):  # noqa: SLF001
            if any(isinstance(hook, Hook) for hook in hooks.values()):
                saved.append((hooks, dict(hooks)))
                for key, hook in list(hooks.items()):
                    if isinstance(hook, Hook) and hook in layer_hooks:
                        hooks[key] = mark
                    elif isinstance(hook, Hook):
                        del hooks[key]
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.clear()
            hooks.update(before)
