"""Compares the runs of one collection: a table for the terminal, and the report over all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import say
from ranktape.analyze.table import Column, Kind, Table, write_table

if TYPE_CHECKING:
    from ranktape.storage import Records

PRODUCTS = ("output", "grad_input", "grad_weight")
"""The results of linear layers, by which runs are compared."""

COLUMNS = (
    Column(name="quant_type", kind=Kind.TEXT),
    Column(name="iterations", kind=Kind.INTEGER),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="loss", kind=Kind.FLOAT),
    Column(name="sqnr", kind=Kind.FLOAT, unit="dB", head="SQNR"),
    Column(name="relative_norm", kind=Kind.FLOAT, head="relative error"),
    Column(name="overflow", kind=Kind.RATIO),
    Column(name="underflow", kind=Kind.RATIO),
    Column(name="flushed", kind=Kind.RATIO, head="flushed to zero"),
    Column(name="worst", kind=Kind.TEXT, head="worst module"),
)
"""One row is one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What has become of one training."""

    quant_type: str
    """Its precision."""
    url: str
    """Its run."""
    is_met: bool
    """Whether what was guaranteed is stored."""
    problem: str = ""
    """What went wrong; empty where nothing did."""
    has_failed: bool = False
    """Whether the training itself failed."""
    losses: tuple[float, ...] = ()
    """The losses that it has printed."""


def write_comparison(done: Sequence[Collected], page: Path, *, storage_options: Mapping[str, Any] | None) -> None:
    """Say the table, and write the report over all runs, which begins with it; none where nothing is recorded.

    The first run is what the others are compared with.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: a store cannot be read, or the page not be written.
    """
    from ranktape.analyze import write_report
    from ranktape.storage import open_run
    from ranktape.storage.records.union import unite

    records = {one.quant_type: open_run(one.url, storage_options=storage_options).select() for one in done}
    num_losses = min((len(one.losses) for one in done if one.losses), default=0)
    first = done[0].quant_type
    notes = (
        f"SQNR, relative error: medians over products of linear layers against {first}, first common iteration",
        "overflow, underflow: beyond the limits of the recorded dtype, below its normal numbers",
        "flushed: operands that quantising makes zero, of those that are not",
        *([f"loss: the value number {num_losses} that each training has printed"] if num_losses else []),
    )
    rows = (
        _measured(one, records[one.quant_type], records[first], is_first=one is done[0], num_losses=num_losses)
        for one in done
    )
    table = Table(title=f"what differs from {first}", columns=COLUMNS, rows=tuple(rows), notes=notes)
    write_table(table)
    if not any(map(len, records.values())):
        return
    write_report(
        unite(records) if len(records) > 1 else records[first],
        output=page,
        url=", ".join(one.url for one in done),
        summary=table,
    )
    say(f"open it in a browser: {page.resolve().as_uri()}")


def _measured(one: Collected, records: Records, first: Records, *, is_first: bool, num_losses: int) -> tuple[Any, ...]:
    """The values of `COLUMNS`."""
    rows = [] if is_first else _differences(first, records)
    sqnr: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["sqnr"] is not None:
            sqnr.setdefault((row["module"], row["tensor_name"]), []).append(row["sqnr"])
    medians = {place: statistics.median(values) for place, values in sqnr.items()}
    norms = [row["relative_norm"] for row in rows if row["relative_norm"] is not None]
    worst = min(medians, key=lambda place: medians[place], default=None)
    loss = one.losses[num_losses - 1] if one.losses else None
    return (
        one.quant_type,
        len(set(records.column("iteration").tolist())),
        len(records),
        loss if loss is not None and math.isfinite(loss) else None,
        statistics.median(medians.values()) if medians else None,
        statistics.median(norms) if norms else None,
        *_losses_of(records),
        "" if worst is None else f"{worst[0]} ({worst[1]}, {medians[worst]:.1f} dB)",
    )


def _differences(first: Records, records: Records) -> list[dict[str, Any]]:
    """What sets the products of linear layers apart, in the first iteration that both runs have."""
    from ranktape.analyze import compare

    common = set(first.column("iteration").tolist()) & set(records.column("iteration").tolist())
    if not common:
        return []
    wanted = f"iteration == {min(common)} and layer_type == 'linear' and tensor_name in {list(PRODUCTS)}"
    sides = first.where(wanted), records.where(wanted)
    if not all(map(len, sides)):
        return []
    tags = [side.column("quant_type").tolist()[0] for side in sides]
    pair = f"quant_type={tags[0]}:{tags[1]}"
    return list(compare(*sides, pair=pair, allow_unmatched=True, distances=False, in_order=True).records())


def _losses_of(records: Records) -> tuple[float, float, float | None]:
    """The shares of overflow, of underflow, and of operands that quantising flushes to zero."""
    sizes, lost = 0, [0, 0]
    wide: dict[str, int] = {}
    for record in records:
        overflow, size = record.overflow, math.prod(record.shape)
        sizes += size
        lost[0] += overflow.upper.count + overflow.lower.count
        lost[1] += overflow.underflow.count
        # A rotation of the operands changes which of them are zero, and fills them up.
        if record.layer_type == "linear" and record.tensor_name.removeprefix("wide_") in {"input", "weight"}:
            zeros = wide.setdefault(record.tensor_name, 0)
            wide[record.tensor_name] = zeros + overflow.zero.count
            wide[f"{record.tensor_name}.size"] = wide.get(f"{record.tensor_name}.size", 0) + size
    names = [name for name in ("input", "weight") if f"wide_{name}" in wide]
    num = sum(wide[f"wide_{name}.size"] - wide[f"wide_{name}"] for name in names)
    flushed = sum(wide[name] - wide[f"wide_{name}"] for name in names)
    return (
        lost[0] / max(1, sizes),
        lost[1] / max(1, sizes),
        None if not names else max(0, flushed) / max(1, num),
    )
