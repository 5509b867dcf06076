"""The options of commands for the settings of a capture, and for the precision of a training.

The options of a capture come from the table of its settings. `--quant` and the like are converted to environment
variables, from which alone `Quantization` is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click

from ranktape.analyze.group import Section, SectionOption
from ranktape.capture.settings.options import SETTINGS
from ranktape.capture.settings.setting import Setting, is_given
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ranktape.analyze.numerics.recipes.plan_file import PrecisionPlan
    from ranktape.analyze.numerics.recipes.recipe import Recipe

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])


def capture_options(
    *, without: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[AnyCommand], AnyCommand]:
    """A decorator that adds one option for each setting of a capture.

    The command receives the values by the settings' names. None and an empty tuple mean 'not given'. `without` names
    the settings that the command leaves out, and `defaults` gives defaults of its own.
    """

    def decorate(command: AnyCommand) -> AnyCommand:
        decorated = command
        for setting in reversed(SETTINGS):
            if setting.name not in without:
                decorated = _option(setting, default=(defaults or {}).get(setting.name))(decorated)
        return decorated

    return decorate


def capture_arguments(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line for the given `values`."""
    arguments: list[str] = []
    for setting in SETTINGS:
        value: Any = values.get(setting.name)
        if not is_given(value) or value is False:
            continue
        if setting.kind is bool:
            arguments.append(setting.flag)
            continue
        for item in value if setting.takes_several and not isinstance(value, str) else (value,):
            arguments += [setting.flag, str(item)]
    return arguments


_MAIN = frozenset({"start_at", "every", "min_iterations", "max_iterations", "select", "layers", "keep", "overwrite"})
"""The settings that the help page always shows; --help-capture shows the others."""


def _option(setting: Setting, *, default: Any) -> Callable[[AnyCommand], AnyCommand]:
    displayed = setting.default if default is None else default
    is_plain = not setting.choices and setting.kind is not bool
    return click.option(
        setting.flag,
        setting.name,
        cls=SectionOption,
        section=Section.OWN if setting.name in _MAIN else Section.CAPTURE,
        type=click.Choice(setting.choices) if setting.choices else setting.kind,
        is_flag=setting.kind is bool,
        multiple=setting.takes_several,
        default=default,
        metavar=(setting.metavar or setting.kind.__name__.upper()) if is_plain else None,
        # Not click's `show_default`, which shows the default of the command: None for 'not given'.
        help=setting.help + ("" if displayed in (None, False, ()) and displayed != 0 else f" [default: {displayed}]"),
    )


QUANT, QUANT_PLAN, QUANT_ATTENTION = "RANKTAPE_QUANT", "RANKTAPE_QUANT_PLAN", "RANKTAPE_QUANT_ATTENTION"
QUANT_VARIABLES = (QUANT, QUANT_PLAN, QUANT_ATTENTION)
"""The variables that correspond to the options of the precision."""

PLANNED = "plan"
"""The `quant_type` of a training with a plan, which gives each layer its own recipe."""

_QUANT_OPTIONS = {
    QUANT: click.option(
        "--quant",
        metavar="RECIPE",
        help="Quantise the operands of linear layers, forward and backward, by this recipe, such as mxfp8 or nvfp4, or "
        "a .yaml file. The script is not changed.",
    ),
    QUANT_PLAN: click.option(
        "--quant-plan",
        metavar="FILE",
        help="Plan with the recipe of each linear layer, as 'ranktape analyze replay --plan' writes it.",
    ),
    QUANT_ATTENTION: click.option(
        "--quant-attention",
        is_flag=True,
        default=None,
        help="Also quantise query, key and value of attention by the recipe, and the gradient of its output.",
    ),
}


