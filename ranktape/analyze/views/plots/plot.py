"""Says what a plot is, and what it may need that a selection does not have."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ranktape.errors import UsageError
from ranktape.fields import SAMPLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.data import PlotData

Need = Callable[["PlotData"], str]
"""Says why a plot cannot be drawn of a selection; empty where it can. Asks the catalogue alone."""

DEFAULT_RECIPES = "mxfp8,mxfp4,nvfp4"
"""What plots of recipes are of where none is named: what hardware has."""

COLUMN_FIELDS = ("iteration", "rank", "microbatch", "call", "batch_size")
"""Fields of whole numbers, whose values may be the columns of a heat map of layers."""

GROUPED = frozenset({"distributions.distributions", "boxes.boxes", "losses.loss_bars"})
"""Functions that draw one thing of each group: two plots of the same groups would show the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot that can be drawn of a run."""

    function: str
    """The module and the function that draw it: given a selection, this row and its options."""
    by: tuple[str, ...]
    """The fields whose values make its groups."""
    of: Mapping[str, Any] | Callable[[PlotData], Mapping[str, Any]]
    """The values that its records have in some fields."""
    needs: tuple[Need, ...]
    """What it needs that a selection may not have."""
    reads_values: bool = False
    """Whether it reads tensors itself, beside what is known of all records."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the function is given."""
    title: str = ""
    """Above the plot."""
    sentence: str = ""
    """What it shows, for the index."""
    name: str = ""
    """The choice of `--kind`, and the name of the file."""
    folder: str = ""
    """Where its file goes."""

    @property
    def path(self) -> str:
        """Where its PNG goes, under the folder that is written."""
        return f"{self.folder}/{self.name}.png"

    def draw(self, data: PlotData) -> Figure:
        """The plot of a selection that has what it needs."""
        module, _, function = self.function.partition(".")
        drawing = importlib.import_module(f"ranktape.analyze.views.plots.{module}")
        figure: Figure = getattr(drawing, function)(data, self, **self.options)
        return figure

    def missing(self, data: PlotData) -> str:
        """Why it cannot be drawn of a selection; empty where it can. Nothing is read."""
        return next(filter(None, (need(data) for need in self.needs)), "")

    def content(self, data: PlotData) -> Hashable:
        """The same of plots that show the same under other names; None where no other can. Nothing is read."""
        if self.function not in GROUPED or self.options or callable(self.of):
            return None
        return self.function, data.partition(*self.by, **self.of)

    def chosen(self, data: PlotData) -> Mapping[str, Any]:
        """The values that its records have in some fields of a selection."""
        return self.of(data) if callable(self.of) else self.of

    def title_of(self, data: PlotData) -> str:
        """Its title above a selection; one of two quant types names them."""
        types = data.two_quant_types() if self.of is of_two_types else None
        return self.title if types is None else f"{self.title}: {_plain(types[0])} and {_plain(types[1])}"

    def grouped_by(self, fields: Sequence[str]) -> Plot:
        """The same plot of groups by other fields; a heat map has one field, whose values are its columns.

        Raises:
            UsageError: it has no groups, or cannot be grouped by these fields.
        """
        from ranktape.analyze.views.plots.data import CELL_FIELDS

        is_map = self.function == "heat_maps.heat_map" and self.options["field"] != SAMPLE
        if not self.by and not is_map:
            raise UsageError(f"--by is for plots of groups, and {self.name} has none")
        allowed = COLUMN_FIELDS if is_map else CELL_FIELDS
        unknown = [field for field in fields if field not in allowed]
        if unknown or not fields or (is_map and len(fields) > 1):
            some = "one of " if is_map else ""
            raise UsageError(
                f"{self.name} has groups by {some}{', '.join(allowed)}: not by {', '.join(fields) or 'none'}"
            )
        about = f"{self.title}, by {' and '.join(fields).replace('_', ' ')}"
        if is_map:
            return replace(self, title=about, options={**self.options, "field": fields[0]}, needs=(several(fields[0]),))
        needs = tuple(need for need in self.needs if need.__qualname__.partition(".")[0] != several.__name__)
        return replace(self, title=about, by=tuple(fields), needs=(several(fields[0]), *needs))

    def says(self, title: str, sentence: str) -> Plot:
        """The same under a title, with a sentence for the index."""
        return replace(self, title=title, sentence=sentence)


