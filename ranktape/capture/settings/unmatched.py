"""Which of the names that a selection gives does nothing of the training match?

Most fields of a record are open: a tensor may be called anything. So a name that is mistyped is no error, and is told
of once it is known what there is: after the first iteration, with the nearest name that was seen.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.capture.settings.rules import LAYER_OUTPUTS, TEXT_FIELDS, read_selection
from ranktape.storage.selection.columns import StringColumn
from ranktape.storage.selection.filters import Filter

if TYPE_CHECKING:
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.settings.rules import Rule
    from ranktape.capture.source import Source, TensorRole
    from ranktape.storage.selection.columns import Column

OF_SITES = ("module", "layer_type", "layer_stack", "layer_idx", "component", "operation", "phase", "tensor_name")
"""What is the same in every iteration, and known of each site."""

_OF_TENSORS = ("dtype", "compute_dtype", "quant_type")
"""What is known of each tensor, and mostly the same in every iteration."""

_MAX_LISTED = 8


@dataclass(slots=True)
class Sightings:
    """What a capture has met on this rank, whether it took it or not."""

    rank: int
    """This one."""
    sites: dict[tuple[Source, TensorRole, str], None] = field(default_factory=dict)
    """Sources and roles, with what follows the name of the tensor."""
    values: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in _OF_TENSORS})
    """Of the fields of single tensors."""

    def column(self, name: str, /) -> Column:
        """The field of all sites; of single tensors the values that there are."""
        if name == "rank":
            return np.array([self.rank])
        if name in self.values:
            return _texts(sorted(self.values[name]))
        found = [_of_site(name, source, role, suffix) for source, role, suffix in self.sites]
        return _texts(found) if name in TEXT_FIELDS else np.array(found, dtype=np.int64)


def find_unmatched(options: CaptureOptions, seen: Sightings, *, paths: Collection[str]) -> Iterator[str]:
    """A line for each alternative of a filter, and each rule, that nothing matched.

    Args:
        options: Of the capture.
        seen: In the first iteration.
        paths: The modules of the model.
    """
    if not seen.sites:
        return  # there was nothing to match, as in a capture of evaluation before that comes
    general, rules = read_selection(options)
    flags = _flags()
    yield from (
        f"{flags[one.field]} {text}"
        for one in general.filters
        for text in _unmatched_of(one, seen, paths=paths, without=LAYER_OUTPUTS if options.wants_layers else ())
    )
    for number, rule in enumerate(rules, start=1):
        found = [f"{one.field} {text}" for one in rule.filters for text in _unmatched_of(one, seen, paths=paths)]
        if not found and not _can_fit(rule, seen):
            found = ["matches nothing of the first iteration: check it against what 'ranktape plan' shows"]
        yield from (f"--select, rule {number}: {text}" for text in found)


def _unmatched_of(
    chosen: Filter, seen: Sightings, *, paths: Collection[str], without: Sequence[str] = ()
) -> Iterator[str]:
    if chosen.field not in (*OF_SITES, *_OF_TENSORS, "rank"):
        return
    column = seen.column(chosen.field)
    is_text = isinstance(column, StringColumn)
    for given in chosen.alternatives:
        for one in given.split(",") if isinstance(given, str) and not is_text else [given]:
            alone = Filter(field=chosen.field, alternatives=(one,))
            if one not in without and not alone.mask(lambda _: column, len(column)).any():
                hint = _hint(str(one), column, paths=paths if chosen.field == "module" else ())
                shown = f"{one!r:.60}" if isinstance(one, str) else str(one)
                yield f"{shown} matches nothing of the first iteration{hint}"


def _hint(given: str, column: Column, *, paths: Collection[str]) -> str:
    """What to give in its place."""
    if not isinstance(column, StringColumn):
        return f" (seen were {column.min()} to {column.max()})" if len(column) > 1 else ""
    names = sorted({*filter(None, column.table), *paths})
    if near := difflib.get_close_matches(given, names, 1, 0.5):
        return f": did you mean {near[0]}?"
    return f" (seen were {', '.join(names)})" if 0 < len(names) <= _MAX_LISTED else ""


def _can_fit(rule: Rule, seen: Sightings) -> bool:
    return bool(rule.can_hold(seen.column, known=OF_SITES, num_rows=len(seen.sites)).any())


def _of_site(name: str, source: Source, role: TensorRole, suffix: str) -> Any:
    if name == "tensor_name":
        return role.tensor_name + suffix
    return getattr(role if name in {"operation", "phase"} else source, name)


def _texts(values: Sequence[Any]) -> StringColumn:
    table = list(dict.fromkeys(map(str, values)))
    numbers = {text: number for number, text in enumerate(table)}
    return StringColumn(codes=np.array([numbers[str(value)] for value in values], dtype=np.int64), table=table)


def _flags() -> dict[str, str]:
    from ranktape.capture.settings.options import SETTINGS

    return {setting.filters: setting.flag for setting in SETTINGS if setting.filters}
