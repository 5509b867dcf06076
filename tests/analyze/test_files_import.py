"""An import takes every file that can be read, names the others, and goes on where it was interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ranktape.analyze import compare, ls, overflow, stats, sweep, trace
from ranktape.analyze.cli import cli
from ranktape.analyze.legacy import ExportForm, export_records, import_folder, open_folder
from ranktape.analyze.legacy.payload import MAX_LISTED
from ranktape.analyze.table import Table
from ranktape.errors import DataError, RunExistsError, StorageError, UsageError
from ranktape.storage import Records, open_run
from tests.analyze.pt_files import TIME, legacy_file, save
from tests.analyze.runs import describe_tensor, store
from tests.analyze.test_files_exchange import imported


def test_an_import_commits_every_rank_of_every_iteration(tmp_path: Path) -> None:
    for iteration, rank in ((4, 0), (4, 2), (9, 2)):
        legacy_file(tmp_path / "files", torch.randn(3), iteration=iteration, rank=rank, counter=rank)
    run = imported(tmp_path / "files", tmp_path / "run")
    assert run.iterations == [4, 9]
    verdict = run.verdict()
    assert (verdict.met, verdict.required, verdict.final, verdict.missing) == (True, 2, True, [])
    assert [status.committed_ranks for status in run.status()] == [[0, 1, 2], [0, 1, 2]]
    assert run.attributes["environment"]["num_files"] == 3
    assert run.select(iteration=9).column("rank").tolist() == [2]


def test_an_import_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    for iteration in range(3):
        legacy_file(tmp_path / "files", torch.randn(3), iteration=iteration, legacy=False)
    paths = sorted((tmp_path / "files").iterdir())
    whole, changed = paths[2].read_bytes(), paths[2].stat()
    damaged = bytearray(whole)
    values = open_folder(tmp_path / "files").select(iteration=2)[0].read().tobytes()
    damaged[whole.index(values)] ^= 1
    paths[2].write_bytes(damaged)
    os.utime(paths[2], ns=(changed.st_atime_ns, changed.st_mtime_ns))
    with pytest.raises(DataError, match="are damaged"):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    broken = open_run(tmp_path / "run")
    assert broken.iterations == [0, 1]
    assert not broken.verdict().met
    paths[2].write_bytes(whole)
    os.utime(paths[2], ns=(changed.st_atime_ns, changed.st_mtime_ns))
    report = import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    assert (report.num_records, report.verdict.met) == (1, True)
    again = import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    assert (again.num_records, again.verdict.met) == (0, True)


def test_another_folder_is_another_run(tmp_path: Path) -> None:
    legacy_file(tmp_path / "files", torch.randn(3))
    imported(tmp_path / "files", tmp_path / "run")
    legacy_file(tmp_path / "files", torch.randn(3), iteration=1)
    with pytest.raises(RunExistsError, match=r"not imported from the current .*/files: add --overwrite"):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    assert imported(tmp_path / "files", tmp_path / "run", overwrite=True).iterations == [0, 1]
    with pytest.raises(RunExistsError, match="is not empty and holds no run"):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "files"))


def test_files_that_cannot_be_read_are_recorded_as_missing(tmp_path: Path) -> None:
    files = [legacy_file(tmp_path / "files", torch.randn(3), counter=counter, legacy=False) for counter in range(3)]
    files[0].write_bytes(b"nothing of ours")
    damaged = bytearray(files[1].read_bytes())
    damaged[damaged.index(open_folder(files[1]).select()[0].read().tobytes())] ^= 8
    files[1].write_bytes(damaged)
    (tmp_path / "files" / "notes.md").write_text("of mine")
    with pytest.raises(DataError, match=r"was not written by torch\.save"):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    save(tmp_path / "files" / "model.pt", torch.zeros(2))
    with pytest.raises(DataError, match=r"1 \.pt files in .* have unknown names, such as 'model\.pt'"):
        import_folder(open_folder(tmp_path / "files", skip_unreadable=True), str(tmp_path / "run"))
    folder = open_folder(tmp_path / "files", skip_unreadable=True)
    report = import_folder(folder, str(tmp_path / "run"), skip_unreadable=True)
    assert (report.num_records, report.verdict.met) == (1, True)
    assert set(report.left_out) == {files[0].name, files[1].name, "model.pt", "notes.md"}
    (status,) = open_run(tmp_path / "run").status()
    assert files[0].name in status.silent_sites[0]


def test_names_that_say_impossible_things_are_refused(tmp_path: Path) -> None:
    legacy_file(tmp_path / "ranks", torch.zeros(1), rank=10**9)
    for is_skipping in (False, True):
        with pytest.raises(UsageError, match="has rank 1000000000, and every rank up to it would be committed"):
            import_folder(open_folder(tmp_path / "ranks"), str(tmp_path / "run"), skip_unreadable=is_skipping)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [1058, 99_999])
def test_one_file_of_a_high_rank_does_not_make_a_group_for_each_below(tmp_path: Path, rank: int) -> None:
    files = [legacy_file(tmp_path / "files", torch.ones(3), rank=rank) for rank in (0, rank)]
    with pytest.raises(
        UsageError, match=rf"with files of 2 ranks, at most 1058 ranks are imported.*{'--skip-unreadable'}"
    ):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    report = import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"), skip_unreadable=True)
    assert report.left_out == {files[1].name: f"rank {rank} is far above the ranks with files"}
    assert [status.committed_ranks for status in open_run(tmp_path / "run").status()] == [[0]]
    # The way out that keeps the tensor.
    files[1].rename(files[1].with_name(files[1].name.replace(f"rank{rank}", "rank1")))
    assert [record.rank for record in imported(tmp_path / "files", tmp_path / "again").select()] == [0, 1]


def test_many_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 40, 41, 90):
        legacy_file(tmp_path / "files", torch.ones(3), rank=rank)
    assert len(imported(tmp_path / "files", tmp_path / "run").status()[0].committed_ranks) == 91


def test_a_name_of_any_length_is_imported(tmp_path: Path) -> None:
    names = [f"{TIME}_000{counter}_iter0_linear_L0_forward_pre_linear_bf16_rank0_input.pt" for counter in (1, 2)]
    for name, module in zip(names, ("short", "m" * 5000), strict=True):
        save(tmp_path / "files" / name, {"tensor": torch.zeros(1), "metadata": {"ranktape": {"module": module}}})
    records = imported(tmp_path / "files", tmp_path / "run").select()
    assert records.column("module").tolist() == ["short", "m" * 5000]


def test_what_is_counted_is_what_is_stored(tmp_path: Path) -> None:
    legacy_file(tmp_path / "files", torch.zeros(4))
    folder = open_folder(tmp_path / "files")
    assert folder.select().column("overflow.maximum").tolist() == [0.0]
    legacy_file(tmp_path / "files", torch.full((4,), 7.0))
    import_folder(folder, str(tmp_path / "run"))
    (record,) = open_run(tmp_path / "run").select()
    assert record.overflow is not None
    assert (float(record.read()[0]), record.overflow.maximum) == (7.0, 7.0)


def test_many_small_and_some_large_tensors_arrive(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sent = {}
    for counter in range(300):
        shape = (1100, 1000) if counter % 100 == 0 else (4, counter % 7)
        tensor = torch.randn(shape).to((torch.bfloat16, torch.float32, torch.float16)[counter % 3])
        path = legacy_file(tmp_path / "files", tensor, counter=counter, rank=counter % 2, legacy=bool(counter % 2))
        sent[path.name] = tensor
    run = imported(tmp_path / "files", tmp_path / "run")
    by_counter = {int(name.split("_")[2]): tensor for name, tensor in sent.items()}
    records = run.select()
    assert len(records) == 300
    for record in records:
        assert torch.equal(record.tensor(), by_counter[record.counter])


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    legacy_file(tmp_path / "files", torch.zeros(2))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "file" / "run"))


SAID: dict[str, Any] = {
    "prompt": "What is it?",
    "input_ids": torch.arange(32).reshape(1, 32),
    "attention_mask": torch.ones(1, 32, dtype=torch.bool),
    "logits": torch.tensor([[1.5, float("-inf"), float("nan")]]).bfloat16(),
    "config": {"layers": 2, "rope": [1.0, 2.0], "none": None},
}


def recorded(folder: Path, said: dict[str, Any]) -> Path:
    """A folder as the recorder of layer outputs left it."""
    for name in ("embedding", "layer_1", "layer_2"):
        save(folder / f"{name}_output.pt", torch.randn(1, 4, 8).bfloat16())
    statistics = {name: {"mean": 0.5, "has_nan": False} for name in ("embedding", "layer_1", "layer_2")}
    save(folder / "statistics.pt", statistics)
    save(folder / "metadata.pt", {**said, "statistics": statistics})
    return folder


def again(records: Records, folder: Path) -> dict[str, Any]:
    """What the exported folder says of itself, as torch reads it."""
    export_records(records, folder, form=ExportForm.LAYERS)
    found: dict[str, Any] = torch.load(folder / "metadata.pt", weights_only=True)
    # Nothing is written twice.
    assert export_records(records, folder, form=ExportForm.LAYERS).num_written == 0
    return found


@pytest.mark.parametrize("is_imported", [False, True])
def test_every_word_comes_out_again(tmp_path: Path, is_imported: bool) -> None:  # noqa: FBT001
    folder = open_folder(recorded(tmp_path / "files", SAID))
    records = folder.select()
    if is_imported:
        import_folder(folder, str(tmp_path / "run"))
        records = open_run(tmp_path / "run").select()
    found = again(records, tmp_path / "again")
    for name, word in SAID.items():
        if isinstance(word, torch.Tensor):
            assert found[name].dtype == word.dtype
            assert torch.equal(found[name].float().nan_to_num(9.0), word.float().nan_to_num(9.0))
            assert found[name].shape == word.shape
        else:
            assert found[name] == word
    assert found["statistics"] == {
        name: {"mean": 0.5, "has_nan": False} for name in ("embedding", "layer_1", "layer_2")
    }


def test_what_is_large_is_named(tmp_path: Path) -> None:
    large = torch.zeros(MAX_LISTED + 1, dtype=torch.int64)
    many = {f"t{number}": torch.full((MAX_LISTED,), 1 / 3, dtype=torch.float64) for number in range(40)}
    records = open_folder(recorded(tmp_path, {"large": large, **many})).select()
    words = records[0].metadata["folder"]["metadata"]  # type: ignore[index]  # there are words
    assert words["large"] == f"tensor int64[{MAX_LISTED + 1}]"
    assert words["t0"]["values"] == [1 / 3] * MAX_LISTED
    assert words["t39"] == f"tensor float64[{MAX_LISTED}]"


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = []
    for layer in (-1, 0, 1):
        tags: dict[str, Any] = {
            "layer_type": "embedding" if layer < 0 else "hidden",
            "layer_idx": layer,
            "phase": "post",
        }
        tags |= {"tensor_name": "output", "iteration": 7, "rank": 0, "microbatch": 2, "call": 1, "mode": "eval"}
        tags |= {
            "quant_type": "mxfp8",
            "compute_dtype": "bfloat16",
            "sample_dim": 1,
            "sample_ids": ["a", 7],
            "layout": "TBH",
        }
        tags |= {"timestamp": 12.5, "counter": layer + 1, "batch_size": 2, "metadata": {"loss": 0.5}}
        tensors.append(describe_tensor(np.full((3, 2, 4), layer, dtype=np.float32), **tags))
    run = store(tmp_path / "run", tensors)
    export_records(run.select(), tmp_path / "files", form=ExportForm.LAYERS)
    folder = open_folder(tmp_path / "files")
    assert folder.iterations == [7]
    found = [record.info.to_json() for record in folder.select()]
    for before, after in zip(run.select(), found, strict=True):
        assert after["metadata"].pop("folder")["statistics"]["mean"] == before.layer_idx
        assert after == before.info.to_json()


def test_what_an_earlier_export_says_of_all_outputs_is_taken(tmp_path: Path) -> None:
    said = {"iteration": 7, "rank": 3, "microbatch": 1, "call": 2, "quant_type": "hifp8", "num_outputs": 3}
    records = open_folder(recorded(tmp_path, said)).select()
    assert {(r.iteration, r.rank, r.microbatch, r.call, r.quant_type) for r in records} == {(7, 3, 1, 2, "hifp8")}
    assert records[0].metadata["folder"]["metadata"]["num_outputs"] == 3  # type: ignore[index]  # there are words


@pytest.mark.parametrize(
    "said", [{"iteration": -1, "rank": "x", "call": 1e9}, {"ranktape": 3}, {"ranktape": {"layer_1_output": []}}]
)
def test_what_no_record_can_hold_is_no_field(tmp_path: Path, said: dict[str, Any]) -> None:
    records = open_folder(recorded(tmp_path, said)).select()
    assert {(r.iteration, r.rank, r.call) for r in records} == {(0, 0, 0)}


def test_samples_that_are_not_in_the_tensor_are_refused(tmp_path: Path) -> None:
    own = {"layer_1_output": {"sample_dim": 0, "sample_ids": [1, 2, 3]}}
    with pytest.raises(DataError, match="lists 3 samples, but its tensor has 1"):
        open_folder(recorded(tmp_path, {"ranktape": own})).select().column("sample_ids")


def test_the_list_says_what_the_folder_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["ls", str(recorded(tmp_path, {**SAID, "note": "x" * 99, "evil": "\x1b[2J"}))])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("metadata.pt: "))
    assert "prompt What is it?, input_ids int64[1, 32], attention_mask bool[1, 32]" in line
    assert f"note {'x' * 60}..., " in line
    assert "\x1b" not in line


TABLES: dict[str, Callable[[Records], Table]] = {
    "ls": ls,
    "stats": stats,
    "stats --per-sample": lambda records: stats(records, per_sample=True),
    "stats --neighbours": lambda records: stats(records, neighbours=True),
    "trace": trace,
    "trace --sample": lambda records: trace(records, sample=0),
    "overflow": overflow,
    "overflow --per-sample": lambda records: overflow(records, per_sample=True),
    "sweep": lambda records: sweep(records, format="fp8_e4m3"),
    "sweep --levels": lambda records: sweep(records, format="fp8_e4m3", with_levels=True),
    "compare": lambda records: compare(records, records),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers of one sample each."""
    for layer in (0, 1):
        legacy_file(tmp_path / "files", torch.randn(4, 8), layer_idx=layer, counter=layer, sample_idx=0)
    return tmp_path / "files"


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_rows_about_files_name_them(folder: Path, tmp_path: Path, make: Callable[[Records], Table]) -> None:
    files = make(open_folder(folder).select())
    named = {path.name: int(path.name.split("_L")[1][0]) for path in folder.iterdir()}
    assert files.rows
    for row in files.records():
        assert named[row["file"]] == row["layer_idx"]
    assert ".pt" not in files.to_text()
    assert ".pt" in files.to_text(wide=True)
    import_folder(open_folder(folder), str(tmp_path / "run"))
    run = make(open_run(tmp_path / "run").select())
    assert {column.name for column in files.columns} - {column.name for column in run.columns} <= {"file", "b.file"}
    assert "file" not in {column.name for column in run.columns}


