"""The precision plan: the recipe to train each linear layer of a model with, as a YAML file.

    run: runs/demo                                  # the source of the figures
    target_sqnr: {output: 18, grad_input: 18, grad_weight: 18}
    summary: {mean_bits: 6.02, relative_gemm_time: 0.41, multiply_adds: {nvfp4: 0.6, mxfp8: 0.4}}
    modules:
      layers.0.attention.query:
        recipe: nvfp4
        bits: 4.5
        speed: 4.0
        multiply_adds: 50331648
        sqnr: {output: 19.81, grad_input: 19.7, grad_weight: 18.64}
        worst_sqnr: {output: 19.6, grad_input: 19.55, grad_weight: 18.01}
      head: {recipe: bf16, why: no recipe reaches the target}
      "*.value": mxfp8                              # enough in a plan that is written by hand
    recipes:                                        # recipes that are not shipped, as in a recipe file
      mine: {operands: mxfp8_e5m2}

A module that matches no name and no pattern is not quantised. Values that follow from others in the file (`summary`,
`bits`, `speed`) are for human readers and are ignored when the file is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.analyze.numerics.recipes.table import RECIPES
from ranktape.analyze.numerics.recipes.words import check_mapping, parse_recipe, recipe_to_yaml, recipes_from_yaml
from ranktape.errors import UsageError, nearest
from ranktape.yaml_file import parse_yaml, read_text

MAX_PLAN_NBYTES = 1 << 24
"""The largest size of a plan, in bytes: enough for some 50,000 modules."""

HIGH_PRECISION = RECIPES["bf16"]
"""The recipe of layers that are not quantised."""

_DECIMALS = 2
"""Number of decimals of decibels and bits in the file."""

_MAX_DECIBELS = 10_000
"""The largest finite number of decibels, more than any float64 numbers give; without errors it is infinite."""

_PLAN_KEYS = ("run", "target_sqnr", "candidates", "summary", "modules", "recipes")
_MODULE_KEYS = ("recipe", "bits", "speed", "multiply_adds", "sqnr", "worst_sqnr", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModule:
    """The recipe of a linear layer, and the expected errors."""

    module: str
    """Dotted path of the layer, or a pattern with * and ?."""
    recipe: Recipe
    """The recipe that the layer computes with."""
    multiply_adds: int | None = None
    """Number of multiply-adds of the three products in the calls that the plan is based on; None if unknown."""
    sqnr: Mapping[str, float] = field(default_factory=dict)
    """Expected signal to quantisation noise in dB over all calls and ranks, for each product that was recomputed."""
    worst_sqnr: Mapping[str, float] = field(default_factory=dict)
    """Signal to quantisation noise of the worst call in dB, for each product that was recomputed."""
    why: str | None = None
    """Why the layer stays in bf16, if the plan found no recipe."""

    def margin(self, target_sqnr: Mapping[str, float]) -> float | None:
        """The smallest distance in dB of a product above its target, over all calls; None without any figure."""
        return _margin(self.sqnr, target_sqnr)

    def worst_margin(self, target_sqnr: Mapping[str, float]) -> float | None:
        """`margin` for the worst call; it is negative if that call misses a target."""
        return _margin(self.worst_sqnr, target_sqnr)

    @property
    def is_pattern(self) -> bool:
        """Whether `module` is a pattern."""
        return "*" in self.module or "?" in self.module

    @property
    def is_high_precision(self) -> bool:
        """Whether the layer is not quantised."""
        return self.recipe.products == HIGH_PRECISION.products


def _margin(sqnr: Mapping[str, float], target_sqnr: Mapping[str, float]) -> float | None:
    return min((sqnr[name] - target for name, target in target_sqnr.items() if name in sqnr), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionGap:
    """A layer with a product that is far worse in a recipe than those of all other layers."""

    recipe: str
    """Name of the cheapest recipe that was tried."""
    module: str
    """Dotted path of the layer."""
    product: str
    """Name of the worst product."""
    below: float
    """The distance in dB below the worst product of the other layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """The recipes of the linear layers of a model.

    Raises:
        UsageError: a module is named twice.
    """

    modules: tuple[PlannedModule, ...]
    """The modules in the order of the model."""
    run: str | None = None
    """The run that the figures come from."""
    target_sqnr: Mapping[str, float] = field(default_factory=dict)
    """Target of the signal to quantisation noise of each product, in dB."""
    candidates: tuple[str, ...] = ()
    """Names of the recipes that were tried."""
    gap: PrecisionGap | None = None
    """The layer that is far worse than all others, if there is one; not written to the file."""
    bits_by_target: Mapping[float, float] = field(default_factory=dict)
    """Bits per element of the plan for each target in dB, if known; not written to the file."""

    def __post_init__(self) -> None:
        """Check that the plan names each module once."""
        names: set[str] = set()
        for module in self.modules:
            if module.module in names:
                raise UsageError(f"the plan names module {module.module} twice: leave one of the two out")
            names.add(module.module)

    def recipes_of(self, linears: Collection[str], *, others: Mapping[str, str] | None = None) -> dict[str, Recipe]:
        """The recipe of each linear layer of a model that does not stay in bf16, by the name of the layer.

        Names take precedence over patterns, and earlier patterns over later ones. The layers that a recipe leaves in
        bf16 are not considered: the plan decides. `others` are the modules that cannot be quantised and their classes;
        the plan may name these with bf16. Projections of `nn.MultiheadAttention` are not quantised (see
        `inside_attention`).

        Raises:
            UsageError: a name or a pattern of the plan matches none of the layers.
        """
        by_name = {entry.module: entry for entry in self.modules}
        patterns = [entry for entry in self.modules if entry.is_pattern]
        recipes: dict[str, Recipe] = {}
        for module in linears:
            planned = by_name.get(module) or next(
                (entry for entry in patterns if fnmatchcase(module, entry.module)), None
            )
            if planned is not None and not planned.is_high_precision:
                recipes[module] = planned.recipe
        unmatched = [
            entry for entry in self.modules if not any(fnmatchcase(module, entry.module) for module in linears)
        ]
        inside = self.inside_attention(others or {})
        unmatched = [entry for entry in unmatched if entry.module not in inside]
        missing = [
            entry.module for entry in unmatched if not (entry.is_high_precision and entry.module in (others or {}))
        ]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            kind = (others or {}).get(missing[0])
            hint = f"it is a {kind}: give it bf16" if kind else nearest(missing[0], linears, otherwise="it has")
            raise UsageError(f"the plan names {missing[0]}{more}, and the model has no such nn.Linear: {hint}")
        return recipes

    def inside_attention(self, others: Mapping[str, str]) -> list[str]:
        """The modules with a recipe that are projections of an `nn.MultiheadAttention`, which calls no `nn.Linear`.

        They are recorded and replayed like linear layers, but fake quantisation cannot train them.
        """
        attention = {name for name, kind in others.items() if kind == "MultiheadAttention"}
        return [
            module.module
            for module in self.modules
            if not module.is_high_precision and module.module.rpartition(".")[0] in attention
        ]

    def by_recipe(self) -> dict[str, list[str]]:
        """The modules of each recipe, by the name of the recipe, in the order of the plan."""
        modules: dict[str, list[str]] = {}
        for module in self.modules:
            modules.setdefault(module.recipe.name, []).append(module.module)
        return modules

    @property
    def multiply_adds(self) -> dict[str, float]:
        """The share of each recipe in all multiply-adds; empty if those of a module are unknown."""
        counts = [module.multiply_adds for module in self.modules]
        total = sum(count or 0 for count in counts)
        if not total or None in counts:
            return {}
        shares: dict[str, float] = {}
        for module, count in zip(self.modules, counts, strict=True):
            shares[module.recipe.name] = shares.get(module.recipe.name, 0.0) + (count or 0) / total
        return shares

    @property
    def mean_bits(self) -> float:
        """Mean stored bits per element of an operand, weighted by multiply-adds; NaN if these are unknown."""
        return self._mean(lambda recipe: recipe.bits)

    @property
    def relative_gemm_time(self) -> float:
        """Time of the products relative to bf16, by the speeds of recipes and without the time of quantisation.

        It is NaN if the multiply-adds are unknown.
        """
        return self._mean(lambda recipe: 1 / recipe.speed)

    def _mean(self, figure: Callable[[Recipe], float]) -> float:
        shares = self.multiply_adds
        recipes = {module.recipe.name: module.recipe for module in self.modules}
        return sum(share * figure(recipes[name]) for name, share in shares.items()) if shares else math.nan


