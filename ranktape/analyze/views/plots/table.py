"""The table of all plots: their names, titles and folders, their requirements, and how they are drawn.

To add a plot, add a row. A new kind of plot also needs a function in a module of this folder. Slow modules are not
imported here, since the help of the command lists all plots.
"""

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
"""Gives the reason why a plot cannot be drawn for a selection, or "". Only reads the catalogue."""

DEFAULT_RECIPES = "mxfp8,mxfp4,nvfp4"
"""The default recipes of the plots: those that hardware supports."""

COLUMN_FIELDS = ("iteration", "rank", "microbatch", "call", "batch_size")
"""The integer fields whose values can be the columns of a heat map of layers."""

GROUPED = frozenset({"distributions.distributions", "bars.boxes", "bars.loss_bars"})
"""The functions whose result depends only on the groups: two plots with the same groups show the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot that can be drawn of a run."""

    function: str
    """Module and name of the function that draws it, called with a selection, this row and its options."""
    by: tuple[str, ...]
    """The fields whose values define its groups."""
    of: Mapping[str, Any] | Callable[[PlotData], Mapping[str, Any]]
    """The field values of its records."""
    needs: tuple[Need, ...]
    """The requirements for a selection."""
    reads_values: bool = False
    """Whether it reads tensors itself, in addition to the data of all records."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function."""
    title: str = ""
    """Title above the plot."""
    sentence: str = ""
    """Description for the index."""
    name: str = ""
    """The choice of `--kind`, and the name of the file."""
    folder: str = ""
    """The folder of its file."""

    @property
    def path(self) -> str:
        """The path of its PNG file, relative to the output folder."""
        return f"{self.folder}/{self.name}.png"

    def draw(self, data: PlotData) -> Figure:
        """The plot of a selection that meets its requirements."""
        module, _, function = self.function.partition(".")
        drawing = importlib.import_module(f"ranktape.analyze.views.plots.{module}")
        figure: Figure = getattr(drawing, function)(data, self, **self.options)
        return figure

    def missing(self, data: PlotData) -> str:
        """The reason why it cannot be drawn for a selection, or "". No values are read."""
        needs = self.needs or ((several(self.by[0]),) if self.function in GROUPED else ())
        return next(filter(None, (need(data) for need in needs)), "")

    def content(self, data: PlotData) -> Hashable:
        """A key that is equal for plots that show the same; None if no other plot can. No values are read."""
        if self.function not in GROUPED or self.options or callable(self.of):
            return None
        return self.function, data.partition(*self.by, **self.of)

    def chosen(self, data: PlotData) -> Mapping[str, Any]:
        """The field values of its records in a selection."""
        return self.of(data) if callable(self.of) else self.of

    def title_of(self, data: PlotData) -> str:
        """Its title for a selection; the title of a plot of two quant types names them."""
        types = data.two_quant_types() if self.of is of_two_types else None
        return self.title if types is None else f"{self.title}: {_plain(types[0])} and {_plain(types[1])}"

    def grouped_by(self, fields: Sequence[str]) -> Plot:
        """The plot with groups by other fields; for a heat map, a single field whose values are its columns.

        Raises:
            UsageError: the plot has no groups, or cannot be grouped by these fields.
        """
        from ranktape.analyze.views.plots.data import CELL_FIELDS

        is_map = self.function == "heat_maps.layer_map" and self.options["field"] != SAMPLE
        if not self.by and not is_map:
            raise UsageError(f"--by is only for plots of groups, and {self.name} has none")
        allowed = COLUMN_FIELDS if is_map else CELL_FIELDS
        if not fields or not set(fields) <= set(allowed) or (is_map and len(fields) > 1):
            some = "one of " if is_map else ""
            raise UsageError(
                f"{self.name} can be grouped by {some}{', '.join(allowed)}, not by {', '.join(fields) or 'none'}"
            )
        about = f"{self.title}, by {' and '.join(fields).replace('_', ' ')}"
        if is_map:
            return replace(self, title=about, options={**self.options, "field": fields[0]}, needs=(several(fields[0]),))
        return replace(self, title=about, by=tuple(fields), needs=(several(fields[0]), *self.needs))

    def described(self, title: str, sentence: str) -> Plot:
        """The plot with a title, and a description for the index."""
        return replace(self, title=title, sentence=sentence)


