"""The one table of plots: their names, titles and folders, what each needs, and how it is drawn.

To add a plot, add a row; one that is drawn in a new way names a new function of `drawing`.
"""

from __future__ import annotations

from dataclasses import replace

from ranktape.analyze.views.plots.plot import (
    Plot,
    a_scale,
    gradients,
    has,
    pairs,
    plot,
    several,
    several_backward,
    several_samples,
    two_layers,
    two_types,
)

FOLDERS = (
    *("distributions", "heatmaps", "comparisons", "statistics", "attention_analysis", "quantization_analysis"),
    *("layer_analysis", "overflow_analysis", "fp8_analysis", "bf16_analysis", "backward_analysis", "rank_analysis"),
)
"""The folders of the legacy tool, in its order."""

BF16 = {"quant_type": ["bf16"]}
"""What the plots of BF16 are of: tensors of other quant types may be held in bfloat16, too."""

ATTENTION_AND_LINEAR = {"layer_type": ["attention", "linear"]}

IN_BF16 = has("no tensor is of the quant type bf16", **BF16)
ATTENTION = has("no tensor is of attention", layer_type="attention")
LINEAR = has("no tensor is of a linear layer", layer_type="linear")
FORWARD = has("nothing of forward was recorded", operation="forward")
BACKWARD = has("nothing of backward was recorded", operation="backward")

_OF_CELLS = {
    "overflow": ("Overflow", "part of the elements that is beyond the largest value"),
    "underflow": ("Underflow", "part of the elements that is below the smallest normal value, zeros left out"),
    "absmax": ("Largest magnitude", "largest magnitude, infinities included"),
    "std": ("Standard deviation", "standard deviation of all finite values"),
}


def _heat_maps() -> list[Plot]:
    return [
        plot(
            f"layer_{field}_{metric}",
            f"{title} by layer and {field}",
            f"For each layer and {field}, forward and backward: {what}.",
            draw="sample_map" if field == "sample" else "heat_map",
            needs=(several_samples if field == "sample" else several(field),),
            options={"metric": metric} | ({} if field == "sample" else {"field": field}),
        )
        for field in ("rank", "iteration", "sample")
        for metric, (title, what) in _OF_CELLS.items()
    ]


