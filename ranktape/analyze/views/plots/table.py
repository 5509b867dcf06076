"""The one table of plots: their names, titles and folders, what each needs, and how it is drawn.

To add a plot, add a row; one that is drawn in a new way names a new function in a module of this folder. Nothing is
imported here that takes long: the help of the command names all plots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ranktape.analyze.views.plots.plot import (
    Need,
    Plot,
    a_product,
    a_scale,
    has,
    matched_pairs,
    of_two_types,
    plot,
    several,
    several_backward,
    several_samples,
    some_gradient,
    two_layers,
    two_types,
)

BF16 = {"quant_type": ["bf16"]}
"""What the plots of BF16 are of: tensors of other quant types may be held in bfloat16, too."""

IN_BF16 = has("no tensor is of the quant type bf16", **BF16)
ATTENTION = has("no tensor is of attention", layer_type="attention")
LINEAR = has("no tensor is of a linear layer", layer_type="linear")
FORWARD = has("nothing of forward was recorded", operation="forward")
BACKWARD = has("nothing of backward was recorded", operation="backward")


def _distributions(*by: str, **more: Any) -> Plot:
    return plot("distributions.distributions", *by, **more)


def _boxes(*by: str, **more: Any) -> Plot:
    return plot("boxes.boxes", *by, **more)


def _of_attention_and_linear(draw: Callable[..., Plot]) -> Plot:
    return draw("layer_type", "operation", of={"layer_type": ["attention", "linear"]}, needs=(LINEAR, ATTENTION))


def _of_two_types(function: str, *needs: Need, **options: Any) -> Plot:
    return plot(function, "quant_type", "operation", of=of_two_types, needs=(two_types, *needs), **options)


def _in_bf16(function: str, *by: str, **options: Any) -> Plot:
    return plot(function, *by, of=BF16, needs=(IN_BF16,), **options)


_OF_CELLS = {
    "underflow": ("Underflow", "part of the elements that is below the smallest normal value, zeros left out"),
    "absmax": ("Largest magnitude", "largest magnitude, infinities included"),
}

REPLAYED = "replay_analysis"
"""The folder of the plots that compute products again."""

_BY_FOLDER = {
    "distributions": {
        "distribution_by_phase": _distributions("phase", "operation").says(
            "Distribution by phase",
            "Values before and after an operation: shape in units of the standard deviation, and range in binades.",
        ),
        "distribution_by_batch_size": _distributions("batch_size", "operation").says(
            "Distribution by batch size", "Values of tensors with each number of samples: shape and range."
        ),
    },
    "heatmaps": {
        f"layer_{field}_{metric}": plot(
            "heat_maps.heat_map",
            needs=(several_samples if field == "sample" else several(field),),
            field=field,
            metric=metric,
        ).says(f"{title} by layer and {field}", f"For each layer and {field}, forward and backward: {what}.")
        for field in ("rank", "iteration", "sample")
        for metric, (title, what) in _OF_CELLS.items()
        if (field, metric) != ("sample", "underflow")
    },
    "comparisons": {
        "neighbouring_layers": plot("lines.neighbouring_layers", "operation", needs=(two_layers,)).says(
            "Each layer against the one before it",
            "Factor by which the standard deviation and absmax grow from a layer to the next, and how far "
            "the distributions lie apart.",
        ),
        "sample_differences": plot("lines.sample_differences", needs=(several_samples,)).says(
            "Samples against the median sample",
            "For each sample the absmax over that of the median sample of the same tensor: the mean over "
            "tensors, and from the lowest to the highest.",
        ),
    },
    "statistics": {
        "statistics_by_tensor": _boxes("tensor_name").says(
            "Statistics by tensor", "Box plots over tensors of each name: mean, standard deviation, absmax, kurtosis."
        ),
        "statistics_by_iteration": plot(
            "lines.lines", "operation", needs=(several("iteration"),), field="iteration"
        ).says(
            "Statistics over iterations",
            "Lines over iterations: standard deviation, absmax, overflow and underflow, forward and backward.",
        ),
    },
    "attention_analysis": {
        "attention_against_linear": _of_attention_and_linear(_distributions).says(
            "Attention against linear",
            "Values of attention and of linear layers, forward and backward: shape and range.",
        ),
        "attention_tensors": _distributions(
            "tensor_name", "operation", of={"layer_type": "attention"}, needs=(ATTENTION,)
        ).says("Tensors of attention", "Values of query, key, value, output and their gradients: shape and range."),
    },
    "quantization_analysis": {
        "sweep_panels": plot("losses.sweep", needs=(a_scale,), reads_values=True).says(
            "What every scale loses",
            "Six panels: each metric of the sweep over the scales of one tensor, the one that needs the widest range.",
        ),
    },
    "layer_analysis": {
        "layer_binades": plot("heat_maps.binade_map").says(
            "Where the values of each layer lie",
            "For each layer the part of its values in each binade, above the ranges of the formats as bands.",
        ),
        "layer_statistics": plot("lines.lines", "layer_type", "operation", field="layer_idx").says(
            "Statistics by layer",
            "Lines over layers for each layer type: standard deviation, absmax, kurtosis and range in binades.",
        ),
    },
    "overflow_analysis": {
        "overflow": plot("overflow_layers.overflow_by_layer").says(
            "Overflow and underflow by layer",
            "Part of the elements of each layer and layer type that overflows and underflows, and its worst tensor.",
        ),
        "overflow_by_quant_type": plot("losses.loss_bars", "quant_type").says(
            "Overflow and underflow by quant type",
            "Bars: part of all elements of each quant type beyond the upper limit, the lower limit, and "
            "below the normals.",
        ),
        "overflow_by_layer_type": plot("losses.loss_bars", "layer_type", "operation").says(
            "Overflow and underflow by layer type",
            "Bars: the same for each layer type, forward and backward apart.",
        ),
        "overflow_upper_lower": plot("losses.upper_against_lower", "layer_type").says(
            "Upper against lower overflow",
            "Each point is a tensor: its part beyond the positive limit against that beyond the negative one.",
        ),
        "overflow_histogram": plot("losses.ratio_histogram").says(
            "How many tensors overflow how much",
            "Tensors counted by their overflow ratio, and by their underflow ratio.",
        ),
    },
    "fp8_analysis": {
        "fp8_distributions": _of_two_types("distributions.distributions").says(
            "Distributions of two quant types",
            "HiFP8 against MXFP8 (or the two most frequent quant types): shape and range.",
        ),
        "fp8_statistics": _of_two_types("boxes.boxes", panels="ends").says(
            "Statistics of two quant types",
            "Box plots of mean, standard deviation, minimum and maximum over tensors of both quant types.",
        ),
        "fp8_scatter": _of_two_types("losses.pairs", matched_pairs, reads_values=True).says(
            "The same tensor in two quant types",
            "Values of one against those of the other, element by element, and the correlation of each tensor.",
        ),
        "fp8_normal_fit": _of_two_types("distributions.normal_fit").says(
            "How normal two quant types are",
            "Quantiles of both quant types against those of a normal distribution, and the distance between them.",
        ),
    },
    "bf16_analysis": {
        "bf16_raw": _in_bf16("distributions.raw_densities", "operation").says(
            "Raw distribution of BF16", "Density of the values as they are, forward and backward."
        ),
        "bf16_density": _in_bf16("distributions.normalised_densities", "operation").says(
            "Density of BF16 normalised to [0, 1]",
            "The same values moved to [0, 1] and the density over its largest value.",
        ),
        "bf16_raw_against_normalised": _in_bf16("distributions.both_densities", "operation").says(
            "Raw against normalised density of BF16",
            "Both densities of the same bins, side by side and one against the other.",
        ),
        "bf16_statistics": _in_bf16("boxes.boxes", "layer_type", "operation", panels="shapes").says(
            "Variance, skewness and kurtosis of BF16", "Box plots over BF16 tensors, by layer type and operation."
        ),
    },
    "backward_analysis": {
        "forward_against_backward": _distributions("operation", needs=(BACKWARD, FORWARD)).says(
            "Forward against backward", "Values of forward and backward: shape and range."
        ),
        "backward_statistics": _boxes("operation", needs=(BACKWARD, FORWARD)).says(
            "Statistics of forward and backward", "Box plots over tensors of forward and backward."
        ),
        "backward_by_layer_type": _distributions(
            "layer_type", of={"operation": "backward"}, needs=(BACKWARD, several_backward)
        ).says("Backward by layer type", "Values of backward of each layer type: shape and range."),
        "gradients": plot(
            "distributions.occupancy",
            "tensor_name",
            of=lambda data: {"tensor_name": data.gradient_names()},
            needs=(some_gradient,),
        ).says(
            "Gradients, and which formats reach them",
            "Part of the values of each gradient in each binade, above the ranges of the formats as bands.",
        ),
    },
    "rank_analysis": {
        "rank_deviation": plot("heat_maps.rank_deviation", needs=(several("rank"),)).says(
            "Each rank against the median rank",
            "For each layer and rank the absmax over that of the median rank: the tensor that is farthest off.",
        ),
    },
    REPLAYED: {
        "replay_modules": plot("recipes.by_module", needs=(a_product,), reads_values=True).says(
            "What recipes keep of each product, by module",
            "For each product of each module the signal to noise ratio in each recipe, all calls together.",
        ),
    },
}
FOLDERS = tuple(_BY_FOLDER)
"""The folders of the legacy tool, in its order, and one of ours."""

_ORDER = ("overflow_analysis", "heatmaps", "distributions", "statistics", *_BY_FOLDER)
"""In which folders are drawn: of plots that show the same, the last one is."""

PLOTS = {
    name: replace(row, name=name, folder=folder)
    for folder in dict.fromkeys(_ORDER)
    for name, row in _BY_FOLDER[folder].items()
}
"""Every plot by its name."""
