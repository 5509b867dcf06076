"""An import takes every file that can be read, names the others, and goes on where it was interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ranktape.analyze.legacy import import_folder, open_folder
from ranktape.errors import DataError, RunExistsError, StorageError, UsageError
from ranktape.storage import open_run
from tests.analyze.pt_files import TIME, legacy_file, save
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
    with pytest.raises(RunExistsError, match=r"not of .*/files as it is now: add --overwrite"):
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
    with pytest.raises(DataError, match=r"1 \.pt files in .* not under a name that we know, such as 'model\.pt'"):
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
        with pytest.raises(UsageError, match="is of rank 1000000000, and every rank up to it would be committed"):
            import_folder(open_folder(tmp_path / "ranks"), str(tmp_path / "run"), skip_unreadable=is_skipping)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [1058, 99_999])
def test_one_file_of_a_high_rank_does_not_make_a_group_for_each_below(tmp_path: Path, rank: int) -> None:
    files = [legacy_file(tmp_path / "files", torch.ones(3), rank=rank) for rank in (0, rank)]
    with pytest.raises(UsageError, match=rf"with files of 2 ranks, 1058 are imported at most.*{'--skip-unreadable'}"):
        import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    report = import_folder(open_folder(tmp_path / "files"), str(tmp_path / "run"), skip_unreadable=True)
    assert report.left_out == {files[1].name: f"rank {rank} is far beyond those with files"}
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
