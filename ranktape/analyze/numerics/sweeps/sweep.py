"""Finds the scale of one tensor that loses least in a format.

A value x becomes s * round(x / s) with a scale s. In `tensor` mode one scale serves the whole tensor: a power of two
with a fractional exponent, spread evenly from the alignment of the largest value, where nothing overflows, to that
of the smallest, where nothing is subnormal. In `mx` mode each block has a scale of its own, as hardware has it, and
the levels are whole offsets to the exponents of all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram, count_few_cells
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.inputs import numbers_of
from ranktape.analyze.numerics.sweeps.group_scaling import sums_of_blocks, sums_of_groups
from ranktape.analyze.numerics.sweeps.legacy import check_legacy, legacy_histogram, legacy_levels, legacy_note
from ranktape.analyze.numerics.sweeps.metrics import Level, levels_of, settled
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve_all
from ranktape.analyze.numerics.sweeps.population import (
    Population,
    population_of_blocks,
    population_of_histogram,
    population_of_values,
)
from ranktape.analyze.numerics.sweeps.scaling import magnitude_pairs, sums_of_pairs, sums_of_values
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.formats import Format, Rounding
    from ranktape.analyze.numerics.quantization.schemes import Scheme
    from ranktape.analyze.numerics.sweeps.scaling import Sums


MAX_CELLS = 1 << 19
"""Counts of blocks that are kept in memory; where there are more, the values themselves are gone through instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSweep(Population):
    """What one tensor loses at each scale, and which scale loses least.

    A tensor without a finite number other than zero has no levels and no best one: `note` says why.
    """

    scheme: Scheme
    """The elements that values are rounded to, and which of them share a scale."""
    mode: SweepMode
    """What the levels are."""
    options: SweepOptions
    """What was asked for."""
    levels: tuple[Level, ...]
    """One for each exponent or offset, from the first to the last."""
    legacy_note: str = ""
    """In legacy mode, whether the older tool may have chosen another level."""

    @property
    def note(self) -> str:
        """What is unusual; empty for an ordinary tensor."""
        return "; ".join(filter(None, (super(ScaleSweep, self).note, self.legacy_note)))

    @property
    def target(self) -> Format:
        """The format of the elements."""
        return self.scheme.element

    @property
    def rounding(self) -> Rounding:
        """How values were rounded."""
        return self.options.rounding or self.target.rounding

    def best(self, metric: Callable[[Level], float]) -> Level | None:
        """The level with the largest metric, the first of them on a tie; None without levels."""
        return max(self.levels, key=metric, default=None)

    @property
    def recommended(self) -> Level | None:
        """The level with the best composite score, or one that is as good (`metrics.settled`); None without levels."""
        found = self.best(lambda level: level.score)
        return None if found is None else self.settled(found)

    @property
    def has_offsets(self) -> bool:
        """Whether levels are offsets to scales that follow from a rule, of which 0 is the rule itself."""
        return self.mode.has_offsets

    def settled(self, level: Level) -> Level:
        """The level to name in the place of one of `levels`: see `metrics.settled`."""
        return settled(self.levels, level, has_offsets=self.has_offsets)


def sweep_array(
    array: Any,
    *,
    format: str,  # noqa: A002 - the option's name
    options: SweepOptions | None = None,
    threads: int | None = None,
) -> ScaleSweep:
    """Round an array to a format at many scales, each exactly, and judge what is lost.

    NaN and infinities are counted and left out of the metrics; of blocks that hold one, all elements. Empty arrays,
    and arrays of nothing but zeros, NaN and infinities, have no levels. Complex elements are judged part by part.
    An array of numpy, a tensor of torch or nested lists, of any shape and layout. The metrics do not depend on
    `threads`.

    Raises:
        UsageError: records do not hold such a dtype, or it is one of integers or bool; the format is not known or has
            no room for a scale; the options do not go with it, or it has no use for one.
    """
    return sweep_formats(array, formats=[format], options=options, threads=threads)[0]


