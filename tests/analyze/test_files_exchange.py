"""What leaves a run as files comes back as the same run, and what other people's files hold arrives whole."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranktape.analyze.legacy import ExportForm, export_records, import_folder, open_folder
from ranktape.analyze.legacy.names import MAX_NAME_NBYTES, parse_tensor_file_name
from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.errors import DataError, NoRecordsError, StorageError, UsageError
from ranktape.storage import Run, open_run
from ranktape.storage.format.dtypes import dtype_name
from ranktape.storage.format.layout import TensorSite, site_path
from ranktape.storage.format.record_info import RecordInfo
from tests.analyze.pt_files import legacy_file, save
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store
from tests.full_disk import file_size_limit
from tests.runs import describe
from tests.s3 import S3Server
from tests.strategies import WITHOUT_TORCH, arrays, raw_bytes, record_infos

NOT_COMPARED = {"attempt", "checksum"}
"""Fields of a record that an import gives: every checksum is compared through the values."""


def imported(files: Path, run: Path, **options: Any) -> Run:
    """The run that a folder becomes."""
    report = import_folder(
        open_folder(files, skip_unreadable=options.get("skip_unreadable", False)), str(run), **options
    )
    assert report.verdict.met
    return open_run(run)


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def identity(info: RecordInfo) -> dict[str, Any]:
    """Everything of a record that must survive."""
    return {name: value for name, value in info.to_json().items() if name not in NOT_COMPARED}


def assert_same(first: Run, second: Run) -> None:
    """Every record of both runs, with every bit."""
    assert first.iterations == second.iterations
    ours = {(record.iteration, record.rank, record.location.site): record for record in first.select()}
    theirs = {(record.iteration, record.rank, record.location.site): record for record in second.select()}
    assert ours.keys() == theirs.keys()
    for key, record in ours.items():
        assert identity(record.info) == identity(theirs[key].info)
        assert raw_bytes(record.read()) == raw_bytes(theirs[key].read())


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = model_tensors(num_ranks=2, iterations=(3, 7))
    own = describe_tensor(
        np.arange(12.0).reshape(3, 4),
        counter=90,
        iteration=3,
        microbatch=2,
        call=3,
        layer_idx=-1,
        timestamp=1757325140.25,
        sample_dim=0,
        sample_ids=["a", 7, "c"],
        layout="BT",
        compute_dtype="bfloat16",
        placement={"mesh": ["dp"], "offset": [0, 3]},
        metadata={"note": "层", "loss": 0.5},
    )
    run = store(tmp_path / "run", [*_numbered(tensors), own])
    report = export_records(run.select(), tmp_path / "files")
    assert (report.num_written, report.num_kept) == (len(run.select()), 0)
    again = imported(tmp_path / "files", tmp_path / "again")
    assert_same(run, again)
    assert again.verdict().required == 2


def _numbered(tensors: list[Tensor]) -> list[Tensor]:
    """As a capture would have it: every tensor of a rank has a counter of its own."""
    return [(array, dataclasses.replace(info, counter=counter)) for counter, (array, info) in enumerate(tensors)]


def test_the_files_are_those_that_the_tools_before_us_read(tmp_path: Path) -> None:
    run = store(tmp_path / "run", _numbered(model_tensors(num_layers=1)))
    export_records(run.select(tensor_name="query"), tmp_path / "files")
    (path,) = (tmp_path / "files").iterdir()
    assert path.name == "19700101_000001_0005_iter0_attention_L0_forward_pre_linear_bf16_rank0_query.pt"
    loaded = torch.load(path, weights_only=True)
    record = run.select(tensor_name="query")[0]
    assert torch.equal(loaded["tensor"], record.tensor())
    metadata = loaded["metadata"]
    tags = (
        "layer_type",
        "layer_idx",
        "operation",
        "phase",
        "component",
        "quant_type",
        "tensor_name",
        "rank",
        "iteration",
    )
    assert {tag: metadata[tag] for tag in tags} == {tag: getattr(record, tag) for tag in tags}
    assert metadata["save_time"] == "1970-01-01 00:00:01"
    info = loaded["tensor_info"]
    assert (info["shape"], info["dtype"]) == ([4, 64], "torch.bfloat16")
    values = record.read().astype(np.float64)
    assert info["mean"] == pytest.approx(values.mean())
    assert info["std"] == pytest.approx(values.std(ddof=1))
    assert info["overflow_info"]["upper_overflow_count"] == 0


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any torch dtype under any tags, as a capture could have written it."""
    info = draw(record_infos().filter(lambda drawn: drawn.dtype not in WITHOUT_TORCH))
    array = draw(arrays(name=info.dtype, shape=info.shape, contiguous=True))
    changed = {"rank": 0, "iteration": 1, "attempt": 0, "timestamp": info.timestamp % 4e9, "overflow": None}
    changed["overflow"] = measure(array, sample_dim=info.sample_dim)  # type: ignore[assignment]
    layout = info.layout if len(info.layout) == len(info.shape) else ""
    return array, dataclasses.replace(info, **changed, layout=layout)  # type: ignore[arg-type]


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(tensors(), min_size=1, max_size=4, unique_by=lambda tensor: site_path(TensorSite.of(tensor[1]))))
def test_any_tags_come_back_and_none_leaves_the_folder(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Tensor]
) -> None:
    place = tmp_path_factory.mktemp("any")
    run = store(place / "run", drawn)
    try:
        report = export_records(run.select(), place / "files")
    except UsageError as error:
        assert f"file systems allow {MAX_NAME_NBYTES}" in str(error)  # noqa: PT017 - a name may be too long
        return
    names = names_in(place / "files")
    assert len(names) == report.num_written == len(drawn)
    assert names_in(place) == ["files", "run"]
    assert all(parse_tensor_file_name(name) is not None for name in names)
    assert_same(run, imported(place / "files", place / "again"))


