"""Tells the share of a model's weights that hooks see, the parts that they do not see, and why nothing was recorded."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.capture.roles.table import FunctionRole, ModuleRole
from ranktape.capture.settings.rules import listed

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.passes.passes import Frame
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.source import Source


MIN_SHARE = 0.01
"""Parts of the model that hold less of its weights are not named."""

_MIN_DIMS = 2
"""Of a weight: norms and biases are no operands of a product."""

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
"""What classes that compute attention are called."""

_BY_HAND = "its attention calls no function that is known: add a role for it (docs/roles.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What hooks see of a model."""

    seen: float
    """The share of the weights, by number of values, that are an operand of something recorded."""
    left_out: float
    """The share that the selection leaves out."""
    unseen: dict[str, str]
    """The parts of the model that no hook sees, layers written as `*`, each with the reason."""

    def text(self) -> str:
        """One line for a person."""
        chosen = f" ({_percent(self.left_out)} are left out by the selection)" if self.left_out else ""
        return f"hooks see {_percent(self.seen)} of the model's weights{chosen}"


def find_coverage(
    frames: Iterable[Frame],
    *,
    is_seen: Callable[[nn.Module, str], bool],
    is_left_out: Callable[[Frame], bool],
    attending: Iterable[Frame],
    sources: Collection[Source],
) -> Coverage:
    """What hooks have seen in an iteration; of a model without weights, all of it.

    Args:
        frames: The model's modules.
        is_seen: Says of a module and its name of a parameter whether what computes with it is recorded.
        is_left_out: Says of a module whether it is not to be recorded.
        attending: The modules whose attention is to be recorded, where they have any.
        sources: What ran.
    """
    weights: dict[int, tuple[str, int, str]] = {}
    for frame in frames:
        for name, weight in frame.module._parameters.items():  # noqa: SLF001  (runs no parametrization)
            if weight is None or weight.ndim < _MIN_DIMS:
                continue
            kind = "seen" if is_seen(frame.module, name) else "left out" if is_left_out(frame) else "unseen"
            own = kind, weight.numel(), _label(f"{frame.path}.{name}", frame.module)
            known, num_values, label = weights.get(id(weight), own)
            # One that several modules have is seen where any of them is.
            weights[id(weight)] = min(kind, known, key=_KINDS.index), num_values, label
    counts: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    for kind, num_values, label in weights.values():
        counts[kind] += num_values
        if kind == "unseen":
            unseen[label] += num_values
    total = counts.total() or math.nan
    named = {
        label: f"no hook sees it: {_percent(num / total)} of the model's weights"
        for label, num in unseen.most_common()
        if num >= MIN_SHARE * total
    }
    return Coverage(
        seen=counts["seen"] / total if weights else 1.0,
        left_out=counts["left out"] / total if weights else 0.0,
        unseen=named | _attention_by_hand(attending, sources=sources),
    )


_KINDS = ("seen", "left out", "unseen")


def _attention_by_hand(frames: Iterable[Frame], *, sources: Collection[Source]) -> dict[str, str]:
    """The modules of attention that ran, and none of whose attention hooks saw; `sources` are what they saw run."""
    attended = {source.module for source in sources if source.layer_type == "attention"}
    ran = {source.module for source in sources if source.layer_type != "attention"}
    return {
        _label(frame.path, frame.module): _BY_HAND
        for frame in frames
        if _ATTENTION.search(type(frame.module).__name__)
        and any(_is_within(path, frame.path) for path in ran)
        and not any(_is_within(path, frame.path) or _is_within(frame.path, path) for path in attended)
    }


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _label(path: str, module: nn.Module) -> str:
    return f"{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', path.lstrip('.'))} ({type(module).__name__})"


def _percent(share: float) -> str:
    """Rounded down: what is not whole is never 100 %."""
    return f"{math.floor(share * 100)} %" if share >= MIN_SHARE or not share else "less than 1 %"


_MAX_NAMED = 5


def explain_silence(options: CaptureOptions, recorder: Recorder, *, paths: Collection[str], has_stack: bool) -> str:
    """Why nothing was recorded of models with modules at these paths, and the way out."""
    globs = listed(options.module)
    if globs and not any(map(options.wants_module, paths)):
        close = {name for glob in globs for name in difflib.get_close_matches(glob, paths, _MAX_NAMED, 0)}
        return (
            f"no module matches --module {' or '.join(globs)}; "
            f"nearest: {', '.join(sorted(close)[:_MAX_NAMED]) or 'none'}"
        )
    if options.wants_layers and not has_stack:
        return "no stack of layers was found in the model (--layers): record layers by --module and --layer-type"
    if reason := recorder.expected.main_refusal():
        return f"nothing was recorded of the layers that ran: {reason}"
    if left_out := recorder.num_left_out:
        flags = ", ".join(options.selection_flags)
        return f"none of {left_out} tensors fits the selection: widen {flags}"
    kinds = " or ".join(options.wanted_layer_types)
    return (
        f"the training ran no {kinds} layer in a module that is in training mode: check --layer-type and --module, "
        f"add --mode=eval for inference, or record tensors by save_tensor"
    )


def explain_unmatched(role: ModuleRole | FunctionRole, kinds: Collection[type]) -> str:
    """The message about a registered role that has matched nothing, where the models have these classes."""
    if isinstance(role, FunctionRole):
        hint = "check its name, and whether it is loaded"
        return f"the role for {role.name} matches no function that is loaded: {hint}"
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    close = difflib.get_close_matches(role.name, names, 1, 0.3)
    hint = f"the nearest class is {close[0]}" if close else "check its name, and whether it is loaded"
    return f"the role for {role.name} matches no module of the model: {hint}"
