"""Does the page of recipes say what the shipped ones are, and do its examples run?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.analyze.numerics.recipes.table import RECIPES
from ranktape.analyze.numerics.recipes.words import KEYS, OPTIONS, read_recipe_file, recipes_of_words
from ranktape.yaml_file import parse_yaml

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_the_table_has_a_row_for_every_recipe() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (\d) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(one.name, f"{one.bits:.4g}", f"{one.speed:g}", one.source) for one in RECIPES.values()]


def test_the_file_on_the_page_says_every_recipe() -> None:
    words = parse_yaml(BLOCKS[0][1], place="the page")
    found = recipes_of_words(words, place="the page", shipped={})
    assert found == {name: dataclasses.replace(one, source=found[name].source) for name, one in RECIPES.items()}


def test_the_page_names_every_key_and_what_every_row_is_tested_with() -> None:
    keys, tested = PAGE.partition("| key | ")[2], PAGE.partition("## How the rows are tested")[2]
    assert [key for key in (*KEYS, *OPTIONS, "rotation", "rotation_seed") if f"`{key}`" not in keys] == []
    assert [name for name in RECIPES if f"`{name}`" not in tested] == []


def test_the_examples_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (own,) = (text for language, text in BLOCKS[1:] if language == "yaml")
    Path("own.yaml").write_text(own, encoding="utf-8")
    assert list(read_recipe_file(Path("own.yaml"))) == ["nvfp4_mine", "wide_gradients"]
    (example,) = (text for language, text in BLOCKS if language == "python")
    names: dict[str, Any] = {}
    exec(compile(example, "docs/recipes.md", "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", example)
