"""Metrics of many records, or of groups of records, as columns, from cached digests if possible.

Intended -Inf is distinguished from overflow. It occurs in additive masks of attention and in scores to which they were
added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.digests import digest_columns, grouped_digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import NUMBERS, Metric, metric_column
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import Groups, role_of
from ranktape.analyze.numerics.digest import SAMPLE_METRICS, Digest, Digests
from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMetrics:
    """Metrics of many records, or of groups of records."""

    columns: dict[str, NDArray[np.float64]]
    """For each metric, one number for each record or group; NaN if there is none."""
    sample_sizes: NDArray[np.int64]
    """Number of samples of each record; 0 for groups."""
    samples: NDArray[np.float64]
    """`SAMPLE_METRICS` of the samples of all records, of shape (samples, 14)."""

    def column(self, name: str) -> NDArray[np.float64]:
        """One number for each record or group; NaN if there is none."""
        return self.columns[name]

    def sample_column(self, name: str) -> NDArray[np.float64]:
        """One of `SAMPLE_METRICS` of the samples of all records."""
        column: NDArray[np.float64] = self.samples[:, SAMPLE_METRICS.index(name)]
        return column

    @property
    def owners(self) -> NDArray[np.int64]:
        """For each sample, the index of its record."""
        return np.repeat(np.arange(self.sample_sizes.size), self.sample_sizes)

    @property
    def sample_indices(self) -> NDArray[np.int64]:
        """For each sample, its index within its record."""
        starts = np.cumsum(self.sample_sizes) - self.sample_sizes
        return np.arange(len(self.samples)) - np.repeat(starts, self.sample_sizes)


def record_metrics(
    records: Records, metrics: Iterable[str | Metric] = NUMBERS, *, view: View, engine: Engine | None = None
) -> RecordMetrics:
    """The metrics of each record. Only records that are not in the cache are read."""
    groups = Groups(keys=({},) * len(records), sizes=(1,) * len(records), numbers=np.arange(len(records)))
    named = [NUMBERS[metric] if isinstance(metric, str) else metric for metric in metrics]
    return group_metrics(records, groups, named, view=view, engine=engine)


def group_metrics(
    records: Records, groups: Groups, metrics: Sequence[Metric], *, view: View, engine: Engine | None = None
) -> RecordMetrics:
    """The metrics of each group as if it were one record, without samples. Raises the errors of `record_metrics`."""
    columns = {metric.name: np.full(len(groups.keys), math.nan) for metric in metrics}
    sizes = np.zeros(len(groups.keys), dtype=np.int64)
    samples = []
    merged = group_digest_columns(
        records, groups, view=view, engine=engine, with_values=any(metric.needs_values for metric in metrics)
    )
    for rows, digests in merged:
        for metric in metrics:
            columns[metric.name][rows] = metric_column(metric, digests)
        sizes[rows] = np.maximum(0, digests.sample_sizes)
        samples.append(digests.samples)
    return RecordMetrics(
        columns=columns,
        sample_sizes=sizes,
        samples=np.concatenate([np.zeros((0, len(SAMPLE_METRICS))), *samples]),
    )


def group_digest_columns(
    records: Records, groups: Groups, *, view: View, engine: Engine | None, with_values: bool = True
) -> Iterator[tuple[NDArray[np.int64], Digests]]:
    """The indices and the merged digests of groups, a few hundred at a time, in any order.

    Without `with_values`, the digests of groups lack the distinct numbers.
    """
    is_mask = additive_masks(records)
    if len(groups.keys) == len(records):
        # Each record is a group of its own.
        numbers, start = groups.numbers, 0
        for columns in digest_columns(records, view=view, engine=engine, is_mask=is_mask):
            yield numbers[start : start + len(columns)], columns
            start += len(columns)
        return
    yield from grouped_digests(
        records, groups.numbers, is_mask=is_mask, view=view, engine=engine, with_values=with_values
    )


def group_digests(
    records: Records, groups: Groups, *, view: View, engine: Engine | None
) -> Iterator[tuple[int, Digest]]:
    """The index and the merged digest of each group, in any order. Raises the errors of `group_digest_columns`."""
    for numbers, columns in group_digest_columns(records, groups, view=view, engine=engine):
        yield from zip(numbers.tolist(), map(columns.digest, range(len(columns))), strict=True)


MIN_MASKED_RATIO = 0.05
"""Minimum fraction of -Inf for a mask. If more than this is -Inf in all records equally, it is a mask: overflow would
vary."""

_OPERANDS = ("input", "output", "weight", "bias", "query", "key", "value")
"""Tensors to which masks are not added. If the same fraction of them is -Inf in every record, it has overflowed."""

_MASKED = ("score", "logit", "attention", "attn", "bias")
"""Parts of the names of tensors to which masks are added. In other tensors, a channel may overflow in every record."""

_MOMENT = ("source", "attempt", "iteration", "rank", "microbatch", "module")
_ROLE = ("layer_type", "tensor_name", "operation", "phase", "component", "quant_type", "mode")


def additive_masks(records: Records) -> NDArray[np.bool_]:
    """Which records are additive masks, or scores to which one was added, according to the catalogue alone.

    A record is a mask if its name contains "mask" and no value exceeds the positive limit. A record of a forward pass
    is masked if all its values beyond the limits are -Inf and their fraction is either that of a mask of the same
    module at the same moment, or large and the same in all records of this role in all layers, if the name is one of
    scores. Operands and results of layers are never masked, nor are records that are -Inf everywhere.
    """
    names = records.column("tensor_name")
    named = {name: "mask" in str(name).lower() for name in set(names.tolist())}
    upper, lower, inf = (records.column(f"overflow.{kind}.count") for kind in ("upper", "lower", "inf"))
    is_mask: NDArray[np.bool_] = np.array([named[name] for name in names.tolist()], dtype=bool) & (upper == 0)
    shares = inf / np.maximum(1, records.column("numel"))
    is_open = ~is_mask & (upper == 0) & (lower == inf) & (inf > 0) & (records.column("operation") == "forward")
    is_open &= ~np.isin(names.astype(str), _OPERANDS) & (shares < 1)
    if not is_open.any():
        return is_mask
    moments, roles = _keys(records, _MOMENT), _roles(records)
    mask_shares: dict[Any, set[float]] = defaultdict(set)
    for index in np.flatnonzero(is_mask).tolist():
        mask_shares[moments[index]].add(float(shares[index]))
    role_shares: dict[Any, list[float]] = defaultdict(list)
    for role, share in zip(roles, shares.tolist(), strict=True):
        role_shares[role].append(share)
    for index in np.flatnonzero(is_open).tolist():
        share, same_role = float(shares[index]), role_shares[roles[index]]
        name = str(names[index]).lower()
        is_named = any(part in name for part in _MASKED) and "output" not in name
        is_same_share = is_named and share > MIN_MASKED_RATIO and len(same_role) > 1 and len(set(same_role)) == 1
        is_mask[index] = is_same_share or share in mask_shares.get(moments[index], ())
    return is_mask


def _keys(records: Records, fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return list(zip(*(records.column(name).tolist() for name in fields), strict=True))


def _roles(records: Records) -> list[tuple[Any, ...]]:
    """For each record, the fields that are the same in all layers."""
    pairs = _keys(records, ("module", "layer_idx"))
    role_keys = {pair: (role_of(str(pair[0]), int(pair[1])), pair[1] < 0) for pair in set(pairs)}
    return [(*role_keys[pair], *fields) for pair, fields in zip(pairs, _keys(records, _ROLE), strict=True)]
