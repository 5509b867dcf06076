"""Do stand-ins stay between iterations, and find what was loaded or replaced meanwhile?"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.nn.functional as F

from ranktape.capture.hooks.stand_ins import StandIn, StandIns

ORIGINALS = [F.linear]
"""In a list, where nothing is replaced."""


@pytest.fixture
def stand_ins() -> Iterator[StandIns]:
    made = StandIns()
    made.put()
    yield made
    made.remove()


def original(function: Any) -> Any:
    assert isinstance(function, StandIn)
    return function.original


def test_they_stay_where_nothing_has_changed(stand_ins: StandIns) -> None:
    places = stand_ins.places
    stand_ins.put()
    assert stand_ins.places is places
    assert original(F.linear) is ORIGINALS[0]
    stand_ins.remove()
    assert F.linear is ORIGINALS[0]


def test_a_module_that_was_loaded_meanwhile_has_them(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    late: Any = ModuleType("late_module")
    late.linear = ORIGINALS[0]
    monkeypatch.setitem(sys.modules, late.__name__, late)
    stand_ins.put()
    assert late.linear is F.linear
    stand_ins.remove()
    assert late.linear is ORIGINALS[0]


def test_they_stand_for_what_the_program_has_put_there(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", own := functools.partial(ORIGINALS[0]))
    stand_ins.put()
    assert original(F.linear) is own
    stand_ins.remove()
    assert F.linear is own
    monkeypatch.setattr(F, "linear", ORIGINALS[0])