def test_awkward_tags_stay_inside(tmp_path: Path) -> None:
    awkward = ("../../x", "/etc/passwd", "a/b\\c", "..", "%2F", "rank1", "a_b")
    run = store(
        tmp_path / "run",
        [
            describe_tensor(np.zeros(2), layer_type=tag, tensor_name=tag, quant_type=tag, counter=counter)
            for counter, tag in enumerate(awkward)
        ],
    )
    export_records(run.select(), tmp_path / "deep" / "files")
    assert names_in(tmp_path) == ["deep", "run"]
    assert names_in(tmp_path / "deep") == ["files"]
    assert len(names_in(tmp_path / "deep" / "files")) == len(awkward)
    assert_same(run, imported(tmp_path / "deep" / "files", tmp_path / "again"))


def test_an_export_goes_on_where_it_was(tmp_path: Path) -> None:
    run = store(tmp_path / "run", _numbered(model_tensors(num_layers=1)))
    folder = tmp_path / "files"
    export_records(run.select(layer_type="linear"), folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    report = export_records(run.select(), folder)
    assert (report.num_written, report.num_kept) == (4, 5)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    damaged = next(iter(before))
    whole = bytearray(damaged.read_bytes())
    damaged.write_bytes(whole[:-30])
    with pytest.raises(UsageError, match="already exists with other content: add --overwrite"):
        export_records(run.select(), folder)
    report = export_records(run.select(), folder, overwrite=True)
    assert (report.num_written, report.num_kept) == (1, 8)
    assert torch.load(damaged, weights_only=True)["tensor"].shape == (4, 64)


@pytest.mark.parametrize("timestamp", [-1.0, 253402300800.0, 1e18])
def test_a_time_that_no_clock_shows_is_named(tmp_path: Path, timestamp: float) -> None:
    run = store(tmp_path / "run", [describe_tensor(np.zeros(2), timestamp=timestamp)])
    with pytest.raises(DataError, match="which a file name cannot represent"):
        export_records(run.select(), tmp_path / "files")


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
def test_a_file_changed_at_random_gives_a_record_or_one_error(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    tensor = describe_tensor(values, sample_dim=0, sample_ids=[1, "b", 3], metadata={"a": 1.5}, placement={"mesh": []})
    export_records(store(tmp_path / "run", [tensor]).select(), tmp_path / "files")
    (path,) = (tmp_path / "files").iterdir()
    whole = save(tmp_path / "x.pt", torch.load(path, weights_only=True), legacy=legacy).read_bytes()
    rng, num_refused = random.Random(3), 0  # noqa: S311 - the same changes every time
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            place = rng.randrange(len(changed))
            changed[place : place + rng.choice([1, 1, 1, 4])] = rng.randbytes(rng.choice([0, 1, 1, 2]))
        path.write_bytes(changed)
        try:
            record = open_folder(tmp_path / "files").select()[0]
            assert record.read().nbytes == record.nbytes
        except DataError:
            num_refused += 1
    assert 100 < num_refused < 400


def test_a_link_in_the_folder_is_replaced_not_followed(tmp_path: Path) -> None:
    run = store(tmp_path / "run", model_tensors(num_layers=1)[:1])
    export_records(run.select(), tmp_path / "files")
    (path,) = (tmp_path / "files").iterdir()
    outside = tmp_path / "outside"
    outside.write_text("precious")
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(UsageError, match="already exists with other content"):
        export_records(run.select(), tmp_path / "files")
    export_records(run.select(), tmp_path / "files", overwrite=True)
    assert outside.read_text() == "precious"
    assert not path.is_symlink()


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    small, large = np.zeros(100), np.zeros(100_000)
    run = store(tmp_path / "run", [describe_tensor(small, counter=0), describe_tensor(large, counter=1, call=1)])
    with file_size_limit(100_000), pytest.raises(StorageError, match="cannot be written: File too large"):
        export_records(run.select(), tmp_path / "files")
    assert len(names_in(tmp_path / "files")) == 1
    assert len(open_folder(tmp_path / "files").select(shape="[[]100]")) == 1
    assert export_records(run.select(), tmp_path / "files").num_kept == 1


def test_one_file_for_each_sample(tmp_path: Path) -> None:
    values = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    with_samples = describe_tensor(values, sample_dim=1, sample_ids=["a", "b", "c"], counter=0)
    weight = describe_tensor(np.ones((2, 2)), tensor_name="weight", counter=1)
    run = store(tmp_path / "run", [with_samples, weight])
    report = export_records(run.select(), tmp_path / "files", per_sample=True)
    assert report.num_written == 4
    records = open_folder(tmp_path / "files").select(tensor_name="input")
    assert [record.sample_ids for record in records] == [["a"], ["b"], ["c"]]
    names = [parse_tensor_file_name(record.location.site) for record in records]
    assert [name.sample_idx for name in names if name is not None] == [0, 1, 2]
    for sample, record in enumerate(records):
        assert np.array_equal(record.read(), values[:, [sample]])
    again = imported(tmp_path / "files", tmp_path / "again")
    assert sorted(again.select(tensor_name="input").column("call")) == [0, 1, 2]


def test_restarts_do_not_overwrite_one_another(tmp_path: Path) -> None:
    first = describe_tensor(np.zeros(2), counter=0, timestamp=5.0)
    second = describe_tensor(np.ones(2), counter=0, timestamp=5.5, call=1)
    run = store(tmp_path / "run", [first, second])
    assert export_records(run.select(), tmp_path / "files").num_written == 2
    assert_is = sorted(float(record.read()[0]) for record in open_folder(tmp_path / "files").select())
    assert assert_is == [0.0, 1.0]
    # And again, in the same order: the names are the same.
    assert export_records(run.select(), tmp_path / "files").num_kept == 2


def hidden(layer: int, values: Any, **fields: Any) -> Tensor:
    """The output of a decoder layer; of the embedding for -1."""
    layer_type = "embedding" if layer < 0 else "hidden"
    tags = {"layer_type": layer_type, "layer_idx": layer, "phase": "post", "tensor_name": "output"}
    return describe_tensor(values, **(tags | fields))


def test_the_outputs_of_layers_have_a_folder_of_their_own(tmp_path: Path) -> None:
    values = [np.full((1, 4, 8), float(layer), dtype=np.float32) for layer in range(-1, 3)]
    values[2][0, 0, 0] = np.nan
    outputs = [hidden(layer - 1, array, counter=layer) for layer, array in enumerate(values)]
    other = describe_tensor(np.zeros(3), counter=9)
    run = store(tmp_path / "run", [*outputs, other])
    report = export_records(run.select(), tmp_path / "files", form=ExportForm.LAYERS)
    assert report.num_written == 6
    assert names_in(tmp_path / "files") == [
        "embedding_output.pt", "layer_1_output.pt", "layer_2_output.pt", "layer_3_output.pt", "metadata.pt",
        "statistics.pt",
    ]  # fmt: skip
    third = torch.load(tmp_path / "files" / "layer_3_output.pt", weights_only=True)
    assert torch.equal(third, torch.full((1, 4, 8), 2.0))
    statistics = torch.load(tmp_path / "files" / "statistics.pt", weights_only=True)
    assert [statistics[name]["has_nan"] for name in sorted(statistics)] == [False, False, True, False]
    assert statistics["layer_3_output"]["mean"] == 2.0
    assert export_records(run.select(), tmp_path / "files", form=ExportForm.LAYERS).num_kept == 6
    again = imported(tmp_path / "files", tmp_path / "again").select()
    assert [record.layer_idx for record in again] == [-1, 0, 1, 2]
    for record, array in zip(again, values, strict=True):
        assert raw_bytes(record.read()) == raw_bytes(array)
        assert record.metadata is not None
        assert "mean" in record.metadata["folder"]["statistics"]


def test_of_several_embeddings_the_one_that_enters_the_first_layer_is_written(tmp_path: Path) -> None:
    tokens, positions, entering = (np.full((1, 4, 8), number, dtype=np.float32) for number in (1, 2, 3))
    parts = [
        hidden(-1, array, counter=number, module=f"model.{name}", component=component)
        for number, (name, array, component) in enumerate(
            [("wte", tokens, "embedding"), ("wpe", positions, "embedding"), ("wte", entering, "hidden")]
        )
    ]
    run = store(tmp_path / "run", [*parts, hidden(0, np.zeros((1, 4, 8), dtype=np.float32), counter=3)])
    assert export_records(run.select(), tmp_path / "files", form=ExportForm.LAYERS).num_written == 4
    written = torch.load(tmp_path / "files" / "embedding_output.pt", weights_only=True)
    assert torch.equal(written, torch.full((1, 4, 8), 3.0))
    with pytest.raises(UsageError, match="choose one with --iteration, --rank, --microbatch, --module and --call"):
        export_records(run.select(component="embedding"), tmp_path / "none", form=ExportForm.LAYERS)


def test_layers_of_two_iterations_are_not_mixed(tmp_path: Path) -> None:
    run = store(tmp_path / "run", [hidden(0, np.zeros(2), iteration=iteration) for iteration in (1, 2)])
    with pytest.raises(UsageError, match=r"are both layer_1_output\.pt: choose one with --iteration"):
        export_records(run.select(), tmp_path / "files", form=ExportForm.LAYERS)
    assert export_records(run.select(iteration=2), tmp_path / "files", form=ExportForm.LAYERS).num_written == 3
    plain = store(tmp_path / "plain", model_tensors(num_layers=1))
    with pytest.raises(NoRecordsError, match="none of 9 records is the output of an embedding"):
        export_records(plain.select(), tmp_path / "none", form=ExportForm.LAYERS)


def test_what_torch_does_not_have_is_named(tmp_path: Path) -> None:
    info = describe(np.zeros(2, dtype="uint8"))
    array = np.zeros(2, dtype=np.dtype("uint8")).view(_float6())
    run = store(tmp_path / "run", [(array, dataclasses.replace(info, dtype=dtype_name(array.dtype)))])
    with pytest.raises(UsageError, match="torch has no dtype float6_e2m3fn"):
        export_records(run.select(), tmp_path / "files")


def _float6() -> Any:
    import ml_dtypes

    return ml_dtypes.float6_e2m3fn


@pytest.mark.s3
def test_an_object_store_takes_an_import_and_gives_an_export(tmp_path: Path, s3_server: S3Server) -> None:
    for counter in range(20):
        legacy_file(tmp_path / "files", torch.randn(4, 8), counter=counter, rank=counter % 2)
    url, options = s3_server.new_url(), s3_server.storage_options
    report = import_folder(open_folder(tmp_path / "files"), url, storage_options=options)
    assert (report.num_records, report.verdict.met) == (20, True)
    run = open_run(url, storage_options=options)
    export_records(run.select(), tmp_path / "out")
    again = import_folder(open_folder(tmp_path / "out"), str(tmp_path / "again"))
    assert again.num_records == 20
    assert_same(run, open_run(tmp_path / "again"))


def test_export_says_what_of_a_record_was_not_kept(tmp_path: Path) -> None:
    counts = np.zeros(1 << 16, dtype=np.uint32)
    counts[0] = 8
    info = dataclasses.replace(
        describe(np.zeros(8, dtype=np.float16)), keep="histogram", nbytes=counts.nbytes, checksum=""
    )
    run = store(tmp_path / "run", [(counts, info)])
    with pytest.raises(UsageError, match=r"1 records store only histogram.* there is nothing to export"):
        export_records(run.select(), tmp_path / "files")
    mixed = store(tmp_path / "mixed", [(counts, info), *model_tensors(num_layers=1)])
    with pytest.raises(UsageError, match="leave them out with --where \"keep == 'values'\""):
        export_records(mixed.select(), tmp_path / "files")
    assert json.loads(json.dumps(run.select()[0].info.to_json()))["keep"] == "histogram"
