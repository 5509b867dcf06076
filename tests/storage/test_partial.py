"""Is 'it can hold' never wrong where it holds, and exact where everything is known?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.storage.query.where import parse_where

NAMES = ("a", "b")


@st.composite
def expressions(draw: st.DrawFn, *, depth: int = 3) -> str:
    """Expressions over two fields of the numbers 0 to 2."""
    if depth and draw(st.booleans()):
        left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
        return draw(st.sampled_from([f"({left} and {right})", f"({left} or {right})", f"not ({left})"]))
    name, value = draw(st.sampled_from(NAMES)), draw(st.integers(0, 2))
    return draw(
        st.sampled_from([f"{name} == {value}", f"{name} < {value}", f"{name} in [{value}, 2]", "a <= b", "a == b"])
    )


@given(expressions(), st.sets(st.sampled_from(NAMES)))
def test_it_is_yes_wherever_some_value_of_the_unknown_fields_makes_it_hold(text: str, known: set[str]) -> None:
    where = parse_where(text)
    pairs = np.array(list(itertools.product(range(3), repeat=2)))
    columns = {"a": pairs[:, 0], "b": pairs[:, 1]}
    holds = where.mask(columns)
    possible = where.can_hold({name: columns[name] for name in known}, known=known, num_rows=9)
    assert (possible | ~holds).all()
    if known == set(NAMES):
        assert (possible == holds).all()


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("a == 1 and b == 7", [False, True, False]),
        ("a == 1 or b == 7", [True, True, True]),
        ("not (a == 1 or b == 7)", [True, False, True]),
        ("not (a == 1 and b == 7)", [True, True, True]),
        ("like(b, 'x*') and a > 0", [False, True, True]),
        ("a == b", [True, True, True]),
    ],
)
def test_examples(text: str, possible: list[bool]) -> None:
    found = parse_where(text).can_hold(lambda _: np.arange(3), known={"a"}, num_rows=3)
    assert found.tolist() == possible
