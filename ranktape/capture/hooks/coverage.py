"""Computes the share of a model's weights that hooks see, lists unseen parts, and explains why nothing was recorded."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ranktape.capture.hooks.hook import Hook
from ranktape.capture.roles.known import role_of
from ranktape.capture.roles.table import FunctionRole, ModuleRole
from ranktape.capture.torch_private import parameters_of

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.hooks.module_hooks import ModuleHooks
    from ranktape.capture.passes.tracker import Frame
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.source import Source


MIN_SHARE = 0.01
"""Parts of the model with a smaller share of its weights are not named."""

_MIN_DIMS = 2
"""Parameters with fewer dimensions, such as norms and biases, are ignored."""

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
"""Pattern of the names of classes that compute attention."""

_BY_HAND = "its attention calls no function that is known: add a role for it (docs/roles.md)"


class Visibility(StrEnum):
    """Whether hooks see a weight, best first."""

    SEEN = "seen"
    """The weight is an operand of a recorded call."""
    LEFT_OUT = "left out"
    """The selection excludes the weight."""
    UNSEEN = "unseen"
    """No hook sees the computation with the weight."""
    USED = "used"
    """The module of the weight was not called, but a gradient of the weight was computed."""
    IDLE = "idle"
    """The module of the weight was not called, and no gradient of the weight was seen."""


_REASONS = {
    Visibility.UNSEEN: "no hook sees it",
    Visibility.USED: "no hook sees it: its module was not called, and its weight was used without it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The parts of a model that hooks see."""

    seen: float
    """Share of the weights, by number of values, that are operands of recorded calls."""
    left_out: float
    """Share of the weights that the selection excludes."""
    idle: float
    """Share of the weights in modules that were not called."""
    unseen: dict[str, str]
    """The reason for each part of the model that no hook sees. Layer numbers in its name are replaced by `*`."""
    shares: dict[str, float]
    """Share of the weights in each part that no hook sees, in descending order, including parts too small to name."""

    def text(self) -> str:
        """A summary in one line."""
        notes = (
            (self.left_out, "are left out by the selection"),
            (self.idle, "are in modules that were not called"),
        )
        rest = "; ".join(f"{_percent(share)} {what}" for share, what in notes if share)
        return f"hooks see {_percent(self.seen)} of the model's weights{rest and f' ({rest})'}"

    def lines(self, *, count: int) -> Iterator[str]:
        """One line for each part that no hook sees, at most `count`, and one that sums up the others."""
        named = dict(itertools.islice(self.unseen.items(), count))
        yield from (f"{part}: {reason}" for part, reason in named.items())
        others = (self.shares.keys() | self.unseen.keys()) - named.keys()
        share = sum(self.shares.get(part, 0.0) for part in others)
        is_listed = len(named) < len(self.unseen)
        if is_listed or share >= MIN_SHARE:
            where = ": 'ranktape status' lists them" if is_listed else ""
            held = f", which hold {_percent(share)} of the model's weights" if share else ""
            yield f"{len(others)}{' more' if named else ''} parts of the model{held}{where}"


