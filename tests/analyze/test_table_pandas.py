"""Is an answer as a DataFrame, and in a notebook, what it is as JSON and as text?"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from rich.console import Console

from ranktape.analyze.table import MAX_BRIEF_ROWS, Column, Kind, Table
from ranktape.errors import UsageError
from tests.storage.test_notebook import Page

pandas = pytest.importorskip("pandas")

TABLE = Table(
    title="what is <shown>",
    columns=(
        Column(name="rank", kind=Kind.INTEGER, is_key=True),
        Column(name="module", kind=Kind.TEXT),
        Column(name="overflow.ratio", kind=Kind.RATIO),
        Column(name="psnr", kind=Kind.FLOAT, unit="dB"),
        Column(name="cosine", kind=Kind.COSINE),
        Column(name="nbytes", kind=Kind.NBYTES, unit="bytes"),
        Column(name="shape", kind=Kind.LIST),
        Column(name="hidden", kind=Kind.INTEGER, is_detail=True),
    ),
    rows=(
        (0, "<script>alert(1)</script>", 0.5, 3.25, 1.0, 512, [4, 64], 1),
        (np.int64(1), None, None, None, None, None, None, None),
        (2**62, "c", 1, np.float32("nan"), 0.5, 2**40, [], 3),
    ),
    notes=("a & b",),
)


def test_columns_have_the_types_of_their_kinds_whatever_is_missing() -> None:
    frame = TABLE.to_pandas()
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        "rank": "Int64",
        "module": "string",
        "overflow.ratio": "float64",
        "psnr": "float64",
        "cosine": "float64",
        "nbytes": "Int64",
        "shape": "object",
        "hidden": "Int64",
    }
    assert frame["rank"].tolist() == [0, 1, 2**62]
    assert frame["nbytes"].isna().tolist() == [False, True, False]
    assert frame["psnr"].isna().tolist() == [False, True, True]
    assert frame["shape"].tolist() == [[4, 64], None, []]
    assert frame.attrs == {
        "title": "what is <shown>",
        "notes": ["a & b"],
        "units": {"psnr": "dB", "nbytes": "bytes"},
    }


def test_a_frame_without_rows_has_the_same_types() -> None:
    empty = Table(title="", columns=TABLE.columns, rows=()).to_pandas()
    assert empty.dtypes.astype(str).tolist() == TABLE.to_pandas().dtypes.astype(str).tolist()


def test_lists_of_one_length_stay_lists() -> None:
    table = Table(title="", columns=(Column(name="shape", kind=Kind.LIST),), rows=(([1, 2],), ([3, 4],)))
    assert table.to_pandas()["shape"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("kind", "value"),
    [(Kind.TEXT, 1.5), (Kind.INTEGER, 2**63), (Kind.INTEGER, 1.5), (Kind.FLOAT, "nan"), (Kind.FLOAT, 1j)],
)
def test_a_value_of_another_kind_is_kept_as_it_is(kind: Kind, value: object) -> None:
    frame = Table(title="", columns=(Column(name="a", kind=kind),), rows=((value,), (None,))).to_pandas()
    assert frame["a"].tolist() == [value, None]


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'ranktape\[notebook\]'"):
        TABLE.to_pandas()


def test_a_notebook_shows_what_text_shows_and_runs_nothing() -> None:
    shown = Page(TABLE._repr_html_())
    lines = TABLE.to_text().splitlines()
    assert shown.texts == [
        "what is <shown>",
        *("rank", "module", "overflow.ratio", "psnr dB", "cosine", "nbytes", "shape"),
        *("0", "<script>alert(1)</script>", "50 %", "3.25", "1.0000000", "512 B", "4 64"),
        *("1", "-", "-", "-", "-", "-", "-"),
        *(str(2**62), "c", "100 %", "nan", "0.5000000", "1.1 TB", "-"),
        "a & b",
    ]
    assert "script" not in shown.tags
    assert [word for text in shown.texts[1:-1] for word in text.split()] == " ".join(lines[1:-1]).split()


def test_what_is_large_is_cut_off_everywhere() -> None:
    columns = (Column(name="a", kind=Kind.INTEGER), Column(name="b", kind=Kind.LIST))
    numbers = list(range(10**4))
    table = Table(title="t" * 10**6, columns=columns, rows=tuple((row, numbers) for row in range(1000)))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    for text in (repr(table), table._repr_html_(), captured.get()):
        assert len(text) < 20_000
        assert f"the first {MAX_BRIEF_ROWS} of 1000 rows" in text
    assert len(repr(table).splitlines()) == 1 + 1 + MAX_BRIEF_ROWS + 1
    assert len(table.to_pandas()) == 1000


def test_a_repr_is_the_text() -> None:
    assert repr(TABLE) + "\n" == TABLE.to_text()
