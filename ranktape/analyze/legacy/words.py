"""What a pickle says, in words that JSON has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ranktape.analyze.legacy.pickles import Pairs, TensorData
from ranktape.errors import DataError

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
            return {counted(str(key)): convert(inner, depth + 1) for key, inner in entry.items if not _is_nested(key)}
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
        return entry if entry is None or isinstance(entry, int) or _is_finite(entry) else text

    return convert(value, 0)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_nested(key: Any) -> bool:
    return isinstance(key, Pairs | list | tuple)
