"""Finds the scale of a tensor that causes the smallest errors in a format.

A value x becomes s * round(x / s) with a scale s. In `tensor` mode, the tensor has one scale, a power of two with a
fractional exponent. Exponents are evenly spaced from the one that aligns the largest value, with which nothing
overflows, to the one that aligns the smallest, with which nothing is subnormal. In `mx` mode, each block has its own
scale, as in hardware, and the levels are integers that are added to the exponents of all scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import Format, Rounding
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram, count_few_cells
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.pieces import as_array
from ranktape.analyze.numerics.quantization.schemes import Scheme
from ranktape.analyze.numerics.sweeps.legacy import check_legacy, legacy_histogram, legacy_levels, legacy_note
from ranktape.analyze.numerics.sweeps.metrics import Level, best_level, levels_of, settled
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions, resolve_all
from ranktape.analyze.numerics.sweeps.sums import (
    Population,
    population_of_blocks,
    population_of_histogram,
    population_of_values,
    sums_of_blocks,
    sums_of_groups,
    sums_of_pairs,
    sums_of_values,
)
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES

MAX_CELLS = 1 << 19
"""Maximum number of cells of a block histogram in memory. If there are more, the values are read for each sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSweep(Population):
    """The errors of a tensor at each scale, and the scale with the smallest errors.

    A tensor without nonzero values in metrics has no levels and no best one; `note` gives the reason.
    """

    scheme: Scheme
    """The format of the elements, and the elements that share a scale."""
    mode: SweepMode
    """Kind of the levels."""
    options: SweepOptions
    """Options of the sweep."""
    levels: tuple[Level, ...]
    """The level for each exponent or offset, from the first to the last."""
    legacy_note: str = ""
    """In legacy mode, a note if the legacy tool may have chosen another level; otherwise empty."""

    @property
    def note(self) -> str:
        """A description of unusual values, and `legacy_note`; empty if there are none."""
        return "; ".join(filter(None, (super(ScaleSweep, self).note, self.legacy_note)))

    @property
    def target(self) -> Format:
        """The format of the elements."""
        return self.scheme.element

    @property
    def rounding(self) -> Rounding:
        """The rounding of values."""
        return self.options.rounding or self.target.rounding

    def best(self, metric: Callable[[Level], float]) -> Level | None:
        """The first level whose metric is the largest up to `metrics.TIE`; None if there are no levels."""
        return best_level(self.levels, metric)

    @property
    def recommended(self) -> Level | None:
        """The level with the best score, or one as good by `metrics.settled`; None if there are no levels."""
        best = self.best(lambda level: level.score)
        return None if best is None else self.settled(best)

    @property
    def has_offsets(self) -> bool:
        """Whether levels are offsets to the exponents of a rule, which offset 0 leaves unchanged."""
        return self.mode.has_offsets

    def settled(self, level: Level) -> Level:
        """The level to recommend instead of one of `levels` (see `metrics.settled`)."""
        return settled(self.levels, level, has_offsets=self.has_offsets)


def sweep_array(
    array: Any,
    *,
    format: str,  # noqa: A002 - the option's name
    options: SweepOptions | None = None,
    threads: int | None = None,
) -> ScaleSweep:
    """Round an array to a format at many scales and measure the errors exactly.

    `array` is a NumPy array, a PyTorch tensor or nested lists, of any shape and layout. NaN and infinities are counted
    and are in no metric, nor are the other elements of blocks with NaN or infinities. Arrays without nonzero values in
    metrics, such as empty ones, have no levels. The parts of complex elements are separate values. The metrics do not
    depend on `threads`.

    Raises:
        UsageError: the dtype is not one of records, or is an integer or Boolean one; the format is unknown or does not
            need a scale; or the options do not apply to the format.
    """
    return sweep_formats(array, formats=[format], options=options, threads=threads)[0]


