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

Made = TypeVar("Made")


def recipes_of_words(words: Any, *, place: str, shipped: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The recipes in the parsed YAML `words`, by name; `place` is the name of the file in messages.

    The base of a recipe is a shipped one or an earlier one in the file.

    Raises:
        UsageError: `words` are not recipes; the message names the recipe and the key.
    """
    if not isinstance(words, dict) or not words:
        raise UsageError(f"{place} holds no recipes: write one, as 'mine: {{operands: mxfp8_e4m3}}'")
    found: dict[str, Recipe] = {}
    for name, said in words.items():
        if name in shipped:
            raise UsageError(f"{place}: {name} is the name of a recipe that comes with ranktape: use another one")
        found[name] = recipe_of_words(name, said, place=f"{place}, {name}", known={**shipped, **found})
    return found


def recipe_of_words(name: str, words: Any, *, place: str, known: Mapping[str, Recipe]) -> Recipe:
    """The recipe in the parsed YAML `words` under its name; `known` are the recipes that can be its base.

    Raises:
        UsageError: `words` are not a recipe; the message starts with `place` and names the key.
    """
    said = _mapping(words, KEYS, place=place)
    base = _base(said.get("base"), place=f"{place}, base", known=known)
    everywhere = _of_operands(said.get("operands", {}), place=f"{place}, operands")
    products = _mapping(said.get("products", {}), PRODUCTS, place=f"{place}, products")
    made = {
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
    options |= {key: said[key] for key in _PLAIN if key in said}
    if not isinstance(options["source"], str) or not options["source"].strip():
        raise UsageError(f"{place}, source: is to be text, and is {_shown(options['source'])}")
    if "high_precision" in said:
        there = f"{place}, high_precision"
        kept = _mapping(said["high_precision"], [one.name for one in dataclasses.fields(HighPrecision)], place=there)
        if isinstance(kept.get("modules"), list):
            kept["modules"] = tuple(kept["modules"])
        options["high_precision"] = _made(lambda: HighPrecision(**kept), place=there)
    return _made(lambda: Recipe(name=name, products=made, **options), place=place)


def words_of_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe as a mapping for YAML, from which `recipe_of_words` makes the same recipe."""
    operands: dict[str, Any] = {}
    products: dict[str, dict[str, Any]] = {product: {} for product in PRODUCTS}
    for name in OPERANDS:
        those = {product: recipe.products[product].operands[name] for product in PRODUCTS if name in PRODUCTS[product]}
        if len(set(those.values())) == 1:
            operands[name] = _words_of_operand(next(iter(those.values())))
        else:
            for product, operand in those.items():
                products[product][name] = _words_of_operand(operand)
    if len(operands) == len(OPERANDS) and all(words == operands["input"] for words in operands.values()):
        operands = {ALL: operands["input"]}
    for product, how in recipe.products.items():
        products[product] |= {"rotation": how.rotation} if how.rotation else {}
        products[product] |= {"rotation_seed": how.rotation_seed} if how.rotation_seed is not None else {}
    kept = dataclasses.asdict(recipe.high_precision)
    kept["modules"] = list(kept["modules"])
    said: dict[str, Any] = {
        "source": recipe.source,
        "operands": operands,
        "products": {product: words for product, words in products.items() if words},
        "high_precision": {key: value for key, value in kept.items() if value},
    }
    said |= {"seed": recipe.seed} if recipe.seed else {}
    said |= {"draws": recipe.draws} if recipe.draws != 1 else {}
    return {key: value for key, value in said.items() if value}


def _words_of_operand(operand: OperandRecipe) -> Any:
    scheme = AS_IT_IS if operand.scheme is None else operand.scheme
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in operand.said.items()}
    return {"scheme": scheme} | options if options else scheme


def _base(name: Any, *, place: str, known: Mapping[str, Recipe]) -> Recipe | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in known:
        raise UsageError(
            f"{place}: {_shown(name)} is neither shipped nor above in the file: {nearest(str(name), known)}"
        )
    return known[name]


def _of_operands(words: Any, *, place: str) -> dict[str, Any]:
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
        for key, said in (
            (f"operands.{ALL}", everywhere.get(ALL)),
            (f"operands.{name}", everywhere.get(name)),
            (f"products.{product}.{name}", words.get(name)),
        ):
            if said is not None:
                operand = _operand(said, before=operand, place=f"{place}, {key}")
        if operand is None:
            raise UsageError(f"{place}: nothing is said of {name}: write operands: {{{name}: mxfp8_e4m3}}, or a base")
        operands[name] = operand
    rotation = {key: getattr(base, key) for key in _ROTATION} if base is not None else {}
    if words.get("rotation") == 0:
        rotation.pop("rotation_seed", None)
    rotation |= {key: words[key] for key in _ROTATION if key in words}
    there = f"{place}, products.{product}"
    return _made(lambda: ProductRecipe(operands=operands, **rotation), place=there)


