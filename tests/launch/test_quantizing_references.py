"""Is a function replaced under the names that a training calls it by, and under no others?"""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from ranktape.launch.quantizing_attention import replace_names, table_of

CODE = "from torch.nn.functional import scaled_dot_product_attention as attend\n"


def marker() -> None:
    """Takes the function's place."""


ATTEND: Any = F.scaled_dot_product_attention
TABLE = table_of([(ATTEND, marker)])
BACK = table_of([(marker, ATTEND)])


@pytest.mark.parametrize("has_file", [True, False], ids=["a file", "no file"])
@pytest.mark.parametrize("name", ["sched", "mine"])
def test_a_module_of_the_users_is_searched_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str, has_file: bool
) -> None:
    module = types.ModuleType(name)
    if has_file:
        module.__file__ = str(tmp_path / f"{name}.py")
    exec(CODE, module.__dict__)  # noqa: S102  (as notebooks and test runners make modules)
    monkeypatch.setitem(sys.modules, name, module)
    replace_names(TABLE)
    try:
        assert module.attend is marker
    finally:
        replace_names(BACK)
    assert module.attend is ATTEND


def test_the_standard_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import calendar

    # With a file, built in, and frozen.
    alone = [calendar, time, sys.modules["_frozen_importlib"]]
    for module in alone:
        monkeypatch.setattr(module, "attend", ATTEND, raising=False)
    replace_names(TABLE)
    try:
        assert vars(F)["scaled_dot_product_attention"] is marker
        assert not any(vars(module)["attend"] is marker for module in alone)
    finally:
        replace_names(BACK)