def plot(
    function: str,
    *by: str,
    needs: tuple[Need, ...] = (),
    of: Mapping[str, Any] | Callable[[PlotData], Mapping[str, Any]] | None = None,
    reads_values: bool = False,
    **options: Any,
) -> Plot:
    """A row of the table. If `needs` is empty, a plot in `GROUPED` requires two values of its first field."""
    return Plot(function=function, by=by, of=of or {}, needs=needs, reads_values=reads_values, options=options)


def has(reason: str, **fields: Any) -> Need:
    """Require a record with these values in its fields."""
    return lambda data: "" if data.mask(**fields).any() else reason


def several(field: str) -> Need:
    """Require at least two values of the field; None does not count."""

    def need(data: PlotData) -> str:
        values = [value for value in data.values_of(field) if value is not None] or [None]
        return "" if len(values) > 1 else f"there is only one {field.replace('_', ' ')}: {_plain(values[0])}"

    return need


def several_samples(data: PlotData) -> str:
    """Require at least two samples, by name and rank, of tensors with stored values."""
    samples = data.kept_samples()
    if not samples:
        return "no tensor has samples with stored values"
    return "" if len(samples) > 1 else "there is only one sample"


def several_backward(data: PlotData) -> str:
    """Require backward records of at least two layer types."""
    layer_types = set(data.column("layer_type")[data.mask(operation="backward")].tolist())
    return "" if len(layer_types) > 1 else f"backward records have only one layer type: {_plain(layer_types.pop())}"


def two_types(data: PlotData) -> str:
    """Require at least two quant types."""
    if data.two_quant_types() is not None:
        return ""
    return f"there is only one quant type: {_plain(data.values_of('quant_type')[0])}"


def matched_pairs(data: PlotData) -> str:
    """Require tensors with stored values in both quant types."""
    types = data.two_quant_types()
    if types is None or data.matched(types):
        return ""
    return f"no tensor was recorded in both {_plain(types[0])} and {_plain(types[1])}"


def two_layers(data: PlotData) -> str:
    """Require at least two layers in one stack."""
    inside = [layer.stack for layer in data.values_of("layer_idx") if layer >= 0]
    return "" if len(inside) > len(set(inside)) else "there are fewer than two layers"


def some_gradient(data: PlotData) -> str:
    """Require tensors with the name of a gradient."""
    return "" if data.gradient_names() else "no tensor is a gradient: no name starts with grad_"


def a_scale(data: PlotData) -> str:
    """Require a format that can use a scale, and records with more than statistics."""
    if data.target is not None and data.target.element.dtype == "float64":
        return "fp64 represents every captured value and needs no scale"
    if set(data.records.column("keep").tolist()) == {"statistics"}:
        return "all tensors store only statistics"
    return ""


def a_product(data: PlotData) -> str:
    """Require recipes, and records of a single source that contain the operands of a product."""
    if not data.recipes:
        return f"no recipe was given: --recipe {DEFAULT_RECIPES} draws this plot"
    if len(data.records.sources) > 1:
        return "products are computed again for only one source: select one with --source"
    reasons = Counter(one.reason for one in data.calls.left_out)
    why = reasons.most_common(1)[0][0] if reasons else "no record belongs to a linear layer"
    return "" if data.calls.calls else f"no product can be computed again: {why}"


def _plain(value: object) -> str:
    from ranktape.analyze.views.plots.style import plain

    return plain(value)


def of_two_types(data: PlotData) -> Mapping[str, Any]:
    """The records of the two quant types that are compared."""
    return {"quant_type": list(data.two_quant_types() or ())}


def of_gradients(data: PlotData) -> Mapping[str, Any]:
    """The records of gradients."""
    return {"tensor_name": data.gradient_names()}


IN_BF16: Mapping[str, Any] = {
    "of": {"quant_type": ["bf16"]},
    "needs": (has("no tensor has the quant type bf16", quant_type=["bf16"]),),
}
"""The selection of the BF16 plots, by quant type, since tensors of other quant types can have dtype bfloat16, too."""

ATTENTION = has("no tensor belongs to attention", layer_type="attention")
LINEAR = has("no tensor belongs to a linear layer", layer_type="linear")
FORWARD = has("no forward tensors were recorded", operation="forward")
BACKWARD = has("no backward tensors were recorded", operation="backward")

_OF_CELLS = {
    "underflow": ("Underflow", "share of nonzero elements below the smallest normal value"),
    "absmax": ("Largest magnitude", "largest magnitude, infinities included"),
}

