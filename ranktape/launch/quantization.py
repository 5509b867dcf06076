"""Says in which precision a training is to compute: the options `--quant` and its like, and their variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from ranktape.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ranktape.analyze.numerics.recipes.plan_file import PrecisionPlan
    from ranktape.analyze.numerics.recipes.recipe import Recipe

QUANT, QUANT_PLAN, QUANT_ATTENTION = "RANKTAPE_QUANT", "RANKTAPE_QUANT_PLAN", "RANKTAPE_QUANT_ATTENTION"
"""The variables that say the same as the options."""

PLANNED = "plan"
"""The `quant_type` of a training whose layers have recipes of their own."""

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])


def quant_options(command: AnyCommand) -> AnyCommand:
    """Add the options that say in which precision a training computes."""
    made = click.option(
        "--quant-attention",
        is_flag=True,
        default=None,
        help="Quantise query, key and value of attention by the recipe, too, and the gradient of its output.",
    )(command)
    made = click.option(
        "--quant-plan",
        metavar="FILE",
        help="A plan that gives linear layers recipes of their own, as 'ranktape analyze replay --plan' writes it.",
    )(made)
    return click.option(
        "--quant",
        metavar="RECIPE",
        help="What the operands of linear layers are quantised to, forward and backward, as mxfp8 or nvfp4; a recipe "
        "of your own is a .yaml file. The script stays as it is.",
    )(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """In which precision a training is to compute."""

    recipe: Recipe | None
    """Of all linear layers; None where there is a plan."""
    plan: PrecisionPlan | None
    """The recipe of each; None where there is one for all."""
    tag: str
    """The `quant_type` of its records."""
    words: Mapping[str, str]
    """The variables that say so."""
    has_attention: bool = False
    """Whether attention is quantised by the recipe, too."""

    @classmethod
    def of_words(
        cls,
        quant: str | None,
        quant_plan: str | None,
        *,
        has_attention: bool = False,
        folder: Path | None = None,
    ) -> Self | None:
        """What the options say, with paths from a folder; None where they say nothing.

        Raises:
            UsageError: a recipe or a plan is not known or cannot be read, or both are given; or attention has none.
        """
        found = cls._of_words(quant, quant_plan, folder=folder)
        if not has_attention:
            return found
        if found is None or found.recipe is None:
            raise UsageError(
                "--quant-attention quantises by the recipe of --quant, and there is none: give one, as --quant mxfp8"
                + (" (a plan names linear layers)" if found else "")
            )
        return replace(found, has_attention=True, words={**found.words, QUANT_ATTENTION: "1"})

    @classmethod
    def _of_words(cls, quant: str | None, quant_plan: str | None, *, folder: Path | None) -> Self | None:
        # Not at the top: the help page does without what it needs.
        from ranktape.analyze.numerics.recipes.plan_file import read_plan
        from ranktape.analyze.numerics.recipes.table import ALIASES, RECIPES
        from ranktape.analyze.numerics.recipes.words import parse_recipe

        if quant is not None and quant_plan is not None:
            raise UsageError("--quant and --quant-plan exclude each other: a plan names the recipe of each layer")
        if quant_plan is not None:
            path = (folder or Path()) / quant_plan
            return cls(recipe=None, plan=read_plan(path), tag=PLANNED, words={QUANT_PLAN: str(path.absolute())})
        if quant is None:
            return None
        if quant in ALIASES or quant in RECIPES:
            return cls(recipe=parse_recipe(quant), plan=None, tag=quant, words={QUANT: quant})
        is_file = quant.endswith((".yaml", ".yml")) or os.sep in quant
        recipe = parse_recipe((folder or Path()) / quant if is_file else quant)
        # The processes that the script starts may be in another folder.
        return cls(recipe=recipe, plan=None, tag=recipe.name, words={QUANT: str(Path(quant).absolute())})

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], *, folder: Path | None = None) -> Self | None:
        """What the variables say, with paths from a folder.

        Raises:
            UsageError: as `of_words`.
        """
        quant, quant_plan = (environment.get(name) or None for name in (QUANT, QUANT_PLAN))
        return cls.of_words(quant, quant_plan, has_attention=_is_on(environment), folder=folder)

    @property
    def options(self) -> list[str]:
        """The options of the launcher that say so."""
        quant, quant_plan = self.words.get(QUANT), self.words.get(QUANT_PLAN)
        given = [("--quant", quant), ("--quant-plan", quant_plan)]
        words = [word for name, value in given if value is not None for word in (name, value)]
        return [*words, *(["--quant-attention"] if self.has_attention else [])]

    def recipes_of(self, linears: Mapping[str, nn.Module], others: Mapping[str, str]) -> dict[str, Recipe]:
        """The recipes of the plain linear layers of a model that are quantised.

        Raises:
            UsageError: the plan names layers that the model has not.
        """
        from ranktape.analyze.numerics.quantization.quantized_layers import recipes_of_layers

        if self.plan is not None:
            return self.plan.recipes_of(linears, others=others)
        assert self.recipe is not None, "there is a recipe where there is no plan"
        # A training in float32 is to be rounded by it, too.
        return recipes_of_layers(self.recipe, linears, keeps_bf16=not self.is_baseline) if linears else {}

    @property
    def is_baseline(self) -> bool:
        """Whether all is to be computed in bf16: what computes in it already is left as it is."""
        return self.recipe is not None and self.recipe.name == "bf16"


def quantization_of(quant: str | None, quant_plan: str | None, *, has_attention: bool | None) -> Quantization | None:
    """What the options say, or where they say nothing the variables.

    Raises:
        UsageError: as `Quantization.of_words`.
    """
    if quant is not None or quant_plan is not None or has_attention is not None:
        return Quantization.of_words(quant, quant_plan, has_attention=bool(has_attention))
    return Quantization.of_environment(os.environ)


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the variables say anything."""
    return any(environment.get(name) for name in (QUANT, QUANT_PLAN, QUANT_ATTENTION))


def _is_on(environment: Mapping[str, str]) -> bool:
    """What the variable for attention says.

    Raises:
        UsageError: it is neither 1 nor 0.
    """
    word = environment.get(QUANT_ATTENTION) or "0"
    if word not in {"0", "1"}:
        raise UsageError(f"{QUANT_ATTENTION}={word!r:.40} is not known: give 1 to quantise attention, or 0")
    return word == "1"
