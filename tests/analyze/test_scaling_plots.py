"""The plots of a sweep are readable, and show what the sweep says."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ranktape.analyze.legacy.plots import PANELS, draw_panels, draw_summary
from ranktape.analyze.legacy.text import limits_of, results_text, statistics_lines
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array
from ranktape.analyze.questions.advice import Recommendation
from ranktape.analyze.views.plots.style import plot_bytes
from tests.analyze.test_plots import readable_texts, texts
from tests.analyze.test_scaling_outputs import NORMAL, SUBJECT, sweep_of
from tests.exhaustive import exhaustive_but, sampled


def fraction_of_ink(png: bytes) -> float:
    """How much of a plot is not white."""
    from io import BytesIO

    from matplotlib.image import imread

    return float((imread(BytesIO(png))[..., :3].min(axis=-1) < 0.95).mean())


@pytest.mark.parametrize(
    "name",
    sampled(
        ["e4m3", "mx", "nvfp4", "gradient", "one level", "many levels", "some lossless", "all lossless", "zeros"],
        keep=3,
    ),
)
def test_pictures_are_readable(name: str) -> None:
    sweep = sweep_of(name)
    for draw in (draw_panels, draw_summary):
        figure = draw(sweep, name="tensor $x$ _" + "long name " * 12)
        readable_texts(figure)
        assert figure.texts[0].get_text().startswith(r"tensor \$x\$ _long name")


def test_pictures_are_png_files_with_something_in_them() -> None:
    for name in ["one level", "all lossless"]:
        png = plot_bytes(draw_panels(sweep_of(name), name=name))
        assert png.startswith(b"\x89PNG")
        assert 0.001 < fraction_of_ink(png) < 0.2


def test_lines_are_the_figures_of_the_levels() -> None:
    sweep = sweep_of("e4m3")
    figure = draw_panels(sweep, name="x")
    assert len(figure.axes) == len(PANELS) == 6
    for axes, panel in zip(figure.axes, PANELS, strict=True):
        drawn = {line.get_label(): line for line in axes.get_lines() if len(np.atleast_1d(line.get_xdata())) == 21}
        assert len(drawn) == len(panel.lines)
        for line, expected in zip(drawn.values(), panel.lines, strict=True):
            assert list(line.get_xdata()) == [level.exponent for level in sweep.levels]  # type: ignore[arg-type]
            assert list(line.get_ydata()) == [expected.metric(level) for level in sweep.levels]  # type: ignore[arg-type]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "linear", "log", "log", "symlog"]


def test_the_recommended_level_and_the_format_s_limits_are_marked() -> None:
    sweep = sweep_of("many levels")
    chosen = sweep.recommended
    assert chosen is not None
    for axes in draw_panels(sweep, name="x").axes:
        upright = [
            line.get_xdata()[0]  # type: ignore[index]
            for line in axes.get_lines()
            if len(set(np.atleast_1d(line.get_xdata()).tolist())) == 1 and len(np.atleast_1d(line.get_xdata())) == 2
        ]
        assert upright == [*(limit.place for limit in limits_of(sweep)), chosen.exponent]


def test_limits_are_where_the_tensor_meets_them() -> None:
    sweep = sweep_of("many levels")
    largest, normal, flush = (limit.place for limit in limits_of(sweep))
    assert sweep.largest / 2**largest == pytest.approx(448)
    assert sweep.smallest / 2**normal == pytest.approx(2**-6)
    assert sweep.smallest / 2**flush == pytest.approx(2**-9)
    assert limits_of(sweep_of("zeros")) == []
    assert [limit.place for name in ("mx", "nvfp4", "channel") for limit in limits_of(sweep_of(name))] == [0, 0, 0]


def test_where_nothing_is_lost_the_picture_says_so() -> None:
    shown = [text.get_text() for text in texts(draw_panels(sweep_of("all lossless"), name="x"))]
    assert shown.count("no error at any level") == 4
    assert "no values are beyond the limits" in shown
    none = [text.get_text() for text in texts(draw_summary(sweep_of("zeros"), name="x"))]
    assert none.count("no level: all zero: exact at any scale") == 3


@pytest.mark.parametrize("factor", [1e200, 1e-310])
@exhaustive_but("1e+200", reason="one end of float64 is in make test")
def test_errors_beyond_float64_are_not_taken_for_none(factor: float) -> None:
    sweep = sweep_array(NORMAL.astype(np.float64) * factor, format="fp8_e4m3")
    for draw in (draw_panels, draw_summary):
        figure = draw(sweep, name="x")
        shown = [text.get_text() for text in readable_texts(figure)]
        assert "no error at any level" not in shown
        assert "outside the range of float64 at every level" in shown
    assert "  MSE            beyond float64" in statistics_lines(sweep)
    report = results_text(Recommendation(sweep), subject=SUBJECT)
    assert "     - MSE: beyond float64\n" in report
    assert "MSE Range: outside the range of float64\n" in report
    assert "no error" not in report


def test_titles_keep_the_ends_of_long_names() -> None:
    site = "20250908_095220_0001_iter000_decoder_layers_12_self_attention,linear_qkv,forward,pre,linear,mxfp8,rank00,"
    for name in (site + "group000,input.pt", "start" + "x" * 300 + "end"):
        *title, _ = (text.get_text() for text in draw_summary(sweep_of("one level"), name=name).texts)
        assert len(title) == 2
        assert "".join(title) == name or ("..." in "".join(title) and title[0][:5] + title[1][-3:] == "startend")


def test_axes_of_little_width_have_round_ticks() -> None:
    options = SweepOptions(num_levels=5, max_scale_exp=-4, min_scale_exp=-5)
    figure = draw_panels(sweep_array(NORMAL, format="fp8_e4m3", options=options), name="x")
    logarithmic = [axes for axes in figure.axes if axes.get_yscale() == "log"]
    assert logarithmic
    for axes in logarithmic:
        ticks = axes.get_yticks()
        assert len(ticks) >= 3
        digits = [f"{tick:e}".split("e")[0].replace(".", "").rstrip("0") for tick in ticks]
        assert max(map(len, digits)) <= 2


def test_a_legend_is_above_its_panel() -> None:
    figure = draw_panels(sweep_of("e4m3"), name="x")
    figure.canvas.draw()
    legends = [(axes, legend) for axes in figure.axes if (legend := axes.get_legend())]
    assert len(legends) == 3
    for axes, legend in legends:
        assert legend.get_window_extent().y0 >= axes.get_window_extent().y1 - 1


def test_the_box_holds_statistics() -> None:
    entries = (re.fullmatch(r"  (\S.*?)  +(\S.*)", line) for line in statistics_lines(sweep_of("specials")))
    lines = [(entry[1], entry[2]) for entry in entries if entry]
    assert lines[:8] == [
        ("elements", "6"),
        ("NaN", "1"),
        ("Inf", "1"),
        ("zeros", "1"),
        ("minimum", "-3"),
        ("maximum", "1"),
        ("largest |x|", "3"),
        ("smallest |x|", "1e-30"),
    ]
    assert ("largest", "448") in lines
