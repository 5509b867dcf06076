"""Finds layers whose products lose more in a recipe than those of their peers over depth, and says why.

A product is judged by its SQNR in dB, all calls together; peers are the same product of the like module in other
layers. Why it is low is read from the operands of its worst call, beside those of its peers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import Finding, Severity, finding_of, number_text, percent_text
from ranktape.analyze.findings.survey import Survey, robust_z
from ranktape.analyze.identity import role_of
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.replays.calls import places_in
from ranktape.analyze.replays.operand_figures import CallFigures, OperandFigures, ProductFigures
from ranktape.analyze.replays.replayed import Replayed

WIDTHS = (4, 6, 8)
"""Bits of elements by which recipes are put together; of wider ones a layer loses nothing that matters."""

MAX_NAMED = 3
"""Recipes that a sentence names, and whose figures stand beside it: those that lose most."""

MAX_PEERS = 8
"""Layers whose operands are read beside those of one that loses more: the nearest."""


class ProductSite(NamedTuple):
    """A product of one layer, over ranks, iterations and microbatches."""

    layer_stack: str
    layer_idx: int
    layer_type: str
    quant_type: str
    mode: str
    module: str
    product: str

    @property
    def role(self) -> tuple[str, ...]:
        """What is the same of peers."""
        return (*self[2:5], self.layer_stack, role_of(self.module, self.layer_idx), self.product)


class RecipeCell(NamedTuple):
    """What a recipe keeps of a product of a layer."""

    sqnr: float
    """In dB, of all calls together."""
    worst: int
    """The place of the call that keeps least."""


class ProductLoss(NamedTuple):
    """A product that keeps less in a recipe than those of its peers."""

    recipe: Recipe
    cell: RecipeCell
    expected: float
    """The median SQNR of the peers."""
    score: float
    """The robust z."""
    peers: list[ProductSite]
    """Those of them that keep what is usual, the nearest first."""
    is_edge: bool
    """Whether the layer is the first or the last one, which are different by nature."""

    @property
    def decibels(self) -> float:
        """How much more than the peers it loses."""
        return self.expected - self.cell.sqnr


def recipe_outliers(
    survey: Survey, replayed: Replayed, recipes: Sequence[Recipe], *, threshold: float = limit.ROBUST_Z
) -> Iterator[Finding]:
    """One for each product of a layer that loses more than those of its peers, with the recipes in which it does.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
    """
    narrow = {recipe.name: recipe for recipe in recipes if _width(recipe)}
    cells: dict[str, dict[ProductSite, RecipeCell]] = {name: {} for name in narrow}
    for group in replayed.groups((*ProductSite._fields, "recipe")):
        *place, recipe = group.key.values()
        site, ratio = ProductSite(*place), group.exact.sqnr
        # What loses nothing has no ratio to speak of; what is outside of the stack has no peers.
        if recipe in narrow and site.layer_idx >= 0 and ratio is not None and math.isfinite(ratio):
            cells[recipe][site] = RecipeCell(ratio, int(replayed.places[group.worst]))
    found: dict[ProductSite, list[ProductLoss]] = defaultdict(list)
    for name, recipe in narrow.items():
        for site, loss in _losses(recipe, cells[name], threshold):
            found[site].append(loss)
    places, figures = places_in(survey.records, replayed.calls) if found else [], CallFigures(replayed.calls)
    for site, losses in found.items():
        worst = max(losses, key=lambda one: one.decibels)
        reason = _reason(figures, site, worst, cells[worst.recipe.name])
        calls = sorted(figures.calls_of(worst.cell.worst), key=lambda call: call != worst.cell.worst)
        own = [place for call in calls for place in places[call]]
        call = replayed.calls.calls[worst.cell.worst]
        moment = f"iteration {call.field('iteration')}, rank {call.field('rank')}"
        yield _finding(survey, site, losses, list(narrow.values()), reason, moment=moment, places=own)


def _width(recipe: Recipe) -> int:
    """The bits of its elements without those of scales; 0 of wider ones."""
    return next((width for width in WIDTHS if recipe.bits < width + 1), 0)


def _losses(
    recipe: Recipe, cells: Mapping[ProductSite, RecipeCell], threshold: float
) -> Iterator[tuple[ProductSite, ProductLoss]]:
    """The products that lose more than those of the same role in other layers."""
    roles: dict[tuple[str, ...], list[ProductSite]] = defaultdict(list)
    for site in cells:
        roles[site.role].append(site)
    for sites in roles.values():
        if len(sites) < limit.MIN_LAYERS:
            continue
        values = np.array([cells[site].sqnr for site in sites])
        apart = np.median(values) - values
        scores = robust_z(apart, float(np.median(np.abs(apart))), floor=limit.MIN_MAD_DECIBELS)
        expected = np.array([np.median(np.delete(values, place)) for place in range(values.size)])
        is_far = (scores > threshold) & (expected - values >= limit.RECIPE_DECIBELS * threshold / limit.ROBUST_Z)
        ends = {pick(site.layer_idx for site in sites) for pick in (min, max)}
        usual = [site for site, far in zip(sites, is_far.tolist(), strict=True) if not far]
        for place in np.flatnonzero(is_far).tolist():
            site = sites[place]
            peers = sorted(usual, key=lambda one: abs(one.layer_idx - site.layer_idx))
            is_edge = site.layer_idx in ends
            yield site, ProductLoss(recipe, cells[site], float(expected[place]), float(scores[place]), peers, is_edge)


def _reason(
    figures: CallFigures, site: ProductSite, loss: ProductLoss, cells: Mapping[ProductSite, RecipeCell]
) -> Reason | None:
    """Why a product loses more than its peers in the recipe in which it loses most, from its worst call."""
    own = figures.of(loss.cell.worst, site.product, loss.recipe)
    calls = [figures.beside(loss.cell.worst, or_else=cells[peer].worst) for peer in loss.peers[:MAX_PEERS]]
    others = [figures.of(call, site.product, loss.recipe) for call in calls]
    known = [one for one in others if one is not None]
    return None if own is None or not known else reason_of(own, known, decibels=loss.decibels)


def _finding(
    survey: Survey,
    site: ProductSite,
    losses: Sequence[ProductLoss],
    recipes: Sequence[Recipe],
    reason: Reason | None,
    *,
    moment: str,
    places: Sequence[int],
) -> Finding:
    named = _named([one.recipe for one in losses], recipes)
    least, worst = (pick(losses, key=lambda one: one.decibels) for pick in (min, max))
    is_serious = least.decibels >= limit.SERIOUS_RECIPE_DECIBELS and not least.is_edge
    shown = sorted(losses, key=lambda one: -one.decibels)[:MAX_NAMED]
    ratios = (f"{one.recipe.name} {one.cell.sqnr:.1f} dB, peers {one.expected:.1f}" for one in shown)
    because = f", because {reason.text}" if reason else ""
    why = [f"{reason.text}, of the peers {reason.peers}"] if reason else []
    return finding_of(
        survey,
        places=places,
        kind="recipe_outlier",
        severity=Severity.MEDIUM if is_serious else Severity.LOW,
        score=worst.decibels,
        what=site.product,
        text=f"loses {least.decibels:.1f} dB more than its peers under {named}{because}",
        evidence="; ".join([f"SQNR in {', in '.join(ratios)}", *why, f"worst in {moment}"]),
        metric="sqnr",
        value=worst.cell.sqnr,
        expected=worst.expected,
        deviation=worst.score,
        options={"recipe": ",".join(one.recipe.name for one in losses)},
    )


def _named(own: Sequence[Recipe], recipes: Sequence[Recipe]) -> str:
    """`every 4-bit recipe` where there are several of that width and all are meant, else names."""
    if len(own) == len(recipes) > 1:
        return "every recipe"
    words = []
    for width in WIDTHS:
        given = [recipe for recipe in recipes if _width(recipe) == width]
        meant = [recipe.name for recipe in given if recipe in own]
        several = f"every {width}-bit recipe" if len(meant) == len(given) else f"{len(meant)} {width}-bit recipes"
        words += [several] if len(meant) == len(given) > 1 or len(meant) > MAX_NAMED else meant
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
