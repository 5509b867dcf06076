"""Which plots are there, in which folder does each go, and what does it show?

Nothing is imported here that takes long: the help of the command names them all.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from ranktape.errors import UsageError

FOLDERS = (
    "distributions",
    "heatmaps",
    "comparisons",
    "statistics",
    "attention_analysis",
    "quantization_analysis",
    "layer_analysis",
    "overflow_analysis",
    "fp8_analysis",
    "bf16_analysis",
    "backward_analysis",
    "rank_analysis",
)
"""The folders of the seeds, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot that can be drawn of a run."""

    name: str
    """The choice of `--kind`, and the name of the file."""
    folder: str
    """One of `FOLDERS`."""
    title: str
    """Above the plot."""
    sentence: str
    """What it shows, for the index."""

    @property
    def path(self) -> str:
        """Where its PNG goes, under the folder that is written."""
        return f"{self.folder}/{self.name}.png"


_LOSSES = {
    "overflow": ("Overflow", "part of the elements that is beyond the largest value"),
    "underflow": ("Underflow", "part of the elements that is below the smallest normal value, zeros left out"),
    "absmax": ("Largest magnitude", "largest magnitude, infinities included"),
    "std": ("Standard deviation", "standard deviation of all finite values"),
}

_AXES = {
    "rank": "rank",
    "iteration": "iteration",
    "sample": "sample",
}


def _heat_maps() -> list[Plot]:
    return [
        Plot(
            name=f"layer_{axis}_{figure}",
            folder="heatmaps",
            title=f"{title} by layer and {word}",
            sentence=f"For each layer and {word}, forward and backward: {what}.",
        )
        for axis, word in _AXES.items()
        for figure, (title, what) in _LOSSES.items()
    ]


def _kind(name: str, folder: str, title: str, sentence: str) -> Plot:
    return Plot(name=name, folder=folder, title=title, sentence=sentence)


_ALL = (
    _kind(
        "overflow",
        "overflow_analysis",
        "Overflow and underflow by layer",
        "Part of the elements of each layer and layer type that overflows and underflows, and its worst tensor.",
    ),
    _kind(
        "overflow_by_quant_type",
        "overflow_analysis",
        "Overflow and underflow by quant type",
        "Bars: part of all elements of each quant type beyond the upper limit, the lower limit, and below the normals.",
    ),
    _kind(
        "overflow_by_layer_type",
        "overflow_analysis",
        "Overflow and underflow by layer type",
        "Bars: the same for each layer type, forward and backward apart.",
    ),
    _kind(
        "overflow_upper_lower",
        "overflow_analysis",
        "Upper against lower overflow",
        "Each point is a tensor: its part beyond the positive limit against that beyond the negative one.",
    ),
    _kind(
        "overflow_histogram",
        "overflow_analysis",
        "How many tensors overflow how much",
        "Tensors counted by their overflow ratio, and by their underflow ratio.",
    ),
    *_heat_maps(),
    _kind(
        "exponent_occupancy",
        "distributions",
        "Which octaves hold the values, and which formats reach them",
        "Part of all values in each octave, forward and backward, above the ranges of the formats as bands.",
    ),
    _kind(
        "distribution_by_phase",
        "distributions",
        "Distribution by phase",
        "Values before and after an operation: shape in units of the standard deviation, and range in octaves.",
    ),
    _kind(
        "distribution_by_component",
        "distributions",
        "Distribution by component",
        "Values of each component, such as FA and linear: shape and range.",
    ),
    _kind(
        "distribution_by_batch_size",
        "distributions",
        "Distribution by batch size",
        "Values of tensors with each number of samples: shape and range.",
    ),
    _kind(
        "distribution_by_tensor",
        "distributions",
        "Distribution by tensor",
        "Values of each tensor name, such as input, weight and grad_output: shape and range.",
    ),
    _kind(
        "statistics_by_tensor",
        "statistics",
        "Statistics by tensor",
        "Box plots over tensors of each name: mean, standard deviation, absmax, kurtosis.",
    ),
    _kind(
        "statistics_by_phase",
        "statistics",
        "Statistics by phase",
        "Box plots over tensors of each phase.",
    ),
    _kind(
        "statistics_by_component",
        "statistics",
        "Statistics by component",
        "Box plots over tensors of each component.",
    ),
    _kind(
        "statistics_by_iteration",
        "statistics",
        "Statistics over iterations",
        "Lines over iterations: standard deviation, absmax, overflow and underflow, forward and backward.",
    ),
    _kind(
        "neighbouring_layers",
        "comparisons",
        "Each layer against the one before it",
        "Factor by which the standard deviation and absmax grow from a layer to the next, and how far the "
        "distributions lie apart.",
    ),
    _kind(
        "batch_differences",
        "comparisons",
        "Statistics by batch size",
        "Box plots over tensors with each number of samples.",
    ),
    _kind(
        "sample_differences",
        "comparisons",
        "Samples against the median sample",
        "For each sample the absmax over that of the median sample of the same tensor: the mean over tensors, and "
        "from the lowest to the highest.",
    ),
    _kind(
        "attention_against_linear",
        "attention_analysis",
        "Attention against linear",
        "Values of attention and of linear layers, forward and backward: shape and range.",
    ),
    _kind(
        "attention_statistics",
        "attention_analysis",
        "Statistics of attention and linear layers",
        "Box plots over tensors of attention and of linear layers, forward and backward.",
    ),
    _kind(
        "attention_tensors",
        "attention_analysis",
        "Tensors of attention",
        "Values of query, key, value, output and their gradients: shape and range.",
    ),
    _kind(
        "distribution_by_quant_type",
        "quantization_analysis",
        "Distribution by quant type",
        "Values of each quant type: shape and range.",
    ),
    _kind(
        "statistics_by_quant_type",
        "quantization_analysis",
        "Statistics by quant type",
        "Box plots over tensors of each quant type.",
    ),
    _kind(
        "sweep_panels",
        "quantization_analysis",
        "What every scale loses",
        "Six panels: each figure of the sweep over the scales of one tensor, the one that needs the widest range.",
    ),
    _kind(
        "sweep_summary",
        "quantization_analysis",
        "What every scale loses, in short",
        "MSE, cosine and PSNR of the same sweep beside a box of statistics.",
    ),
    _kind(
        "layer_octaves",
        "layer_analysis",
        "Where the values of each layer lie",
        "For each layer the part of its values in each octave, above the ranges of the formats as bands.",
    ),
    _kind(
        "layer_statistics",
        "layer_analysis",
        "Statistics by layer",
        "Lines over layers for each layer type: standard deviation, absmax, kurtosis and range in octaves.",
    ),
    _kind(
        "fp8_distributions",
        "fp8_analysis",
        "Distributions of two quant types",
        "HiFP8 against MXFP8 (or the two most frequent quant types): shape and range.",
    ),
    _kind(
        "fp8_statistics",
        "fp8_analysis",
        "Statistics of two quant types",
        "Box plots of mean, standard deviation, minimum and maximum over tensors of both quant types.",
    ),
    _kind(
        "fp8_scatter",
        "fp8_analysis",
        "The same tensor in two quant types",
        "Values of one against those of the other, element by element, and the correlation of each tensor.",
    ),
    _kind(
        "fp8_normal_fit",
        "fp8_analysis",
        "How normal two quant types are",
        "Quantiles of both quant types against those of a normal distribution, and the distance between them.",
    ),
    _kind(
        "bf16_raw",
        "bf16_analysis",
        "Raw distribution of BF16",
        "Density of the values as they are, forward and backward.",
    ),
    _kind(
        "bf16_density",
        "bf16_analysis",
        "Density of BF16 normalised to [0, 1]",
        "The same values moved to [0, 1] and the density over its largest value.",
    ),
    _kind(
        "bf16_raw_against_normalised",
        "bf16_analysis",
        "Raw against normalised density of BF16",
        "Both densities of the same bins, side by side and one against the other.",
    ),
    _kind(
        "bf16_statistics",
        "bf16_analysis",
        "Variance, skewness and kurtosis of BF16",
        "Box plots over BF16 tensors, by layer type and operation.",
    ),
    _kind(
        "forward_against_backward",
        "backward_analysis",
        "Forward against backward",
        "Values of forward and backward: shape and range.",
    ),
    _kind(
        "backward_statistics",
        "backward_analysis",
        "Statistics of forward and backward",
        "Box plots over tensors of forward and backward.",
    ),
    _kind(
        "backward_by_layer_type",
        "backward_analysis",
        "Backward by layer type",
        "Values of backward of each layer type: shape and range.",
    ),
    _kind(
        "gradients",
        "backward_analysis",
        "Gradients, and which formats reach them",
        "Part of the values of each gradient in each octave, above the ranges of the formats as bands.",
    ),
    _kind(
        "rank_figures",
        "rank_analysis",
        "Figures of each rank",
        "Standard deviation, absmax, overflow and underflow of each rank, forward and backward.",
    ),
    _kind(
        "rank_octaves",
        "rank_analysis",
        "Where the values of each rank lie",
        "For each rank the part of its values in each octave, above the ranges of the formats as bands.",
    ),
    _kind(
        "rank_deviation",
        "rank_analysis",
        "Each rank against the median rank",
        "For each layer and rank the absmax over that of the median rank: the tensor that is farthest off.",
    ),
    _kind(
        "rank_against_rank",
        "rank_analysis",
        "Rank against rank",
        "For each pair of ranks how far the standard deviations of the same tensors lie apart, on average.",
    ),
)

KINDS = {one.name: one for one in _ALL}
"""Every plot by its name."""


def parse_kinds(texts: Sequence[str]) -> list[Plot]:
    """The plots that texts name: their own names, names with * and ?, folders; each once, in the order of `KINDS`.

    Raises:
        UsageError: a text names none; the message has the nearest names.
    """
    found: set[str] = set()
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        wanted = text.replace("-", "_").rstrip("/")
        named = [one.name for one in _ALL if fnmatch.fnmatchcase(one.name, wanted) or wanted in {one.folder, one.path}]
        if not named:
            near = difflib.get_close_matches(wanted, [*KINDS, *FOLDERS], n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(KINDS)}"
            raise UsageError(f"--kind {text!r} names no plot: {hint}")
        found.update(named)
    return [one for one in _ALL if one.name in found]