REPLAYED = "replay_analysis"
"""The folder of plots of products that are computed again."""

_BY_FOLDER = {
    "distributions": {
        "distribution_by_phase": plot("distributions.distributions", "phase", "operation").described(
            "Distribution by phase",
            "Values before and after an operation: shape in units of the standard deviation, and range in binades.",
        ),
        "distribution_by_batch_size": plot("distributions.distributions", "batch_size", "operation").described(
            "Distribution by batch size", "Values of tensors with each number of samples: shape and range."
        ),
    },
    "heatmaps": {
        f"layer_{field}_{metric}": plot(
            "heat_maps.layer_map",
            needs=(several_samples if field == "sample" else several(field),),
            field=field,
            metric=metric,
        ).described(f"{title} by layer and {field}", f"For each layer and {field}, forward and backward: {what}.")
        for field in ("rank", "iteration", "sample")
        for metric, (title, what) in _OF_CELLS.items()
        if (field, metric) != ("sample", "underflow")
    },
    "comparisons": {
        "neighbouring_layers": plot("lines.neighbouring_layers", "operation", needs=(two_layers,)).described(
            "Each layer against the one before it",
            "Factor by which the standard deviation and absmax grow from each layer to the next, and the "
            "distance of the distributions.",
        ),
        "sample_differences": plot("lines.sample_differences", needs=(several_samples,)).described(
            "Samples against the median sample",
            "For each sample, the absmax relative to that of the median sample of the same tensor: mean "
            "and range over tensors.",
        ),
    },
    "statistics": {
        "statistics_by_tensor": plot("bars.boxes", "tensor_name").described(
            "Statistics by tensor", "Box plots over tensors of each name: mean, standard deviation, absmax, kurtosis."
        ),
        "statistics_by_iteration": plot(
            "lines.lines", "operation", needs=(several("iteration"),), field="iteration", panels="losses"
        ).described(
            "Statistics over iterations",
            "Lines over iterations: standard deviation, absmax, overflow and underflow, forward and backward.",
        ),
    },
    "attention_analysis": {
        "attention_against_linear": plot(
            *("distributions.distributions", "layer_type", "operation"),
            of={"layer_type": ["attention", "linear"]},
            needs=(LINEAR, ATTENTION),
        ).described(
            "Attention against linear",
            "Values of attention and of linear layers, forward and backward: shape and range.",
        ),
        "attention_tensors": plot(
            *("distributions.distributions", "tensor_name", "operation"),
            of={"layer_type": "attention"},
            needs=(ATTENTION,),
        ).described(
            "Tensors of attention", "Values of query, key, value, output and their gradients: shape and range."
        ),
    },
    "quantization_analysis": {
        "sweep_panels": plot("bars.sweep", needs=(a_scale,), reads_values=True).described(
            "Losses by scale",
            "Six panels: the metrics of a sweep over the scales of the tensor with the widest range.",
        ),
    },
    "layer_analysis": {
        "layer_binades": plot("heat_maps.binade_map").described(
            "Range of the values of each layer",
            "For each layer, the share of its values in each binade, with the ranges of formats below.",
        ),
        "layer_statistics": plot(
            "lines.lines", "layer_type", "operation", field="layer_idx", panels="shapes"
        ).described(
            "Statistics by layer",
            "Lines over layers for each layer type: standard deviation, absmax, kurtosis and range in binades.",
        ),
    },
    "overflow_analysis": {
        "overflow": plot("lines.lines", "layer_type", field="layer_idx", panels="overflow").described(
            "Overflow and underflow by layer",
            "Share of the elements of each layer and layer type that overflow and underflow, and its worst tensor.",
        ),
        "overflow_by_quant_type": plot("bars.loss_bars", "quant_type").described(
            "Overflow and underflow by quant type",
            "Bars: share of all elements of each quant type beyond the upper and the lower limit, and below "
            "the smallest normal value.",
        ),
        "overflow_by_layer_type": plot("bars.loss_bars", "layer_type", "operation").described(
            "Overflow and underflow by layer type",
            "Bars: the same for each layer type, separately for forward and backward.",
        ),
        "overflow_upper_lower": plot("bars.upper_against_lower", "layer_type").described(
            "Upper against lower overflow",
            "Each point is a tensor: its share beyond the positive limit against that beyond the negative one.",
        ),
        "overflow_histogram": plot("bars.ratio_histogram").described(
            "Tensors by overflow ratio",
            "Tensors counted by their overflow ratio, and by their underflow ratio.",
        ),
    },
    "fp8_analysis": {
        "fp8_distributions": plot(
            *("distributions.distributions", "quant_type", "operation"), of=of_two_types, needs=(two_types,)
        ).described(
            "Distributions of two quant types",
            "HiFP8 against MXFP8 (or the two most frequent quant types): shape and range.",
        ),
        "fp8_statistics": plot(
            "bars.boxes", "quant_type", "operation", of=of_two_types, needs=(two_types,), panels="ends"
        ).described(
            "Statistics of two quant types",
            "Box plots of mean, standard deviation, minimum and maximum over tensors of both quant types.",
        ),
        "fp8_scatter": plot(
            "bars.pairs", "quant_type", of=of_two_types, needs=(two_types, matched_pairs), reads_values=True
        ).described(
            "The same tensor in two quant types",
            "Values of one against those of the other, element by element, and the correlation of each tensor.",
        ),
        "fp8_normal_fit": plot(
            "distributions.normal_fit", "quant_type", "operation", of=of_two_types, needs=(two_types,)
        ).described(
            "Normal fit of two quant types",
            "Quantiles of both quant types against those of a normal distribution, and the distance between them.",
        ),
    },
    "bf16_analysis": {
        "bf16_raw": plot("distributions.densities", "operation", **IN_BF16, panels=("raw",)).described(
            "Raw distribution of BF16", "Density of the values as they are, forward and backward."
        ),
        "bf16_density": plot("distributions.densities", "operation", **IN_BF16, panels=("normalised",)).described(
            "Density of BF16 normalised to [0, 1]",
            "The same values scaled to [0, 1], and the density relative to its largest value.",
        ),
        "bf16_raw_against_normalised": plot(
            "distributions.densities", "operation", **IN_BF16, panels=("raw", "normalised", "both")
        ).described(
            "Raw against normalised density of BF16",
            "Both densities of the same bins, side by side and one against the other.",
        ),
        "bf16_statistics": plot("bars.boxes", "layer_type", "operation", **IN_BF16, panels="shapes").described(
            "Variance, skewness and kurtosis of BF16", "Box plots over BF16 tensors, by layer type and operation."
        ),
    },
    "backward_analysis": {
        "forward_against_backward": plot(
            "distributions.distributions", "operation", needs=(BACKWARD, FORWARD)
        ).described("Forward against backward", "Values of forward and backward: shape and range."),
        "backward_statistics": plot("bars.boxes", "operation", needs=(BACKWARD, FORWARD)).described(
            "Statistics of forward and backward", "Box plots over tensors of forward and backward."
        ),
        "backward_by_layer_type": plot(
            "distributions.distributions",
            "layer_type",
            of={"operation": "backward"},
            needs=(BACKWARD, several_backward),
        ).described("Backward by layer type", "Values of backward of each layer type: shape and range."),
        "gradients": plot("distributions.occupancy", "tensor_name", of=of_gradients, needs=(some_gradient,)).described(
            "Range of gradients and of formats",
            "Share of the values of each gradient in each binade, with the ranges of formats below.",
        ),
    },
    "rank_analysis": {
        "rank_deviation": plot("heat_maps.rank_deviation", needs=(several("rank"),)).described(
            "Each rank against the median rank",
            "For each layer and rank, the absmax relative to the median rank, for the most extreme tensor.",
        ),
    },
    REPLAYED: {
        "replay_modules": plot("heat_maps.recipe_map", needs=(a_product,), reads_values=True).described(
            "SQNR of each product by module and recipe",
            "For each product of each module, the signal-to-noise ratio in each recipe, over all calls.",
        ),
    },
}
FOLDERS = tuple(_BY_FOLDER)
"""The folders of the legacy tool, in its order, and `REPLAYED`."""

_ORDER = ("overflow_analysis", "heatmaps", "distributions", "statistics", *_BY_FOLDER)
"""The order in which folders are drawn. The last one of several plots that show the same is drawn."""

PLOTS = {
    name: replace(row, name=name, folder=folder)
    for folder in dict.fromkeys(_ORDER)
    for name, row in _BY_FOLDER[folder].items()
}
"""All plots by name."""