def write_plan(plan: PrecisionPlan, path: Path) -> None:
    """Write the plan as a YAML file; an existing file is overwritten.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(plan_text(plan), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be written ({error.strerror}): give a file that can be") from error


def plan_text(plan: PrecisionPlan) -> str:
    """The plan as YAML text."""
    document: dict[str, Any] = {}
    if plan.run is not None:
        document["run"] = plan.run
    if plan.target_sqnr:
        document["target_sqnr"] = _rounded(plan.target_sqnr)
    if plan.candidates:
        document["candidates"] = list(plan.candidates)
    if shares := plan.multiply_adds:
        means = {"mean_bits": plan.mean_bits, "relative_gemm_time": plan.relative_gemm_time}
        document["summary"] = _rounded(means) | {"multiply_adds": _rounded(shares, decimals=4)}
    document["modules"] = {module.module: _module_settings(module) for module in plan.modules}
    custom = [module.recipe for module in plan.modules if RECIPES.get(module.recipe.name) != module.recipe]
    custom_recipes = {recipe.name: recipe for recipe in custom}
    if custom_recipes:
        document["recipes"] = {name: recipe_to_yaml(recipe) for name, recipe in custom_recipes.items()}
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)


def _module_settings(module: PlannedModule) -> dict[str, Any]:
    recipe = module.recipe
    settings: dict[str, Any] = {
        "recipe": recipe.name,
        "bits": round(recipe.bits, _DECIMALS),
        "speed": round(recipe.speed, _DECIMALS),
        "multiply_adds": module.multiply_adds,
        "sqnr": _rounded(module.sqnr),
        "worst_sqnr": _rounded(module.worst_sqnr),
        "why": module.why,
    }
    return {key: value for key, value in settings.items() if value is not None and value != {}}


def _rounded(figures: Mapping[str, float], *, decimals: int = _DECIMALS) -> dict[str, float]:
    return {name: round(figure, decimals) for name, figure in figures.items()}


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan from a YAML file.

    Raises:
        UsageError: the file cannot be read, or is not a plan; the message names the file, the module and the key.
    """
    text = read_text(path, option="plan", wanted="a .yaml file", holds="modules", max_nbytes=MAX_PLAN_NBYTES)
    return parse_plan(text, place=str(path))


