"""On which tensors is a plot, in one line below its title?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ranktape.analyze.engine.values import View
from ranktape.analyze.views.plots.groups import short_count
from ranktape.analyze.views.plots.style import plain

if TYPE_CHECKING:
    from ranktape.analyze.views.plots.survey import Survey

MAX_NAMED = 4
"""Values of a field that are named, before they are counted."""


def subject_line(survey: Survey, *, with_limits: bool = True) -> str:
    """The iterations, ranks, layers and dtypes, how many tensors and values, and against which limits they count."""
    parts = [
        _span(survey, "iteration"),
        _span(survey, "rank"),
        _names(survey, "dtype", "dtype"),
        _names(survey, "quant_type", "quant type"),
        f"{len(survey):,} tensor{'s' if len(survey) != 1 else ''}",
        f"{short_count(float(survey.column('numel').sum()))} values",
    ]
    return f"{', '.join(parts)}; {_limits(survey)}" if with_limits else ", ".join(parts)


def _span(survey: Survey, field: str) -> str:
    values = survey.values_of(field)
    if len(values) == 1:
        return f"{field} {values[0]}"
    return f"{len(values)} {field}s from {values[0]} to {values[-1]}"


def _names(survey: Survey, field: str, words: str) -> str:
    values = survey.values_of(field)
    if len(values) > MAX_NAMED:
        return f"{len(values)} {words}s"
    named = "/".join(plain(value, max_letters=24) for value in values)
    return f"{words}{'s' if len(values) > 1 else ''} {named}"


def _limits(survey: Survey) -> str:
    as_seen = " as captured" if survey.view is View.SEEN else ""
    if survey.target is None:
        return f"limits of the values' own dtype{as_seen}"
    target = survey.target
    return (
        f"limits of {target.name} without scaling: largest value {target.maximum:.4g}, "
        f"smallest normal {target.min_normal:.3g}"
    )
