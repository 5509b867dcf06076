"""Says why a product loses more in a recipe than those of its peers, from the figures of its operands and theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import number_text, percent_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.replays.operand_figures import OperandFigures, ProductFigures

_Figures = TypeVar("_Figures")

_MOST_OF_IT = 0.5
"""Of a loss, what explains it explains so much at the least."""

_FEW_RATIO, _FEW = 0.05, 4
"""A few channels are no more than that part of them, or that number where there are hardly more."""

_WORDS = {"weight": {"rows": "row", "channels": "column"}}
_OTHER_WORDS = {"rows": "token", "channels": "channel"}
"""What rows and places along the last dimension of an operand are called."""


class Reason(NamedTuple):
    """Why, as the end of a sentence, and the same figures of the peers."""

    text: str
    peers: str


def reason_of(own: ProductFigures, others: Sequence[ProductFigures], *, decibels: float) -> Reason | None:
    """Why a product loses so many dB more than the others; None where no figure stands out from theirs.

    What an operand loses by itself comes first, and of two operands the one that loses more.
    """
    for name in sorted(own.operands, key=lambda name: own.operands[name].alone):
        operand, peers = own.operands[name], [one.operands[name] for one in others]
        if _median(peers, lambda one: one.alone) - operand.alone >= _MOST_OF_IT * decibels:
            found = next(_of_operand(name, operand, peers, decibels=decibels), None)
            if found is not None:
                return found
    usual = _median(others, lambda one: one.coherence)
    if usual - own.coherence >= _MOST_OF_IT * decibels:
        text = f"the terms of its sums cancel: it is {_against_unrelated(own.coherence)}"
        return Reason(text, _against_unrelated(usual))
    return None


def _of_operand(
    name: str, own: OperandFigures, peers: Sequence[OperandFigures], *, decibels: float
) -> Iterator[Reason]:
    for which, word in _WORDS.get(name, _OTHER_WORDS).items():
        count = _num_few(own.energy[which])
        share, usual = (float(part) for part in (own.energy[which][:count].sum(), _share(peers, which, count)))
        if share >= limit.ENERGY_SHARE and share >= 2 * usual:
            hold = f"{count} {word} of its {name} holds" if count == 1 else f"{count} {word}s of its {name} hold"
            yield Reason(f"{hold} {percent_text(share)} of the energy", percent_text(usual))
    usual = _median(peers, lambda one: one.flushed)
    if own.flushed - usual >= limit.FLUSHED_EXCESS:
        yield Reason(f"{percent_text(own.flushed)} of the values of its {name} become 0", percent_text(usual))
    usual = _median(peers, lambda one: one.crest)
    if own.crest - usual >= _MOST_OF_IT * decibels:
        text = f"of its {name} the largest value under one scale is {_factor(own.crest)} times their RMS"
        yield Reason(text, f"{_factor(usual)} times")


def _num_few(shares: NDArray[np.float64]) -> int:
    """How many stand out: up to where the next one holds so much less; 0 where none do."""
    most = max(_FEW, int(_FEW_RATIO * shares.size))
    if shares.size < limit.MIN_CHANNELS or not shares.size > most:
        return 0
    largest, next_ones = shares[:most], shares[1 : most + 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.where(largest > 0, largest / next_ones, 0.0)
    place = int(np.argmax(gaps))
    return place + 1 if gaps[place] >= limit.ENERGY_GAP else 0


def _share(peers: Sequence[OperandFigures], which: str, count: int) -> float:
    return float(np.median([one.energy[which][:count].sum() for one in peers]))


def _median(figures: Sequence[_Figures], of: Callable[[_Figures], float]) -> float:
    """The median of what is known; NaN, which explains nothing, where nothing is."""
    known = [value for value in map(of, figures) if not math.isnan(value)]
    return float(np.median(known)) if known else math.nan


def _factor(decibels: float) -> str:
    return number_text(float(f"{10 ** (decibels / 20):.2g}"))


def _against_unrelated(decibels: float) -> str:
    size = number_text(float(f"{abs(decibels):.2g}"))
    return f"{size} dB {'smaller' if decibels < 0 else 'larger'} than that of unrelated operands"
