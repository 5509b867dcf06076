"""Compares the runs of one collection: a table for the terminal, and a page."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ranktape.analyze.console import say, write_whole
from ranktape.analyze.table import Column, Kind, Table, write_table
from ranktape.storage.places.failures import printable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What one run is compared by."""

    quant_type: str
    url: str
    row: tuple[Any, ...]
    """The values of `COLUMNS`."""
    sqnr: Mapping[tuple[str, str], float]
    """Against the first run, by module and product: the median over ranks and calls of the first iteration."""


def write_comparison(done: Sequence[Collected], page: Path, *, storage_options: Mapping[str, Any] | None) -> None:
    """Write the page, and say the table; the first run is what the others are compared with.

    Raises:
        StorageError: a store cannot be read, or the page not be written.
    """
    from ranktape.storage import open_run

    records = [open_run(one.url, storage_options=storage_options).select() for one in done]
    num_losses = min((len(one.losses) for one in done if one.losses), default=0)
    runs = [
        _measured(one, own, records[0], is_first=own is records[0], num_losses=num_losses)
        for one, own in zip(done, records, strict=True)
    ]
    first = done[0].quant_type
    notes = (
        f"SQNR, relative error: medians over products of linear layers against {first}, first common iteration",
        "overflow, underflow: beyond the limits of the recorded dtype, below its normal numbers",
        "flushed: operands that quantising makes zero, of those that are not",
        *([f"loss: the value number {num_losses} that each training has printed"] if num_losses else []),
    )
    table = Table(title="", columns=COLUMNS, rows=tuple(run.row for run in runs), notes=notes)
    write_table(table)
    write_whole(page, _page(runs, notes=notes, first=first).encode(), what="page")
    say(f"open it in a browser: {page.resolve().as_uri()}")


def _measured(one: Collected, records: Records, first: Records, *, is_first: bool, num_losses: int) -> _Run:
    rows = [] if is_first else _differences(first, records)
    sqnr: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["sqnr"] is not None:
            sqnr.setdefault((row["module"], row["tensor_name"]), []).append(row["sqnr"])
    medians = {place: statistics.median(values) for place, values in sqnr.items()}
    norms = [row["relative_norm"] for row in rows if row["relative_norm"] is not None]
    worst = min(medians, key=lambda place: medians[place], default=None)
    loss = one.losses[num_losses - 1] if one.losses else None
    cells = (
        one.quant_type,
        len(set(records.column("iteration").tolist())),
        len(records),
        loss if loss is not None and math.isfinite(loss) else None,
        statistics.median(medians.values()) if medians else None,
        statistics.median(norms) if norms else None,
        *_losses_of(records),
        "" if worst is None else f"{worst[0]} ({worst[1]}, {medians[worst]:.1f} dB)",
    )
    return _Run(quant_type=one.quant_type, url=one.url, row=cells, sqnr=medians)


def _differences(first: Records, records: Records) -> list[dict[str, Any]]:
    """What sets the products of linear layers apart, in the first iteration that both runs have."""
    from ranktape.analyze import compare

    common = set(first.column("iteration").tolist()) & set(records.column("iteration").tolist())
    if not common:
        return []
    wanted: dict[str, Any] = {"layer_type": "linear", "tensor_name": list(PRODUCTS), "iteration": min(common)}
    sides = first.select(**wanted), records.select(**wanted)
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


_BAD_DB, _GOOD_DB = 5.0, 45.0
"""Where the colours of cells end."""


def _page(runs: Sequence[_Run], *, notes: Sequence[str], first: str) -> str:
    others = [run for run in runs if run.sqnr]
    modules = list(dict.fromkeys(module for run in others for module, _ in run.sqnr))
    template = Template((Path(__file__).parent / "collected.html").read_text(encoding="utf-8"))
    heads = "".join(f'<th scope="col">{_escaped(column.head or column.name)}</th>' for column in COLUMNS)
    rows = "".join("<tr>" + "".join(map(_cell, run.row, COLUMNS)) + "</tr>" for run in runs)
    return template.substitute(
        title=_escaped(f"{', '.join(run.quant_type for run in runs)}: what differs from {first}"),
        heads=heads,
        rows=rows,
        first=_escaped(first),
        notes="".join(f"<p>{_escaped(note)}</p>" for note in notes),
        kinds="".join(f'<th scope="colgroup" colspan="3">{_escaped(run.quant_type)}</th>' for run in others),
        products="".join(f'<th scope="col">{product}</th>' for product in PRODUCTS) * len(others),
        modules="".join(
            f'<tr><th scope="row">{_escaped(module)}</th>'
            + "".join(_heat(run.sqnr.get((module, product))) for run in others for product in PRODUCTS)
            + "</tr>"
            for module in modules
        ),
        commands="".join(
            f"<p><code>ranktape analyze report {_escaped(run.url)} -o {_escaped(run.quant_type)}.html</code></p>"
            for run in runs
        ),
    )


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return "<td></td>"
    if column.kind is Kind.RATIO:
        return f'<td class="number">{value:.3%}</td>'
    if column.kind is Kind.FLOAT:
        return f'<td class="number">{value:.4g}</td>'
    return f'<td class="number">{value}</td>' if column.kind is Kind.INTEGER else f"<td>{_escaped(value)}</td>"


def _heat(sqnr: float | None) -> str:
    """A cell that is the darker the lower the SQNR is."""
    if sqnr is None:
        return "<td></td>"
    share = min(1.0, max(0.0, (_GOOD_DB - sqnr) / (_GOOD_DB - _BAD_DB)))
    text = f"{sqnr:.1f}" if math.isfinite(sqnr) else "same"
    return f'<td class="number" style="--share: {share:.2f}">{text}</td>'


def _escaped(text: str) -> str:
    return html.escape(printable(text))
