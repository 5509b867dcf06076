"""The precision plan of a run: for each linear layer, the cheapest recipe whose products all reach a target."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.recipes.plan_file import HIGH_PRECISION, PlannedModule, PrecisionGap, PrecisionPlan
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.numerics.recipes.words import RecipeSource, parse_recipes
from ranktape.analyze.replays.calls import RecordedCall
from ranktape.analyze.replays.computable import CALL_FIELDS, LinearTensors
from ranktape.analyze.replays.replayed import Replayed, ReplayedGroup, replay_calls
from ranktape.errors import NoRecordsError, UsageError, nearest
from ranktape.storage import Records
from ranktape.storage.places.backend import without_credentials

Targets: TypeAlias = "str | float | Mapping[str, float]"
"""A number of dB for all products, a text such as `20` or `output=20,grad_weight=15`, or numbers by product."""


def precision_plan(
    records: Records,
    *,
    recipe: RecipeSource | Sequence[RecipeSource] = "nvfp4,mxfp8",
    target_sqnr: Targets | None = None,
    target_bits: float | None = None,
    engine: Engine | None = None,
) -> PrecisionPlan:
    """The plan of the selected linear layers: for each, the cheapest recipe whose products all reach the target.

    The cheapest recipe is the one with the highest speed, then the fewest bits, then the best SQNR. A layer stays in
    bf16 if no recipe reaches the target or if none of its products can be replayed; the plan gives the reason. The SQNR
    covers all calls of a layer, over ranks and iterations; the plan also has that of the worst call. Products that
    cannot be replayed are ignored.

    With `target_bits` instead of `target_sqnr`, the target is the highest one, in steps of 0.5 dB up to 40 dB, whose
    plan has at most this many bits per element on average.

    Raises:
        NoRecordsError: no linear layer is selected, or no product of the selected layers can be replayed.
        UsageError: a recipe is unknown, a target is invalid, both targets or none are given, or no plan has so few
            bits.
        RanktapeError: the errors of `replay_calls`.
    """
    if (target_sqnr is None) == (target_bits is None):
        raise UsageError("a plan is for one target: give target_sqnr or target_bits")
    if target_bits is not None and math.isnan(target_bits):
        raise UsageError("target_bits nan is no number of bits: give one, as 6")
    recipes, targets = parse_recipes(recipe), parse_targets(0 if target_sqnr is None else target_sqnr)
    replayed = replay_calls(records, recipes, products=list(targets), engine=engine)
    plan = make_plan(replayed, recipes, target_sqnr=targets)
    if target_bits is None:
        return plan
    return make_plan(replayed, recipes, target_sqnr=_target_within(plan, target_bits))


def _target_within(plan: PrecisionPlan, target_bits: float) -> dict[str, float]:
    """The highest target whose plan does not exceed `target_bits`; `plan` has the bits for each target."""
    if not plan.bits_by_target:
        unknown = next((module.module for module in plan.modules if module.multiply_adds is None), None)
        why = "no product has elements" if unknown is None else f"{unknown} cannot be computed again"
        raise UsageError(
            f"the bits of a plan are not known: {why}; leave such layers out by --where, or give target_sqnr"
        )
    targets = [target for target, bits in plan.bits_by_target.items() if bits <= target_bits]
    if not targets:
        least = min(plan.bits_by_target.values(), default=math.nan)
        raise UsageError(
            f"target_bits {target_bits:g} is less than any plan of these recipes has: the least is {least:.4g}; "
            "give so many, or narrower recipes"
        )
    return dict.fromkeys(plan.target_sqnr, max(targets))


def parse_targets(targets: Targets) -> dict[str, float]:
    """The target of each product, in dB. A product that is not named has no target.

    Raises:
        UsageError: a target is not a finite number, or does not name a product.
    """
    if isinstance(targets, str) and "=" in targets:
        pairs = [part.partition("=")[::2] for part in targets.split(",")]
        named: dict[str, str | float] = {}
        for name, number in pairs:
            if name.strip() in named:
                raise UsageError(f"target_sqnr {targets!r:.60} has {name.strip()} twice: give it once")
            named[name.strip()] = number
    elif isinstance(targets, Mapping):
        named = {**targets}
    else:
        named = dict.fromkeys(PRODUCTS, targets)
    for name in named:
        if name not in PRODUCTS:
            raise UsageError(f"target_sqnr names {name!r:.60}, which is no product: {nearest(name, PRODUCTS)}")
    return {name: _decibels(named[name]) for name in PRODUCTS if name in named}


def _decibels(number: str | float) -> float:
    try:
        decibels = math.nan if isinstance(number, bool) else float(number)
    except (TypeError, ValueError):
        decibels = math.nan
    if not math.isfinite(decibels):
        raise UsageError(
            f"target_sqnr has {number!r:.60}, which is no number of dB: give one, as 18, or output=20,grad_weight=15"
        )
    return decibels


def make_plan(replayed: Replayed, recipes: Sequence[Recipe], *, target_sqnr: Mapping[str, float]) -> PrecisionPlan:
    """The plan from products that were replayed with these recipes.

    Raises:
        NoRecordsError: there are no linear layers, or none can be replayed.
    """
    calls: defaultdict[str, list[RecordedCall]] = defaultdict(list)
    for call in replayed.calls.calls:
        calls[call.field("module")].append(call)
    reasons = {skipped.key[CALL_FIELDS.index("module")]: skipped.reason for skipped in replayed.calls.left_out}
    modules = [name for name in dict.fromkeys(_modules(replayed)) if name in calls or name in reasons]
    if not modules:
        raise NoRecordsError("no linear layer is selected, and a plan is one of linear layers: choose other filters")
    if not calls:
        text = "; ".join(dict.fromkeys(reasons.values()))
        raise NoRecordsError(f"no product of {len(modules)} linear layers can be computed again: {text}")
    groups: defaultdict[str, _Groups] = defaultdict(dict)
    for group in replayed.groups(["module", "recipe", "product"]):
        module, recipe, product = group.key.values()
        groups[module].setdefault(recipe, {})[product] = group
    tensors = LinearTensors(replayed.calls.records, tied=set())
    layers: list[tuple[PlannedModule, list[_Candidate]]] = []
    cheapest = min(recipes, key=lambda recipe: (-recipe.speed, recipe.bits))
    in_cheapest: dict[tuple[str, str], float] = {}
    for name in modules:
        if name not in calls:
            layers.append((PlannedModule(module=name, recipe=HIGH_PRECISION, why=reasons[name]), []))
            continue
        options = [_Candidate.of(recipe, groups[name][recipe.name], replayed=replayed) for recipe in recipes]
        for candidate in options:
            if candidate.recipe == cheapest:
                in_cheapest |= {(name, product): sqnr for product, sqnr in candidate.sqnr.items()}
        computed = {recipe.name: replayed.calls.recipe_of(calls[name][0], recipe) for recipe in recipes}
        layers.append(
            (
                PlannedModule(
                    module=name,
                    recipe=HIGH_PRECISION,
                    multiply_adds=sum(_multiply_adds(call, tensors=tensors) for call in calls[name]),
                ),
                [option for option in options if computed[option.recipe.name].products != HIGH_PRECISION.products],
            )
        )

    def modules_for(targets: Mapping[str, float]) -> tuple[PlannedModule, ...]:
        return tuple(_cheapest(layer, candidates, targets=targets) for layer, candidates in layers)

    bits = {
        target: PrecisionPlan(modules=modules_for(dict.fromkeys(target_sqnr, target))).mean_bits
        for target in (halves / 2 for halves in range(2 * MAX_TARGET + 1))
    }
    return PrecisionPlan(
        modules=modules_for(target_sqnr),
        run=without_credentials(replayed.calls.records.reader.url),
        target_sqnr=dict(target_sqnr),
        candidates=tuple(recipe.name for recipe in recipes),
        gap=_gap(in_cheapest, recipe=cheapest.name),
        bits_by_target={target: mean for target, mean in bits.items() if not math.isnan(mean)},
    )


MAX_TARGET = 40
"""Highest target, in dB, for which a plan gives the number of bits. No 8-bit recipe reaches it."""


def _gap(sqnr: Mapping[tuple[str, str], float], *, recipe: str) -> PrecisionGap | None:
    """The worst product of all layers with a recipe, if those of all other layers are much better; None otherwise."""
    if not sqnr:
        return None
    worst, product = min(sqnr, key=sqnr.__getitem__)
    others = [value for (module, _), value in sqnr.items() if module != worst]
    below = min(others, default=-math.inf) - sqnr[worst, product]
    if not MIN_GAP <= below < math.inf:
        return None
    return PrecisionGap(recipe=recipe, module=worst, product=product, below=below)


MIN_GAP = 3.0
"""A layer is named if it is worse than all others by at least this many dB."""

_Groups: TypeAlias = "dict[str, dict[str, ReplayedGroup]]"
"""The groups of one module, by recipe and product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A recipe that a layer may get."""

    recipe: Recipe
    sqnr: Mapping[str, float]
    """SQNR of all calls by product, in dB; minus infinity if finite operands gave NaN or Inf."""
    worst_sqnr: Mapping[str, float]
    """SQNR of the worst call by product, in dB."""

    @classmethod
    def of(cls, recipe: Recipe, products: Mapping[str, ReplayedGroup], *, replayed: Replayed) -> _Candidate:
        """The candidate from the replayed products of a layer."""
        return cls(
            recipe=recipe,
            sqnr={name: _sqnr(group.exact) for name, group in products.items()},
            worst_sqnr={name: _sqnr(replayed.sums(group.worst)) for name, group in products.items()},
        )

    def shortage(self, targets: Mapping[str, float]) -> dict[str, float]:
        """How far each product is below its target, in dB; negative if it is above."""
        return {name: target - self.sqnr[name] for name, target in targets.items() if name in self.sqnr}


def _sqnr(sums: ErrorSums) -> float:
    sqnr = sums.sqnr
    return -math.inf if sums.num_lost or sqnr is None else sqnr


def _cheapest(layer: PlannedModule, candidates: Sequence[_Candidate], *, targets: Mapping[str, float]) -> PlannedModule:
    """The layer with the cheapest candidate that reaches the targets, or in bf16 with the reason if none does."""
    if layer.why is not None:
        return layer
    if not candidates:
        return replace(layer, why="every recipe leaves it in bf16")
    short = {option.recipe.name: option.shortage(targets) for option in candidates}
    sufficient = [option for option in candidates if max(short[option.recipe.name].values()) <= 0]
    if not sufficient:
        nearest_option = min(candidates, key=lambda option: max(short[option.recipe.name].values()))
        product = max(short[nearest_option.recipe.name], key=short[nearest_option.recipe.name].__getitem__)
        sqnr = nearest_option.sqnr[product]
        detail = f"{nearest_option.recipe.name} comes nearest, with {sqnr:.2f} dB in {product}"
        if sqnr == -math.inf:
            detail = f"{nearest_option.recipe.name} leaves NaN or Inf in {product}, or it has no elements"
        return replace(layer, why=f"no recipe reaches {targets[product]:g} dB: {detail}")
    best = min(
        sufficient,
        key=lambda option: (-option.recipe.speed, option.recipe.bits, max(short[option.recipe.name].values())),
    )
    return replace(layer, recipe=best.recipe, sqnr=best.sqnr, worst_sqnr=best.worst_sqnr)


def _modules(replayed: Replayed) -> list[str]:
    """The module of each record, in order."""
    modules: list[str] = replayed.calls.records.column("module").tolist()
    return modules


def _multiply_adds(call: RecordedCall, *, tensors: LinearTensors) -> int:
    """Number of multiply-adds in the replayed products of a call."""
    rows = call.rows
    is_usual = tensors.layout(rows) == "OI"
    # The dimension of the weight that the result of a product has and the first operand lacks.
    other = {"output": 0 if is_usual else -1, "grad_input": -1 if is_usual else -2}
    total = 0
    for product in call.products:
        first, second = PRODUCTS[product]
        width = tensors.shape(rows[second])[other.get(product, -1)]
        total += math.prod(tensors.shape(rows[first])) * width
    return total
