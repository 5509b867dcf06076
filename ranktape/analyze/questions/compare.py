"""How far apart are two runs, or two kinds of tensors of one run, and where do they begin to differ?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.comparison.divergence import DEFAULT_MARGIN, ComparedPair, Judge, execution_order
from ranktape.analyze.comparison.figures import judged_figure
from ranktape.analyze.comparison.map import MAX_BINS, DifferenceMap, difference_map
from ranktape.analyze.comparison.matching import match, places, rows_by_place
from ranktape.analyze.comparison.pairing import Pairing, parse_pairs
from ranktape.analyze.comparison.spreads import distances_of
from ranktape.analyze.comparison.tables import PairTable, is_differing
from ranktape.analyze.comparison.tasks import PairTasks
from ranktape.analyze.comparison.tensors import compare_pairs
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_row
from ranktape.analyze.layer_stacks import with_stacks
from ranktape.analyze.table import Table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.analyze.comparison.matching import Matching
    from ranktape.storage import Records

DEFAULT_FIGURE = "relative_norm"
"""What a divergence is judged by."""


def compare(
    a: Records,
    b: Records | None = None,
    *,
    pair: Sequence[str] = (),
    neighbours: bool = False,
    noise: Records | None = None,
    figure: str = DEFAULT_FIGURE,
    tolerance: float = 0.0,
    margin: float = DEFAULT_MARGIN,
    allow_unmatched: bool = False,
    with_distances: bool = True,
    in_order: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """One row for each pair of tensors, the worst first; with `by` one row for each group of pairs.

    Pairs whose values are both there and of one shape are compared element by element, the others by their
    distributions alone. NaN and infinities: see `Differences`; a pair in which only one of the two has one at some
    place diverges whatever is tolerated. Tensors without elements do not differ.

    Args:
        a: The first side, the reference.
        b: The second side; None where both are of one run.
        pair: Fields in which the sides differ, and how: `quant_type=hifp8:mxfp8`. See `comparison.pairing`.
        neighbours: Whether each layer of one run is compared with the next.
        noise: A second run that should equal the first side's: what differs between these two is the noise floor.
        figure: What a divergence is judged by, one of `comparison.figures.JUDGED`.
        tolerance: How large the figure may be.
        margin: How many times the noise floor it may be.
        allow_unmatched: Whether records without a counterpart are left out, and counted in a note.
        with_distances: Whether the distributions are compared, too; values are read a second time for them, unless
            they were counted before.
        in_order: Whether the rows are in the order of execution.
        view: Which numbers are compared; None for those that were captured.
        by: Fields of the first side by which pairs are grouped.
        engine: Where the work is done.

    Raises:
        DataError: bytes or parts of a tensor are missing, or damaged.
        NoRecordsError: a side is empty, or nothing has a counterpart.
        StorageError: a store cannot be read.
        UnknownFieldError: `by` names no field.
        UsageError: the sides are not told apart, records have no counterpart, or a value is not allowed.
    """
    pairing = Pairing(fields=parse_pairs(pair), neighbours=neighbours)
    judge = Judge(
        figure=judged_figure(figure),
        tolerance=_not_negative(tolerance, "tolerance"),
        margin=_not_negative(margin, "margin"),
        has_noise=noise is not None,
        is_same_tensor=pairing.is_same_tensor,
    )
    matching = _match(a, b, pairing, allow_unmatched=allow_unmatched)
    fields = with_stacks(by, matching.a)
    keys = [matching.a.column(field).tolist() for field in fields]
    pairs = _compared(matching, noise, judge, view=view, with_distances=with_distances, engine=engine or Engine())
    table = PairTable(matching, figure=judge.figure, has_noise=judge.has_noise)
    ordered = sorted(pairs, key=lambda one: one.order) if in_order else table.worst_first(pairs)
    title, notes = _title(pairs, table, is_same_tensor=pairing.is_same_tensor), tuple(_notes(matching, pairs, judge))
    if not fields:
        rows = tuple(table.pair_row(one) for one in ordered)
        return Table(title=title, columns=table.pair_columns(), rows=rows, notes=notes)
    groups: dict[tuple[Any, ...], list[ComparedPair]] = {}
    for one in ordered:
        key = tuple(_plain(column[one.a.rows[0]]) for column in keys)
        groups.setdefault(key, []).append(one)
    rows = tuple(table.group_row(_named(fields, key), members) for key, members in groups.items())
    return Table(title=title, columns=table.group_columns(fields), rows=rows, notes=notes)


def compare_map(
    a: Records,
    b: Records | None = None,
    *,
    pair: Sequence[str] = (),
    neighbours: bool = False,
    allow_unmatched: bool = False,
    max_bins: int = MAX_BINS,
    view: View | None = None,
) -> DifferenceMap:
    """Where the two tensors of the one pair that is left differ: see `difference_map`.

    Raises:
        DataError: bytes or parts of a tensor are missing, or damaged.
        NoRecordsError: a side is empty, or nothing has a counterpart.
        StorageError: a store cannot be read.
        UsageError: as `compare`; there are several pairs; shapes differ, or values were not kept.
    """
    matching = _match(a, b, Pairing(fields=parse_pairs(pair), neighbours=neighbours), allow_unmatched=allow_unmatched)
    if len(matching.pairs) > 1:
        named = matching.name_pairs()
        raise UsageError(f"a map is of one pair, and there are {len(matching.pairs)}: {named}; leave one with filters")
    (only,) = PairTasks(matching, twins=None, noise=None, view=view)[0]
    return difference_map(only.a, only.b, max_bins=max_bins, view=only.view)


def _not_negative(value: float, name: str) -> float:
    if not 0 <= value < math.inf:
        raise UsageError(f"{name} {value} is not allowed: give 0 or more")
    return value


def _match(a: Records, b: Records | None, pairing: Pairing, *, allow_unmatched: bool) -> Matching:
    if b is None and not pairing.names:
        raise UsageError(
            "nothing says what is compared with what: give a second run, or within one run --pair FIELD=LEFT:RIGHT "
            "(such as operation=forward:backward) or --neighbours"
        )
    if pairing.neighbours and (b is not None or pairing.fields):
        raise UsageError("--neighbours compares the layers of one run: give neither a second run nor --pair with it")
    for records in (a, b):
        if records is not None and not len(records):
            raise NoRecordsError(f"{records!r} has no record to compare")
    matching = match(*pairing.sides(a, a if b is None else b), pairing, is_one_run=b is None)
    unmatched = matching.unmatched()
    # A kind of layers has places that the other one has not, as the head of a model.
    if unmatched and not (allow_unmatched or pairing.is_of_kinds):
        raise UsageError("; ".join(unmatched) + ": leave them out with a filter, or give --allow-unmatched")
    return matching


def _compared(
    matching: Matching,
    noise: Records | None,
    judge: Judge,
    *,
    view: View | None,
    with_distances: bool,
    engine: Engine,
) -> list[ComparedPair]:
    """What sets the tensors of each pair apart."""
    tasks = PairTasks(matching, twins=None if noise is None else _twins(matching, noise), noise=noise, view=view)
    answers = [answer for batch in engine.map(compare_pairs, tasks, sizes=tasks.sizes) for answer in batch]
    distances = distances_of(matching, view=view, engine=engine) if with_distances else [None] * len(matching.pairs)
    orders = execution_order(matching.a, [one.rows[0] for one, _ in matching.pairs])
    pairs = []
    for (one, other), order, (differences, twin), apart in zip(matching.pairs, orders, answers, distances, strict=True):
        floor, ratio, diverges = judge.judge(differences, twin, apart)
        pairs.append(
            ComparedPair(
                a=one,
                b=other,
                order=order,
                differences=differences,
                distances=apart,
                floor=floor,
                ratio=ratio,
                diverges=diverges,
            )
        )
    return pairs


def _twins(matching: Matching, noise: Records) -> list[tuple[int, ...] | None]:
    """For each pair the records of the equal run that are the twins of the first side's; None where one is missing."""
    rows = rows_by_place(noise)
    keys = places(matching.a)
    found = [[rows.get(keys[row]) for row in one.rows] for one, _ in matching.pairs]
    twins = [None if None in row else tuple(place for place in row if place is not None) for row in found]
    if not any(twins):
        raise NoRecordsError("no tensor of the first side is in the run that --noise names: give a second equal run")
    return twins


