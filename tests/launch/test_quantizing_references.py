"""Is a function replaced under the names that a training calls it by?"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from ranktape.launch.quantizing_attention import replace_names

CODE = "from torch.nn.functional import scaled_dot_product_attention as attend\n"


def marker() -> None:
    """Takes the function's place."""


ATTEND: Any = F.scaled_dot_product_attention


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
    replace_names(ATTEND, marker)
    try:
        assert module.attend is marker
    finally:
        replace_names(marker, ATTEND)
    assert module.attend is ATTEND