def test_either_side_of_a_comparison_may_be_files(folder: Path, tmp_path: Path) -> None:
    import_folder(open_folder(folder), str(tmp_path / "run"))
    run, files = open_run(tmp_path / "run").select(), open_folder(folder).select()
    names = files.column("site").tolist()
    assert compare(files, run).column("file") == names
    table = compare(run, files)
    assert table.column("b.file") == names
    assert "file" not in {column.name for column in table.columns}


def test_where_overflow_begins_the_file_is_named(folder: Path) -> None:
    path = legacy_file(folder, torch.tensor([1.0, float("inf")]), layer_idx=1, counter=9)
    rows = overflow(open_folder(folder).select(), first=True).records()
    assert [row["first.file"] for row in rows if row["affected"]] == [path.name]


def answer(*words: str | Path) -> Any:
    """The document of a command."""
    result = CliRunner().invoke(cli, [*map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_files_and_a_run_are_swept_together(folder: Path, tmp_path: Path) -> None:
    import_folder(open_folder(folder), str(tmp_path / "run"))
    rows = answer("sweep", tmp_path / "run", folder, "--format", "fp8_e4m3")["rows"]
    assert [row["file"] for row in rows] == [None, None, *open_folder(folder).select().column("site").tolist()]


def test_a_file_of_any_name_is_named(tmp_path: Path) -> None:
    save(tmp_path / "tensör.pt", torch.randn(2, 4))
    assert [row["file"] for row in answer("sweep", tmp_path, "--format", "fp8_e4m3")["rows"]] == ["tens%C3%B6r.pt"]


def test_the_list_says_how_to_see_the_files(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["ls", str(folder)])
    assert "2 records, 256 B; --wide shows the file of each" in result.stdout
    assert ".pt" not in result.stdout


def test_a_frame_has_the_files(folder: Path) -> None:
    pytest.importorskip("pandas")
    records = open_folder(folder).select(layer_idx=1)
    frame = records.to_pandas()
    assert frame["file"].tolist() == records.column("site").tolist()
    assert str(frame["file"].dtype) == "string"
    assert ls(records).to_pandas()["file"].tolist() == frame["file"].tolist()