def sweep_formats(
    numbers: Any,
    *,
    formats: Sequence[str],
    options: SweepOptions | None = None,
    threads: int | None = None,
) -> tuple[ScaleSweep, ...]:
    """`sweep_array` for several formats, which share reading and counting the tensor.

    `numbers` is an array as for `sweep_array`, or the `Histogram` or `BlockHistogram` of an array.

    Raises:
        UsageError: as for `sweep_array`, or the histogram is not sufficient for a format.
    """
    chosen = options or SweepOptions()
    return sweep_schemes(numbers, resolve_all(formats, options=chosen), options=chosen, threads=threads)


def sweep_schemes(
    numbers: NDArray[Any] | Histogram | BlockHistogram,
    schemes: Sequence[tuple[Scheme, SweepMode]],
    *,
    options: SweepOptions,
    threads: int | None = None,
) -> tuple[ScaleSweep, ...]:
    """`sweep_formats` for the schemes and modes that `resolve` returns; options that none of them uses are allowed.

    Raises:
        UsageError: as for `sweep_formats`.
    """
    source = _Source(numbers, options=options, threads=threads)
    return tuple(source.sweep(scheme, mode) for scheme, mode in schemes)


class _Source:
    """The values of a sweep, and the counts of them that sweeps of several formats share."""

    def __init__(
        self, numbers: NDArray[Any] | Histogram | BlockHistogram, *, options: SweepOptions, threads: int | None
    ) -> None:
        self._options, self._threads = options, threads
        self._counted = numbers if isinstance(numbers, Histogram | BlockHistogram) else None
        self._blocks: dict[int, BlockHistogram | None] = {}
        if isinstance(numbers, Histogram | BlockHistogram):
            return
        array = as_array(numbers)
        if array.dtype.kind in "iub":
            raise UsageError(f"{array.dtype} values are no floating-point numbers, and no scale is sought for them")
        self._shape = array.shape
        shaped = array.reshape(1) if array.ndim == 0 else array
        # The two parts of a complex number are separate values, along a new first dimension.
        self._array = _parts(shaped) if array.dtype.kind == "c" else shaped

    def sweep(self, scheme: Scheme, mode: SweepMode) -> ScaleSweep:
        """The sweep of one format."""
        if isinstance(self._counted, BlockHistogram):
            return self._sweep_stored_blocks(self._counted, scheme, mode)
        if mode is SweepMode.LEGACY:
            return self._sweep_legacy(scheme)
        if mode is SweepMode.TENSOR:
            return self._sweep_tensor(scheme)
        if self._counted is not None:
            raise UsageError(
                f"scales of {mode} for {scheme.name} do not follow from counts of single values: give a format without "
                "blocks and --sweep-mode tensor, or the values themselves"
            )
        return self._sweep_groups(scheme, mode)

    def _sweep_legacy(self, scheme: Scheme) -> ScaleSweep:
        check_legacy(scheme.element, options=self._options)
        counted = self._legacy_histogram
        levels = legacy_levels(counted, target=scheme.element, options=self._options)
        population = population_of_histogram(counted)
        note = legacy_note(levels, largest=population.largest)
        return self._result(population, levels, scheme, SweepMode.LEGACY, legacy_note=note)

    def _sweep_tensor(self, scheme: Scheme) -> ScaleSweep:
        population, target, rounding = self._population, scheme.element, self._options.rounding
        if not population.largest:
            return self._result(population, (), scheme, SweepMode.TENSOR)
        exponents = self._options.exponents(largest=population.largest, smallest=population.smallest, target=target)
        if self._is_countable:
            values, counts = self._histogram.magnitudes()
            sums = sums_of_pairs(values, counts=counts, exponents=exponents, target=target, rounding=rounding)
        else:
            sums = sums_of_values(
                self._array,
                largest=population.largest,
                exponents=exponents,
                target=target,
                rounding=rounding,
                threads=self._threads,
            )
        return self._result(population, levels_of(sums, exponents=exponents.tolist()), scheme, SweepMode.TENSOR)

    def _sweep_groups(self, scheme: Scheme, mode: SweepMode) -> ScaleSweep:
        ends = self._population
        num_dims, axis = max(len(self._shape), 1), self._options.axis
        if not -num_dims <= axis < num_dims:
            raise UsageError(f"--axis {axis} is not one of a tensor of shape {self._shape}")
        from_front = axis % num_dims + self._array.ndim - num_dims
        if self._is_countable and mode is SweepMode.MX and not scheme.has_tensor_scale:
            blocks = self._count_blocks(scheme.block_size, axis=from_front)
            if blocks is not None and blocks.supports(self._options.rule, scheme.element):
                return self._sweep_blocks(blocks, scheme, ends)
        sums, population = sums_of_groups(
            self._array,
            largest=ends.largest,
            scheme=scheme,
            options=self._options,
            axis=from_front,
            threads=self._threads,
        )
        offsets = self._options.offsets().astype(np.float64).tolist()
        levels = levels_of(sums, exponents=offsets) if population.largest else ()
        return self._result(_with_extremes(population, ends), levels, scheme, mode)

    def _sweep_stored_blocks(self, blocks: BlockHistogram, scheme: Scheme, mode: SweepMode) -> ScaleSweep:
        if mode is not SweepMode.MX or scheme.has_tensor_scale or blocks.block_size != scheme.block_size:
            requested = scheme.name if mode is SweepMode.MX else f"mode {mode}"
            raise UsageError(
                f"counts of blocks of {blocks.block_size} are not sufficient for {requested} with blocks of "
                f"{scheme.block_size}: give --sweep-mode mx and that block size, or the values themselves"
            )
        return self._sweep_blocks(blocks, scheme, None)

    def _sweep_blocks(self, blocks: BlockHistogram, scheme: Scheme, ends: Population | None) -> ScaleSweep:
        population, options = population_of_blocks(blocks), self._options
        levels: tuple[Level, ...] = ()
        offsets = options.offsets()
        if population.largest:
            sums = sums_of_blocks(
                blocks,
                element=scheme.element,
                rule=options.rule,
                rounding=options.rounding or scheme.element.rounding,
                offsets=offsets,
                scale_bits=options.bits,
            )
            levels = levels_of(sums, exponents=offsets.astype(np.float64).tolist())
        return self._result(_with_extremes(population, ends), levels, scheme, SweepMode.MX)

    def _result(
        self,
        population: Population,
        levels: tuple[Level, ...],
        scheme: Scheme,
        mode: SweepMode,
        *,
        legacy_note: str = "",
    ) -> ScaleSweep:
        return ScaleSweep(
            **{field.name: getattr(population, field.name) for field in dataclasses.fields(population)},
            scheme=scheme,
            mode=mode,
            options=self._options,
            levels=levels,
            legacy_note=legacy_note,
        )

    @property
    def _is_countable(self) -> bool:
        return self._counted is not None or self._array.dtype.itemsize <= HALF_NBYTES

    @functools.cached_property
    def _histogram(self) -> Histogram:
        return (
            self._counted if isinstance(self._counted, Histogram) else count_values(self._array, threads=self._threads)
        )

    @functools.cached_property
    def _legacy_histogram(self) -> Histogram:
        return legacy_histogram(self._histogram if self._is_countable else self._array)

    @functools.cached_property
    def _population(self) -> Population:
        return population_of_histogram(self._histogram) if self._is_countable else population_of_values(self._array)

    def _count_blocks(self, block_size: int, *, axis: int) -> BlockHistogram | None:
        if block_size not in self._blocks:
            self._blocks[block_size] = count_few_cells(
                self._array, axis=axis, block_size=block_size, threads=self._threads, max_cells=MAX_CELLS
            )
        return self._blocks[block_size]


def _with_extremes(population: Population, ends: Population | None) -> Population:
    """The population with `minimum` and `maximum` of `ends`, which counts of magnitudes lack; unchanged if None."""
    return population if ends is None else dataclasses.replace(population, minimum=ends.minimum, maximum=ends.maximum)


def _parts(array: NDArray[Any]) -> NDArray[Any]:
    rows = np.ascontiguousarray(array)
    return np.moveaxis(rows.view(rows.real.dtype).reshape(*array.shape, 2), -1, 0)
