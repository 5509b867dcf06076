"""Values become tensors of torch, those too that stand among the words about a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch


def as_tensor(values: Any, dtype: str) -> torch.Tensor:
    """The values as a tensor of their dtype, in torch's words.

    Raises:
        UsageError: torch has no such dtype.
    """
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"torch has no dtype {dtype}: leave such records out with --dtype or --where")
    if not values.size:
        return torch.empty(values.shape, dtype=kind)
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
    return raw.view(kind).reshape(values.shape)


def with_tensors(entry: Any) -> Any:
    """The same with a tensor in each place where `read_plain` has listed one."""
    if isinstance(entry, list):
        return [with_tensors(inner) for inner in entry]
    if not isinstance(entry, dict):
        return entry
    if entry.keys() != {"tensor", "shape", "values"}:
        return {key: with_tensors(inner) for key, inner in entry.items()}
    row = DTYPES.get(str(entry["tensor"]))
    if row is None or not isinstance(entry["values"], list) or not isinstance(entry["shape"], list):
        return entry
    try:
        numbers = [float(number) for number in entry["values"]] if row.is_floating else entry["values"]
        return as_tensor(np.array(numbers).astype(row.numpy_dtype).reshape(entry["shape"]), row.name)
    except (TypeError, ValueError, OverflowError, UsageError):
        return entry  # it looks like a tensor, and is none
