"""Writes the catalogue, with any metrics, as a Parquet file that DuckDB, pandas and polars open."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.engine.values import View
from ranktape.analyze.metrics.gather import gather
from ranktape.analyze.metrics.metric import parse_metric
from ranktape.analyze.views.exports.files import Exported, check_folder, counted, missing_package, put_file

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.storage import Records

FILE = "records.parquet"
"""One row for each record."""


def check_parquet() -> None:
    """See that the library is there, before anything is read.

    Raises:
        UsageError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401 - asked whether it is there
    except ImportError as error:
        raise missing_package("pyarrow", "parquet", error) from error


def write_parquet(
    records: Records,
    *,
    folder: str,
    metrics: Sequence[str] = (),
    overwrite: bool = False,
    view: View | None = None,
    engine: Engine | None = None,
) -> Exported:
    """Write the catalogue of a selection into a folder, with a column for each metric that the catalogue lacks.

    Without metrics no value is read. A metric that is not there is null.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read, or the file cannot be written.
        UsageError: pyarrow is not installed, there is no such metric, or the file is there and holds something else.
    """
    check_parquet()
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = check_folder(folder) / FILE
    chosen = {name: parse_metric(name).of for name in metrics}
    table = records.to_arrow()
    wanted = {name: metric for name, metric in chosen.items() if name not in table.column_names}
    if wanted:
        for name, column in gather(records, wanted, view=view or View.COMPUTE, engine=engine).items():
            table = table.append_column(name, pa.array(column, from_pandas=True))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    is_kept = put_file(path, sink.getvalue(), what="table", overwrite=overwrite)
    what = counted([(table.num_rows, "record"), (table.num_columns, "column")])
    next_step = "open it: SELECT in DuckDB, read_parquet of pandas and polars"
    return Exported(place=str(path), what=what, is_kept=is_kept, next_step=next_step)
