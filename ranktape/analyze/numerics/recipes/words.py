"""Reads recipes from names and YAML files, and writes them for such a file.

    nvfp4_mine:                                    # the name
      base: nvfp4                                  # the recipe with all other settings
      operands:                                    # in all products: a scheme, or options of `quantize`
        weight: {block_size: [16, 16]}
        grad_output: {rounding: stochastic}
      products:                                    # settings of single products
        grad_weight: {rotation: 16, rotation_seed: 0}
      high_precision: {last_layers: 2, modules: ["*head"]}

Options are overridden one by one, but an operand that names a scheme discards all its earlier options.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ranktape.analyze.numerics.recipes.recipe import (
    OPERANDS,
    PRODUCTS,
    HighPrecision,
    OperandRecipe,
    ProductRecipe,
    Recipe,
)
from ranktape.analyze.numerics.recipes.table import ALIASES, RECIPES
from ranktape.errors import UsageError, nearest
from ranktape.yaml_file import parse_yaml, read_text

AS_IT_IS = "none"
"""The scheme of an operand that is not quantised."""

ALL = "all"
"""The key for every operand."""

MAX_SHOWN = 60
"""The largest number of characters of a value in a message."""

OPTIONS = tuple(one.name for one in dataclasses.fields(OperandRecipe))
_ROTATION = ("rotation", "rotation_seed")
_PLAIN = ("source", "seed", "draws")
KEYS = ("base", *_PLAIN, "operands", "products", "high_precision")

Result = TypeVar("Result")


def recipes_from_yaml(words: Any, *, place: str, shipped: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes in the parsed YAML `words`, by name; `place` is the name of the file in messages.

    The base of a recipe is a shipped one or an earlier one in the file.

    Raises:
        UsageError: `words` are not recipes; the message names the recipe and the key.
    """
    if not isinstance(words, dict) or not words:
        raise UsageError(f"{place} contains no recipes: write one, such as 'mine: {{operands: mxfp8_e4m3}}'")
    recipes: dict[str, Recipe] = {}
    for name, settings in words.items():
        if name in shipped:
            raise UsageError(f"{place}: {name} is the name of a recipe that comes with ranktape: use another one")
        recipes[name] = recipe_from_yaml(name, settings, place=f"{place}, {name}", bases={**shipped, **recipes})
    return recipes


def recipe_from_yaml(name: str, words: Any, *, place: str, bases: Mapping[str, Recipe]) -> Recipe:
    """The recipe in the parsed YAML `words` under its name; `known` are the recipes that can be its base.

    Raises:
        UsageError: `words` are not a recipe; the message starts with `place` and names the key.
    """
    settings = _mapping(words, KEYS, place=place)
    base = _base(settings.get("base"), place=f"{place}, base", bases=bases)
    everywhere = _operand_defaults(settings.get("operands", {}), place=f"{place}, operands")
    products = _mapping(settings.get("products", {}), PRODUCTS, place=f"{place}, products")
    recipe_products = {
        product: _product(
            product,
            _mapping(products.get(product, {}), (*PRODUCTS[product], *_ROTATION), place=f"{place}, products.{product}"),
            everywhere,
            base=None if base is None else base.products[product],
            place=place,
        )
        for product in PRODUCTS
    }
    options: dict[str, Any] = {"source": f"based on {base.name}" if base else place}
    if base is not None:
        options |= {"high_precision": base.high_precision, "seed": base.seed, "draws": base.draws}
    options |= {key: settings[key] for key in _PLAIN if key in settings}
    if not isinstance(options["source"], str) or not options["source"].strip():
        raise UsageError(f"{place}, source: must be text, not {_shown(options['source'])}")
    if "high_precision" in settings:
        section = f"{place}, high_precision"
        layers = _mapping(
            settings["high_precision"], [field.name for field in dataclasses.fields(HighPrecision)], place=section
        )
        if isinstance(layers.get("modules"), list):
            layers["modules"] = tuple(layers["modules"])
        options["high_precision"] = _with_location(lambda: HighPrecision(**layers), place=section)
    return _with_location(lambda: Recipe(name=name, products=recipe_products, **options), place=place)