def parse_plan(text: str, *, place: str) -> PrecisionPlan:
    """Parse a plan from YAML text; `place` is its name in messages.

    Raises:
        UsageError: as for `read_plan`.
    """
    document = check_mapping(parse_yaml(text, place=place), _PLAN_KEYS, place=place)
    custom_recipes = {}
    if "recipes" in document:
        custom_recipes = recipes_from_yaml(document["recipes"], place=f"{place}, recipes", shipped=RECIPES)
    modules = document.get("modules")
    if not isinstance(modules, dict) or not modules:
        raise UsageError(f"{place} names no modules: write modules: {{layers.0.mlp.up: nvfp4}}")
    run = document.get("run")
    if run is not None and not isinstance(run, str):
        raise UsageError(f"{place}, run: must be text, not {run!r:.60}")
    candidates = document.get("candidates", [])
    if not isinstance(candidates, list) or not all(isinstance(candidate, str) for candidate in candidates):
        raise UsageError(f"{place}, candidates: must be a list of names, not {candidates!r:.60}")
    return PrecisionPlan(
        modules=tuple(
            _module(name, settings, custom_recipes=custom_recipes, place=f"{place}, modules.{name:.100}")
            for name, settings in modules.items()
        ),
        run=run,
        target_sqnr=_decibels(document.get("target_sqnr", {}), place=f"{place}, target_sqnr"),
        candidates=tuple(candidates),
    )


def _module(name: str, settings: Any, *, custom_recipes: Mapping[str, Recipe], place: str) -> PlannedModule:
    values = check_mapping({"recipe": settings} if isinstance(settings, str) else settings, _MODULE_KEYS, place=place)
    recipe = values.get("recipe")
    if not isinstance(recipe, str):
        raise UsageError(f"{place}, recipe: must be the name of a recipe, such as mxfp8, not {recipe!r:.60}")
    multiply_adds = values.get("multiply_adds")
    is_count = isinstance(multiply_adds, int) and not isinstance(multiply_adds, bool) and multiply_adds >= 0
    if multiply_adds is not None and not is_count:
        raise UsageError(f"{place}, multiply_adds: must be a whole number, 0 or more, not {multiply_adds!r:.60}")
    why = values.get("why")
    if why is not None and not isinstance(why, str):
        raise UsageError(f"{place}, why: must be text, not {why!r:.60}")
    if recipe not in custom_recipes:
        try:
            custom_recipes = {**custom_recipes, recipe: parse_recipe(recipe)}
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
    return PlannedModule(
        module=name,
        recipe=custom_recipes[recipe],
        multiply_adds=multiply_adds,
        sqnr=_decibels(values.get("sqnr", {}), place=f"{place}, sqnr"),
        worst_sqnr=_decibels(values.get("worst_sqnr", {}), place=f"{place}, worst_sqnr"),
        why=why,
    )


def _decibels(value: Any, *, place: str) -> dict[str, float]:
    figures = check_mapping(value, PRODUCTS, place=place)
    for product, figure in figures.items():
        is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
        if not is_number or not (abs(figure) <= _MAX_DECIBELS or abs(figure) == math.inf):
            raise UsageError(f"{place}.{product}: must be a number of dB, not {figure!r:.60}")
    return {product: float(figure) for product, figure in figures.items()}
