"""Does an answer look the same whoever reads it: a person, a program, a pipe?"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from rich.console import Console

from ranktape.analyze.console import Form, write_whole
from ranktape.analyze.table import MAX_BRIEF_ROWS, Coded, Column, Kind, Table, TableRows, number_cells, write_table
from ranktape.errors import UsageError
from ranktape.storage.places.backend import nbytes_text
from tests.storage.test_notebook import Page
from tests.terminal import CODES, on_terminal

TABLE = Table(
    title="what is shown",
    columns=(
        Column(name="layer", kind=Kind.INTEGER, is_key=True),
        Column(name="kind", kind=Kind.TEXT, is_key=True),
        Column(name="ratio", kind=Kind.RATIO, head="overflow"),
        Column(name="absmax", kind=Kind.FLOAT),
        Column(name="size", kind=Kind.NBYTES, unit="bytes"),
        Column(name="shape", kind=Kind.LIST),
        Column(name="hidden", kind=Kind.INTEGER, is_detail=True),
    ),
    rows=(
        (0, "linear", 0.0, 3.25, 512, [4, 64], 1),
        (1, "linear", 1e-7, None, 33_554_432, [], 2),
        (10, "linear", 1.0, float("inf"), 10**13, [1], 3),
    ),
    notes=("a note",),
)


def test_text_is_aligned_and_says_once_what_all_rows_share() -> None:
    assert TABLE.to_text().splitlines() == [
        "what is shown",
        "all rows: kind linear",
        "layer  overflow  absmax      size  shape",
        "    0       0 %    3.25     512 B  4 64",
        "    1   1e-05 %       -  33.55 MB  -",
        "   10     100 %     inf     10 TB  1",
        "a note",
    ]


def test_wide_text_shows_every_column() -> None:
    assert TABLE.to_text(wide=True).splitlines()[1].split() == [
        "layer", "kind", "overflow", "absmax", "size", "shape", "hidden",
    ]  # fmt: skip


def test_columns_without_a_value_are_left_out_of_text() -> None:
    columns = (Column(name="a", kind=Kind.INTEGER), Column(name="note", kind=Kind.TEXT))
    table = Table(title="", columns=columns, rows=((1, ""), (2, None)))
    assert table.to_text().splitlines() == ["a", "1", "2"]


def test_a_table_without_rows_has_its_heads() -> None:
    assert Table(title="", columns=TABLE.columns, rows=()).to_text() == "layer  kind  overflow  absmax  size  shape\n"


def test_json_holds_everything_and_no_value_that_json_lacks() -> None:
    document = json.loads(json.dumps(TABLE.to_json(), allow_nan=False))
    assert list(document) == ["title", "columns", "rows", "notes"]
    assert document["columns"][4] == {"name": "size", "kind": "nbytes", "unit": "bytes"}
    assert document["rows"][2] == {
        "layer": 10, "kind": "linear", "ratio": 1.0, "absmax": "inf", "size": 10**13, "shape": [1], "hidden": 3,
    }  # fmt: skip
    assert document["rows"][1]["absmax"] is None


def test_numbers_of_numpy_are_numbers() -> None:
    columns = (Column(name="a", kind=Kind.INTEGER), Column(name="b", kind=Kind.FLOAT))
    table = Table(title="", columns=columns, rows=((np.int64(3), np.float32("nan")),))
    assert table.to_json()["rows"] == [{"a": 3, "b": "nan"}]


def test_csv_has_one_line_for_each_row() -> None:
    rows = list(csv.DictReader(io.StringIO(TABLE.to_csv())))
    assert [row["layer"] for row in rows] == ["0", "1", "10"]
    assert (rows[1]["absmax"], rows[0]["shape"], rows[2]["ratio"]) == ("", "[4, 64]", "1.0")


def test_only_nothing_is_zero_and_only_all_is_a_hundred_percent() -> None:
    for ratio, text in [
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.99999999, "<100 %"),
        (0.9996, "<100 %"),
        (0.5, "50 %"),
        (1 / 3, "33.3 %"),
        (5e-10, "5e-08 %"),
    ]:
        table = Table(title="", columns=(Column(name="r", kind=Kind.RATIO),), rows=((ratio,),))
        assert table.to_text().splitlines()[1].strip() == text


def test_sizes_are_for_people() -> None:
    for nbytes, text in [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567_890, "1.235 GB")]:
        assert nbytes_text(nbytes) == text


def test_control_codes_of_others_stay_out_of_the_terminal() -> None:
    table = Table(title="", columns=(Column(name="a", kind=Kind.TEXT),), rows=(("\x1b[31mred\nline",),))
    assert table.to_text() == "a\n [31mred line\n"


def test_rows_are_sorted_with_the_largest_first_and_the_missing_last() -> None:
    assert TABLE.sorted_by("absmax").column("layer") == [10, 0, 1]
    assert TABLE.sorted_by("overflow").column("ratio") == [1.0, 1e-7, 0.0]
    with pytest.raises(UsageError, match="the table has no column ''"):
        TABLE.sorted_by("")


def test_the_first_rows_say_how_many_there_were() -> None:
    assert TABLE.first(2).notes == ("the first 2 of 3 rows", "a note")
    assert TABLE.first(3) is TABLE


def test_an_unknown_column_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="no column 'zzz': it has layer, kind, ratio"):
        TABLE.sorted_by("zzz")
    with pytest.raises(UsageError, match="no column 'lair': did you mean layer"):
        TABLE.column("lair")


def test_a_row_that_does_not_fit_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        Table(title="", columns=TABLE.columns, rows=((1,),))


@pytest.mark.parametrize("form", Form)
def test_a_table_goes_to_a_file(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "out"
    write_table(TABLE, form=form, output=path)
    expected = {
        Form.TEXT: TABLE.to_text(),
        Form.CSV: TABLE.to_csv(),
        Form.JSON: json.dumps(TABLE.to_json(), indent=2) + "\n",
    }
    assert path.read_text() == expected[form]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_table(TABLE, output=tmp_path / "no" / "out")


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    """On a terminal rich prints the table; lines that are too long wrap."""
    columns = (Column(name="name", kind=Kind.TEXT), Column(name="number", kind=Kind.INTEGER))
    table = Table(title="", columns=columns, rows=(("a" * 300, 12345678901234567890),))
    text = on_terminal(lambda: write_table(table), columns=40, term="dumb").replace("\n", "")
    assert text.count("a") >= 300
    assert "12345678901234567890" in text


def test_lists_of_others_are_one_line_too() -> None:
    table = Table(
        title="a\nb", columns=(Column(name="l", kind=Kind.LIST),), rows=((["x\x1b[2J", "\n"],),), notes=("c\r",)
    )
    assert table.to_text() == "a b\nl\nx [2J\nc \n"


def test_json_is_that_of_the_library() -> None:
    for names in [(), ("a", "b"), ("a", "a"), ("50 %", 'a "quoted" %s')]:
        cells: list[Any] = [0, True, None, 1.5, 1e-300, float("nan"), float("inf"), -float("inf"), 2**70]
        cells += [
            "",
            "a, b",
            'NaN "Infinity"',
            "\n\u2028\x00",
            '"rows": []',
            [],
            [1, [2, "x\ny"]],
            {"a": [float("nan")]},
        ]
        cells += [np.float32(0.1), np.int64(3), (1.0, 2), [True, 1, 1.0], {}]
        columns = tuple(Column(name=name, kind=Kind.TEXT) for name in names)
        for left, right in itertools.product(range(1, len(cells) + 1), (cells, cells[::-1], [1.0] * len(cells))):
            rows = tuple((one, two)[: len(names)] for one, two in zip(cells[:left], right, strict=False))
            table = Table(title='"rows": []', columns=columns, rows=rows, notes=('"rows": []',))
            assert "".join(table.json_parts()) == json.dumps(table.to_json(), indent=2, allow_nan=False) + "\n"


WIDE_TABLE = Table(
    title="",
    columns=(
        Column(name="module", kind=Kind.TEXT, is_key=True),
        Column(name="dtype", kind=Kind.TEXT, is_key=True),
        Column(name="absmax", kind=Kind.FLOAT),
        Column(name="std", kind=Kind.FLOAT),
        Column(name="severity", kind=Kind.TEXT),
    ),
    rows=(("layers.0.query", "bfloat16", 1.5, 0.25, "high"), ("layers.1.query", "float32", 2.5, 0.5, "none")),
)


def test_a_terminal_shows_the_columns_that_it_has_room_for_and_names_the_others() -> None:
    cases: list[tuple[int, list[str], str]] = [
        (80, ["module", "dtype", "absmax", "std", "severity"], ""),
        (40, ["module", "absmax", "std", "severity"], "dtype"),
        (34, ["module", "absmax", "severity"], "dtype, std"),
        (25, ["module", "severity"], "dtype, absmax, std"),
    ]
    for width, heads, gone in cases:
        lines = CODES.sub("", on_terminal(lambda: write_table(WIDE_TABLE), columns=width)).splitlines()
        assert lines[0].split() == heads
        assert max(map(len, lines)) <= width
        said = " ".join(" ".join(lines[3:]).split())
        assert said == (f"hidden columns (use --wide): {gone}" if gone else "")


def test_a_terminal_without_room_for_a_table_shows_a_block_for_each_row() -> None:
    lines = CODES.sub("", on_terminal(lambda: write_table(WIDE_TABLE), columns=20)).splitlines()
    found = [line.split() for line in lines if line.strip()]
    names = ["module", "dtype", "absmax", "std", "severity"]
    whole = " ".join(word for line in found for word in line)
    assert [word for word in whole.split() if word in names] == names * 2
    assert all(value in whole for value in ("layers.1.query", "bfloat16", "2.5", "0.25", "high"))


def test_all_columns_are_there_where_they_are_asked_for() -> None:
    text = on_terminal(lambda: write_table(WIDE_TABLE, wide=True), columns=20, term="dumb").replace("\n", "")
    assert all(name in text for name in ("dtype", "absmax", "std", "severity"))


def test_two_threads_that_write_one_file_leave_one_of_both_whole(tmp_path: Path) -> None:
    """Each writes beside the file under a name of its own: neither moves away what the other is writing."""
    path = tmp_path / "table.json"
    texts = [letter * 200_000 for letter in (b"a", b"b")]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(write_whole, path, texts[number % 2]) for number in range(64)]:
            done.result()
    assert path.read_bytes() in texts
    assert [one.name for one in tmp_path.iterdir()] == ["table.json"]


def test_a_table_draws_lines_against_numbers_and_bars_against_words() -> None:
    columns = (
        Column(name="iteration", kind=Kind.INTEGER, is_key=True),
        Column(name="module", kind=Kind.TEXT, is_key=True),
        Column(name="records", kind=Kind.INTEGER),
        Column(name="absmax", kind=Kind.FLOAT),
    )
    rows = ((0, "up", 4, 1.5), (10, "up", 4, None), (20, "up", 4, 2.5))
    table = Table(title="t", columns=columns, rows=rows)
    axes = table.plot(axes=Figure().subplots())
    (line,) = axes.lines
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("iteration", "absmax", "t")
    np.testing.assert_array_equal(line.get_xdata(), [0, 10, 20])
    np.testing.assert_array_equal(line.get_ydata(), [1.5, math.nan, 2.5])
    words = Table(title="t", columns=columns, rows=((0, "up", 4, 1.5), (0, "down", 5, 2.5)))
    axes = words.plot(y=["absmax", "records"], axes=Figure().subplots())
    assert [label.get_text() for label in axes.get_xticklabels()] == ["up", "down"]
    bars = [one.patches for one in axes.containers if isinstance(one, BarContainer)]
    assert [[bar.get_height() for bar in group] for group in bars] == [[1.5, 2.5], [4, 5]]
    with pytest.raises(UsageError, match="no column 'absmx'"):
        table.plot(y="absmx")
    with pytest.raises(UsageError, match="column 'module' contains text values, but y requires numbers"):
        table.plot(y="module")
    with pytest.raises(UsageError, match="nothing to plot"):
        Table(title="t", columns=columns, rows=()).plot()


def test_columns_of_arrays_are_as_those_of_values() -> None:
    columns = tuple(Column(name=name, kind=kind) for name, kind in zip("abcd", [*Kind][:4], strict=True))
    numbers = np.array([1.5, math.nan, -0.0, 0.0] * 700)
    codes = np.arange(2800) % 3
    texts = ["x", None, "y"]
    table = Table(
        title="",
        columns=columns,
        rows=TableRows([Coded(codes, texts), np.arange(2800), numbers, number_cells(numbers, kind=Kind.INTEGER)]),
    )
    rows = tuple(
        (texts[row % 3], row, None if row % 4 == 1 else [1.5, 0, -0.0, 0.0][row % 4], [1, None, 0, 0][row % 4])
        for row in range(2800)
    )
    plain = Table(title="", columns=columns, rows=rows)
    assert table.rows == rows
    assert table.rows[-2] == rows[-2]
    assert "".join(table.json_parts()) == "".join(plain.json_parts())
    assert table.to_csv() == plain.to_csv()
    assert table.to_text() == plain.to_text()
    assert table.sorted_by("c").rows == plain.sorted_by("c").rows
    assert table.check("b < 5").rows == plain.check("b < 5").rows


def test_floats_are_written_as_the_library_writes_them() -> None:
    powers = 10.0 ** np.arange(-330, 309)
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(2000) * 10.0 ** rng.integers(-25, 25, 2000)
    values = np.concatenate([powers, -powers / 3, drawn, [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1e-4]])
    table = Table(title="", columns=(Column(name="a", kind=Kind.FLOAT),), rows=TableRows([values]))
    assert "".join(table.json_parts()) == json.dumps(table.to_json(), indent=2, allow_nan=False) + "\n"


pandas = pytest.importorskip("pandas")

FRAMED = Table(
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
    frame = FRAMED.to_pandas()
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
    empty = Table(title="", columns=FRAMED.columns, rows=()).to_pandas()
    assert empty.dtypes.astype(str).tolist() == FRAMED.to_pandas().dtypes.astype(str).tolist()


def test_lists_of_one_length_stay_lists() -> None:
    table = Table(title="", columns=(Column(name="shape", kind=Kind.LIST),), rows=(([1, 2],), ([3, 4],)))
    assert table.to_pandas()["shape"].tolist() == [[1, 2], [3, 4]]


def test_a_value_of_another_kind_is_kept_as_it_is() -> None:
    cases: list[tuple[Kind, object]] = [
        (Kind.TEXT, 1.5),
        (Kind.INTEGER, 2**63),
        (Kind.INTEGER, 1.5),
        (Kind.FLOAT, "nan"),
        (Kind.FLOAT, 1j),
    ]
    for kind, value in cases:
        frame = Table(title="", columns=(Column(name="a", kind=kind),), rows=((value,), (None,))).to_pandas()
        assert frame["a"].tolist() == [value, None]


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'ranktape\[notebook\]'"):
        FRAMED.to_pandas()


def test_a_notebook_shows_what_text_shows_and_runs_nothing() -> None:
    shown = Page(FRAMED._repr_html_())
    lines = FRAMED.to_text().splitlines()
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
    assert repr(FRAMED) + "\n" == FRAMED.to_text()