def sweep_formats(
    numbers: Any,
    *,
    formats: Sequence[str],
    options: SweepOptions | None = None,
    threads: int | None = None,
) -> tuple[ScaleSweep, ...]:
    """What `sweep_array` finds for each of several formats, from as little reading of the tensor as they need.

    `numbers` is what `sweep_array` takes, or what was counted of one: a `Histogram` or a `BlockHistogram`.

    Raises:
        UsageError: as `sweep_array`; or the counts do not answer the question.
    """
    chosen = options or SweepOptions()
    return sweep_schemes(numbers, resolve_all(formats, options=chosen), options=chosen, threads=threads)


def sweep_schemes(
    numbers: NDArray[Any] | Histogram | BlockHistogram,
    wanted: Sequence[tuple[Scheme, SweepMode]],
    *,
    options: SweepOptions,
    threads: int | None = None,
) -> tuple[ScaleSweep, ...]:
    """What `sweep_formats` finds, for what `resolve` says of names; not all options need be of use to these.

    Raises:
        UsageError: as `sweep_formats`.
    """
    if isinstance(numbers, Histogram):
        return tuple(_of_histogram(numbers, scheme, mode, options) for scheme, mode in wanted)
    if isinstance(numbers, BlockHistogram):
        return tuple(_of_blocks(numbers, scheme, mode, options) for scheme, mode in wanted)
    tensor = _Tensor(numbers_of(numbers), options=options, threads=threads)
    return tuple(tensor.sweep(scheme, mode) for scheme, mode in wanted)


def _of_histogram(histogram: Histogram, scheme: Scheme, mode: SweepMode, options: SweepOptions) -> ScaleSweep:
    if mode.has_offsets:
        raise UsageError(
            f"scales of {mode} for {scheme.name} do not follow from counts of single values: give a format without "
            "blocks and --sweep-mode tensor, or the values themselves"
        )
    if mode is SweepMode.LEGACY:
        counted = legacy_histogram(histogram)
        levels = legacy_levels(counted, target=scheme.element, options=options)
        population = population_of_histogram(counted)
        note = legacy_note(levels, largest=population.largest)
        return _result(population, levels, scheme, mode, options, legacy_note=note)
    population = population_of_histogram(histogram)
    values, counts = magnitude_pairs(histogram)

    def sums_at(exponents: NDArray[np.float64]) -> Sums:
        return sums_of_pairs(
            values, counts=counts, exponents=exponents, target=scheme.element, rounding=options.rounding
        )

    return _of_tensor(population, sums_at, scheme, options)


def _of_tensor(
    found: Population, sums_at: Callable[[NDArray[np.float64]], Sums], scheme: Scheme, options: SweepOptions
) -> ScaleSweep:
    levels: tuple[Level, ...] = ()
    if found.largest:
        exponents = options.exponents(largest=found.largest, smallest=found.smallest, target=scheme.element)
        levels = levels_of(sums_at(exponents), exponents=exponents.tolist())
    return _result(found, levels, scheme, SweepMode.TENSOR, options)


def _of_blocks(histogram: BlockHistogram, scheme: Scheme, mode: SweepMode, options: SweepOptions) -> ScaleSweep:
    if mode is not SweepMode.MX or scheme.has_tensor_scale or histogram.block_size != scheme.block_size:
        asked = scheme.name if mode is SweepMode.MX else f"mode {mode}"
        raise UsageError(
            f"counts of blocks of {histogram.block_size} do not answer {asked} with blocks of {scheme.block_size}: "
            "give --sweep-mode mx and that block size, or the values themselves"
        )
    found = population_of_blocks(histogram)
    levels: tuple[Level, ...] = ()
    offsets = options.offsets()
    if found.largest:
        sums = sums_of_blocks(
            histogram,
            element=scheme.element,
            rule=options.rule,
            rounding=options.rounding or scheme.element.rounding,
            offsets=offsets,
            scale_bits=options.bits,
        )
        levels = levels_of(sums, exponents=offsets.astype(np.float64).tolist())
    return _result(found, levels, scheme, mode, options)