def recipe_to_yaml(recipe: Recipe) -> dict[str, Any]:
    """A recipe as a mapping for YAML, from which `recipe_from_yaml` makes the same recipe."""
    operands: dict[str, Any] = {}
    products: dict[str, dict[str, Any]] = {product: {} for product in PRODUCTS}
    for name in OPERANDS:
        by_product = {
            product: recipe.products[product].operands[name] for product in PRODUCTS if name in PRODUCTS[product]
        }
        if len(set(by_product.values())) == 1:
            operands[name] = _operand_settings(next(iter(by_product.values())))
        else:
            for product, operand in by_product.items():
                products[product][name] = _operand_settings(operand)
    if len(operands) == len(OPERANDS) and all(words == operands["input"] for words in operands.values()):
        operands = {ALL: operands["input"]}
    for product, product_recipe in recipe.products.items():
        products[product] |= {"rotation": product_recipe.rotation} if product_recipe.rotation else {}
        products[product] |= (
            {"rotation_seed": product_recipe.rotation_seed} if product_recipe.rotation_seed is not None else {}
        )
    layers = dataclasses.asdict(recipe.high_precision)
    layers["modules"] = list(layers["modules"])
    settings: dict[str, Any] = {
        "source": recipe.source,
        "operands": operands,
        "products": {product: words for product, words in products.items() if words},
        "high_precision": {key: value for key, value in layers.items() if value},
    }
    settings |= {"seed": recipe.seed} if recipe.seed else {}
    settings |= {"draws": recipe.draws} if recipe.draws != 1 else {}
    return {key: value for key, value in settings.items() if value}


def _operand_settings(operand: OperandRecipe) -> Any:
    scheme = AS_IT_IS if operand.scheme is None else operand.scheme
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in operand.changed.items()}
    return {"scheme": scheme} | options if options else scheme


def _base(name: Any, *, place: str, bases: Mapping[str, Recipe]) -> Recipe | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in bases:
        raise UsageError(
            f"{place}: {_shown(name)} is neither a shipped recipe nor an earlier one in the file: "
            f"{nearest(str(name), bases)}"
        )
    return bases[name]


def _operand_defaults(words: Any, *, place: str) -> dict[str, Any]:
    """The settings of each operand in all products."""
    if isinstance(words, str):
        return {ALL: words}
    return _mapping(words, (ALL, *OPERANDS), place=place)


def _product(
    product: str, words: Mapping[str, Any], everywhere: Mapping[str, Any], *, base: ProductRecipe | None, place: str
) -> ProductRecipe:
    operands = {}
    for name in PRODUCTS[product]:
        operand = None if base is None else base.operands[name]
        for key, settings in (
            (f"operands.{ALL}", everywhere.get(ALL)),
            (f"operands.{name}", everywhere.get(name)),
            (f"products.{product}.{name}", words.get(name)),
        ):
            if settings is not None:
                operand = _operand(settings, previous=operand, place=f"{place}, {key}")
        if operand is None:
            raise UsageError(f"{place}: {name} has no scheme: write operands: {{{name}: mxfp8_e4m3}}, or a base")
        operands[name] = operand
    rotation = {key: getattr(base, key) for key in _ROTATION} if base is not None else {}
    if words.get("rotation") == 0:
        rotation.pop("rotation_seed", None)
    rotation |= {key: words[key] for key in _ROTATION if key in words}
    section = f"{place}, products.{product}"
    return _with_location(lambda: ProductRecipe(operands=operands, **rotation), place=section)


def _operand(words: Any, *, previous: OperandRecipe | None, place: str) -> OperandRecipe:
    options = dict(_mapping({"scheme": words} if isinstance(words, str) else words, OPTIONS, place=place))
    if isinstance(options.get("block_size"), list):
        options["block_size"] = tuple(options["block_size"])
    if "scheme" in options:
        scheme = options.pop("scheme")
        if not isinstance(scheme, str):
            raise UsageError(f"{place}.scheme: must be a scheme or {AS_IT_IS}, not {_shown(scheme)}")
        return _with_location(
            lambda: OperandRecipe(scheme=None if scheme == AS_IT_IS else scheme, **options), place=place
        )
    if previous is None:
        raise UsageError(f"{place}: there is no scheme: write one, such as scheme: mxfp8_e4m3, or a base")
    return _with_location(lambda: dataclasses.replace(previous, **options), place=place)


