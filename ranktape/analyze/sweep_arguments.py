"""Gives the options of the command line that say what a sweep tries, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]

SWEEP_MODES = ("mx", "tensor", "channel", "legacy")
"""The members of `SweepMode`, which is not imported for a help text."""

SWEEP_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--format", "--elem-format", "formats"),
        {
            "multiple": True,
            "metavar": "NAME",
            "default": ("fp8_e4m3",),
            "show_default": True,
            "help": "mxfp8_e4m3, mxfp4_e2m1, nvfp4, fp8_e4m3, fp8_e5m2, int8, hif8, ...; several with commas between.",
        },
    ),
    (
        ("--sweep-mode",),
        {
            "type": click.Choice(SWEEP_MODES),
            "help": "What a level is; mx for formats with blocks, tensor for others, unless given.",
        },
    ),
    (
        ("--scale-rule",),
        {
            "type": click.Choice(["floor", "ceil", "even", "rceil"]),
            "help": "How a block's scale follows from its largest value; floor unless given. Not of nvfp4.",
        },
    ),
    (
        ("--rounding",),
        {
            "type": click.Choice(["even", "away", "floor", "stochastic", "hybrid"]),
            "help": "Which neighbour a value becomes; by default the format's own: away for hif8, even for others.",
        },
    ),
    (("--block-size",), {"type": int, "metavar": "N", "help": "Elements that share a scale; 32, for nvfp4 16."}),
    (
        ("--axis",),
        {
            "type": int,
            "default": -1,
            "show_default": True,
            "help": "Where blocks lie, or channels are told apart.",
        },
    ),
    (
        ("--scale-bits",),
        {"type": int, "metavar": "N", "help": "Width of the exponent of a block's scale; 8 unless given."},
    ),
    (("--num-levels",), {"type": int, "metavar": "N", "help": "Scales that are tried; 21 by default."}),
    (
        ("--max-scale-exp",),
        {
            "type": float,
            "metavar": "E",
            "help": "First exponent; where the largest value is aligned by default. In mx mode first offset, +10.",
        },
    ),
    (
        ("--min-scale-exp",),
        {
            "type": float,
            "metavar": "E",
            "help": "Last exponent; where the smallest value is aligned by default. In mx mode last offset, -10.",
        },
    ),
)
"""The options that say which formats and scales are tried, and how."""


def sweep_options(command: Command) -> Command:
    """Add `SWEEP_OPTIONS`; the command gets `formats`, and the rest by the names of fields of `SweepOptions`."""
    decorated = command
    for names, settings in reversed(SWEEP_OPTIONS):
        decorated = click.option(*names, **settings)(decorated)
    return decorated
