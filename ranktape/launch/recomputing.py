"""Adds to the check of a run whether its recorded products are what their recorded operands give."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, RunFormatError
from ranktape.launch.place import by_reason, count_text
from ranktape.storage.maintenance.finding import FindingKind, Findings

if TYPE_CHECKING:
    from ranktape.analyze.replays.recomputed import Recomputed
    from ranktape.storage.maintenance.finding import CheckReport
    from ranktape.storage.maintenance.work import OnProgress

CANNOT = "could not be computed again"
IN_TF32 = "agreed only as if the device had rounded float32 operands to TF32"


def recompute_products(
    report: CheckReport,
    run: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Add to a report what computing the products of a run again finds, and how many there are.

    Complete iterations count, each in its latest attempt. A run that cannot be opened is a note: the report says why.

    Raises:
        StorageError: the store cannot be read.
    """
    from ranktape.analyze.replays.recomputed import recompute
    from ranktape.storage import open_run

    found = Findings(items=report.findings)
    counts = {"agreed": 0, "disagreed": 0, "unchecked": 0}
    reasons: list[tuple[str, str]] = []
    damaged: defaultdict[tuple[int, ...], list[Recomputed]] = defaultdict(list)
    try:
        for one in recompute(open_run(run, storage_options=storage_options).select(), on_progress=on_progress):
            if one.is_damaged:
                damaged[tuple(_at(one).values())].append(one)
                counts["unchecked"] += 1
            elif one.agreement is None:
                reasons.append((f"{CANNOT}: {one.reason}", _place(one)))
                counts["unchecked"] += 1
            elif one.agreement.is_agreed:
                reasons += [(IN_TF32, _place(one))] if one.agreement.is_tf32 else []
                counts["agreed"] += 1
            else:
                counts["disagreed"] += 1
                found.error(FindingKind.PRODUCT, _disagreement(one), **_at(one))
    except (DataError, RunFormatError) as error:
        found.note(FindingKind.UNCHECKED, f"its products {CANNOT}: {error}")
        return
    # One object holds many tensors: what is lost with it is an error once, not for each product.
    for first, *more in damaged.values():
        what = count_text(1 + len(more), "product")
        found.error(FindingKind.DAMAGED, f"{what} {CANNOT}; the first: {_place(first)}: {first.reason}", **_at(first))
    numbers = Counter(reason for reason, _ in reasons)
    for reason, places in by_reason(reasons).items():
        what = count_text(numbers[reason], "product")
        found.note(FindingKind.UNCHECKED, f"{what} {reason} ({places})")
    report.products = counts


def _disagreement(one: Recomputed) -> str:
    agreement = one.agreement
    assert agreement is not None, "only of what was compared"
    where = ", ".join(f"{name} {one.field(name)}" for name in ("microbatch", "call"))
    sample = "" if one.sample is None else f", sample {one.sample}"
    return (
        f"{_place(one)} ({where}{sample}) is not what its recorded operands give: "
        f"relative error {agreement.relative_error:.3g}, {agreement.deviation:.3g} times what rounding allows"
    )


def _at(one: Recomputed) -> dict[str, int]:
    return {name: one.field(name) for name in ("attempt", "iteration", "rank")}


def _place(one: Recomputed) -> str:
    return f"{one.field('module') or one.field('layer_type')} {one.product}"
