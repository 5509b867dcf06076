"""What each plot needs that a selection may not have; asked of the catalogue alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ranktape.analyze.identity import sample_names
from ranktape.analyze.layer_stacks import stack_of
from ranktape.analyze.views.plots.pairs import matched, two_quant_types
from ranktape.analyze.views.plots.style import plain
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from ranktape.analyze.views.plots.survey import Survey

Reason = str
"""Why a plot cannot be drawn; empty where it can."""

BF16 = ("bf16",)
"""The quant type that the plots of BF16 are of: tensors of other ones may be held in bfloat16, too."""

GRADIENT_NAMES = "grad_"
"""How names of gradients begin."""


def gradient_names(survey: Survey) -> list[str]:
    """The names of tensors that are gradients."""
    return [name for name in survey.values_of("tensor_name") if name.startswith(GRADIENT_NAMES)]


def needs_several(field: str, what: str) -> Callable[[Survey], Reason]:
    """The field must have two values at least; that it is not known is none."""

    def needs(survey: Survey) -> Reason:
        values = [value for value in survey.values_of(field) if value is not None] or [None]
        return "" if len(values) > 1 else f"there is one {what}: {plain(values[0])}"

    return needs


def needs_several_samples(survey: Survey) -> Reason:
    """Tensors with samples, with their values; or samples of several ranks."""
    kept = survey.records.column("keep").tolist()
    pairs = zip(sample_names(survey.records), survey.records.column("rank").tolist(), kept, strict=True)
    found = {(name, rank) for names, rank, keep in pairs if keep == Keep.VALUES for name in names}
    if not found:
        return "no tensor has samples whose values were kept"
    return "" if len(found) > 1 else "there is one sample"


def needs_two_types(survey: Survey) -> Reason:
    """Another quant type."""
    if two_quant_types(survey) is not None:
        return ""
    return f"there is one quant type, {plain(survey.values_of('quant_type')[0])}: nothing to compare it with"


def needs_pairs(survey: Survey) -> Reason:
    """Tensors that were recorded in both quant types, with their values."""
    types = two_quant_types(survey)
    if types is None:
        return needs_two_types(survey)
    if matched(survey, types):
        return ""
    return f"no tensor was recorded in both {plain(types[0])} and {plain(types[1])}"


def needs_bf16(survey: Survey) -> Reason:
    """Tensors of the quant type bf16."""
    return "" if survey.mask(quant_type=BF16).any() else "no tensor is of the quant type bf16"


def needs_attention(survey: Survey) -> Reason:
    """Tensors of attention."""
    return "" if survey.mask(layer_type="attention").any() else "no tensor is of attention"


def needs_attention_and_linear(survey: Survey) -> Reason:
    """Tensors of attention and of linear layers."""
    if not survey.mask(layer_type="linear").any():
        return "no tensor is of a linear layer"
    return needs_attention(survey)


def needs_backward(survey: Survey) -> Reason:
    """Tensors of backward."""
    return "" if survey.mask(operation="backward").any() else "nothing of backward was recorded"


def needs_backward_of_several(survey: Survey) -> Reason:
    """Backward of two layer types."""
    found = set(survey.column("layer_type")[survey.mask(operation="backward")].tolist())
    return needs_backward(survey) or ("" if len(found) > 1 else f"backward is of one layer type: {plain(found.pop())}")


def needs_both(survey: Survey) -> Reason:
    """Tensors of forward and of backward."""
    return needs_backward(survey) or (
        "" if survey.mask(operation="forward").any() else "nothing of forward was recorded"
    )


def needs_layers(survey: Survey) -> Reason:
    """Two layers of one stack."""
    inside = [stack_of(layer) for layer in survey.values_of("layer_idx") if layer >= 0]
    return "" if len(inside) > len(set(inside)) else "there are no two layers"


def needs_scale(survey: Survey) -> Reason:
    """A format that scales are tried for, and values."""
    if survey.target is not None and survey.target.dtype == "float64":
        return "fp64 holds every captured value, and has no use for a scale"
    if set(survey.records.column("keep").tolist()) == {"statistics"}:
        return "of all tensors statistics alone were kept"
    return ""
