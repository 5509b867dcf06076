"""The function that draws each plot, and the one that says why it cannot be drawn of a selection."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ranktape.analyze.views.plots import boxes, lines
from ranktape.analyze.views.plots.boxes import draw_boxes
from ranktape.analyze.views.plots.distributions import (
    draw_distributions,
    draw_normal_fit,
    draw_normalised,
    draw_raw,
    draw_raw_against_normalised,
)
from ranktape.analyze.views.plots.kinds import KINDS
from ranktape.analyze.views.plots.losses import draw_ratio_histogram
from ranktape.analyze.views.plots.needs import (
    BF16,
    Reason,
    gradient_names,
    needs_attention,
    needs_attention_and_linear,
    needs_backward_of_several,
    needs_bf16,
    needs_both,
    needs_layers,
    needs_pairs,
    needs_scale,
    needs_several,
    needs_several_samples,
    needs_two_types,
)
from ranktape.analyze.views.plots.recipes import (
    FIGURES,
    Recipe,
    boxes_of,
    compared,
    gradients_picture,
    heading_of,
    heat_map_of,
    lines_of,
    neighbours_picture,
    occupancy_of,
    octave_map_of,
    of_bf16,
    of_two_types,
    overflow_picture,
    pairs_picture,
    rank_against_rank_picture,
    rank_deviation_picture,
    sample_differences_picture,
    sample_map_of,
    sweep_of,
    upper_lower_picture,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ranktape.analyze.views.plots.survey import Survey


def draw(name: str, survey: Survey) -> Figure:
    """The plot of that name; `missing` has said that there is nothing missing."""
    return RECIPES[name].draw(survey, heading_of(name, survey))


def missing(name: str, survey: Survey) -> Reason:
    """Why the plot of that name cannot be drawn of a selection; empty where it can. Nothing is read."""
    return RECIPES[name].needs(survey)


def content(name: str, survey: Survey) -> Hashable:
    """What is the same of plots that show the same under other names; None where no other can. Nothing is read."""
    return RECIPES[name].content(survey)


RECIPES: Mapping[str, Recipe] = {
    "overflow": Recipe(draw=overflow_picture),
    "overflow_by_quant_type": compared("loss bars", "quant_type"),
    "overflow_by_layer_type": compared("loss bars", "layer_type", "operation"),
    "overflow_upper_lower": Recipe(draw=upper_lower_picture),
    "overflow_histogram": Recipe(draw=lambda survey, heading: draw_ratio_histogram(survey, heading=heading)),
    **{
        f"layer_{field}_{one}": Recipe(draw=heat_map_of(field, one), needs=needs_several(field, field))
        for field in ("rank", "iteration")
        for one in FIGURES
    },
    **{f"layer_sample_{one}": Recipe(draw=sample_map_of(one), needs=needs_several_samples) for one in FIGURES},
    "exponent_occupancy": Recipe(draw=occupancy_of("operation")),
    "distribution_by_phase": compared("distributions", "phase", "operation"),
    "distribution_by_component": compared("distributions", "component", "operation"),
    "distribution_by_batch_size": compared("distributions", "batch_size", "operation"),
    "distribution_by_tensor": compared("distributions", "tensor_name"),
    "statistics_by_tensor": compared("boxes", "tensor_name"),
    "statistics_by_phase": compared("boxes", "phase", "operation"),
    "statistics_by_component": compared("boxes", "component", "operation"),
    "statistics_by_iteration": Recipe(
        draw=lines_of("iteration", "operation"), needs=needs_several("iteration", "iteration")
    ),
    "neighbouring_layers": Recipe(draw=neighbours_picture, needs=needs_layers),
    "batch_differences": compared("boxes", "batch_size", "operation"),
    "sample_differences": Recipe(draw=sample_differences_picture, needs=needs_several_samples),
    "attention_against_linear": replace(
        compared("distributions", "layer_type", "operation", layer_type=["attention", "linear"]),
        needs=needs_attention_and_linear,
    ),
    "attention_statistics": replace(
        compared("boxes", "layer_type", "operation", layer_type=["attention", "linear"]),
        needs=needs_attention_and_linear,
    ),
    "attention_tensors": replace(
        compared("distributions", "tensor_name", "operation", layer_type="attention"), needs=needs_attention
    ),
    "distribution_by_quant_type": compared("distributions", "quant_type", "operation"),
    "statistics_by_quant_type": compared("boxes", "quant_type", "operation"),
    "sweep_panels": Recipe(draw=sweep_of(is_summary=False), needs=needs_scale),
    "sweep_summary": Recipe(draw=sweep_of(is_summary=True), needs=needs_scale),
    "layer_octaves": Recipe(draw=octave_map_of("layer_idx")),
    "layer_statistics": Recipe(draw=lines_of("layer_idx", "layer_type", "operation", panels=lines.SHAPES)),
    "fp8_distributions": Recipe(
        draw=of_two_types(lambda _, heading, found: draw_distributions(found.groups, heading=heading)),
        needs=needs_two_types,
    ),
    "fp8_statistics": Recipe(
        draw=of_two_types(
            lambda survey, heading, found: draw_boxes(survey, found.groups, panels=boxes.ENDS, heading=heading)
        ),
        needs=needs_two_types,
    ),
    "fp8_scatter": Recipe(draw=of_two_types(pairs_picture), needs=needs_pairs),
    "fp8_normal_fit": Recipe(
        draw=of_two_types(lambda _, heading, found: draw_normal_fit(found.groups, heading=heading)),
        needs=needs_two_types,
    ),
    "bf16_raw": Recipe(draw=of_bf16(draw_raw), needs=needs_bf16),
    "bf16_density": Recipe(draw=of_bf16(draw_normalised), needs=needs_bf16),
    "bf16_raw_against_normalised": Recipe(draw=of_bf16(draw_raw_against_normalised), needs=needs_bf16),
    "bf16_statistics": Recipe(
        draw=boxes_of("layer_type", "operation", panels=boxes.SHAPES, quant_type=BF16), needs=needs_bf16
    ),
    "forward_against_backward": replace(compared("distributions", "operation"), needs=needs_both),
    "backward_statistics": replace(compared("boxes", "operation"), needs=needs_both),
    "backward_by_layer_type": replace(
        compared("distributions", "layer_type", operation="backward"), needs=needs_backward_of_several
    ),
    "gradients": Recipe(
        draw=gradients_picture,
        needs=lambda survey: "" if gradient_names(survey) else "no tensor is a gradient: none is called grad_...",
    ),
    "rank_figures": Recipe(draw=lines_of("rank", "operation"), needs=needs_several("rank", "rank")),
    "rank_octaves": Recipe(draw=octave_map_of("rank"), needs=needs_several("rank", "rank")),
    "rank_deviation": Recipe(draw=rank_deviation_picture, needs=needs_several("rank", "rank")),
    "rank_against_rank": Recipe(draw=rank_against_rank_picture, needs=needs_several("rank", "rank")),
}
"""How each plot is made, in the order of `KINDS`."""

assert list(RECIPES) == list(KINDS)