class ModuleCalls:
    """Notes which modules are called in an iteration, to find the coverage at its end."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        frames: Mapping[nn.Module, Frame],
        hooks: Mapping[nn.Module, ModuleHooks],
        is_wanted_layer: Callable[[str, str], bool],
    ) -> None:
        """Starts without modules.

        Args:
            recorder: Records the tensors.
            frames: All modules with hooks. The caller updates it.
            hooks: The hooks of the modules with a role. The caller updates it.
            is_wanted_layer: Tells from a layer type and the path of a module whether to record it.
        """
        self._expected = recorder.expected
        self._options = recorder.options
        self._frames = frames
        self._hooks = hooks
        self._is_wanted_layer = is_wanted_layer
        self._unchecked: list[nn.Module] = []
        """The modules with a role that have not been checked for a call at the end of a pass."""
        self._handles: list[Any] = []
        """The hooks on the weights of modules that had not been called when a pass ended."""
        self.attention: dict[nn.Module, Frame] = {}
        """The modules that were called and compute attention according to the names of their classes."""
        self._last: tuple[Any, Coverage] | None = None
        """The coverage of the last iteration, with a key of everything that it depends on."""

    def begin(self) -> None:
        """Start an iteration, in which no module has been called yet."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.attention.clear()
        self._unchecked = list(self._hooks)

    def add(self, module: nn.Module) -> None:
        """Add a module with a role."""
        self._unchecked.append(module)

    def check(self, used: Container[tuple[nn.Module, str]]) -> None:
        """After a pass, watch the gradients of weights whose modules were not called: such a weight was used elsewhere.

        Shared weights are not watched, nor are those in `used`: modules and names of parameters in recorded products.
        """
        unchecked, self._unchecked = self._unchecked, []
        idle = [module for module in unchecked if self._expected.is_idle(self._hooks[module].source)]
        counts = Counter(id(weight) for module in self._frames if idle for weight in parameters_of(module).values())
        for module in idle:
            note = functools.partial(self._expected.used, self._hooks[module].source)
            for name, weight in parameters_of(module).items():
                is_own = weight is not None and counts[id(weight)] == 1 and (module, name) not in used
                if is_own and weight.ndim > 1 and weight.requires_grad:
                    self._handles.append(weight.register_hook(Hook(lambda _, note=note: note())))

    def find_coverage(self, used: Collection[tuple[nn.Module, str]], *, num_models: int) -> Coverage:
        """The coverage of all modules with hooks. `used` is as in `check`; `num_models` counts all models so far."""

        def visibility_of(frame: Frame, name: str) -> Visibility:
            if (frame.module, name) in used:
                return Visibility.SEEN
            if frame.module in visibilities:
                return visibilities[frame.module]
            role = role_of(type(frame.module))
            if role is None:
                is_wanted = self._options.wants_module(frame.path)
            else:
                is_wanted = self._is_wanted_layer(role.layer_type, frame.path)
            return Visibility.UNSEEN if is_wanted else Visibility.LEFT_OUT

        visibilities = {module: self._visibility_of_source(hooks.source) for module, hooks in self._hooks.items()}
        # A walk through all parameters delays the training, so it is repeated only if hooks see something else.
        unseen = frozenset(pair for pair in visibilities.items() if pair[1] is not Visibility.SEEN)
        key = num_models, len(self._frames), len(self._hooks), len(used), unseen
        if self._last is None or self._last[0] != key:
            ran = self._expected.ran()
            attending, frames = self._attention({source.module for source in ran}), self._frames.values()
            self._last = key, find_coverage(frames, visibility=visibility_of, attending=attending, sources=ran)
        return self._last[1]

    def _attention(self, paths: Collection[str]) -> Iterator[Frame]:
        """The attention modules that were called, or that contain one of the paths of the sources that ran."""
        for module, frame in self._frames.items() if self._options.wants_layer_type("attention") else ():
            is_wanted = is_attention(module) and self._options.wants_module(frame.path)
            if is_wanted and (module in self.attention or any(is_within(path, frame.path) for path in paths)):
                yield frame

    def _visibility_of_source(self, source: Source) -> Visibility:
        if not self._expected.is_idle(source):
            return Visibility.SEEN
        return Visibility.USED if self._expected.is_used(source) else Visibility.IDLE


