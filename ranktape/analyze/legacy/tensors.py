"""Gives what a pickle says as JSON has it, and tensors of torch again of what was listed there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.legacy.pickles import Pairs, TensorData
from ranktape.errors import DataError, UsageError
from ranktape.storage.format.dtypes import DTYPES

if TYPE_CHECKING:
    import torch


MAX_NODES = 100_000
"""Values that `plain` gives at most: what refers to itself or to one list many times is endless otherwise."""

MAX_DEPTH = 64
"""Lists and dictionaries within one another that `plain` follows."""

MAX_CHARACTERS = 1 << 24
"""Characters that `plain` gives at most: a pickle names one long text many times in few bytes."""


_NUMBER_CHARACTERS = 26
"""The most that a number of a tensor takes."""


def plain(
    value: Any,
    *,
    place: str,
    max_characters: int = MAX_CHARACTERS,
    listed: Callable[[TensorData], Any] = lambda _: None,
) -> Any:
    """The same as JSON has it: dictionaries of texts, lists, numbers; NaN becomes a text.

    A tensor becomes what `listed` gives of it, while half of the characters are not taken yet; else a text.

    Raises:
        DataError: it is larger than any description of a tensor, or refers to itself.
    """
    num_nodes = num_characters = 0

    def counted(text: str) -> str:
        nonlocal num_characters
        num_characters += len(text)
        if num_characters > max_characters:
            raise DataError(f"what {place} says of its tensor is longer than {max_characters} characters")
        return text

    def convert(entry: Any, depth: int) -> Any:
        nonlocal num_nodes
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise DataError(f"what {place} says of its tensor is larger than {MAX_NODES} values or refers to itself")
        if isinstance(entry, Pairs):
            return {
                counted(str(key)): convert(inner, depth + 1)
                for key, inner in entry.items
                if not isinstance(key, Pairs | list | tuple)
            }
        if isinstance(entry, TensorData):
            # A pickle may name one tensor many times, too.
            has_room = num_characters + _NUMBER_CHARACTERS * math.prod(entry.shape) <= max_characters // 2
            known = listed(entry) if has_room else None
            text = counted(f"tensor {entry.dtype}{list(entry.shape)}" if known is None else json.dumps(known))
            return text if known is None else known
        if type(entry) in {list, tuple}:
            return [convert(inner, depth + 1) for inner in entry]
        # A number has as many characters as its digits, of which a stranger's may have hundreds.
        text = counted(str(entry))
        is_plain = entry is None or isinstance(entry, int) or (isinstance(entry, float) and math.isfinite(entry))
        return entry if is_plain else text

    return convert(value, 0)


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
