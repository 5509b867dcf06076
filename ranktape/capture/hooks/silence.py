"""Explains why nothing was recorded, of the whole training or of a registered role."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING

from ranktape.capture.roles.table import FunctionRole, ModuleRole
from ranktape.capture.settings.rules import listed

if TYPE_CHECKING:
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.settings.options import CaptureOptions

_MAX_NAMED = 5


def explain_silence(options: CaptureOptions, recorder: Recorder, *, paths: Collection[str], has_stack: bool) -> str:
    """Why nothing was recorded of models with modules at these paths, and the way out."""
    globs = listed(options.modules)
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
    """What a person is told of a registered role that has matched nothing, where the models have these classes."""
    if isinstance(role, FunctionRole):
        hint = "check its name, and whether it is loaded"
        return f"the role for {role.name} matches no function that is loaded: {hint}"
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    close = difflib.get_close_matches(role.name, names, 1, 0.3)
    hint = f"the nearest class is {close[0]}" if close else "check its name, and whether it is loaded"
    return f"the role for {role.name} matches no module of the model: {hint}"
