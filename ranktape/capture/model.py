"""Which modules of a model are captured, under which names, and how are the hooks put on and taken off?"""

from __future__ import annotations

import difflib
import fnmatch
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from ranktape.capture.attention import AttentionHooks
from ranktape.capture.linear import WEIGHT, LinearHooks
from ranktape.capture.recorder import Source
from ranktape.capture.tracker import Frame, in_backward

if TYPE_CHECKING:
    from ranktape.capture.options import CaptureOptions
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.tracker import Tracker

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which wrappers keep the module they wrap."""

_MAX_NAMED = 5


class ModelHooks:
    """Everything that is attached to the training while an iteration is captured, and nothing besides.

    The models are those given, or those found: the outermost module that a training forward enters.
    """

    def __init__(self, *, options: CaptureOptions, recorder: Recorder, tracker: Tracker, is_given: bool) -> None:
        """Know no model yet.

        Args:
            options: Of the capture.
            recorder: Takes the tensors.
            tracker: Follows the passes.
            is_given: The model will be added; no others are looked for.
        """
        self._options = options
        self._recorder = recorder
        self._tracker = tracker
        self._is_given = is_given
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._attached: set[nn.Module] = set()
        self._paths: set[str] = set()
        self._handles: list[Any] = []
        self._linears: dict[nn.Module, LinearHooks] = {}
        self._stance: Any = None

    def add_root(self, root: nn.Module) -> None:
        """Know a model, or what wraps a model that is known."""
        new = {path for path, module, _ in _walk(root, prefix="") if path and module not in self._known}
        is_alone = isinstance(root, nn.Linear) and bool(self._roots)
        prefix = f"{type(root).__name__}{len(self._roots)}." if is_alone or new & self._paths else ""
        self._roots.append((weakref.ref(root), prefix))
        self._paths |= {prefix + path for path in new}
        self._known.update(root.modules())

    def explain_silence(self) -> str:
        """Why nothing was recorded, and the way out."""
        globs = self._options.modules
        if globs and not any(self._is_wanted(path) for path in self._paths):
            close = {name for glob in globs for name in difflib.get_close_matches(glob, self._paths, _MAX_NAMED, 0)}
            return (
                f"no module matches --module {' or '.join(globs)}; "
                f"nearest: {', '.join(sorted(close)[:_MAX_NAMED]) or 'none'}"
            )
        kinds = " or ".join(self._options.layer_types) or "linear or attention"
        return (
            f"the training ran no {kinds} layer in a module that is in training mode: "
            f"check --layer-type and --module, or record tensors by save_tensor"
        )

    def attach(self) -> None:
        """Put the hooks on all known models, and wait for models that are not known."""
        self._stance = _run_eagerly()
        for reference, prefix in self._roots:
            module = reference()
            if module is not None:
                self._attach_to(module, prefix)
        if self._wants("attention"):
            self._handles.append(
                AttentionHooks(recorder=self._recorder, tracker=self._tracker, is_wanted=self._is_wanted)
            )
        if not self._is_given:
            # torch's type says that such a hook returns nothing; what it returns replaces the arguments.
            handle = register_module_forward_pre_hook(self._meet)  # type: ignore[arg-type]
            self._handles.append(handle)

    def detach(self) -> None:
        """Take everything off again."""
        for handle in self._handles:
            handle.remove()
        for hooks in self._linears.values():
            hooks.remove()
        self._handles.clear()
        self._linears.clear()
        self._attached.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _meet(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A global pre-hook: a module that is entered first and is not known is a model."""
        if (
            module in self._known
            or self._tracker.current() is not None
            or in_backward()
            or not (module.training and torch.is_grad_enabled())
        ):
            return None
        with self._recorder.guarded():
            self.add_root(module)
            prefix = self._roots[-1][1]
            self._attach_to(module, prefix)
            # Its own pre-hooks came too late for this call: do what they do.
            path, part, layer_idx = next(_walk(module, prefix=prefix))
            self._tracker.enter(Frame(module=part, path=path, layer_idx=layer_idx), args, {})
            if isinstance(module, nn.Linear) and module in self._linears:
                return self._linears[module].call_before(module, args)
        return None

    def _attach_to(self, root: nn.Module, prefix: str) -> None:
        for path, module, layer_idx in _walk(root, prefix=prefix):
            if module in self._attached:
                continue
            self._attached.add(module)
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks; what it does inside is not Python either
            frame = Frame(module=module, path=path, layer_idx=layer_idx)
            self._handles.append(module.register_forward_pre_hook(self._on_enter(frame), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._on_leave, always_call=True))
            if isinstance(module, nn.Linear) and self._wants("linear") and self._is_wanted(path):
                source = Source(module=path, layer_type="linear", layer_idx=layer_idx, component="linear")
                self._attach_linear(module, source)

    def _attach_linear(self, module: nn.Linear, source: Source) -> None:
        weight = module._parameters.get("weight")  # noqa: SLF001  (a parametrized weight is computed when it is read)
        if weight is None or is_lazy(weight):
            reason = "its weight is not a plain parameter (parametrized, or not made yet)"
            self._recorder.refuse(source, WEIGHT, reason)
            return
        hooks = LinearHooks(module, source=source, recorder=self._recorder, tracker=self._tracker)
        self._linears[module] = hooks

    def _on_enter(self, frame: Frame) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self._recorder.guarded():
                self._tracker.enter(frame, args, kwargs)

        return hook

    def _on_leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        with self._recorder.guarded():
            self._tracker.leave(module, output)

    def _wants(self, layer_type: str) -> bool:
        return not self._options.layer_types or layer_type in self._options.layer_types

    def _is_wanted(self, path: str) -> bool:
        globs = self._options.modules
        return not globs or any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def module_path(path: str) -> str:
    """The dotted path of a module without the prefixes that wrappers add."""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def layer_index(path: str, module: nn.Module) -> int:
    """The layer that a module says it belongs to, or the first number in its path; -1 where there is none."""
    own = getattr(module, "layer_idx", None)
    if isinstance(own, int):
        return own
    return next((int(part) for part in path.split(".") if part.isdecimal()), -1)


def _walk(root: nn.Module, *, prefix: str) -> Iterator[tuple[str, nn.Module, int]]:
    for name, module in root.named_modules():
        path = module_path(name)
        yield (prefix + path).rstrip("."), module, layer_index(path, module)


def _run_eagerly() -> Any:
    """Have compiled code run as written while hooks are attached: they are not part of what was compiled."""
    # A compiled module warns of our global hook, which is there for this iteration and never calls a hook twice.
    warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
    return torch.compiler.set_stance("force_eager")
