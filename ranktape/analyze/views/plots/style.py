"""The style of all plots: colours, fonts and sizes, and the layout of headings and legends.

From top to bottom, a plot consists of a title, a line about the selection, panels, a legend and notes. The panels have
the requested size; the plot grows with the rest. Plots do not change global state of matplotlib, so they can be drawn
in any thread and any notebook.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font, get_font_names
from matplotlib.image import imsave
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from ranktape.analyze.views import BLACK, BLUE, DIVERGING, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend
    from numpy.typing import NDArray

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (9, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (2, 2)),
    (0, (4, 1, 4, 1, 1, 1)),
)
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo", "+++")
"""The hatches of groups, which distinguish them without colours, for example in grey prints."""

MAX_GROUPS = len(COLORS)
"""The largest number of groups that are distinct in a panel."""

SEQUENTIAL = "viridis"
"""The colour map of sequential scales: lightness grows with the value for any colour vision, and no colour is grey."""

FALLBACKS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Source Han Sans SC"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC", "Arial Unicode MS"),
)
"""Fonts with Chinese, Japanese and Korean letters; those that are installed are used."""

FORMS = ("png", "svg", "pdf")
"""The file formats of plots."""

TITLE_SIZE, PANEL_SIZE, TEXT_SIZE, SMALL_SIZE = 13.0, 10.5, 9.0, 8.0
"""The font sizes, in points."""

INK, PALE_INK = "0.15", "0.4"
"""The colours of primary and of secondary text."""

SAVED_DPI = 150
"""The resolution of files, in dots per inch."""

COMPRESSION = 2
"""The compression level of PNG, from 0 to 9. The default, 6, takes several times as long for about the same size."""

PAD_INCHES = 0.12
"""The padding around and between heading, panels, legend and notes."""


class Page:
    """A plot that is being drawn: its panels, title, subtitle about the tensors, legend, and notes."""

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        *,
        width: float,
        height: float,
        title: str,
        subtitle: str = "",
        notes: Iterable[str] = (),
        **grid: Any,
    ) -> None:
        """Create panels of a size in inches that includes the labels of axes; `grid` is passed to `Figure.subplots`.

        Lines of the subtitle are wrapped if they are too long; notes explain the plot.
        """
        self.figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained", dpi=100)
        FigureCanvasAgg(self.figure)
        self.panels: NDArray[Any] = self.figure.subplots(num_rows, num_columns, squeeze=False, **grid)
        """The panels by row and column."""
        for axes in self.panels.flat:
            dress(axes)
        self.title, self.subtitle = title, subtitle
        self.notes = list(filter(None, notes))
        """The notes below the panels."""
        self.handles: list[Artist] = []
        """The entries of the legend."""

    def finish(self) -> Figure:
        """Add the heading above the panels and the legend and notes below, with room for them; returns the figure."""
        figure = self.figure
        width, panels_height = figure.get_size_inches().tolist()
        above = self._texts(self.title, width=width, size=TITLE_SIZE, max_lines=2, weight="bold", color=INK)
        for part in self.subtitle.splitlines():
            above += self._texts(part, width=width, size=TEXT_SIZE, max_lines=2)
        below = [text for note in self.notes for text in self._texts(note, width=width, size=SMALL_SIZE, max_lines=3)]
        top, bottom = (sum(_line_height(text) for text in some) + PAD_INCHES * bool(some) for some in (above, below))
        legend = _legend(figure, self.handles, width=width) if self.handles else None
        # Measures the drawn height, which depends on the scripts of the labels.
        legend_height = 0.0 if legend is None else legend.get_window_extent().height / figure.dpi
        height = panels_height + top + bottom + legend_height
        figure.set_size_inches(width, height)
        for texts, start in ((above, height - PAD_INCHES / 2), (below, bottom)):
            place = start
            for text in texts:
                text.set_position((PAD_INCHES / width, place / height))
                place -= _line_height(text)
        if legend is not None:
            legend.set_bbox_to_anchor((0.5, bottom / height), transform=figure.transFigure)
        foot = (bottom + legend_height) / height
        engine = figure.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        _draw_all_letters(figure)
        engine.set(rect=(0, foot, 1, 1 - foot - top / height), w_pad=0.06, h_pad=0.06)
        return figure

    def _texts(
        self, text: str, *, width: float, size: float, max_lines: int, weight: str = "normal", color: str = PALE_INK
    ) -> list[Text]:
        """Add the lines of a text outside of the panels' layout; text beyond `max_lines` is cut off."""
        lines = wrapped(text, width=width - 2 * PAD_INCHES, size=size, max_lines=max_lines, weight=weight)
        style: dict[str, Any] = {"fontsize": size, "fontweight": weight, "color": color, "ha": "left", "va": "top"}
        texts = [self.figure.text(0, 0, line, **style) for line in lines]
        for one in texts:
            one.set_in_layout(False)
        return texts


def _line_height(text: Text) -> float:
    return float(text.get_fontsize()) * 1.45 / 72