def quant_options(command: AnyCommand) -> AnyCommand:
    """Add the options for the precision of a training."""
    for option in reversed(_QUANT_OPTIONS.values()):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The precision in which a training computes."""

    recipe: Recipe | None
    """Recipe of all linear layers; None if there is a plan."""
    plan: PrecisionPlan | None
    """Plan with the recipe of each layer; None if one recipe is for all."""
    tag: str
    """The `quant_type` of the records."""
    variables: Mapping[str, str]
    """Its environment variables. Paths are absolute, as processes of a script may have other working directories."""

    @classmethod
    def read(cls, variables: Mapping[str, str], *, folder: Path | None = None) -> Self | None:
        """The precision in variables, with paths relative to a folder; None if they request none.

        Raises:
            UsageError: a variable is not allowed.
        """
        # Not at the top, so that the help page is fast.
        from ranktape.analyze.numerics.recipes.plan_file import read_plan
        from ranktape.analyze.numerics.recipes.table import ALIASES, RECIPES
        from ranktape.analyze.numerics.recipes.words import parse_recipe

        quant, quant_plan, attention = (variables.get(name) or None for name in _QUANT_OPTIONS)
        if attention not in {None, "0", "1"}:
            raise UsageError(f"{QUANT_ATTENTION}={attention!r:.40} is not allowed: give 1 to quantise attention, or 0")
        has_attention = attention == "1"
        if quant is not None and quant_plan is not None:
            raise UsageError("--quant and --quant-plan exclude each other: a plan names the recipe of each layer")
        if has_attention and quant is None:
            raise UsageError(
                "--quant-attention needs the recipe of --quant: give one, such as --quant mxfp8"
                + (" (a plan is only for linear layers)" if quant_plan else "")
            )
        if quant_plan is not None:
            path = ((folder or Path()) / quant_plan).absolute()
            return cls(recipe=None, plan=read_plan(path), tag=PLANNED, variables={QUANT_PLAN: str(path)})
        if quant is None:
            return None
        if quant not in ALIASES and quant not in RECIPES and (quant.endswith((".yaml", ".yml")) or os.sep in quant):
            quant = str(((folder or Path()) / quant).absolute())
        recipe = parse_recipe(quant)
        settings = {QUANT: quant, **({QUANT_ATTENTION: "1"} if has_attention else {})}
        return cls(recipe=recipe, plan=None, tag=recipe.name if os.sep in quant else quant, variables=settings)

    @classmethod
    def of_options(
        cls, quant: str | None, quant_plan: str | None = None, *, attention: bool | None = None
    ) -> Self | None:
        """The precision in the options; None if they request none.

        Raises:
            UsageError: an option is not allowed.
        """
        for option, value, kind in (("--quant", quant, "recipe"), ("--quant-plan", quant_plan, "file")):
            if value == "":  # for example, from a shell variable that is not set
                raise UsageError(f"{option} '' is empty: give a {kind}, or leave the option out")
        return cls.read({QUANT: quant or "", QUANT_PLAN: quant_plan or "", QUANT_ATTENTION: "1" if attention else ""})

    @property
    def options(self) -> list[str]:
        """The options of the launcher for this precision."""
        named = [("--quant", self.variables.get(QUANT)), ("--quant-plan", self.variables.get(QUANT_PLAN))]
        options = [word for name, value in named if value is not None for word in (name, value)]
        return [*options, *(["--quant-attention"] if self.has_attention else [])]

    @property
    def has_attention(self) -> bool:
        """Whether attention is quantised too."""
        return QUANT_ATTENTION in self.variables

    @property
    def is_baseline(self) -> bool:
        """Whether the recipe is bf16, so that layers that already compute in bf16 are left unchanged."""
        return self.recipe is not None and self.recipe.name == "bf16"

    def recipes_of(self, linears: Mapping[str, nn.Module], others: Mapping[str, str]) -> dict[str, Recipe]:
        """The recipes of the plain linear layers of a model that are quantised."""
        from ranktape.analyze.numerics.quantization.quantized_layers import layer_recipes

        if self.plan is not None:
            return self.plan.recipes_of(linears, others=others)
        assert self.recipe is not None, "there is a recipe where there is no plan"
        # The baseline also rounds a training in float32.
        return layer_recipes(self.recipe, linears, keeps_bf16=not self.is_baseline) if linears else {}