class _Tensor:
    """An array and what has been counted of it, for one format after the other."""

    def __init__(self, array: NDArray[Any], *, options: SweepOptions, threads: int | None) -> None:
        self._options, self._threads = options, threads
        if array.dtype.kind in "iub":
            raise UsageError(f"{array.dtype} values are no floating-point numbers, and no scale is sought for them")
        self._shape = array.shape
        # Both parts of a complex number are values, in a dimension before all others.
        is_complex = array.dtype.kind == "c"
        whole = array.reshape(1) if array.ndim == 0 else array
        self._array = _parts(whole) if is_complex else whole
        self._num_parts = int(is_complex)
        self._blocks: dict[int, BlockHistogram | None] = {}

    def sweep(self, scheme: Scheme, mode: SweepMode) -> ScaleSweep:
        """What is lost in one format."""
        if mode is SweepMode.LEGACY:
            check_legacy(scheme.element, options=self._options)
            return _of_histogram(self._legacy_histogram, scheme, mode, self._options)
        if mode is SweepMode.TENSOR:
            return self._with_one_scale(scheme)
        return self._with_many_scales(scheme, mode)

    def _with_one_scale(self, scheme: Scheme) -> ScaleSweep:
        if self._is_countable:
            return _of_histogram(self._histogram, scheme, SweepMode.TENSOR, self._options)
        found = self._population

        def sums_at(exponents: NDArray[np.float64]) -> Sums:
            return sums_of_values(
                self._array,
                largest=found.largest,
                exponents=exponents,
                target=scheme.element,
                rounding=self._options.rounding,
                threads=self._threads,
            )

        return _of_tensor(found, sums_at, scheme, self._options)

    def _with_many_scales(self, scheme: Scheme, mode: SweepMode) -> ScaleSweep:
        ends = self._population
        if self._is_countable and mode is SweepMode.MX:
            blocks = None if scheme.has_tensor_scale else self._counted(scheme.block_size)
            if blocks is not None and blocks.answers(self._options.rule, scheme.element):
                found = _of_blocks(blocks, scheme, mode, self._options)
                return dataclasses.replace(found, minimum=ends.minimum, maximum=ends.maximum)
        sums, found_here = sums_of_groups(
            self._array,
            largest=ends.largest,
            scheme=scheme,
            options=self._options,
            axis=self._axis,
            threads=self._threads,
        )
        population = dataclasses.replace(found_here, minimum=ends.minimum, maximum=ends.maximum)
        offsets = self._options.offsets().astype(np.float64).tolist()
        levels = levels_of(sums, exponents=offsets) if population.largest else ()
        return _result(population, levels, scheme, mode, self._options)

    @property
    def _axis(self) -> int:
        num_dims, axis = max(len(self._shape), 1), self._options.axis
        if not -num_dims <= axis < num_dims:
            raise UsageError(f"--axis {axis} is not one of a tensor of shape {self._shape}")
        return axis % num_dims + self._num_parts

    @property
    def _is_countable(self) -> bool:
        return self._array.dtype.itemsize <= 2  # noqa: PLR2004 - bytes that can be counted

    @functools.cached_property
    def _histogram(self) -> Histogram:
        return count_values(self._array, threads=self._threads)

    @functools.cached_property
    def _legacy_histogram(self) -> Histogram:
        return legacy_histogram(self._histogram if self._is_countable else self._array)

    @functools.cached_property
    def _population(self) -> Population:
        return population_of_histogram(self._histogram) if self._is_countable else population_of_values(self._array)

    def _counted(self, block_size: int) -> BlockHistogram | None:
        if block_size not in self._blocks:
            self._blocks[block_size] = count_few_cells(
                self._array, axis=self._axis, block_size=block_size, threads=self._threads, max_cells=MAX_CELLS
            )
        return self._blocks[block_size]


def _parts(array: NDArray[Any]) -> NDArray[Any]:
    rows = np.ascontiguousarray(array)
    return np.moveaxis(rows.view(rows.real.dtype).reshape(*array.shape, 2), -1, 0)


def _result(
    found: Population,
    levels: tuple[Level, ...],
    scheme: Scheme,
    mode: SweepMode,
    options: SweepOptions,
    *,
    legacy_note: str = "",
) -> ScaleSweep:
    counted = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return ScaleSweep(**counted, scheme=scheme, mode=mode, options=options, levels=levels, legacy_note=legacy_note)