def find_coverage(
    frames: Iterable[Frame],
    *,
    visibility: Callable[[Frame, str], Visibility],
    attending: Iterable[Frame],
    sources: Collection[Source],
) -> Coverage:
    """The coverage in an iteration. If the weights have no elements, the whole model is seen.

    Args:
        frames: The modules of the model.
        visibility: Tells from a module and the name of a parameter whether hooks see the parameter.
        attending: The modules that ran and compute attention according to the names of their classes.
        sources: The sources that were recorded, or would have been.
    """
    weights: dict[int, tuple[Visibility, int, str]] = {}
    for frame in frames:
        for name, weight in parameters_of(frame.module).items():
            if weight is None or weight.ndim < _MIN_DIMS:
                continue
            entry = visibility(frame, name), weight.numel(), _label(f"{frame.path}.{name}", frame.module)
            known, num_values, label = weights.get(id(weight), entry)
            # A shared weight is seen if it is seen in any of its modules.
            weights[id(weight)] = min(entry[0], known, key=list(Visibility).index), num_values, label
    counts: Counter[Visibility] = Counter()
    unseen: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for kind, num_values, label in weights.values():
        counts[kind] += num_values
        if kind in _REASONS:
            unseen[label] += num_values
            reasons[label] = _REASONS[kind]
    total = counts.total()
    # A rank's shards may have no elements. They are then seen, as in a model without weights.
    shares = {label: num / max(total, 1) for label, num in unseen.most_common()}
    named = {
        label: f"{reasons[label]}: {_percent(share)} of the model's weights"
        for label, share in shares.items()
        if share >= MIN_SHARE
    }
    return Coverage(
        seen=counts[Visibility.SEEN] / total if total else 1.0,
        left_out=counts[Visibility.LEFT_OUT] / max(total, 1),
        idle=counts[Visibility.IDLE] / max(total, 1),
        unseen=named | _attention_by_hand(attending, sources=sources),
        shares=shares,
    )


def is_attention(module: nn.Module) -> bool:
    """Whether a module computes attention, according to the name of its class."""
    return _ATTENTION.search(type(module).__name__) is not None


def _attention_by_hand(frames: Iterable[Frame], *, sources: Collection[Source]) -> dict[str, str]:
    """The attention modules inside which no attention function was seen. `sources` are all sources that ran."""
    attended = {source.module for source in sources if source.layer_type == "attention"}
    return {
        _label(frame.path, frame.module): _BY_HAND
        for frame in frames
        if not any(is_within(path, frame.path) or is_within(frame.path, path) for path in attended)
    }


def is_within(path: str, outer: str) -> bool:
    """Whether a dotted path is that of a module or of something inside it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def _label(path: str, module: nn.Module) -> str:
    return f"{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', path.lstrip('.'))} ({type(module).__name__})"


def _percent(share: float) -> str:
    """The percentage, rounded down, so that an incomplete share is never 100 %."""
    return f"{math.floor(share * 100)} %" if share >= MIN_SHARE or not share else "less than 1 %"


_MAX_NAMED = 5


NOTHING_CALLED = (
    "no module with parameters was called: hooks do not see a script that calls the forward method of its model, as in "
    "model.forward(x); call model(x), or give the model to Capture(model=...)"
)
"""The reason why nothing was recorded if no model was given and none was found."""


def explain_silence(options: CaptureOptions, recorder: Recorder, *, paths: Collection[str], has_stack: bool) -> str:
    """The reason why nothing was recorded for models with modules at these paths, and the remedy."""
    globs = options.named_modules
    if globs and not any(map(options.wants_module, paths)):
        close = {name for glob in globs for name in difflib.get_close_matches(glob, paths, _MAX_NAMED, 0)}
        return (
            f"no module matches --select module={' or '.join(globs)}; "
            f"nearest: {', '.join(sorted(close)[:_MAX_NAMED]) or 'none'}"
        )
    if options.wants_layers and not has_stack:
        return "no stack of layers was found in the model (--layers): record layers by --select module=... instead"
    if reason := recorder.expected.main_refusal():
        return f"nothing was recorded of the layers that ran: {reason}"
    if left_out := recorder.num_left_out:
        return f"none of {left_out} tensors fits the selection: widen --select"
    kinds = " or ".join(options.wanted_layer_types)
    return (
        f"the training ran no {kinds} layer in a module that is in training mode: check --select, "
        f"add --select mode=eval for inference, or record tensors by save_tensor"
    )


def explain_unmatched(role: ModuleRole | FunctionRole, kinds: Collection[type]) -> str:
    """The message about a registered role that matched nothing. `kinds` are the classes of the models' modules."""
    if isinstance(role, FunctionRole):
        hint = "check its name, and whether it is loaded"
        return f"the role for {role.name} matches no function that is loaded: {hint}"
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    close = difflib.get_close_matches(role.name, names, 1, 0.3)
    hint = f"the nearest class is {close[0]}" if close else "check its name, and whether it is loaded"
    return f"the role for {role.name} matches no module of the model: {hint}"
