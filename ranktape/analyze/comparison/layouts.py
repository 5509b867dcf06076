"""Chooses which ranks' records are compared, where both sides have records of several ranks at one place.

Where both sides have the same ranks and every rank holds the same part (or one of the same shape, where one side does
not say what it is), each rank's record is compared with its own counterpart; copies of one part that are the same bits
on either side are compared once. Otherwise the tensors are put
together from what the ranks hold, and compared as wholes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.storage.records.assemble import assemble_records
from ranktape.storage.records.placement import AxisKind, parse_placement

if TYPE_CHECKING:
    from ranktape.storage import Record, Records

WHOLE = "null"
"""What the catalogue says of the placement of a tensor that is no part."""


class Side:
    """The records of one side, with the columns that tell their layouts."""

    def __init__(self, records: Records) -> None:
        self.records = records
        """The selection."""
        self.ranks: list[int] = records.column("rank").tolist()
        self.placements: list[str] = records.column("placement").tolist()
        self.checksums: list[int] = records.column("checksum").tolist()
        self.shapes: list[str] = records.column("shape").tolist()
        self._parts: dict[tuple[str, int], object] = {}

    def by_rank(self, rows: Sequence[int]) -> list[int]:
        """The records in the order of their ranks."""
        return sorted(rows, key=self.ranks.__getitem__)

    def bits(self, row: int) -> tuple[str, int]:
        """What two records have in common whose values are the same bits."""
        return self.shapes[row], self.checksums[row]

    def part(self, row: int) -> object:
        """What the records of copies have in common; a whole tensor without a placement is of its rank alone.

        Raises:
            DataError: a placement is damaged.
        """
        rank, text = self.ranks[row], self.placements[row]
        if text == WHOLE:
            return rank
        if (text, rank) not in self._parts:
            placement = parse_placement(self.records[row].info)
            assert placement is not None
            self._parts[text, rank] = placement.axes, placement.ranks, placement.fixed(AxisKind.REPLICATE)
        return self._parts[text, rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Records of one side that are one tensor."""

    rows: tuple[int, ...]
    """Where in the selection they are; by rank."""
    is_assembled: bool
    """Whether they are put together, or a single record is taken as it is."""
    shape: tuple[int, ...] = ()
    """Of the whole tensor, where it is put together."""
    copies: int = 1
    """Ranks whose records are the same bits, and of which this one stands for all."""
    has_differing_copies: bool = False
    """Whether ranks that should hold the same recorded other bits."""


def match_ranks(a: Side, rows_a: Sequence[int], b: Side, rows_b: Sequence[int]) -> list[tuple[Parts, Parts]]:
    """The tensors of both sides, one with the other; empty where they are not as many.

    Raises:
        DataError: a placement is damaged.
    """
    if len(rows_a) == 1 and len(rows_b) == 1 and a.placements[rows_a[0]] == b.placements[rows_b[0]] == WHOLE:
        return [(_single(rows_a[0]), _single(rows_b[0]))]
    by_rank = list(zip(a.by_rank(rows_a), b.by_rank(rows_b), strict=False))
    if len(rows_a) == len(rows_b) and all(_is_same_part(a, row_a, b, row_b) for row_a, row_b in by_rank):
        return _rank_by_rank(a, b, by_rank)
    tensors = [_assembled(side, side.by_rank(rows)) for side, rows in ((a, rows_a), (b, rows_b))]
    if len(tensors[0]) != len(tensors[1]):
        tensors = [_one_of_equals(side, parts) for side, parts in zip((a, b), tensors, strict=True)]
    return list(zip(*tensors, strict=True)) if len(tensors[0]) == len(tensors[1]) else []


def single_pair(row_a: int, row_b: int) -> tuple[Parts, Parts]:
    """Two records as they are, whatever parts of tensors they hold."""
    return _single(row_a), _single(row_b)


def _single(row: int, **fields: int) -> Parts:
    return Parts(rows=(row,), is_assembled=False, **fields)  # type: ignore[arg-type]


def _is_same_part(a: Side, row_a: int, b: Side, row_b: int) -> bool:
    """Whether two records are of one rank and one part, as far as is known."""
    placements = a.placements[row_a], b.placements[row_b]
    is_same = placements[0] == placements[1] or (WHOLE in placements and a.shapes[row_a] == b.shapes[row_b])
    return a.ranks[row_a] == b.ranks[row_b] and is_same


def _rank_by_rank(a: Side, b: Side, rows: Sequence[tuple[int, int]]) -> list[tuple[Parts, Parts]]:
    """Each rank's record with its counterpart; of copies that are equal on either side the first."""
    groups: dict[object, list[tuple[int, int]]] = {}
    for row_a, row_b in rows:
        groups.setdefault((a.part(row_a), b.part(row_b)), []).append((row_a, row_b))
    pairs: list[tuple[Parts, Parts]] = []
    for copies in groups.values():
        num_a, num_b = len({a.bits(row) for row, _ in copies}), len({b.bits(row) for _, row in copies})
        if (num_a, num_b) == (1, 1):
            first_a, first_b = copies[0]
            pairs.append((_single(first_a, copies=len(copies)), _single(first_b, copies=len(copies))))
            continue
        pairs += [
            (_single(row_a, has_differing_copies=num_a > 1), _single(row_b, has_differing_copies=num_b > 1))
            for row_a, row_b in copies
        ]
    return pairs


def _assembled(side: Side, rows: Sequence[int]) -> list[Parts]:
    """The tensors of which the records are parts, by the lowest of their ranks."""
    records: list[Record] = [side.records[row] for row in rows]
    row_of = {id(record): row for record, row in zip(records, rows, strict=True)}
    return [
        Parts(
            rows=tuple(row_of[id(record)] for record in view.records),
            is_assembled=side.placements[row_of[id(view.records[0])]] != WHOLE,
            shape=view.shape,
            has_differing_copies=bool(view.differing_replicas()),
        )
        for view in assemble_records(records, replicas="ignore")
    ]


def _one_of_equals(side: Side, tensors: list[Parts]) -> list[Parts]:
    """One for all, where every tensor is one record, and all of them are the same bits."""
    is_equal = len({side.bits(parts.rows[0]) for parts in tensors}) == 1
    if len(tensors) > 1 and is_equal and all(len(parts.rows) == 1 and not parts.is_assembled for parts in tensors):
        return [_single(tensors[0].rows[0], copies=len(tensors))]
    return tensors
