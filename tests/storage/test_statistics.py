"""Are records of which only statistics were kept stored, read, checked and refused where values are needed?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from ranktape.analyze.legacy.export import export_records
from ranktape.analyze.legacy.open import open_source
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.analyze.questions.ls import ls
from ranktape.analyze.questions.overflow import overflow
from ranktape.errors import DataError, RunFormatError, UsageError
from ranktape.storage import Records, open_run
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.format.statistics import STATISTICS, Statistics
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from tests.runs import describe, start, write_run

Array: TypeAlias = np.ndarray[Any, Any]

SHAPES = ((4, 8), (3,), (), (0, 5), (700, 9))


def reduced(array: Array, **fields: Any) -> tuple[Array, RecordInfo]:
    """The statistics of an array, and its identity."""
    vector = statistics_of(array).to_vector()
    return vector, describe(array, keep="statistics", nbytes=vector.nbytes, **fields)


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        f"layer.{number}": np.asarray(random.standard_normal(shape), np.float32) for number, shape in enumerate(SHAPES)
    }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Array]) -> str:
    """A run with the statistics of tensors of many shapes, and the values of one."""
    url = str(tmp_path_factory.mktemp("runs") / "run")
    tensors = [reduced(array, module=module, counter=place) for place, (module, array) in enumerate(arrays.items())]
    whole = np.arange(6, dtype=np.float32)
    write_run(url, {0: [[*tensors, (whole, describe(whole, module="whole", counter=99))]]})
    return url


def kept(url: str) -> Records:
    return open_run(url).select(keep="statistics")


def test_statistics_come_back(url: str, arrays: dict[str, Array]) -> None:
    records = kept(url)
    assert len(records) == len(arrays)
    for record in records:
        array = arrays[record.module]
        assert (record.shape, record.dtype, record.nbytes) == (array.shape, "float32", 80)
        assert record.statistics() == statistics_of(array)
        assert record.overflow.zero.count == 0
        if array.size:
            assert record.statistics().mean == pytest.approx(float(array.mean()), abs=1e-6)
            assert record.overflow.absmax == record.statistics().absmax


def test_tensors_of_all_shapes_share_one_array(url: str) -> None:
    records = kept(url)
    [stack] = set(records.column("stack"))
    assert stack.startswith("stack_float64_10_")
    document = json.loads(Path(url, records[0].location.array_path, "zarr.json").read_bytes())
    assert document["dimension_names"] == ["capture_5", "statistic_10"]
    assert document["shape"] == [len(SHAPES), len(STATISTICS)]


def test_a_check_reads_them(url: str) -> None:
    findings = check_run(open_backend(url), deep=True).findings
    assert [finding.message for finding in findings if finding.is_error] == []


def test_values_are_refused_with_what_to_use(url: str, tmp_path: Path) -> None:
    record = kept(url)[0]
    for read in (record.read, record.histogram, record.tensor):
        with pytest.raises(UsageError, match=r"statistics were kept, not the (values|histogram): use statistics\(\)"):
            read()
    whole = open_run(url).select(module="whole")
    with pytest.raises(UsageError, match=r"the values were kept, not the statistics: use read\(\)"):
        whole[0].statistics()
    with pytest.raises(UsageError, match=r"the statistics were kept, not the values: use statistics\(\)"):
        kept(url)[:1].stack()
    with pytest.raises(UsageError, match=r"5 records store only statistics, such as .*: leave them out with --where"):
        export_records(open_run(url).select(), tmp_path / "files")
    with pytest.raises(UsageError, match=r"leave such records out with --where"):
        overflow(kept(url), format="fp8_e4m3")


def test_what_the_catalogue_answers_is_answered(url: str) -> None:
    assert len(ls(open_run(url).select()).rows) == len(SHAPES) + 1
    assert [row[0] for row in overflow(open_run(url).select(), by=["keep"]).rows] == ["statistics", "values"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_elements": 33.0}, "they are of 33 elements"),
        ({"num_elements": 32.5}, "num_elements of statistics is 32.5"),
        ({"num_finite": -1.0}, "num_finite of statistics is -1"),
        ({"num_finite": math.nan}, "num_finite of statistics is nan"),
        ({"num_finite": 40.0}, "40 finite values of 32 are damaged"),
        ({"minimum": math.nan, "maximum": math.nan, "absmax": math.nan}, "32 finite values of 32 are damaged"),
    ],
)
def test_statistics_of_a_stranger_are_refused(tmp_path: Path, changes: dict[str, float], message: str) -> None:
    vector, info = reduced(np.ones((4, 8), np.float32))
    for name, value in changes.items():
        vector[STATISTICS.index(name)] = value
    record = write_run(tmp_path / "run", {0: [[(vector, info)]]}).select()[0]
    with pytest.raises(DataError, match=message):
        record.statistics()


def test_only_statistics_are_taken_for_them(tmp_path: Path) -> None:
    _, _, (writer,) = start(str(tmp_path / "run"))
    _, info = reduced(np.ones((4, 8), np.float32))
    with pytest.raises(DataError, match=r"cannot be the statistics of the tensor that it is said to be: float32"):
        writer.write(np.zeros(9), info=info)
    with pytest.raises(DataError, match=r"float64\[9\] are no statistics"):
        Statistics.from_vector(np.zeros(9))


def test_the_mode_of_a_pass_is_a_field_like_others(tmp_path: Path) -> None:
    arrays = {mode: np.full((2, 3), place, np.float32) for place, mode in enumerate(("train", "eval"))}
    tensors = [(array, describe(array, mode=mode, counter=place)) for place, (mode, array) in enumerate(arrays.items())]
    records = write_run(tmp_path / "run", {0: [tensors]}).select()
    export_records(records, tmp_path / "files")
    for given in (records, open_source(str(tmp_path / "files")).select()):
        assert [record.mode for record in given] == ["train", "eval"]
        assert given.select(mode="eval")[0].read().tolist() == arrays["eval"].tolist()
        assert len(given.where("mode == 'train'")) == 1
        assert [key["mode"] for key, _ in given.group_by(["mode"])] == ["eval", "train"]
        stacked = given.stack()
        assert stacked.dims[0] == "mode"
        assert stacked.sel(mode="eval").values.tolist() == arrays["eval"].tolist()
        table = ls(given)
        place = [column.name for column in table.columns].index("mode")
        assert [row[place] for row in table.rows] == ["train", "eval"]


def test_a_mode_of_a_stranger_is_refused(tmp_path: Path) -> None:
    array = np.ones(3, np.float32)
    run = write_run(tmp_path / "run", {0: [[(array, describe(array, mode="sleep"))]]})
    with pytest.raises(RunFormatError, match="mode 'sleep'"):
        list(run.select())
