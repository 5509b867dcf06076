"""The limits of a format with its scale, and the measure that counts the values of records beyond them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.cache import Columns
from ranktape.analyze.engine.metrics import aligned_limits
from ranktape.analyze.engine.sweep_measure import Job, sample_arrays, sweep_numbers, sweep_record
from ranktape.analyze.engine.values import View, read_numbers, read_values
from ranktape.analyze.identity import words
from ranktape.analyze.numerics.formats import Format
from ranktape.analyze.numerics.histograms.histogram import KINDS as SCANNED
from ranktape.analyze.numerics.histograms.histogram import (
    Histogram,
    Limits,
    Tallies,
    format_limits,
    scan,
    scan_histogram,
)
from ranktape.analyze.numerics.quantization.schemes import SCHEMES, Scaling, parse_scheme
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.errors import UsageError, nearest
from ranktape.storage import Record, Records
from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import EXTREMES

KINDS = ("upper", "lower", "total", "underflow", "flushed", "nan", "inf", "zero", "spoiled")
"""The counts. `total` is the overflow on both sides; `spoiled` are finite values in blocks with NaN or Inf."""

NAMES = ("elements", *KINDS, *EXTREMES)
"""The numbers of each record or sample: counts, and the extreme values without NaN."""

VERSION = 1
"""Version of the rows of `LimitsMeasure`, and part of its name."""

Row = dict[str, float]
"""A number for each of `NAMES`; NaN if it is unknown or does not exist."""

SCALINGS = (Scaling.NONE, Scaling.TENSOR, Scaling.BLOCK)
"""The choices of `--scaling`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format, and the scale by which values are divided before they are compared with its limits."""

    name: str
    """Its name in tables: the name of the element's format, or of the scheme if it has blocks."""
    element: Format
    """The format that defines the limits."""
    scaling: Scaling
    """Which elements share a scale: none are scaled, all of a tensor do, or those of a block do."""

    @property
    def title(self) -> str:
        """The format and its scale as text."""
        scaling_texts = {
            Scaling.NONE: "without scaling",
            Scaling.TENSOR: "with one scale for each tensor",
            Scaling.BLOCK: "with scales of blocks",
        }
        return f"{self.name} {scaling_texts[self.scaling]}"

    def limits(self, *, largest: float | None = None) -> Limits:
        """The limits for a tensor with this largest finite magnitude. Not for blocks.

        A scale for the tensor is the smallest power of two with which that magnitude does not exceed the format's
        largest value. A tensor without a finite nonzero number is not scaled.
        """
        assert self.scaling is not Scaling.BLOCK, "each block has limits of its own"
        is_scaled = self.scaling is Scaling.TENSOR and bool(largest)
        exponent = self.element.largest_alignment(largest) if is_scaled and largest else 0
        return format_limits(self.element, exponent=exponent)

    def limits_of(self, largest: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        """The three numbers of `limits` for each of several tensors; `largest` is NaN if none is finite."""
        return aligned_limits(self.element, largest if self.scaling is Scaling.TENSOR else None)

    @property
    def job(self) -> Job:
        """The sweep whose only level uses the format's own scales of blocks."""
        return _block_job(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsMeasure:
    """Counts the values of records, or of each of their samples, beyond the limits of a format."""

    target: Target
    """The format and its scale."""
    view: View
    """The view in which the values are counted."""
    per_sample: bool = False
    """Whether samples are counted separately."""

    @property
    def name(self) -> str:
        """The name in the cache."""
        prefix = "sample_limits" if self.per_sample else "record_limits"
        return f"{prefix}_{self.target.name}_{self.target.scaling}_{self.view}_v{VERSION}"

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """The counts of records: a row of `NAMES` for each record, or for each of its samples."""
        rows = [
            self._rows_of_blocks(record) if self.target.scaling is Scaling.BLOCK else self._rows(record)
            for record in records
        ]
        numbers = [[row[name] for name in NAMES] for record in rows for row in record]
        return Columns(
            {"rows": np.array(numbers, dtype=np.float64).reshape(-1, len(NAMES))},
            sizes={"rows": np.array([len(record) for record in rows], dtype=np.int64)},
            num_records=len(rows),
        )

    def _rows(self, record: Record) -> list[Row]:
        numbers = read_values(record, view=self.view) if self.per_sample else read_numbers(record, view=self.view)
        limits = self.target.limits()
        if self.target.scaling is Scaling.TENSOR:
            limits = self.target.limits(largest=_count_limits(numbers, limits).largest_finite)
        if not self.per_sample:
            return [tallies_row(_count_limits(numbers, limits))]
        assert not isinstance(numbers, Histogram), "values were read"
        dim = record.sample_dim
        per_sample = scan(
            numbers if dim is not None else numbers[np.newaxis], limits=limits, sample_dim=dim or 0
        ).per_sample
        assert per_sample is not None
        columns = [np.asarray(per_sample[kind]).tolist() for kind in SCANNED]
        elements = numbers.size // max(1, len(columns[0]))
        return [
            unknown_row(elements) | with_total(zip(SCANNED, row, strict=True)) for row in zip(*columns, strict=True)
        ]

    def _rows_of_blocks(self, record: Record) -> list[Row]:
        if not self.per_sample:
            return [sweep_row(sweep_record(record, [self.target.job], view=self.view)[0])]
        samples = sample_arrays(record, view=self.view)
        return [sweep_row(sweep_numbers(sample, [self.target.job])[0]) for sample in samples]


@functools.cache
def _block_job(name: str) -> Job:
    options = SweepOptions(mode=SweepMode.MX, num_levels=1, max_scale_exp=0, min_scale_exp=0)
    return Job(*resolve(name, options=options), options)


def _count_limits(numbers: NDArray[Any] | Histogram, limits: Limits) -> Tallies:
    return scan_histogram(numbers, limits=limits) if isinstance(numbers, Histogram) else scan(numbers, limits=limits)


def unknown_row(num_elements: int) -> Row:
    """The row of a record whose values were not counted."""
    return dict.fromkeys(NAMES, math.nan) | {"elements": float(num_elements)}


def with_total(counts: Iterable[tuple[str, float]]) -> Row:
    """The counts of some kinds and the total overflow; `flushed` and `spoiled` are 0 if they are not given."""
    row = {kind: float(count) for kind, count in counts}
    return {"flushed": 0.0, "spoiled": 0.0} | row | {"total": row["upper"] + row["lower"]}


def tallies_row(tallies: Tallies) -> Row:
    """The row of a record with these tallies."""
    extremes = {name: getattr(tallies, name) for name in EXTREMES}
    return {
        "elements": float(tallies.num_elements),
        **with_total((kind, getattr(tallies, kind)) for kind in SCANNED),
        **{name: math.nan if value is None else value for name, value in extremes.items()},
    }


def sweep_row(sweep: ScaleSweep) -> Row:
    """The row for a sweep with one level, which has no counts by sign and no extremes."""
    level = sweep.levels[0] if sweep.levels else None
    counts = {"total": "overflow_count", "underflow": "underflow_count", "flushed": "flushed_count"}
    row = {kind: 0.0 if level is None else float(getattr(level, name)) for kind, name in counts.items()}
    row |= {kind: float(getattr(sweep, kind)) for kind in ("nan", "inf", "zero", "spoiled")}
    return unknown_row(sweep.num_elements) | row | {"total": row["total"] + row["inf"]}


def usual_scaling(name: str) -> Scaling:
    """The usual scaling of a format: its blocks, one scale for each tensor up to 8 bits, or none above."""
    scheme = parse_scheme(name)
    if scheme.scaling is Scaling.BLOCK:
        return Scaling.BLOCK
    return Scaling.TENSOR if scheme.element.num_bits <= _MAX_SCALED_BITS else Scaling.NONE


_MAX_SCALED_BITS = 8
"""Wider formats have the range of the types in which training computes."""


def parse_targets(
    formats: str | Sequence[str] | None, scalings: str | Sequence[str] | None = None
) -> tuple[Target, ...]:
    """The targets for names as users write them: one, several, or several with commas. No name gives no target.

    Each format is combined with each of the scalings that it supports, or with its `usual_scaling` if none is given.

    Raises:
        UsageError: a name is unknown, a scaling applies to no format, or a format supports none of the scalings.
    """
    kinds = [_parse_scaling(name) for name in words(scalings)]
    names = words(formats)
    if not names:
        if kinds:
            raise UsageError(f"--scaling {kinds[0]} needs a format to scale for: give --format, such as fp8_e4m3")
        if formats is not None:
            raise UsageError("no format is given: give --format NAME, such as fp8_e4m3")
        return ()
    selected: dict[Target, None] = {}
    used: set[Scaling] = set()
    for name in names:
        targets, mistakes = [], []
        for kind in kinds or [usual_scaling(name)]:
            try:
                targets.append(_target(name, kind))
            except UsageError as error:
                mistakes.append(error)
        if not targets:
            raise mistakes[0]
        used |= {target.scaling for target in targets}
        selected |= dict.fromkeys(targets)
    for kind in kinds:
        if kind not in used:
            raise UsageError(f"--scaling {kind} has no effect on {', '.join(names)}: leave it out")
    return tuple(selected)


def parse_target(name: str | None, scaling: str | None = None) -> Target | None:
    """The target for one name; None if the name is None.

    Raises:
        UsageError: like `parse_targets`, or there are several targets.
    """
    targets = parse_targets(name, scaling)
    if len(targets) > 1:
        raise UsageError(
            f"{', '.join(target.title for target in targets)} are more than one: give one format and scaling"
        )
    return targets[0] if targets else None


def largest_value(dtype: str) -> float:
    """The largest finite value of a dtype. For a complex dtype, that of its parts."""
    row = dtype_row(dtype)
    if row.is_floating or row.is_complex:
        return float(ml_dtypes.finfo(row.numpy_dtype).max)  # type: ignore[no-untyped-call]
    return 1.0 if dtype == "bool" else float(np.iinfo(row.numpy_dtype).max)


def sweepable(records: Records) -> Records:
    """The records of floating-point or complex numbers. Nothing is read.

    Indices and masks, which a run may have among its inputs, are left out because no format is sought for them.
    """
    names = set(records.column("dtype").tolist())
    dtypes = sorted(filter(is_sweepable, names))
    return records if len(dtypes) == len(names) else records.select(dtype=dtypes)


def is_sweepable(dtype: str) -> bool:
    """Whether a scale can be sought for elements of this dtype, named as in torch."""
    row = dtype_row(dtype)
    return row.is_floating or row.is_complex


def preserves_limits(limits: Limits) -> bool:
    """Whether the rounded values of a digest are on the same side of the limits as the original values.

    In an inexact digest, no value is moved past a number with nine significant bits.
    """
    starts = (limits.overflow_start, limits.min_normal)
    return all(_is_bfloat16(end) or _is_bfloat16(float(np.nextafter(end, 0.0))) for end in starts) and (
        _is_bfloat16(limits.flush_limit) or _is_bfloat16(float(np.nextafter(limits.flush_limit, np.inf)))
    )


def _is_bfloat16(value: float) -> bool:
    with np.errstate(over="ignore"):
        return math.isinf(value) or float(ml_dtypes.bfloat16(value)) == value


def _parse_scaling(name: str) -> Scaling:
    if name not in SCALINGS:
        hint = nearest(name, SCALINGS, otherwise="give one of", cutoff=0.6)
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
    if not element.is_signed:
        raise UsageError(f"format {name!r} is one of scales: it has no sign; give one of values, such as fp8_e4m3")
    return Target(name=element.name, element=element, scaling=scaling)