def check_mapping(words: Any, allowed: Collection[str], *, place: str) -> dict[str, Any]:
    """A copy of the mapping `words`, after checking that all its keys are known.

    Raises:
        UsageError: `words` is not a mapping, or has another key; the message names the place and the key.
    """
    if not isinstance(words, dict):
        raise UsageError(f"{place}: must be a mapping of {', '.join(allowed)}, not {_shown(words)}")
    for key in words:
        if key not in allowed:
            raise UsageError(
                f"{place}: unknown key {_shown(key)}: {nearest(key, allowed, otherwise='use', cutoff=0.6)}"
            )
    return dict(words)


def _mapping(words: Any, allowed: Collection[str], *, place: str) -> dict[str, Any]:
    for key, value in (settings := check_mapping(words, allowed, place=place)).items():
        if value is None:
            raise UsageError(f"{place}.{key}: is empty: give it a value, or leave it out")
    return settings


def _with_location(make: Callable[[], Result], *, place: str) -> Result:
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


RecipeSource: TypeAlias = "str | os.PathLike[str] | Recipe"
"""The name of a shipped recipe, a YAML file, or a recipe."""

_SUFFIXES = (".yaml", ".yml")


def parse_recipe(source: RecipeSource) -> Recipe:
    """The recipe with this name, the only recipe of a YAML file, or the recipe itself.

    Raises:
        UsageError: the name is unknown (the message has the nearest one); or the file cannot be read, is not valid, or
            has more than one recipe.
    """
    recipes = _load_recipes(source)
    if len(recipes) != 1:
        raise UsageError(
            f"{source} contains {len(recipes)} recipes ({', '.join(recipe.name for recipe in recipes)}): give one"
        )
    return recipes[0]


def parse_recipes(sources: RecipeSource | Sequence[RecipeSource]) -> list[Recipe]:
    """The recipes named by a comma-separated string, or by a sequence of such strings, files and recipes, in order.

    Repeated recipes are returned once.

    Raises:
        UsageError: as for `parse_recipe`, except that a file may have several recipes; a name is empty; or two
            different recipes have the same name.
    """
    items = sources if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
    expanded: list[RecipeSource] = []
    for item in items:
        expanded += [part.strip() for part in item.split(",")] if isinstance(item, str) else [item]
    if not expanded or "" in expanded:
        raise UsageError(f"recipe {','.join(map(str, items))!r:.60} has an empty name: give names, such as nvfp4,mxfp8")
    recipes: dict[str, Recipe] = {}
    for recipe in (item for source in expanded for item in _load_recipes(source)):
        if recipes.setdefault(recipe.name, recipe) != recipe:
            raise UsageError(f"two different recipes are called {recipe.name}: give one of them another name")
    return list(recipes.values())


def read_recipe_file(path: Path) -> dict[str, Recipe]:
    """Read the recipes of a YAML file, by name.

    Raises:
        UsageError: the file cannot be read or is not valid; the message names the file, the recipe and the key.
    """
    text = read_text(path, option="recipe", wanted="a .yaml file", holds="recipes")
    return recipes_from_yaml(parse_yaml(text, place=str(path)), place=str(path), shipped=RECIPES)


def _load_recipes(source: RecipeSource) -> list[Recipe]:
    if isinstance(source, Recipe):
        return [source]
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"recipe {source!r:.60} is not a name: give one such as nvfp4, a .yaml file, or a Recipe")
    text = os.fspath(source)
    if isinstance(source, os.PathLike) or text.endswith(_SUFFIXES) or os.sep in text:
        return list(read_recipe_file(Path(text)).values())
    name = ALIASES.get(text, text)
    if name not in RECIPES:
        raise UsageError(f"recipe {text!r:.60} is not known: {nearest(text, [*RECIPES, *ALIASES])}")
    return [RECIPES[name]]
