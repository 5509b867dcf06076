"""Is the catalogue as an Arrow table what it is as columns?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ranktape.storage import open_run
from ranktape.storage.records.tables import frame_columns
from tests.runs import describe, write_run

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = pytest.importorskip("pyarrow")


@pytest.fixture
def table(tmp_path: Path) -> pa.Table:
    """Records with and without what may be missing, one of them under a name that is no text."""
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    nothing = np.full((2, 2), np.nan, np.float32)
    tensors = [
        (array, describe(array, module="a", batch_size=2, sample_dim=0, sample_ids=[7, 8], tensor_name="input")),
        (nothing, describe(nothing, module="half \ud83d of one")),
    ]
    return write_run(tmp_path / "run", {0: [tensors]}).select().to_arrow()


def test_columns_have_the_types_of_their_fields_whatever_is_missing(table: pa.Table) -> None:
    assert table.column_names == frame_columns()
    wanted = {
        "iteration": pa.int64(),
        "batch_size": pa.int64(),
        "module": pa.string(),
        "shape": pa.list_(pa.int64()),
        "sample_ids": pa.string(),
        "timestamp": pa.float64(),
        "overflow.nan.ratio": pa.float64(),
        "overflow.absmax": pa.float64(),
        "checksum": pa.string(),
    }
    assert {name: table.schema.field(name).type for name in wanted} == wanted
    assert table.schema.field("nbytes").metadata == {b"unit": b"bytes"}


def test_what_is_missing_is_null_and_half_of_a_character_an_escape(table: pa.Table) -> None:
    assert table["batch_size"].to_pylist() == [2, None]
    assert table["sample_ids"].to_pylist() == ["[7,8]", None]
    assert table["shape"].to_pylist() == [[2, 4], [2, 2]]
    assert table["overflow.absmax"].to_pylist() == [7.0, None]
    assert table["overflow.nan.count"].to_pylist() == [0, 4]
    assert table["module"].to_pylist() == ["a", "half \\ud83d of one"]


def test_a_selection_without_records_has_the_same_types(table: pa.Table, tmp_path: Path) -> None:
    empty = open_run(tmp_path / "run").select().where("layer_idx == 99").to_arrow()
    assert empty.num_rows == 0
    assert empty.schema.types == table.schema.types
