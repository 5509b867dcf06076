"""The stacks of layers that records are of, and what tells apart layers of the same number."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranktape.storage import Records


def stacks_of(records: Records) -> tuple[str, ...]:
    """The stacks of layers that records are of, in the order of the records; none where it is not known."""
    return tuple(stack for stack in dict.fromkeys(records.column("layer_stack").tolist()) if stack)


def with_stacks(by: Sequence[str], *selections: Records) -> tuple[str, ...]:
    """The fields to group by: where records are of several stacks, layers of one number are not one layer.

    Then `layer_stack` comes before `layer_idx`.
    """
    if "layer_idx" not in by or "layer_stack" in by:
        return tuple(by)
    place = list(by).index("layer_idx")
    is_several = len({stack for records in selections for stack in stacks_of(records)}) > 1
    return (*by[:place], *(["layer_stack"] if is_several else []), *by[place:])


def short_names(stacks: Sequence[str]) -> dict[str, str]:
    """What people call each of several stacks: its path without what begins or ends all of them.

    `encoder` for `model.encoder.layers` beside `model.decoder.layers`; the whole path where nothing else is left.
    """
    paths = [stack.split(".") for stack in stacks]
    head, tail = _num_alike(paths), _num_alike([path[::-1] for path in paths])
    short = [".".join(path[head : len(path) - tail]) for path in paths]
    return dict(zip(stacks, short if all(short) else stacks, strict=True))


def _num_alike(paths: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


class LayerPlace(int):
    """Where a layer lies among those of several stacks, which lie one behind the other; as text its name."""

    stack: str
    """What its stack is called."""
    number: int
    """Its number in it."""

    @classmethod
    def of(cls, place: int, *, stack: str, number: int) -> LayerPlace:
        """The place of a layer."""
        found = cls(place)
        found.stack, found.number = stack, number
        return found

    def __str__(self) -> str:
        return f"{self.stack} {self.number}".strip()


def layer_places(stacks: Sequence[str], layers: Sequence[int]) -> list[int]:
    """For the stack and the layer of each record where the layer lies: its number, of several stacks a `LayerPlace`.

    Between two stacks is a gap. What is outside of any (-1) stays there.
    """
    pairs = [pair for pair in dict.fromkeys(zip(stacks, layers, strict=True)) if pair[1] >= 0]
    known = list(dict.fromkeys(stack for stack, _ in pairs))
    if len(list(filter(None, known))) <= 1:
        return list(layers)
    names = {"": "", **short_names([*filter(None, known)])}
    places: dict[tuple[str, int], int] = {}
    start = 0
    for stack in known:
        numbers = sorted(layer for name, layer in pairs if name == stack)
        for number in numbers:
            place = start + number - numbers[0]
            places[stack, number] = LayerPlace.of(place, stack=names[stack], number=number)
        start += numbers[-1] - numbers[0] + 2
    return [places.get(pair, pair[1]) for pair in zip(stacks, layers, strict=True)]


def number_of(layer: int) -> int:
    """The number of a layer in its stack, of a place or of a number."""
    return layer.number if isinstance(layer, LayerPlace) else layer


def stack_of(layer: int) -> str:
    """What the stack of a place is called; empty for a number, as of the only stack."""
    return layer.stack if isinstance(layer, LayerPlace) else ""
