"""How values are distributed: the command `ranktape analyze distribution`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.options import (
    Output,
    Selection,
    by_option,
    engine_options,
    output_options,
    selection_options,
    view_option,
)
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View

KINDS = ("linear", "normalised", "log2", "exponents", "formats", "normal", "qq")
"""What `--kind` takes: `questions.looks.Look`, whose module is imported when it is used."""

_OWNERS = {
    "bins": ("linear", "normalised"),
    "per_octave": ("log2",),
    "points": ("qq",),
    "formats": ("exponents", "formats"),
}
"""The kinds that each option is for."""


@click.command(name="distribution")
@selection_options
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="linear",
    show_default=True,
    help="Bins of values, of values normalised to [0, 1], of octaves; powers of two; what formats hold; "
    "distance from a normal distribution; quantiles beside its.",
)
@click.option("--bins", type=int, metavar="N", help="Bins of equal width; 64 by default.")
@click.option("--per-octave", type=int, metavar="N", help="Bins in each octave; 1 by default.")
@click.option("--points", type=int, metavar="N", help="Quantiles; 101 by default.")
@click.option(
    "--format", "formats", multiple=True, metavar="NAME", help="Only these formats: fp8_e4m3, hif8, ...; repeatable."
)
@view_option
@by_option
@engine_options
@output_options
def command(
    *,
    selection: Selection,
    kind: str,
    bins: int | None,
    per_octave: int | None,
    points: int | None,
    formats: tuple[str, ...],
    view: View | None,
    by: tuple[str, ...],
    engine: Engine,
    output: Output,
) -> None:
    """Show how the values of a selection are distributed, or with --by those of each group."""
    from ranktape.analyze.questions.distribution import distribution

    names = tuple(name.strip() for text in formats for name in text.split(","))
    numbers = {"bins": bins, "per_octave": per_octave, "points": points}
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if names:
        given["formats"] = names
    for name in given:
        if kind not in _OWNERS[name]:
            flag = "--" + name.removesuffix("s" if name == "formats" else "").replace("_", "-")
            raise UsageError(f"{flag} says nothing about --kind {kind}: it is for {' and '.join(_OWNERS[name])}")
    table = distribution(selection.records(), kind=kind, by=by, view=view, engine=engine, **given)
    # Half of a distribution says nothing.
    dataclasses.replace(output, limit=output.limit or 0).write(table)
