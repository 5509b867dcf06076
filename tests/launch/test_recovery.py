"""Do check, repair, cp and runs say what they found and did, with the right exit code?"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ranktape.launch.cli import cli
from ranktape.storage import open_run
from tests.storage.whole_run import record, whole_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is whole and closed."""
    path = tmp_path / "run"
    whole_run(str(path))
    return path


def invoke(*words: object) -> Result:
    """A command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)


def break_values(run: Path) -> None:
    """One bit of one tensor."""
    (values,) = run.glob("attempt*/rank_00001/iter_00000010/large*/c.0.0")
    data = bytearray(values.read_bytes())
    data[100] ^= 4
    values.write_bytes(data)


def test_a_sound_run_is_said_to_be_in_one_line(run: Path) -> None:
    result = invoke("check", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.fullmatch(
        r"0 errors, 0 notes; 2 complete iterations, 24 records, \d+ objects, [\d.]+ MB \(sizes and documents were "
        r"compared, --deep reads every byte\)\n",
        result.stdout,
    )
    assert "(every byte was read)" in invoke("check", run, "--deep").stdout


def test_an_iteration_that_was_cut_off_counts_as_partial(tmp_path: Path) -> None:
    run = tmp_path / "run"
    backend, attempt, writers = whole_run(run, close=False)
    record(backend, attempt, writers, iteration=20, cut_off="cut off: SIGKILL, after 6 of 9 expected tensors")
    assert "; 2 complete iterations, 1 partial iteration, 36 records, " in invoke("check", run).stdout
    document = json.loads(invoke("check", run, "--json").stdout)
    assert (document["iterations"], document["partial"]) == (3, 1)
    [listed] = json.loads(invoke("runs", run, "--json").stdout)["runs"]
    assert (listed["iterations"], listed["num_records"]) == ([0, 10], 24)
    said = invoke("analyze", "ls", run, "--iteration", "30").stderr
    assert "readable iterations are 0, 10, 20" in said


def test_what_is_wrong_is_listed_and_ends_with_3(run: Path) -> None:
    break_values(run)
    assert invoke("check", run).exit_code == 0
    result = invoke("check", run, "--deep")
    assert result.exit_code == 3
    assert result.stderr == f"Error: 1 error in {run}\n"
    first, summary = result.stdout.splitlines()
    assert first.startswith("error: damaged (attempt 0, iteration 10, rank 1): large,linear,L0,")
    assert summary.startswith("1 error, 0 notes; 2 complete iterations")


def test_a_check_for_programs_is_one_document(run: Path) -> None:
    break_values(run)
    result = invoke("check", run, "--deep", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert set(document) == {
        "run", "deep", "sound", "attempts", "iterations", "partial", "records", "objects", "nbytes", "findings",
    }  # fmt: skip
    assert (document["run"], document["deep"], document["sound"], document["attempts"]) == (str(run), True, False, 1)
    (finding,) = document["findings"]
    assert set(finding) == {
        "kind", "severity", "message", "attempt", "iteration", "rank", "record", "key", "mend",
    }  # fmt: skip
    assert (finding["kind"], finding["severity"], finding["iteration"], finding["mend"]) == (
        "damaged",
        "error",
        10,
        None,
    )


def test_a_repair_says_what_it_does_and_does_it_once(run: Path) -> None:
    (marker,) = run.glob("attempt*/commits/iter_00000010/rank_00001.committed/zarr.json")
    marker.unlink()
    planned = invoke("repair", run, "--dry-run")
    assert planned.exit_code == 0
    assert planned.stdout.startswith("would restore the marker: error: missing (attempt 0, iteration 10, rank 1)")
    assert planned.stdout.endswith("1 to be repaired, 0 left, 0 cannot be repaired\n")
    assert not marker.exists()
    done = invoke("repair", run)
    assert done.exit_code == 0
    assert done.stdout.startswith("restore the marker: error: missing")
    assert done.stdout.endswith("1 repaired, 0 left, 0 cannot be repaired\n")
    assert marker.exists()
    assert invoke("repair", run).stdout == "0 repaired, 0 left, 0 cannot be repaired\n"


def test_a_repair_leaves_the_young_alone_and_names_what_is_lost(run: Path, tmp_path: Path) -> None:
    (values,) = run.glob("attempt*/rank_00001/iter_00000010/large*/c.0.0")
    values.unlink()
    result = invoke("repair", run)
    assert result.exit_code == 3
    assert result.stderr == f"Error: 1 error left in {run}\n"
    assert "cannot be repaired: error: missing (attempt 0, iteration 10, rank 1): large," in result.stdout
    other = tmp_path / "open"
    backend, attempt, writers = whole_run(str(other), close=False)
    record(backend, attempt, writers, iteration=20, finish=False)
    result = invoke("repair", other)
    assert result.exit_code == 0
    assert "left, as it is newer than 3600 s: write the iteration commit: note: unfinished" in result.stdout
    assert open_run(other).iterations == [0, 10]
    document = json.loads(invoke("repair", other, "--min-age", "0", "--json").stdout)
    assert set(document) == {"run", "dry_run", "done", "young", "left"}
    assert [one["mend"] for one in document["done"]] == ["write the iteration commit"]
    assert open_run(other).iterations == [0, 10, 20]


def test_a_copy_says_what_it_copied(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (run / "notes.txt").write_text("mine")
    first = invoke("cp", run, copy)
    assert (first.exit_code, first.stderr) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(str(copy))}: \d+ objects \([\d.]+ MB\) copied; 1 that are not committed were left "
        rf"out\n",
        first.stdout,
    )
    second = invoke("cp", run, f"file://{copy}", "--no-verify")
    assert re.search(r": 0 objects \(0 B\) copied; \d+ \([\d.]+ MB\) were already there; 1 that", second.stdout)
    document = json.loads(invoke("cp", run, copy, "--json").stdout)
    assert set(document) == {
        "run", "url", "num_copied", "nbytes_copied", "num_present", "nbytes_present", "left_out",
    }  # fmt: skip
    assert document["left_out"] == ["notes.txt"]
    assert invoke("check", copy, "--deep").exit_code == 0


def test_runs_are_listed_with_what_they_are(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "broken")
    (tmp_path / "broken" / "zarr.json").write_bytes(b'{"ranktape')
    result = invoke("runs", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    title, head, broken, good, note = result.stdout.splitlines()
    assert title == str(tmp_path)
    assert head.split() == ["run", "state", "iterations", "ranks", "attempts", "records", "size", "created"]
    assert broken.split()[:3] == ["broken", "unreadable", "0"]
    assert good.split()[:6] == ["run", "met", "2", "2", "1", "24"]
    assert re.search(r"MB  \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ$", good)
    assert note.startswith("broken: ")
    document = json.loads(invoke("runs", tmp_path, "--json", "--depth", "1").stdout)
    assert document["url"] == str(tmp_path)
    assert [(one["path"], one["state"]) for one in document["runs"]] == [("broken", "unreadable"), ("run", "met")]
    assert set(document["runs"][1]) == {
        "path", "url", "state", "message", "created", "num_attempts", "world_size", "iterations", "num_records",
        "nbytes",
    }  # fmt: skip


def test_a_place_without_runs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert invoke("runs").stdout.endswith("there is no run here\n")
    result = invoke("runs", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}\n" + result.stdout.split("\n", 1)[1])
    assert result.stdout.endswith("there is no run here\n")


@pytest.mark.parametrize(
    ("words", "exit_code", "match"),
    [
        (["check", "rnu"], 1, r"Error: there is no run at .*rnu: check the URL; beside it there is run\n"),
        (["status", "rnu"], 1, r"beside it there is run\n"),
        (["status", "rnu", "--require-minimum"], 1, r"Error: there is no run at .*rnu"),
        (["status", "nosuch://bucket/run"], 2, r"Error: .*nosuch"),
        (["status", "run", "--storage-options", "{"], 2, r"Error: --storage-options is not JSON"),
        (["status"], 2, r"Missing argument 'RUN'"),
        (["repair", "rnu"], 1, r"beside it there is run\n"),
        (["cp", "rnu", "copy"], 1, r"beside it there is run\n"),
        (["runs", "rnu"], 1, r"there is nothing at .*; beside it there is run\n"),
        (["check", "nosuch://bucket/run"], 2, r"nosuch"),
        (["check", "run", "--storage-options", "{"], 2, r"--storage-options is not JSON"),
        (["cp", "run", "run"], 2, r"overlaps with"),
        (["cp", "run"], 2, r"Missing argument 'URL'"),
        (["export", "run"], 2, "Missing argument 'DIR'"),
        (["repair", "run", "--min-age", "-1"], 2, r"--min-age"),
        (["check", "half"], 1, r"Error: .*half.*damaged or is not a run\n"),
        (["chekc", "run"], 2, r"no command 'chekc': use check"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    words: list[str], exit_code: int, match: str, *, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.is_dir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "zarr.json").write_bytes(b'{"zarr_format": 3, "node_')
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert re.search(match, result.stderr), result.stderr


def test_no_credentials_are_printed(tmp_path: Path) -> None:
    place = "memory://user:canary@nowhere/run?token=canary"
    for words in (["check", place], ["runs", place], ["status", place], ["cp", place, str(tmp_path)]):
        result = invoke(*words)
        assert result.exit_code != 0
        assert "canary" not in result.output