def _operand(words: Any, *, before: OperandRecipe | None, place: str) -> OperandRecipe:
    said = dict(_mapping({"scheme": words} if isinstance(words, str) else words, OPTIONS, place=place))
    if isinstance(said.get("block_size"), list):
        said["block_size"] = tuple(said["block_size"])
    if "scheme" in said:
        scheme = said.pop("scheme")
        if not isinstance(scheme, str):
            raise UsageError(f"{place}.scheme: is to be a scheme, or {AS_IT_IS}, and is {_shown(scheme)}")
        return _made(lambda: OperandRecipe(scheme=None if scheme == AS_IT_IS else scheme, **said), place=place)
    if before is None:
        raise UsageError(f"{place}: there is no scheme: write one, as scheme: mxfp8_e4m3, or a base")
    return _made(lambda: dataclasses.replace(before, **said), place=place)


def mapping_of(words: Any, known: Collection[str], *, place: str) -> dict[str, Any]:
    """A copy of the mapping `words`, after checking that all its keys are known.

    Raises:
        UsageError: `words` is not a mapping, or has another key; the message names the place and the key.
    """
    if not isinstance(words, dict):
        raise UsageError(f"{place}: is to be a mapping of {', '.join(known)}, and is {_shown(words)}")
    for key in words:
        if key not in known:
            raise UsageError(f"{place}: unknown key {_shown(key)}: {nearest(key, known, otherwise='use', cutoff=0.6)}")
    return dict(words)


def _mapping(words: Any, known: Collection[str], *, place: str) -> dict[str, Any]:
    for key, value in (found := mapping_of(words, known, place=place)).items():
        if value is None:
            raise UsageError(f"{place}.{key}: is empty: write what it is to be, or leave it out")
    return found


def _made(make: Callable[[], Made], *, place: str) -> Made:
    try:
        return make()
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


RecipeWord: TypeAlias = "str | os.PathLike[str] | Recipe"
"""The name of a shipped recipe, a YAML file, or a recipe."""

_SUFFIXES = (".yaml", ".yml")


def parse_recipe(word: RecipeWord) -> Recipe:
    """The recipe with this name, the only recipe of a YAML file, or the recipe itself.

    Raises:
        UsageError: the name is unknown (the message has the nearest one); or the file cannot be read, is not valid, or
            has more than one recipe.
    """
    found = _several(word)
    if len(found) != 1:
        raise UsageError(f"{word} holds {len(found)} recipes ({', '.join(one.name for one in found)}): give one")
    return found[0]


def parse_recipes(words: RecipeWord | Sequence[RecipeWord]) -> list[Recipe]:
    """The recipes named by a comma-separated string, or by a sequence of such strings, files and recipes, in order.

    Repeated recipes are returned once.

    Raises:
        UsageError: as for `parse_recipe`, except that a file may have several recipes; a name is empty; or two
            different recipes have the same name.
    """
    given = words if isinstance(words, Sequence) and not isinstance(words, str) else [words]
    several: list[RecipeWord] = []
    for one in given:
        several += [part.strip() for part in one.split(",")] if isinstance(one, str) else [one]
    if not several or "" in several:
        raise UsageError(
            f"recipe {','.join(map(str, given))!r:.60} names nothing at one place: give names, as nvfp4,mxfp8"
        )
    found: dict[str, Recipe] = {}
    for recipe in (one for word in several for one in _several(word)):
        if found.setdefault(recipe.name, recipe) != recipe:
            raise UsageError(f"two different recipes are called {recipe.name}: give one of them another name")
    return list(found.values())


def read_recipe_file(path: Path) -> dict[str, Recipe]:
    """Read the recipes of a YAML file, by name.

    Raises:
        UsageError: the file cannot be read or is not valid; the message names the file, the recipe and the key.
    """
    text = read_text(path, option="recipe", wanted="a .yaml file", holds="recipes")
    return recipes_of_words(parse_yaml(text, place=str(path)), place=str(path), shipped=RECIPES)


def _several(word: RecipeWord) -> list[Recipe]:
    if isinstance(word, Recipe):
        return [word]
    if not isinstance(word, str | os.PathLike):
        raise UsageError(f"recipe {word!r:.60} is not a name: give one such as nvfp4, a .yaml file, or a Recipe")
    text = os.fspath(word)
    if isinstance(word, os.PathLike) or text.endswith(_SUFFIXES) or os.sep in text:
        return list(read_recipe_file(Path(text)).values())
    name = ALIASES.get(text, text)
    if name not in RECIPES:
        raise UsageError(f"recipe {text!r:.60} is not known: {nearest(text, [*RECIPES, *ALIASES])}")
    return [RECIPES[name]]
