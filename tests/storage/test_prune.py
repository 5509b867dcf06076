"""Iterations and whole runs are removed in an order that leaves nothing that looks whole and is not."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ranktape.errors import RunExistsError, RunNotFoundError, StorageError, UsageError
from ranktape.launch.cli import cli
from ranktape.storage.format.attempt import Launch
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.prune import delete_run, prune_run
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording import start as lease
from ranktape.storage.recording.start import Lease
from ranktape.storage.records.run import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.s3 import BUCKET, S3Server
from tests.storage.whole_run import record, whole_run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run of four iterations, all of which it guarantees."""
    path = tmp_path_factory.mktemp("prune") / "run"
    whole_run(path, iterations=(0, 10, 20, 30), min_iterations=4)
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be made smaller."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def test_an_iteration_that_was_cut_off_does_not_count_as_complete(tmp_path: Path) -> None:
    backend, attempt, writers = whole_run(tmp_path / "run", iterations=(0, 10), close=False)
    record(backend, attempt, writers, iteration=20, cut_off="cut off: SIGKILL")
    opened = open_backend(tmp_path / "run")
    assert prune_run(opened, keep_last=2).removed == ()
    assert prune_run(opened, keep_last=1).removed == (0,)
    assert open_run(tmp_path / "run").iterations == [10, 20]
    assert prune_run(opened, iteration="20").removed == (20,)
    assert open_run(tmp_path / "run").iterations == [10]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--keep-last", "1"], [30]),
        (["--keep-last", "5"], [0, 10, 20, 30]),
        (["--iteration", "0:30:20"], [10, 30]),
        (["--iteration", "0-10,30"], [20]),
    ],
)
def test_a_pruned_run_is_sound_and_has_kept_its_promise(path: Path, words: list[str], kept: list[int]) -> None:
    planned = CliRunner().invoke(cli, ["prune", str(path), *words, "--dry-run"])
    assert open_run(path).iterations == [0, 10, 20, 30]
    done = CliRunner().invoke(cli, ["prune", str(path), *words, "--yes"], catch_exceptions=False)
    assert (planned.exit_code, done.exit_code) == (0, 0)
    assert planned.output.replace("to be removed", "removed") == done.output
    run = open_run(path)
    assert run.iterations == kept
    assert run.verdict().met
    assert {record.iteration for record in run.select() if record.read() is not None} == set(kept)
    assert check_run(open_backend(path), deep=True).findings == []
    assert sorted({int(one.name[5:]) for one in path.glob("attempt*/rank_*/iter_*")}) == kept


@pytest.mark.parametrize("num_deletions", [0, 1, 2, 4])
@exhaustive_but("1", "4", reason="two moments are in make test")
def test_an_interrupted_pruning_shows_nothing_broken_and_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_deletions: int
) -> None:
    calls = []

    def limited(self: LocalBackend, work: Any, keys: Any) -> None:
        calls.append(keys)
        # The first is of the lease.
        if len(calls) > 1 + num_deletions:
            raise StorageError("the store is away")
        work(self, keys)

    for verb in ("delete", "delete_keys"):
        monkeypatch.setattr(LocalBackend, verb, functools.partialmethod(limited, getattr(LocalBackend, verb)))
    with pytest.raises(StorageError, match="is away"):
        prune_run(open_backend(path), keep_last=3)
    monkeypatch.undo()
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 1.0)
    run = open_run(path)
    assert [record.read() is not None for record in run.select()] == [True] * 12 * len(run.iterations)
    assert check_run(open_backend(path)).errors == []
    repair_run(open_backend(path), min_age_seconds=0)
    assert prune_run(open_backend(path), keep_last=3).kept == (10, 20, 30)
    assert check_run(open_backend(path)).errors == []


def test_a_run_that_is_recorded_is_neither_pruned_nor_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    launch = Launch(launch_id="training", restart=0, world_size=2)
    with Lease(open_backend(path), launch=launch):
        for command in (["prune", str(path), "--keep-last", "1", "--yes"], ["rm", str(path), "--yes"]):
            answer = CliRunner().invoke(cli, command)
            assert answer.exit_code == 1
            assert "another launch records into the run" in answer.output
        with pytest.raises(RunExistsError):
            delete_run(open_backend(path))
    assert open_run(path).iterations == [0, 10, 20, 30]


def test_a_deleted_run_is_gone_and_what_is_beside_it_stays(path: Path) -> None:
    (path / "notes.txt").write_text("mine")
    asked = CliRunner().invoke(cli, ["rm", str(path)])
    assert (asked.exit_code, "add --yes" in asked.output) == (2, True)
    assert CliRunner().invoke(cli, ["rm", str(path), "--dry-run"]).output.startswith("to be deleted: ")
    assert open_run(path).iterations
    done = CliRunner().invoke(cli, ["rm", str(path), "--yes"], catch_exceptions=False)
    assert "4 complete iterations, 48 records" in done.output
    assert [one.name for one in path.iterdir() if one.is_file() or any(one.iterdir())] == ["notes.txt"]
    with pytest.raises(RunNotFoundError):
        delete_run(open_backend(path))


def test_a_damaged_run_can_be_deleted(path: Path) -> None:
    (path / "zarr.json").unlink()
    done = CliRunner().invoke(cli, ["rm", str(path), "--yes"], catch_exceptions=False)
    assert "which cannot be read" in done.output
    assert not list(path.glob("attempt*/*"))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "give what to remove"),
        (["--keep-last", "1", "--iteration", "0"], "give what to remove"),
        (["--iteration", "5"], "matches none of the complete iterations"),
        (["--keep-last", "1"], "add --yes"),
    ],
)
def test_what_cannot_be_pruned_is_said(path: Path, words: list[str], match: str) -> None:
    answer = CliRunner().invoke(cli, ["prune", str(path), *words])
    assert (answer.exit_code, match in answer.output) == (2, True), answer.output
    with pytest.raises(UsageError):
        prune_run(open_backend(path), keep_last=-1)


@exhaustive("make test prunes in a folder")
def test_in_a_bucket_a_run_is_copied_in_part_pruned_and_deleted(tmp_path: Path, s3_server: S3Server) -> None:
    path = tmp_path / "run"
    whole_run(path, min_iterations=2)
    url = s3_server.new_url()
    options = s3_server.storage_options

    def say(command: str, *words: str) -> str:
        done = CliRunner().invoke(cli, [command, *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    text = json.dumps(options)
    say("cp", str(path), f"{url}/whole", "--target-storage-options", text)
    say("cp", f"{url}/whole", f"{url}/part", "--storage-options", text, "--module", "layers.*", "--rank", "1")
    say("prune", f"{url}/whole", "--storage-options", text, "--keep-last", "1", "--yes")
    whole, part = (open_run(f"{url}/{name}", storage_options=options) for name in ("whole", "part"))
    assert whole.iterations == [10]
    assert whole.verdict().met
    assert {(one.rank, one.module) for one in part.select()} == {(1, f"layers.{number}") for number in range(3)}
    assert part.iterations == [0, 10]
    originals = {(one.iteration, one.module): one.read() for one in open_run(path).select(rank=1)}
    assert all((one.read() == originals[one.iteration, one.module]).all() for one in part.select())
    for name in ("whole", "part"):
        assert check_run(open_backend(f"{url}/{name}", storage_options=options), deep=True).findings == []
        say("rm", f"{url}/{name}", "--storage-options", text, "--yes")
    assert "Contents" not in s3_server.client().list_objects_v2(Bucket=BUCKET, Prefix=url.split("/")[-1])
