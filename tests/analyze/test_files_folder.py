"""A folder of `.pt` files answers as a run does, and no file is opened that nobody asked about."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze import overflow, sweep
from ranktape.analyze.legacy import Folder, open_folder, open_source
from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.errors import DataError, RunFormatError, RunNotFoundError, UnknownFieldError, UsageError
from ranktape.storage.format.catalogue import COLUMNS, empty_catalogue
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.query.columns import StringColumn
from tests.analyze.pt_files import TIME, legacy_file, save
from tests.analyze.runs import model_tensors, store
from tests.exhaustive import exhaustive

GARBAGE = b"this is no file of torch"


def collection(folder: Path, *, legacy: bool = True) -> dict[str, torch.Tensor]:
    """What the legacy saver left of two iterations of two ranks, by file name."""
    torch.manual_seed(0)
    found = {}
    counter = 0
    for iteration in (0, 1):
        for rank in (0, 1):
            for layer in (0, 1):
                for operation, phase, name in (("forward", "pre", "input"), ("backward", "post", "output")):
                    counter += 1
                    tags: dict[str, Any] = {
                        "iteration": iteration,
                        "rank": rank,
                        "layer_idx": layer,
                        "counter": counter,
                    }
                    tags |= {"operation": operation, "phase": phase, "tensor_name": name}
                    tensor = torch.randn(4, 8).bfloat16()
                    found[legacy_file(folder, tensor, legacy=legacy, sample_idx=3, **tags).name] = tensor
    return found


@pytest.mark.parametrize("legacy", [True, False])
def test_every_tensor_is_there_with_its_tags_and_its_bits(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    tensors = collection(tmp_path, legacy=legacy)
    folder = open_folder(tmp_path)
    assert (folder.url, folder.iterations, len(folder)) == (str(tmp_path), [0, 1], 16)
    records = folder.select()
    assert len(records) == 16
    for record in records:
        tensor = tensors[record.location.site]
        values = record.read()
        assert values.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert torch.equal(record.tensor(), tensor)
        assert record.overflow == measure(values, sample_dim=None)
        assert (record.dtype, record.shape, record.nbytes) == ("bfloat16", (4, 8), 64)
        assert (record.layer_type, record.quant_type, record.sample_ids) == ("linear", "mxfp8", [3])
        assert record.metadata is not None
        assert record.metadata["experiment"] == "first"
        assert record.metadata["tensor_info"]["min"] == "nan"
        assert "layer_type" not in record.metadata
    assert [record.counter for record in records] == sorted(record.counter for record in records)
    assert set(records.column("tensor_name")) == {"input", "grad_input"}


def test_selections_and_groups_are_those_of_a_run(tmp_path: Path) -> None:
    collection(tmp_path)
    folder = open_folder(tmp_path)
    assert len(folder.select(rank=1, iteration="0-1", layer_idx=0)) == 4
    assert len(folder.select(operation="back*", shape="[[]4,8]")) == 8
    assert len(folder.select(overflow__total=0).where("overflow.absmax > 0 and rank == 0")) == 8
    groups = folder.select().group_by(["rank", "tensor_name"])
    assert [(key["rank"], len(members)) for key, members in groups] == [(0, 4), (0, 4), (1, 4), (1, 4)]
    assert [record.rank for record in folder.select()[4:12:4]] == [1, 0]
    assert folder.select()[-1].iteration == 1
    with pytest.raises(IndexError):
        folder.select()[16]
    with pytest.raises(UnknownFieldError, match="layer_type"):
        folder.select(layertype="linear")
    assert len(folder.select(rank=7)) == 0
    assert len(overflow(folder.select(), by=["rank"]).rows) == 2
    assert len(sweep(folder.select(iteration=0), format="fp8_e4m3").rows) == 8


def test_a_run_and_the_files_of_its_tensors_give_the_same_answers(tmp_path: Path) -> None:
    tensors = model_tensors()
    run = store(tmp_path / "run", tensors)
    for counter, (array, info) in enumerate(tensors):
        raw = torch.from_numpy(array.view(np.uint16).astype(np.int32)).to(torch.uint16).view(torch.bfloat16)
        tags = {name: getattr(info, name) for name in ("iteration", "rank", "layer_idx", "layer_type", "operation")}
        tags |= {name: getattr(info, name) for name in ("phase", "component", "quant_type", "tensor_name")}
        legacy_file(tmp_path / "files", raw, counter=counter, **tags)
    ours = overflow(run.select(), by=["layer_type", "tensor_name"], format="fp4_e2m1")
    theirs = overflow(open_folder(tmp_path / "files").select(), by=["layer_type", "tensor_name"], format="fp4_e2m1")
    assert ours.rows == theirs.rows


def test_every_column_has_the_type_that_a_run_has(tmp_path: Path) -> None:
    collection(tmp_path)
    for records in (open_folder(tmp_path).select(), open_folder(tmp_path).select(rank=9)):
        for name in COLUMNS:
            ours, theirs = records._all(name), empty_catalogue().column(name)
            assert len(ours) == len(records)
            assert isinstance(ours, StringColumn) == isinstance(theirs, StringColumn), name
            if not isinstance(ours, StringColumn) and not isinstance(theirs, StringColumn):
                assert ours.dtype == theirs.dtype, name


def test_only_what_is_asked_about_is_opened(tmp_path: Path) -> None:
    collection(tmp_path)
    for path in tmp_path.glob("*_rank01_*"):
        path.write_bytes(GARBAGE)
    folder = open_folder(tmp_path)
    assert len(folder.select(layer_idx=0)) == 8
    assert len(folder.select(dtype="bfloat16", rank=0)) == 8
    assert len(folder.select(overflow__nan__count=0, rank=0)) == 8
    assert folder.select()[0].read().shape == (4, 8)
    assert set(folder.select().column("quant_type")) == {"mxfp8"}
    with pytest.raises(DataError, match=r"rank01.*was not written by torch\.save"):
        folder.select(dtype="bfloat16")


def test_values_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    collection(tmp_path, legacy=False)
    folder = open_folder(tmp_path)
    records = folder.select(rank=0)
    assert list(records.column("nbytes")) == [64] * 8
    damaged = tmp_path / records.column("site")[0]
    whole = bytearray(damaged.read_bytes())
    start = whole.index(records[0].read().tobytes())
    whole[start] ^= 1
    damaged.write_bytes(whole)
    again = open_folder(tmp_path).select(rank=0)
    assert list(again.column("nbytes")) == [64] * 8
    with pytest.raises(DataError, match="are damaged"):
        again.column("overflow.total")
    with pytest.raises(DataError, match="are damaged"):
        records[0].read()


def test_a_file_that_was_replaced_since_is_noticed(tmp_path: Path) -> None:
    path = legacy_file(tmp_path, torch.zeros(4))
    record = open_folder(tmp_path).select()[0]
    legacy_file(tmp_path, torch.ones(4))
    with pytest.raises(DataError, match="has changed since it was listed"):
        record.read()
    assert path.exists()


OLDER = {
    ("backward", "pre", "input"): "grad_output",
    ("backward", "pre", "weight"): "weight",
    ("backward", "post", "output"): "grad_input",
    ("forward", "pre", "input"): "input",
    ("forward", "post", "output"): "output",
}


def test_names_of_the_older_form_mean_what_they_meant(tmp_path: Path) -> None:
    for counter, (operation, phase, name) in enumerate(OLDER):
        save(tmp_path / f"{TIME}_{counter:04d}_linear_L1_{operation}_{phase}_linear_hifp8_{name}.pt", torch.zeros(2))
    records = open_folder(tmp_path).select()
    assert [record.tensor_name for record in records] == list(OLDER.values())
    assert {(record.iteration, record.rank, record.quant_type) for record in records} == {(0, 0, "hifp8")}


def test_what_a_name_of_the_older_form_lacks_is_taken_from_the_file(tmp_path: Path) -> None:
    for rank in range(3):
        payload = {"tensor": torch.zeros(2), "metadata": {"iteration": 7, "rank": rank, "quant_type": "other"}}
        save(tmp_path / f"{TIME}_{rank:04d}_attention_L0_forward_pre_FA_hifp8_query.pt", payload)
    folder = open_folder(tmp_path)
    assert folder.iterations == [7]
    assert [(record.rank, record.call, record.quant_type) for record in folder.select()] == [
        (rank, 0, "hifp8") for rank in range(3)
    ]


def test_files_that_only_their_counters_tell_apart_are_calls(tmp_path: Path) -> None:
    for counter in (4, 2, 9):
        legacy_file(tmp_path, torch.full((2,), float(counter)), counter=counter)
    records = open_folder(tmp_path).select()
    assert [(record.call, record.counter, float(record.read()[0])) for record in records] == [
        (0, 2, 2.0),
        (1, 4, 4.0),
        (2, 9, 9.0),
    ]
    assert len(records.select(call=1)) == 1


def layer_outputs(folder: Path) -> list[torch.Tensor]:
    """A folder as the recorder of layer outputs left it."""
    outputs = [torch.randn(1, 4, 8).bfloat16() for _ in range(3)]
    for number, output in enumerate(outputs):
        save(folder / (f"layer_{number}_output.pt" if number else "embedding_output.pt"), output)
    statistics = {f"layer_{number}": {"mean": 0.5 * number, "has_nan": False} for number in range(3)}
    save(folder / "statistics.pt", statistics)
    save(folder / "metadata.pt", {"model": "a", "input_ids": torch.arange(4)})
    return outputs


def test_a_folder_of_layer_outputs_is_read(tmp_path: Path) -> None:
    outputs = layer_outputs(tmp_path)
    records = open_folder(tmp_path).select()
    assert [(record.layer_type, record.layer_idx, record.tensor_name, record.phase) for record in records] == [
        ("embedding", -1, "output", "post"),
        ("hidden", 0, "output", "post"),
        ("hidden", 1, "output", "post"),
    ]
    for number, (record, output) in enumerate(zip(records, outputs, strict=True)):
        assert torch.equal(record.tensor(), output)
        assert record.quant_type == "bf16"
        assert record.metadata == {
            "folder": {
                "metadata": {"model": "a", "input_ids": {"tensor": "int64", "shape": [4], "values": [0, 1, 2, 3]}},
                "statistics": {"mean": 0.5 * number, "has_nan": False},
            }
        }


def test_invalid_and_unknown_fields_of_layer_outputs_are_ignored(tmp_path: Path) -> None:
    layer_outputs(tmp_path)
    own = {
        "iteration": 7,
        "rank": -2,
        "microbatch": True,
        "quant_type": "",
        "compute_dtype": "x",
        "odd": 1,
        "module": "m",
    }
    save(tmp_path / "metadata.pt", {"ranktape": {"layer_1_output": own}})
    plain, described = open_folder(tmp_path).select(layer_type="hidden")
    fields = ("iteration", "rank", "microbatch", "quant_type", "compute_dtype")
    assert [getattr(described, name) for name in fields] == [7, *(getattr(plain, name) for name in fields[1:])]
    assert described.module == "m"


def test_a_damaged_description_of_a_folder_is_named(tmp_path: Path) -> None:
    layer_outputs(tmp_path)
    (tmp_path / "statistics.pt").write_bytes(GARBAGE)
    with pytest.raises(DataError, match=r"statistics\.pt was not written"):
        open_folder(tmp_path)
    folder = open_folder(tmp_path, skip_unreadable=True)
    assert len(folder) == 3
    assert list(folder.unreadable) == ["statistics.pt"]


def test_unreadable_files_are_left_out_on_demand_and_named(tmp_path: Path) -> None:
    names = list(collection(tmp_path))
    (tmp_path / names[3]).write_bytes(GARBAGE)
    save(tmp_path / names[5], {"weights": [1, 2, 3]})
    (tmp_path / "notes.txt").write_text("not a tensor")
    save(tmp_path / "model.pt", torch.zeros(1))
    folder = open_folder(tmp_path, skip_unreadable=True)
    assert len(folder) == 14
    assert set(folder.unreadable) == {names[3], names[5]}
    assert "dictionary of weights" in folder.unreadable[names[5]]
    assert sorted(folder.foreign) == ["model.pt", "notes.txt"]
    assert len(folder.select(dtype="bfloat16")) == 14


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    secret = legacy_file(outside, torch.ones(3), counter=1)
    real = legacy_file(inside, torch.ones(3), counter=2)
    (inside / secret.name).symlink_to(secret)
    third = legacy_file(tmp_path, torch.ones(3), counter=3).name
    (inside / third).symlink_to(real.name)
    (inside / real.name.replace("0002", "0004")).symlink_to("/dev/zero")
    (inside / real.name.replace("0002", "0005")).symlink_to("nowhere")
    (inside / real.name.replace("0002", "0006")).mkdir()
    assert sorted(open_folder(inside).foreign) == sorted([secret.name, real.name.replace("0002", "0004")])
    folder = open_folder(inside, skip_unreadable=True)
    assert [file.path.name for file in folder.files] == sorted([real.name, third])
    assert list(folder.unreadable) == [real.name.replace("0002", "0005")]
    (tmp_path / "link").symlink_to(inside)
    assert len(open_folder(tmp_path / "link", skip_unreadable=True)) == 2


SPECIAL = {
    "nan everywhere": torch.full((4, 4), math.nan, dtype=torch.bfloat16),
    "no elements": torch.empty(0, 5, dtype=torch.float16),
    "a scalar": torch.tensor(3.0),
    "complex": torch.tensor([complex(1, math.inf), complex(0, 0)]),
    "whole numbers": torch.arange(6).reshape(2, 3),
    "truth": torch.tensor([True, False]),
    "eight bits": torch.tensor([448.0, 0.0]).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_unusual_tensors_are_counted_like_any(tmp_path: Path, what: str) -> None:
    tensor = SPECIAL[what]
    legacy_file(tmp_path, tensor, legacy=False)
    records = open_folder(tmp_path).select()
    record = records[0]
    assert record.shape == tuple(tensor.shape)
    assert record.overflow == measure(record.read(), sample_dim=None)
    assert records.column("numel").tolist() == [tensor.numel()]
    assert len(overflow(records).rows) == 1


def test_a_single_file_of_any_name_will_do(tmp_path: Path) -> None:
    tensor = torch.randn(3, 3).bfloat16()
    path = save(tmp_path / "my tensor.pt", {"tensor": tensor, "metadata": {"layer_type": "attention", "rank": 5}})
    records = open_source(path).select()
    record = records[0]
    assert (record.tensor_name, record.layer_type, record.rank) == ("my tensor", "attention", 5)
    assert torch.equal(record.tensor(), tensor)
    assert len(open_source(f"file://{path}").select()) == 1


def test_what_a_stranger_embeds_is_not_believed(tmp_path: Path) -> None:
    for words in (
        {"layer_type": "x" * 1000, "rank": -5, "iteration": True, "operation": "sideways", "tensor_name": ["a"]},
        {"rank": "0", "iteration": 2**80, "layer_idx": 1.5, "sample_idx": "one", "phase": "a\nb"},
    ):
        record = open_source(save(tmp_path / "x.pt", {"tensor": torch.zeros(2), "metadata": words})).select()[0]
        assert (record.layer_type, record.rank, record.iteration) == ("unknown", 0, 0)
        assert (record.operation, record.layer_idx, record.sample_ids, record.phase) == ("forward", -1, None, "unknown")


BAD_RECORDS: tuple[dict[str, Any], ...] = (
    {"layout": "../../../etc"},
    {"rank": -1},
    {"module": 7},
    {"compute_dtype": "float3"},
    {"sample_dim": 9},
    {"sample_dim": 0, "sample_ids": [1, 2, 3, 4, 5]},
    {"metadata": [1]},
    {"timestamp": "nan"},
    {"timestamp": 1e300},
    {"timestamp": 10**400},
    {"operation": "sideways"},
    {"layer_type": ""},
    {"operation": {}, "compute_dtype": "float32"},
    {"compute_dtype": [1]},
)


def test_a_record_that_nobody_can_have_written_is_refused(tmp_path: Path) -> None:
    for own in BAD_RECORDS:
        path = save(tmp_path / "x.pt", {"tensor": torch.zeros(2), "metadata": {"ranktape": own}})
        with pytest.raises(DataError, match=r"x\.pt"):
            open_source(path)


def test_a_checksum_that_a_file_embeds_is_compared(tmp_path: Path) -> None:
    own = {"record_checksum": "crc32c:00000001"}
    path = save(tmp_path / "x.pt", {"tensor": torch.zeros(2), "metadata": {"ranktape": own}})
    with pytest.raises(DataError, match=r"their checksum is .* not crc32c:00000001"):
        open_source(path).select()[0].read()


def test_places_without_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"there is no run at .*: it is an empty folder$"):
        open_source(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(RunNotFoundError, match=r"there is no run at .*pipe\.pt: it is a named pipe"):
        open_source(tmp_path / "pipe.pt")
    (tmp_path / "pipe.pt").unlink()
    save(tmp_path / "model.pt", torch.zeros(1))
    with pytest.raises(RunNotFoundError, match=r"with a name of the legacy tools \(it contains model\.pt\)"):
        open_source(tmp_path)
    with pytest.raises(RunNotFoundError, match="there is nothing at"):
        open_folder(tmp_path / "missing")
    with pytest.raises(RunNotFoundError):
        open_source(tmp_path / "missing")
    (tmp_path / "zarr.json").write_text("{}")
    with pytest.raises(RunFormatError):
        open_source(tmp_path)


def test_what_is_no_path_is_named() -> None:
    for path in ("x" * 5000, "y/" * 3000, "a\0b", "a\ud800"):
        for function in (open_source, open_folder):
            with pytest.raises(UsageError, match="is not a path") as caught:
                function(path)
            assert len(str(caught.value)) < 300


def test_a_url_of_what_is_no_path_is_named() -> None:
    with pytest.raises(UsageError, match="is not a path"):
        open_source("file:///a%00b")


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o600)
    source = (
        "import os, sys; from pathlib import Path; from ranktape.analyze.legacy.open import open_folder\n"
        "from ranktape.errors import AccessDeniedError\n"
        "if os.getuid() == 0:\n    os.setuid(65534)\n"
        "try:\n    open_folder(sys.argv[1])\n"
        "except AccessDeniedError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-c", source, str(closed / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "cannot be accessed: Permission denied: change the permissions" in done.stdout, done.stderr


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    real = legacy_file(tmp_path, torch.zeros(2), counter=1)
    circle = tmp_path / real.name.replace("0001", "0002")
    circle.symlink_to(circle.name)
    folder = open_folder(tmp_path, skip_unreadable=True)
    assert [file.path for file in folder.files] == [real]
    assert "Too many levels of symbolic links" in folder.unreadable[circle.name]
    with pytest.raises(RunNotFoundError, match="there is nothing at"):
        open_folder(circle)


def test_a_long_description_of_a_folder_is_not_repeated_by_every_record(tmp_path: Path) -> None:
    layer_outputs(tmp_path)
    save(tmp_path / "metadata.pt", {"prompt": "x" * (1 << 20)})
    with pytest.raises(DataError, match=r"metadata\.pt is longer than 1048576 characters"):
        open_folder(tmp_path)
    assert list(open_folder(tmp_path, skip_unreadable=True).unreadable) == ["metadata.pt"]


def peak_nbytes(*, reset: bool = False) -> int:
    """The most memory that this process had since the last reset, torch's own included."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_large_files_are_counted_one_at_a_time(tmp_path: Path) -> None:
    nbytes = (1 << 26) + 2
    first = legacy_file(tmp_path, torch.full((nbytes // 2,), 3.0).bfloat16(), counter=1)
    for counter in range(2, 5):
        os.link(first, first.with_name(first.name.replace("_0001_", f"_{counter:04d}_")))
    records = open_folder(tmp_path).select()
    before = peak_nbytes(reset=True)
    assert records.column("overflow.maximum").tolist() == [3.0] * 4
    # One is counted while another one is listed.
    assert peak_nbytes() - before < 3.5 * nbytes


def test_a_run_beside_files_is_the_run(tmp_path: Path) -> None:
    store(tmp_path, model_tensors())
    legacy_file(tmp_path, torch.zeros(2))
    assert not isinstance(open_source(tmp_path), Folder)
    assert len(open_source(str(tmp_path)).select()) == 18


def test_a_run_is_opened_without_what_files_need(tmp_path: Path) -> None:
    store(tmp_path / "run", model_tensors())
    source = (
        "import sys; from ranktape.analyze.legacy import open_source; "
        f"assert len(open_source({str(tmp_path / 'run')!r}).select()) == 18; "
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_files_have_no_samples_of_their_own(tmp_path: Path) -> None:
    legacy_file(tmp_path, torch.zeros(2, 3))
    record = open_folder(tmp_path).select()[0]
    with pytest.raises(UsageError, match="has no dimension of samples"):
        record.read(sample=0)
    assert isinstance(record.info, RecordInfo)


@exhaustive("folders of few files are in make test")
def test_a_hundred_thousand_files_are_listed_in_seconds(tmp_path: Path) -> None:
    first = legacy_file(tmp_path, torch.zeros(2, 3), counter=0)
    name = first.name
    for counter in range(1, 100_000):
        if counter % 20_000 == 0:  # file systems bound the links of one file
            first = legacy_file(tmp_path / "more", torch.zeros(2, 3), counter=counter)
        os.link(first, tmp_path / name.replace("_0000_", f"_{counter:04d}_").replace("L1", f"L{counter % 50}"))
    started = time.monotonic()
    records = open_folder(tmp_path).select(layer_idx=7)
    seconds = time.monotonic() - started
    assert len(records) == 2000
    assert records[0].shape == (2, 3)
    assert seconds < 30


def test_an_extreme_beyond_float32_is_infinite_without_a_warning(tmp_path: Path) -> None:
    records = open_source(save(tmp_path / "x.pt", torch.full((3,), 1e300, dtype=torch.float64))).select()
    assert records.column("overflow.absmax").tolist() == [math.inf]
