"""Shows a run: plots, a report, and exports for other programs; and the colours that they share.

Okabe and Ito's, which people with any colour vision tell apart. No plotting library is imported here.
"""

from __future__ import annotations

BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, BLACK, GREY = "#56B4E9", "#000000", "#7F7F7F"
"""Theirs; grey in the place of yellow."""

NAN_COLOR, INFINITE_COLOR, ZERO_COLOR, MISSING_COLOR = "#A3007C", "#E58AC6", "#AEB4BB", "#DDE3EA"
"""Of the cells of maps that hold NaN, that hold infinities, that are exactly zero, and of which nothing is known: none
of them is in the scales of maps."""

DIVERGING = ("#053F66", BLUE, "#8CC1E0", "#F7F7F7", "#F2B27A", VERMILION, "#6E2B00")
"""Blue below, orange above, nearly white between: for differences, whose middle is no difference."""
