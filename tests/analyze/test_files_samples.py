"""Files of single samples have the metrics that the samples have in the run that they come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ranktape.analyze import overflow, stats, sweep, trace
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.legacy import export_records, import_folder, open_folder
from ranktape.analyze.table import Table
from ranktape.analyze.views.plots.data import PlotData
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records, Run, open_run
from ranktape.storage.format.record_info import RUN
from tests.analyze.pt_files import legacy_file, save
from tests.analyze.runs import Tensor, describe_tensor, store

SAMPLES = 3
UNCACHED = Engine(use_cache=False)
KEY = ("iteration", "layer_idx", "layer_type", "operation", "phase", "tensor_name")
"""What files of every form say of a tensor, beside its sample."""

SITES = (("forward", "pre", "query", 0), ("forward", "post", "output", 1), ("backward", "pre", "grad_output", 0))


def captured(folder: Path) -> Run:
    """Two iterations of attention and one weight, samples along either of the first dimensions, NaN in one."""
    rng = np.random.default_rng(0)
    tensors: list[Tensor] = []
    for iteration in (0, 1):
        for layer in (0, 1):
            for operation, phase, name, dim in SITES:
                shape = (SAMPLES, 5, 64) if dim == 0 else (5, SAMPLES, 64)
                values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 4)).astype(np.float32)
                values.reshape(-1)[7] = np.nan if name == "output" else 1e30
                dtype = np.float32 if name == "output" else ml_dtypes.bfloat16
                tags = {"layer_type": "attention", "layer_idx": layer, "iteration": iteration, "operation": operation}
                tags |= {"phase": phase, "tensor_name": name, "counter": len(tensors), "batch_size": SAMPLES}
                tensors.append(describe_tensor(values.astype(dtype), sample_dim=dim, **tags))
        weight = rng.standard_normal((8, 64)).astype(np.float32)
        tags = {"layer_idx": 0, "iteration": iteration, "tensor_name": "weight", "counter": len(tensors)}
        tensors.append(describe_tensor(weight, layer_type="attention", **tags))
    return store(folder, tensors)


def exported(run: Run, folder: Path) -> Records:
    """As our export makes it."""
    export_records(run.select(), folder, per_sample=True)
    return open_folder(folder).select()


def imported(run: Run, folder: Path) -> Records:
    """The same as a run again."""
    exported(run, folder / "files")
    import_folder(open_folder(folder / "files"), str(folder / "run"))
    return open_run(folder / "run").select()


def collected(run: Run, folder: Path) -> Records:
    """As the legacy tool would have saved it: each sample without its batch, weights once for each."""
    counter = 0
    for record in run.select():
        for sample in range(SAMPLES):
            dim = record.sample_dim
            tensor = record.tensor() if dim is None else record.tensor().select(dim, sample).contiguous()
            tags = {name: getattr(record, name) for name in KEY} | {"component": "FA", "sample_idx": sample}
            counter += 1
            legacy_file(folder, tensor, counter=counter, **tags)
    return open_folder(folder).select()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that the files come from."""
    return captured(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", params=[exported, imported, collected], ids=lambda make: make.__name__)
def single(request: pytest.FixtureRequest, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Its samples as records of their own."""
    make: Callable[[Run, Path], Records] = request.param
    return make(run, tmp_path_factory.mktemp("files"))


def by_sample(table: Table, *fields: str) -> dict[tuple[str, ...], str]:
    """The named figures, NaN among them, of each tensor and sample."""
    names = (*KEY, "sample") if "operation" in {column.name for column in table.columns} else ("sample",)
    found = {
        tuple(str(row[name]) for name in names): json.dumps([row[name] for name in fields]) for row in table.records()
    }
    assert len(found) == len(table.rows)
    return found


def figures_of(table: Table) -> list[str]:
    """The columns that count or measure values."""
    return [column.name for column in table.columns if not column.is_key]


def test_statistics_are_those_of_the_run(run: Run, single: Records) -> None:
    expected, found = (stats(records, engine=UNCACHED, per_sample=True) for records in (run.select(), single))
    names = figures_of(expected)
    assert {"mean", "std", "norm", "overflow.nan.count"} < set(names)
    assert by_sample(found, *names) == by_sample(expected, *names)
    assert len(found.rows) == 2 * 2 * len(SITES) * SAMPLES


def test_statistics_over_records_are_those_of_the_run(run: Run, single: Records) -> None:
    options: dict[str, Any] = {"by": ["operation", "sample"], "engine": UNCACHED}
    expected, found = (stats(records, **options, per_sample=True) for records in (run.select(), single))
    assert found.rows == expected.rows


@pytest.mark.parametrize("sample", [0, "1", 2])
def test_a_sample_goes_the_same_way(run: Run, single: Records, sample: int | str) -> None:
    fields = ("tensor_name", "mean", "std", "absmax", "norm", "absmax.binades", "first")
    ways = [trace(records.select(iteration=1), sample=sample, engine=UNCACHED) for records in (run.select(), single)]
    expected, found = ([[row[field] for field in fields] for row in way.records()] for way in ways)
    assert json.dumps(found) == json.dumps(expected)
    assert len(found) == 2 * len(SITES)


def test_a_sample_that_is_not_there_is_named(single: Records) -> None:
    with pytest.raises(NoRecordsError, match="no record has sample 7: identifiers are 0, 1, 2, 3 in all"):
        trace(single, sample=7, engine=UNCACHED)


@pytest.mark.parametrize("options", [{}, {"format": "fp8_e4m3", "scaling": "none"}, {"format": "mxfp8"}], ids=str)
def test_overflow_is_that_of_the_run(run: Run, single: Records, options: dict[str, Any]) -> None:
    expected, found = (
        overflow(records, per_sample=True, engine=UNCACHED, **options) for records in (run.select(), single)
    )
    names = [name for name in figures_of(expected) if name.startswith(("overflow", "elements"))]
    assert "overflow.total" in names
    assert by_sample(found, *names) == by_sample(expected, *names)


@pytest.mark.parametrize("format_name", ["fp8_e4m3", "mxfp8"])
def test_sweeps_are_those_of_the_run(run: Run, single: Records, format_name: str) -> None:
    by = ["operation", "layer_idx", "sample"]
    expected, found = (sweep(records, format=format_name, by=by, engine=UNCACHED) for records in (run.select(), single))
    assert json.dumps(list(found.rows)) == json.dumps(list(expected.rows))


def test_large_samples_are_added_up_as_in_the_run(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((2, RUN + 1000)).astype(np.float32)
    run = store(tmp_path / "run", [describe_tensor(values, sample_dim=0)])
    for sample in (0, 1):
        legacy_file(tmp_path / "files", torch.from_numpy(values[sample]), sample_idx=sample, counter=sample + 1)
    tables = [
        stats(records, engine=UNCACHED, per_sample=True)
        for records in (run.select(), open_folder(tmp_path / "files").select())
    ]
    names = figures_of(tables[0])
    expected, found = ([[row[name] for name in names] for row in table.records()] for table in tables)
    assert found == expected


def test_a_record_that_is_one_sample_is_read_as_it(single: Records, run: Run) -> None:
    record = single.select(tensor_name="query", iteration=0, layer_idx=0)[1]
    expected = run.select(tensor_name="query", iteration=0, layer_idx=0)[0].read(sample=1)
    assert np.array_equal(record.read(sample=0), expected, equal_nan=True)
    with pytest.raises(UsageError, match="it has samples 0 to 0"):
        record.read(sample=1)


def test_findings_know_the_samples(single: Records) -> None:
    assert Survey(single, engine=UNCACHED).sample_records.size == 2 * 2 * len(SITES) * SAMPLES


def test_samples_of_two_ranks_are_drawn_apart(tmp_path: Path) -> None:
    for counter, (rank, sample) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        legacy_file(tmp_path, torch.full((2, 4), 1.0 + counter), rank=rank, sample_idx=sample, counter=counter)
    records = open_folder(tmp_path).select()
    found = PlotData(records, engine=UNCACHED).samples
    assert found.keys == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.grid("forward").tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_weights_are_no_samples(tmp_path: Path) -> None:
    legacy_file(tmp_path, torch.zeros(2, 2), tensor_name="weight", sample_idx=0)
    record = open_folder(tmp_path).select()[0]
    assert (record.sample_ids, record.info.num_samples) == ([0], 0)
    with pytest.raises(UsageError, match="has no dimension of samples"):
        record.read(sample=0)
    with pytest.raises(UsageError, match="none of 1 records has samples"):
        overflow(open_folder(tmp_path).select(), per_sample=True)


@pytest.mark.parametrize(
    ("shape", "tags", "expected"),
    [
        ((2, 8, 128, 64), {}, (None, 2)),
        ((128, 2, 64), {}, (None, 2)),
        ((32, 64), {}, (None, None)),
        ((16, 8, 64), {"batch_size": 16}, (0, 16)),
        ((16, 8, 64), {"batch_size": 8}, (1, 8)),
        ((16, 8, 64), {"batch_size": 5}, (None, 5)),
        ((16, 8, 64), {"batch_size": 8, "sample_idx": 3}, (None, 8)),
        ((16, 8, 64), {"tensor_name": "weight"}, (None, None)),
    ],
    ids=str,
)
def test_the_batch_is_seen_from_the_shape(
    tmp_path: Path, shape: tuple[int, ...], tags: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    legacy_file(tmp_path, torch.zeros(shape), **tags)
    record = open_folder(tmp_path).select()[0]
    assert (record.sample_dim, record.batch_size) == expected


def test_outputs_of_layers_have_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(3, 4, 8)
    save(tmp_path / "layer_1_output.pt", outputs)
    save(tmp_path / "layer_2_output.pt", outputs[0, 0])
    first, second = open_folder(tmp_path).select()
    assert (first.sample_dim, first.batch_size, first.layout) == (0, 3, "BTH")
    assert (second.sample_dim, second.batch_size, second.layout) == (None, None, "")
    rows = stats(open_folder(tmp_path).select(), metric=["absmax"], per_sample=True).records()
    assert [row["absmax"] for row in rows] == outputs.abs().amax((1, 2)).tolist()


def test_a_sample_of_a_shard_is_placed(tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    mesh = {"mesh": ["tp"], "mesh_shape": [2], "coordinates": [0], "placements": ["S(2)"], "offset": [0, 0, 0]}
    placement = {**mesh, "global_shape": [2, 3, 8]}
    run = store(tmp_path / "run", [describe_tensor(values, sample_dim=0, placement=placement)])
    exported(run, tmp_path / "files")
    found = open_folder(tmp_path / "files").select()
    assert [record.placement for record in found] == [{**placement, "global_shape": [1, 3, 8]}] * 2
    assert [record.shape for record in found] == [(1, 3, 4)] * 2