def plot(
    function: str,
    *by: str,
    reads_values: bool = False,
    of: Mapping[str, Any] | Callable[[PlotData], Mapping[str, Any]] | None = None,
    needs: tuple[Need, ...] | None = None,
    **options: Any,
) -> Plot:
    """A row of the table; to compare groups needs two values of the first field by default."""
    wanted = needs or ((several(by[0]),) if function in GROUPED else ())
    return Plot(function=function, by=by, of=of or {}, needs=wanted, reads_values=reads_values, options=options)


def has(reason: str, **fields: Any) -> Need:
    """A record must have those values in its fields; else there is that reason."""
    return lambda data: "" if data.mask(**fields).any() else reason


def several(field: str) -> Need:
    """The field must have two values at least; that it is not known is none."""

    def need(data: PlotData) -> str:
        values = [value for value in data.values_of(field) if value is not None] or [None]
        return "" if len(values) > 1 else f"there is one {field.replace('_', ' ')}: {_plain(values[0])}"

    return need


def several_samples(data: PlotData) -> str:
    """Tensors with samples, with their values; or samples of several ranks."""
    found = data.kept_samples()
    if not found:
        return "no tensor has samples whose values were kept"
    return "" if len(found) > 1 else "there is one sample"


def several_backward(data: PlotData) -> str:
    """Backward of two layer types."""
    found = set(data.column("layer_type")[data.mask(operation="backward")].tolist())
    return "" if len(found) > 1 else f"backward is of one layer type: {_plain(found.pop())}"


def two_types(data: PlotData) -> str:
    """Another quant type."""
    if data.two_quant_types() is not None:
        return ""
    return f"there is one quant type, {_plain(data.values_of('quant_type')[0])}: nothing to compare it with"


def matched_pairs(data: PlotData) -> str:
    """Tensors that were recorded in both quant types, with their values."""
    types = data.two_quant_types()
    if types is None or data.matched(types):
        return ""
    return f"no tensor was recorded in both {_plain(types[0])} and {_plain(types[1])}"


def two_layers(data: PlotData) -> str:
    """Two layers of one stack."""
    inside = [layer.stack for layer in data.values_of("layer_idx") if layer >= 0]
    return "" if len(inside) > len(set(inside)) else "there are no two layers"


def some_gradient(data: PlotData) -> str:
    """Tensors that are called gradients."""
    return "" if data.gradient_names() else "no tensor is a gradient: none is called grad_..."


def a_scale(data: PlotData) -> str:
    """A format that scales are tried for, and values."""
    if data.target is not None and data.target.element.dtype == "float64":
        return "fp64 holds every captured value, and has no use for a scale"
    if set(data.records.column("keep").tolist()) == {"statistics"}:
        return "of all tensors statistics alone were kept"
    return ""


def a_product(data: PlotData) -> str:
    """Recipes, and records that hold what products were computed from."""
    if not data.recipes:
        return f"no recipe was named: --recipe {DEFAULT_RECIPES} computes products again"
    if len(data.records.sources) > 1:
        return "products are computed again of one source at a time: choose one with --source"
    reasons = Counter(one.reason for one in data.calls.left_out)
    why = reasons.most_common(1)[0][0] if reasons else "nothing was recorded of a linear layer"
    return "" if data.calls.calls else f"no product can be computed again: {why}"


def _plain(value: object) -> str:
    from ranktape.analyze.views.plots.style import plain

    return plain(value)


def of_two_types(data: PlotData) -> Mapping[str, Any]:
    """The records of the two quant types that are compared."""
    return {"quant_type": list(data.two_quant_types() or ())}