_BY_FOLDER = {
    "overflow_analysis": (
        plot(
            "overflow",
            "Overflow and underflow by layer",
            "Part of the elements of each layer and layer type that overflows and underflows, and its worst tensor.",
            draw="overflow",
        ),
        plot(
            "overflow_by_quant_type",
            "Overflow and underflow by quant type",
            "Bars: part of all elements of each quant type beyond the upper limit, the lower limit, and "
            "below the normals.",
            draw="loss_bars",
            by=("quant_type",),
        ),
        plot(
            "overflow_by_layer_type",
            "Overflow and underflow by layer type",
            "Bars: the same for each layer type, forward and backward apart.",
            draw="loss_bars",
            by=("layer_type", "operation"),
        ),
        plot(
            "overflow_upper_lower",
            "Upper against lower overflow",
            "Each point is a tensor: its part beyond the positive limit against that beyond the negative one.",
            draw="upper_against_lower",
            by=("layer_type",),
        ),
        plot(
            "overflow_histogram",
            "How many tensors overflow how much",
            "Tensors counted by their overflow ratio, and by their underflow ratio.",
            draw="ratio_histogram",
        ),
    ),
    "heatmaps": tuple(_heat_maps()),
    "distributions": (
        plot(
            "exponent_occupancy",
            "Which octaves hold the values, and which formats reach them",
            "Part of all values in each octave, forward and backward, above the ranges of the formats as bands.",
            draw="occupancy",
            by=("operation",),
        ),
        plot(
            "distribution_by_phase",
            "Distribution by phase",
            "Values before and after an operation: shape in units of the standard deviation, and range in octaves.",
            draw="distributions",
            by=("phase", "operation"),
        ),
        plot(
            "distribution_by_component",
            "Distribution by component",
            "Values of each component, such as FA and linear: shape and range.",
            draw="distributions",
            by=("component", "operation"),
        ),
        plot(
            "distribution_by_batch_size",
            "Distribution by batch size",
            "Values of tensors with each number of samples: shape and range.",
            draw="distributions",
            by=("batch_size", "operation"),
        ),
        plot(
            "distribution_by_tensor",
            "Distribution by tensor",
            "Values of each tensor name, such as input, weight and grad_output: shape and range.",
            draw="distributions",
            by=("tensor_name",),
        ),
    ),
    "statistics": (
        plot(
            "statistics_by_tensor",
            "Statistics by tensor",
            "Box plots over tensors of each name: mean, standard deviation, absmax, kurtosis.",
            draw="boxes",
            by=("tensor_name",),
        ),
        plot(
            "statistics_by_phase",
            "Statistics by phase",
            "Box plots over tensors of each phase.",
            draw="boxes",
            by=("phase", "operation"),
        ),
        plot(
            "statistics_by_component",
            "Statistics by component",
            "Box plots over tensors of each component.",
            draw="boxes",
            by=("component", "operation"),
        ),
        plot(
            "statistics_by_iteration",
            "Statistics over iterations",
            "Lines over iterations: standard deviation, absmax, overflow and underflow, forward and backward.",
            draw="lines",
            by=("operation",),
            needs=(several("iteration"),),
            options={"field": "iteration"},
        ),
    ),
    "comparisons": (
        plot(
            "neighbouring_layers",
            "Each layer against the one before it",
            "Factor by which the standard deviation and absmax grow from a layer to the next, and how far "
            "the distributions lie apart.",
            draw="neighbouring_layers",
            by=("operation",),
            needs=(two_layers,),
        ),
        plot(
            "batch_differences",
            "Statistics by batch size",
            "Box plots over tensors with each number of samples.",
            draw="boxes",
            by=("batch_size", "operation"),
        ),
        plot(
            "sample_differences",
            "Samples against the median sample",
            "For each sample the absmax over that of the median sample of the same tensor: the mean over "
            "tensors, and from the lowest to the highest.",
            draw="sample_differences",
            needs=(several_samples,),
        ),
    ),
    "attention_analysis": (
        plot(
            "attention_against_linear",
            "Attention against linear",
            "Values of attention and of linear layers, forward and backward: shape and range.",
            draw="distributions",
            by=("layer_type", "operation"),
            of=ATTENTION_AND_LINEAR,
            needs=(LINEAR, ATTENTION),
        ),
        plot(
            "attention_statistics",
            "Statistics of attention and linear layers",
            "Box plots over tensors of attention and of linear layers, forward and backward.",
            draw="boxes",
            by=("layer_type", "operation"),
            of=ATTENTION_AND_LINEAR,
            needs=(LINEAR, ATTENTION),
        ),
        plot(
            "attention_tensors",
            "Tensors of attention",
            "Values of query, key, value, output and their gradients: shape and range.",
            draw="distributions",
            by=("tensor_name", "operation"),
            of={"layer_type": "attention"},
            needs=(ATTENTION,),
        ),
    ),
    "quantization_analysis": (
        plot(
            "distribution_by_quant_type",
            "Distribution by quant type",
            "Values of each quant type: shape and range.",
            draw="distributions",
            by=("quant_type", "operation"),
        ),
        plot(
            "statistics_by_quant_type",
            "Statistics by quant type",
            "Box plots over tensors of each quant type.",
            draw="boxes",
            by=("quant_type", "operation"),
        ),
        plot(
            "sweep_panels",
            "What every scale loses",
            "Six panels: each figure of the sweep over the scales of one tensor, the one that needs the widest range.",
            draw="sweep",
            needs=(a_scale,),
            options={"is_summary": False},
        ),
        plot(
            "sweep_summary",
            "What every scale loses, in short",
            "MSE, cosine and PSNR of the same sweep beside a box of statistics.",
            draw="sweep",
            needs=(a_scale,),
            options={"is_summary": True},
        ),
    ),
    "layer_analysis": (
        plot(
            "layer_octaves",
            "Where the values of each layer lie",
            "For each layer the part of its values in each octave, above the ranges of the formats as bands.",
            draw="octave_map",
            options={"field": "layer_idx"},
        ),
        plot(
            "layer_statistics",
            "Statistics by layer",
            "Lines over layers for each layer type: standard deviation, absmax, kurtosis and range in octaves.",
            draw="lines",
            by=("layer_type", "operation"),
            options={"field": "layer_idx"},
        ),
    ),
    "fp8_analysis": (
        plot(
            "fp8_distributions",
            "Distributions of two quant types",
            "HiFP8 against MXFP8 (or the two most frequent quant types): shape and range.",
            draw="distributions_of_two",
            needs=(two_types,),
        ),
        plot(
            "fp8_statistics",
            "Statistics of two quant types",
            "Box plots of mean, standard deviation, minimum and maximum over tensors of both quant types.",
            draw="boxes_of_two",
            needs=(two_types,),
        ),
        plot(
            "fp8_scatter",
            "The same tensor in two quant types",
            "Values of one against those of the other, element by element, and the correlation of each tensor.",
            draw="pairs",
            needs=(two_types, pairs),
        ),
        plot(
            "fp8_normal_fit",
            "How normal two quant types are",
            "Quantiles of both quant types against those of a normal distribution, and the distance between them.",
            draw="normal_fit",
            needs=(two_types,),
        ),
    ),
    "bf16_analysis": (
        plot(
            "bf16_raw",
            "Raw distribution of BF16",
            "Density of the values as they are, forward and backward.",
            draw="densities",
            by=("operation",),
            of=BF16,
            needs=(IN_BF16,),
            options={"which": "raw"},
        ),
        plot(
            "bf16_density",
            "Density of BF16 normalised to [0, 1]",
            "The same values moved to [0, 1] and the density over its largest value.",
            draw="densities",
            by=("operation",),
            of=BF16,
            needs=(IN_BF16,),
            options={"which": "normalised"},
        ),
        plot(
            "bf16_raw_against_normalised",
            "Raw against normalised density of BF16",
            "Both densities of the same bins, side by side and one against the other.",
            draw="densities",
            by=("operation",),
            of=BF16,
            needs=(IN_BF16,),
            options={"which": "both"},
        ),
        plot(
            "bf16_statistics",
            "Variance, skewness and kurtosis of BF16",
            "Box plots over BF16 tensors, by layer type and operation.",
            draw="box_shapes",
            by=("layer_type", "operation"),
            of=BF16,
            needs=(IN_BF16,),
        ),
    ),
    "backward_analysis": (
        plot(
            "forward_against_backward",
            "Forward against backward",
            "Values of forward and backward: shape and range.",
            draw="distributions",
            by=("operation",),
            needs=(BACKWARD, FORWARD),
        ),
        plot(
            "backward_statistics",
            "Statistics of forward and backward",
            "Box plots over tensors of forward and backward.",
            draw="boxes",
            by=("operation",),
            needs=(BACKWARD, FORWARD),
        ),
        plot(
            "backward_by_layer_type",
            "Backward by layer type",
            "Values of backward of each layer type: shape and range.",
            draw="distributions",
            by=("layer_type",),
            of={"operation": "backward"},
            needs=(BACKWARD, several_backward),
        ),
        plot(
            "gradients",
            "Gradients, and which formats reach them",
            "Part of the values of each gradient in each octave, above the ranges of the formats as bands.",
            draw="gradients",
            by=("tensor_name",),
            needs=(gradients,),
        ),
    ),
    "rank_analysis": (
        plot(
            "rank_figures",
            "Figures of each rank",
            "Standard deviation, absmax, overflow and underflow of each rank, forward and backward.",
            draw="lines",
            by=("operation",),
            needs=(several("rank"),),
            options={"field": "rank"},
        ),
        plot(
            "rank_octaves",
            "Where the values of each rank lie",
            "For each rank the part of its values in each octave, above the ranges of the formats as bands.",
            draw="octave_map",
            needs=(several("rank"),),
            options={"field": "rank"},
        ),
        plot(
            "rank_deviation",
            "Each rank against the median rank",
            "For each layer and rank the absmax over that of the median rank: the tensor that is farthest off.",
            draw="rank_deviation",
            needs=(several("rank"),),
        ),
        plot(
            "rank_against_rank",
            "Rank against rank",
            "For each pair of ranks how far the standard deviations of the same tensors lie apart, on average.",
            draw="rank_against_rank",
            needs=(several("rank"),),
        ),
    ),
}

_ALL = [replace(one, folder=folder) for folder, plots in _BY_FOLDER.items() for one in plots]

PLOTS = {one.name: one for one in _ALL}
"""Every plot by its name."""
