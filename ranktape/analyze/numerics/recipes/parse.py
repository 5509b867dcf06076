"""Gives the recipes that users name: shipped ones, those of a YAML file, and their own objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.numerics.recipes.table import ALIASES, RECIPES
from ranktape.analyze.numerics.recipes.words import recipes_of_words
from ranktape.errors import UsageError, nearest
from ranktape.yaml_file import parse_yaml, read_text

RecipeWord: TypeAlias = "str | os.PathLike[str] | Recipe"
"""The name of a shipped recipe, a YAML file, or a recipe."""

_SUFFIXES = (".yaml", ".yml")


def parse_recipe(word: RecipeWord) -> Recipe:
    """The recipe of that name, of a YAML file that holds one, or the recipe itself.

    Raises:
        UsageError: there is none of that name (the message says the nearest one), the file cannot be read or holds
            another number of recipes, or what it says is no recipe.
    """
    found = _several(word)
    if len(found) != 1:
        raise UsageError(f"{word} holds {len(found)} recipes ({', '.join(one.name for one in found)}): give one")
    return found[0]


def parse_recipes(words: RecipeWord | Sequence[RecipeWord]) -> list[Recipe]:
    """The recipes that a text with commas, or a sequence of such texts, files and recipes names, in order, each once.

    Raises:
        UsageError: as `parse_recipe`; nothing is named; or two different recipes have the same name.
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
    """The recipes of a YAML file, by name.

    Raises:
        UsageError: it cannot be read, or what it says is no recipe; the message names the file, the recipe and the key.
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
