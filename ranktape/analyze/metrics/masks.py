"""Tells additive masks of attention from overflow: in them, and in scores that they were added to, -Inf is meant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.digests import digest_columns
from ranktape.analyze.identity import role_of

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.digest import Digest
    from ranktape.storage import Records

MIN_MASKED_RATIO = 0.05
"""A part of a tensor that is -Inf in every record alike is a mask: what overflows is not the same part twice."""

_OPERANDS = ("input", "output", "weight", "bias", "query", "key", "value")
"""Masks are added to none of these: if the same part of them is -Inf in every record, that part has overflowed."""

_MASKED = ("score", "logit", "attention", "attn", "bias")
"""Words in the names of what masks are added to. Elsewhere the same part may be a channel that has overflowed."""

_MOMENT = ("source", "attempt", "iteration", "rank", "microbatch", "module")
_ROLE = ("layer_type", "tensor_name", "operation", "phase", "component", "quant_type", "mode")


def additive_masks(records: Records) -> NDArray[np.bool_]:
    """Which records are additive masks, or scores that one was added to; from the catalogue alone.

    A record whose name says that it is a mask, without values beyond the positive limit. Or one of a forward pass whose
    values beyond the limits are all -Inf, a part that is the same in a mask of its module at the same moment, or the
    same large part in all records of all layers, where its name is one of scores; unless it is an operand or a result
    of a layer, or -Inf everywhere.
    """
    names = records.column("tensor_name")
    named = {name: "mask" in str(name).lower() for name in set(names.tolist())}
    upper, lower, inf = (records.column(f"overflow.{kind}.count") for kind in ("upper", "lower", "inf"))
    found: NDArray[np.bool_] = np.array([named[name] for name in names.tolist()], dtype=bool) & (upper == 0)
    shares = inf / np.maximum(1, records.column("numel"))
    is_open = ~found & (upper == 0) & (lower == inf) & (inf > 0) & (records.column("operation") == "forward")
    is_open &= ~np.isin(names.astype(str), _OPERANDS) & (shares < 1)
    if not is_open.any():
        return found
    moments, roles = _keys(records, _MOMENT), _roles(records)
    shares_of_masks: dict[Any, set[float]] = defaultdict(set)
    for place in np.flatnonzero(found).tolist():
        shares_of_masks[moments[place]].add(float(shares[place]))
    shares_of_roles: dict[Any, list[float]] = defaultdict(list)
    for role, share in zip(roles, shares.tolist(), strict=True):
        shares_of_roles[role].append(share)
    for place in np.flatnonzero(is_open).tolist():
        share, alike = float(shares[place]), shares_of_roles[roles[place]]
        name = str(names[place]).lower()
        is_named = any(word in name for word in _MASKED) and "output" not in name
        is_alike = is_named and share > MIN_MASKED_RATIO and len(alike) > 1 and len(set(alike)) == 1
        found[place] = is_alike or share in shares_of_masks.get(moments[place], ())
    return found


def _keys(records: Records, fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return list(zip(*(records.column(name).tolist() for name in fields), strict=True))


def _roles(records: Records) -> list[tuple[Any, ...]]:
    """For each record what places have in common that differ in the layer alone."""
    pairs = _keys(records, ("module", "layer_idx"))
    known = {pair: (role_of(str(pair[0]), int(pair[1])), pair[1] < 0) for pair in set(pairs)}
    return [(*known[pair], *rest) for pair, rest in zip(pairs, _keys(records, _ROLE), strict=True)]


def digests_without_masks(records: Records, *, view: View, engine: Engine | None = None) -> Iterator[Digest]:
    """The digest of each record; the -Inf of additive masks are infinite in it, and do not overflow.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record cannot be looked at so.
    """
    for columns in digest_columns(records, view=view, engine=engine, is_mask=additive_masks(records)):
        yield from map(columns.digest, range(len(columns)))