def dress(axes: Axes) -> None:
    """Set the frame, ticks and grid of a panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL_SIZE, color=PALE_INK)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="0.92", linewidth=0.8)


def name(axes: Axes, *, title: str | None = None, x: str | None = None, y: str | None = None, pad: int = 6) -> None:
    """Set the title and axis labels of a panel."""
    if title is not None:
        axes.set_title(title, fontsize=PANEL_SIZE, pad=pad)
    if x is not None:
        axes.set_xlabel(x, fontsize=TEXT_SIZE)
    if y is not None:
        axes.set_ylabel(y, fontsize=TEXT_SIZE)


def _legend(figure: Figure, handles: Sequence[Artist], *, width: float) -> Legend:
    """The legend below the panels, in as many columns as fit."""
    room = (width - 2 * PAD_INCHES) * figure.dpi
    fewest: Legend | None = None
    for num_columns in range(min(len(handles), 6), 0, -1):
        if fewest is not None:
            fewest.remove()
        fewest = figure.legend(
            handles=list(handles), loc="lower center", ncols=num_columns, frameon=False, fontsize=TEXT_SIZE
        )
        fewest.set_in_layout(False)
        _draw_all_letters(fewest)
        if fewest.get_window_extent().width <= room:
            break
    assert fewest is not None
    return fewest


def say(axes: Axes, text: str) -> None:
    """Write a text, such as the reason why a panel is empty, into its middle."""
    frame = {"facecolor": "white", "edgecolor": "none", "pad": 3}
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, color=PALE_INK, fontsize=TEXT_SIZE, bbox=frame, **place)


def empty(axes: Axes, text: str) -> None:
    """Make a panel empty except for the reason."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    say(axes, text)


def plain(text: object, *, max_letters: int = 40) -> str:
    """Text from an untrusted source for a plot: one line, without formulas, with the middle cut out if it is too long.

    Both ends are shown, since they distinguish tensors. Letters that no installed font has are shown as escapes.
    """
    letters = "".join(letter if letter.isprintable() else " " for letter in str(text)).strip() or "(empty)"
    known = _letters()
    drawn = "".join(one if ord(one) in known else one.encode("unicode_escape").decode() for one in letters)
    if len(drawn) > max_letters:
        start = (max_letters - 3) // 3
        drawn = f"{drawn[:start]}...{drawn[len(drawn) - (max_letters - 3 - start) :]}"
    # matplotlib reads $ as the start of a formula.
    return drawn.replace("$", r"\$")


def key(artist: Artist, label: str) -> Artist:
    """The artist as a legend entry. The label is already `plain`.

    A space is put before it, since matplotlib hides labels that start with an underscore.
    """
    artist.set_label(f" {label}")
    return artist


@functools.cache
def families() -> tuple[str, ...]:
    """The default font of matplotlib, then the installed fallbacks for letters that it lacks."""
    installed = set(get_font_names())
    return (*FontProperties().get_family(), *(name for name in FALLBACKS if name in installed))


@functools.cache
def _letters() -> frozenset[int]:
    fonts = (get_font(findfont(FontProperties(family=[name]))) for name in families())
    return frozenset(letter for font in fonts for letter in font.get_charmap())


def _draw_all_letters(artist: Artist) -> None:
    """Set the fallback fonts of every text, without changing global state."""
    if families() == tuple(FontProperties().get_family()):
        return
    own = get_font(findfont(FontProperties())).get_charmap()
    for text in artist.findobj(Text):
        # Tick labels get their text only when drawn. For bold text, matplotlib warns if a fallback has no bold font.
        is_known = all(ord(letter) in own for letter in text.get_text() if letter.isprintable())
        if not (is_known and text.get_fontweight() == "bold"):
            text.set_fontfamily(list(families()))


def wrapped(text: str, *, width: float, size: float, max_lines: int, weight: str = "normal") -> list[str]:
    """Wrap a text into lines of at most `width` inches at a font size, between words if possible.

    Text beyond `max_lines` is replaced by "...".
    """
    paths = [
        findfont(FontProperties(weight=weight)),
        *(findfont(FontProperties(family=[name])) for name in families()[1:]),
    ]
    font = get_font(paths)
    # Letters are slightly wider in a plot, where each starts at a whole pixel.
    room = 0.97 * width * 72

    def is_narrow(line: str) -> bool:
        font.set_size(size, 72)
        font.set_text(line.replace(r"\$", "$"), 0.0)
        return bool(font.get_width_height()[0] / 64 <= room)

    lines: list[str] = []
    rest = text
    while rest and len(lines) < max_lines:
        end = len(rest)
        if not is_narrow(rest):
            low, high = 1, len(rest)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if is_narrow(rest[:middle]) else (low, middle)
            end = (rest.rfind(" ", 0, low + 1) + 1) or low
        lines.append(rest[:end].rstrip())
        rest = rest[end:]
    if rest and lines:
        last = lines[-1]
        while last and not is_narrow(f"{last} ..."):
            last = last[:-1]
        lines[-1] = f"{last} ..."
    return lines


def diverging() -> Colormap:
    """The colour map for differences: blue for negative, nearly white for no difference, orange for positive."""
    return LinearSegmentedColormap.from_list("blue_orange", DIVERGING)


def plot_bytes(figure: Figure, *, form: str = "png") -> bytes:
    """The bytes of the plot's file; the same data give the same bytes."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
    if form == "png":
        # `savefig` would draw twice, first for the layout.
        figure.set_dpi(SAVED_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]  # it has no types
        packing: dict[str, Any] = {"metadata": metadata, "pil_kwargs": {"compress_level": COMPRESSION}}
        pixels = canvas.buffer_rgba()  # type: ignore[no-untyped-call]  # it has no types
        imsave(stream, pixels, format=form, origin="upper", dpi=SAVED_DPI, **packing)
    else:
        figure.savefig(stream, format=form, dpi=SAVED_DPI, metadata=metadata)
    return stream.getvalue()
