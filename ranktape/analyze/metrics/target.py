"""Gives the limits that values are counted against: those of a format, and the scale they have there."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.analyze.identity import words
from ranktape.analyze.numerics.formats import Coding
from ranktape.analyze.numerics.histograms.histogram import Limits
from ranktape.analyze.numerics.quantization.schemes import SCHEMES, Scaling, parse_scheme
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve
from ranktape.analyze.table import Column, Kind
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import dtype_row

if TYPE_CHECKING:
    from ranktape.analyze.numerics.formats import Format
    from ranktape.storage import Records

SCALINGS = (Scaling.NONE, Scaling.TENSOR, Scaling.BLOCK)
"""The choices of `--scaling`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format, and the scale that values are divided by before they meet its limits."""

    name: str
    """The word for it in tables: of the elements, or with blocks of the scheme."""
    element: Format
    """Whose limits they are."""
    scaling: Scaling
    """Which elements share a scale: none has one, all of a tensor, or those of a block."""

    @property
    def title(self) -> str:
        """The format and its scale, in words."""
        words = {
            Scaling.NONE: "without scaling",
            Scaling.TENSOR: "with one scale for each tensor",
            Scaling.BLOCK: "with scales of blocks",
        }
        return f"{self.name} {words[self.scaling]}"

    def limits(self, *, largest: float | None = None) -> Limits:
        """Where numbers cease to be ordinary, for a tensor with that largest finite magnitude; not with blocks.

        With a scale for the tensor it is the smallest power of two with which that magnitude does not exceed the
        format's largest value. A tensor without a finite number other than zero has none.
        """
        assert self.scaling is not Scaling.BLOCK, "each block has limits of its own"
        is_scaled = self.scaling is Scaling.TENSOR and bool(largest)
        exponent = self.element.largest_alignment(largest) if is_scaled and largest else 0
        ends = self.element.overflow_start, self.element.min_normal, self.element.flush_limit
        # A limit that float64 does not hold lies beyond every value.
        start, normal, flushed = (_scaled(end, exponent) for end in ends)
        return Limits(overflow_start=start, min_normal=normal, flush_limit=flushed)


def parse_targets(
    formats: str | Sequence[str] | None, scalings: str | Sequence[str] | None = None
) -> tuple[Target, ...]:
    """The targets for names as people write them: one, several, or several with commas in between; none for none.

    Every format is meant with every scaling of those that it can have; without any, one with blocks is meant with the
    scales of those, any other without a scale.

    Raises:
        UsageError: a name is not known; a scaling has no format, or a format none of the scalings.
    """
    kinds = [_parse_scaling(name) for name in words(scalings)]
    names = words(formats)
    if not names:
        if kinds:
            raise UsageError(f"--scaling {kinds[0]} needs a format to scale for: give --format, such as fp8_e4m3")
        if formats is not None:
            raise UsageError("no format is given: give --format NAME, such as fp8_e4m3")
        return ()
    found: dict[Target, None] = {}
    used: set[Scaling] = set()
    for name in names:
        targets, mistakes = [], []
        for kind in kinds or [parse_scheme(name).scaling]:
            try:
                targets.append(_target(name, kind))
            except UsageError as error:
                mistakes.append(error)
        if not targets:
            raise mistakes[0]
        used |= {target.scaling for target in targets}
        found |= dict.fromkeys(targets)
    for kind in kinds:
        if kind not in used:
            raise UsageError(f"--scaling {kind} has no effect on {', '.join(names)}: leave it out")
    return tuple(found)


def one_target(name: str | None, scaling: str | None = None) -> Target | None:
    """The target for one name; None for none.

    Raises:
        UsageError: as `parse_targets`; or there are several.
    """
    found = parse_targets(name, scaling)
    if len(found) > 1:
        raise UsageError(
            f"{', '.join(target.title for target in found)} are more than one: give one format and scaling"
        )
    return found[0] if found else None


def largest_value(dtype: str) -> float:
    """The largest finite value of an element type; of a complex one, that of its parts."""
    row = dtype_row(dtype)
    if row.is_floating or row.is_complex:
        return float(ml_dtypes.finfo(row.numpy_dtype).max)  # type: ignore[no-untyped-call]
    return 1.0 if dtype == "bool" else float(np.iinfo(row.numpy_dtype).max)


def sweepable(records: Records) -> Records:
    """The records of floating-point or complex numbers; nothing is read.

    Indices and masks are left out, as no format is sought for them: a run holds some among its inputs.
    """
    names = set(records.column("dtype").tolist())
    wanted = sorted(filter(is_sweepable, names))
    return records if len(wanted) == len(names) else records.select(dtype=wanted)


def is_sweepable(dtype: str) -> bool:
    """Whether a scale is sought for elements of that type, in torch's words."""
    row = dtype_row(dtype)
    return row.is_floating or row.is_complex


def limit_columns(targets: Sequence[Target]) -> tuple[Column, ...]:
    """The columns that say whose limits count."""
    scaling = (Column(name="scaling", kind=Kind.TEXT, is_key=True),) if targets else ()
    return (
        Column(name="limits_of", kind=Kind.TEXT, head="limits of", is_key=True),
        Column(name="largest_value", kind=Kind.FLOAT, head="largest value", is_detail=True),
        *scaling,
    )


def limit_cells(names: Sequence[str], *, target: Target | None) -> tuple[Any, ...]:
    """What those columns hold: the name of the limits, the largest value if all have the same, and the scaling."""
    largest = {target.element.maximum} if target is not None else {largest_value(name) for name in names}
    cells = " ".join(names), largest.pop() if len(largest) == 1 else None
    return cells if target is None else (*cells, target.scaling.value)


def tells_apart(limits: Limits) -> bool:
    """Whether the rounded values of a digest lie on the same sides of the limits as the values themselves.

    In digests that are not exact no value is moved past a number of nine significant bits.
    """
    starts = (limits.overflow_start, limits.min_normal)
    return all(_is_held(end) or _is_held(float(np.nextafter(end, 0.0))) for end in starts) and (
        _is_held(limits.flush_limit) or _is_held(float(np.nextafter(limits.flush_limit, np.inf)))
    )


def _is_held(value: float) -> bool:
    with np.errstate(over="ignore"):
        return math.isinf(value) or float(ml_dtypes.bfloat16(value)) == value


def _scaled(end: float, exponent: int) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.ldexp(end, exponent))


def _parse_scaling(name: str) -> Scaling:
    if name not in SCALINGS:
        near = difflib.get_close_matches(name, SCALINGS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(SCALINGS)}"
        raise UsageError(f"--scaling {name!r} is not allowed: {hint}")
    return Scaling(name)


def _target(name: str, scaling: Scaling) -> Target:
    if scaling is Scaling.BLOCK:
        scheme, _ = resolve(name, options=SweepOptions(mode=SweepMode.MX))
        if scheme.name not in SCHEMES:
            raise UsageError(f"format {name!r} is not one of blocks: give one of {', '.join(SCHEMES)}")
        return Target(name=scheme.name, element=scheme.element, scaling=scaling)
    scheme = parse_scheme(name)
    element = scheme.element
    if scheme.scaling is Scaling.BLOCK and element.name != scheme.name:
        raise UsageError(
            f"format {name!r} has no limits of its own: it puts elements of {element.name} into blocks with scales; "
            f"give --format {element.name} for what they hold without a scale, or --scaling block"
        )
    if element.coding is Coding.EXPONENT:
        raise UsageError(
            f"format {name!r} is one of scales: it has neither zero nor a sign; give one of values, such as fp8_e4m3"
        )
    return Target(name=element.name, element=element, scaling=scaling)