def _title(pairs: Sequence[ComparedPair], table: PairTable, *, is_same_tensor: bool) -> str:
    num_differing = sum(map(is_differing, pairs))
    counted = f"{len(pairs)} pairs compared, {num_differing} differ"
    if not is_same_tensor:
        return counted
    diverging = [pair for pair in pairs if pair.diverges]
    if not diverging:
        return f"no divergence: {counted}" + (", none by more than is tolerated" if num_differing else "")
    first = min(diverging, key=lambda pair: pair.order)
    return f"first divergence: {table.place(first)} ({counted}, {len(diverging)} diverge)"


def _notes(matching: Matching, pairs: Sequence[ComparedPair], judge: Judge) -> Iterator[str]:
    yield from map(printable, matching.unmatched())
    alone = sum(pair.differences is None for pair in pairs)
    if alone:
        yield f"{alone} pairs are compared by their distributions alone: shapes differ, or values were not kept"
    copies = sum(pair.a.has_differing_copies or pair.b.has_differing_copies for pair in pairs)
    if copies:
        yield f"in {copies} pairs ranks that should hold the same recorded other bits: see 'ranktape analyze outliers'"
    unknown = sum(pair.diverges is None for pair in pairs) if judge.is_same_tensor else 0
    if unknown:
        yield f"of {unknown} pairs it is not known whether they diverge: no noise floor, no {judge.figure.name}"


def _plain(value: Any) -> Any:
    """A value of a column; a missing one, which is a NaN, as None."""
    return None if value != value else value  # noqa: PLR0124  (NaN)


def _named(by: Sequence[str], key: Sequence[Any]) -> tuple[Any, ...]:
    """The key of a group, as tables hold it."""
    return group_row(dict(zip(by, key, strict=True)), num_records=0)[:-1]
