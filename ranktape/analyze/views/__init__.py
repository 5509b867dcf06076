"""Shows a run as plots, a report, and exports for other programs. This module defines the colours that they share.

They are those of Okabe and Ito, which are distinct for any colour vision. No plotting library is imported here.
"""

from __future__ import annotations

BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, BLACK, GREY = "#56B4E9", "#000000", "#7F7F7F"
"""The colours of Okabe and Ito, with grey instead of yellow."""

NAN_COLOR, INFINITE_COLOR, ZERO_COLOR, MISSING_COLOR = "#A3007C", "#E58AC6", "#AEB4BB", "#DDE3EA"
"""The colours of map cells with NaN, with infinities, of exact zeros, and without data. Colour scales of maps do not
contain them."""

DIVERGING = ("#053F66", BLUE, "#8CC1E0", "#F7F7F7", "#F2B27A", VERMILION, "#6E2B00")
"""The colours for differences: blue for negative, nearly white for no difference, orange for positive."""
