"""Gives the colours that plots and the report share.

Okabe and Ito's, which people with any colour vision tell apart. No plotting library is imported here.
"""

from __future__ import annotations

BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, BLACK, GREY = "#56B4E9", "#000000", "#7F7F7F"
"""Theirs; grey in the place of yellow."""

DIVERGING = ("#053F66", BLUE, "#8CC1E0", "#F7F7F7", "#F2B27A", VERMILION, "#6E2B00")
"""Blue below, orange above, nearly white between: for differences, whose middle is no difference."""
