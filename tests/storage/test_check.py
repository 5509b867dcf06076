"""Does a check find whatever is wrong with a run, say precisely what it is, and keep quiet where nothing is?"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import DataError, RunFormatError, RunNotFoundError
from ranktape.storage import open_run
from ranktape.storage.format.attempt import IterationPlan, write_plan
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import CheckFinding, CheckSeverity, FindingKind
from ranktape.storage.places.urls import open_backend
from tests.runs import start
from tests.storage.whole_run import LONG_NAME, forge, keys_of, record, tensors, whole_run
from tests.storage.wrapped import wrapped


def errors(path: Path, *, deep: bool = True) -> list[CheckFinding]:
    """What a check says is wrong."""
    return check_run(open_backend(path), deep=deep).errors


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_run_has_no_findings(sound: Path, *, deep: bool) -> None:
    report = check_run(open_backend(sound), deep=deep)
    assert report.findings == []
    assert (report.deep, report.num_attempts, report.num_iterations) == (deep, 1, 2)
    assert report.num_records == 2 * 2 * 6
    files = [one for one in sound.glob("attempt*/**/*") if one.is_file()]
    assert (report.num_objects, report.nbytes) == (len(files), sum(one.stat().st_size for one in files))


@pytest.mark.parametrize("stated", [None, {"0": "cut off: SIGKILL"}, {"1": "cut off: SIGTERM"}])
def test_the_iteration_commit_says_which_ranks_were_cut_off(tmp_path: Path, stated: dict[str, str] | None) -> None:
    backend, attempt, writers = whole_run(tmp_path / "run", close=False)
    record(backend, attempt, writers, iteration=20, cut_off="cut off: SIGKILL")
    report = check_run(backend)
    assert (report.errors, report.num_iterations, report.num_partial) == ([], 3, 1)
    (key,) = keys_of(tmp_path / "run", "attempt*/iterations/iter_00000020/zarr.json")

    def change(document: dict[str, Any]) -> None:
        assert document["attributes"].pop("cut_off") == {"1": "cut off: SIGKILL"}
        document["attributes"] |= {} if stated is None else {"cut_off": stated}

    forge(tmp_path / "run", key, change)
    (error,) = check_run(backend).errors
    assert (error.kind, error.iteration) == (FindingKind.MISMATCH, 20)
    assert "cut_off" in error.message


def damages(old: bytes, chance: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Ways to damage an object."""
    yield "deleted", None
    yield "cut", old[: chance.randrange(len(old))]
    yield "longer", old + b"\0"
    for _ in range(2):
        place = chance.randrange(len(old))
        yield f"bit {place}", old[:place] + bytes([old[place] ^ (1 << chance.randrange(8))]) + old[place + 1 :]


def test_every_damage_to_every_kind_of_object_is_found(short_path: Path) -> None:
    path = short_path
    chance = random.Random(7)  # noqa: S311 - the same damages in every run
    names = keys_of(path, "**/*")
    kinds = {re.sub(r"rank_\d+", "rank", name): name for name in names}
    unseen = []
    for key in kinds.values():
        file = path / key
        old = file.read_bytes()
        others = [(path / name).read_bytes() for name in names if Path(name).name == file.name]
        swapped = chance.choice([data for data in others if data != old] or [b"elsewhere"])
        for how, data in [*damages(old, chance), ("of another place", swapped)]:
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
            # The words of a coordinator that was lost may be missing in a sound run: there is a note.
            is_word = re.search(r"closed/rank|verdict|commits/iter_\d+/zarr", key)
            may_be_missing = how == "deleted" and is_word is not None
            if not any(one.is_error or may_be_missing for one in check_run(open_backend(path), deep=True).findings):
                unseen.append((key, how))
        file.write_bytes(old)
    assert unseen == []
    assert errors(path) == []


@pytest.mark.parametrize(
    ("pattern", "kind", "record"),
    [
        ("attempt*/rank_00001/iter_00000010/large*/c.0.0", FindingKind.DAMAGED, "large,"),
        ("attempt*/rank_00001/iter_00000010/stack*/c.0.0.0", FindingKind.DAMAGED, "layers.0,"),
        ("attempt*/rank_00001/iter_00000010/catalogue/c.0", FindingKind.DAMAGED, ""),
        ("attempt*/iterations/iter_00000010/c.0", FindingKind.DAMAGED, ""),
    ],
)
def test_a_finding_names_the_place_and_the_tensor(path: Path, pattern: str, kind: FindingKind, record: str) -> None:
    (key,) = keys_of(path, pattern)
    data = bytearray((path / key).read_bytes())
    data[8] ^= 1
    (path / key).write_bytes(data)
    (found, *more) = errors(path)
    assert (found.kind, found.severity, found.key) == (kind, CheckSeverity.ERROR, key)
    assert (found.attempt, found.iteration) == (0, 10)
    assert found.record.startswith(record)
    assert bool(found.record) == bool(record)
    assert more == []
    # Without --deep the values are not read.
    assert bool(errors(path, deep=False)) == (not record)
    text = found.text()
    assert text.startswith(f"error: {kind} (attempt 0, iteration 10")
    assert text.endswith(f"[{key}]")


def test_damage_to_some_tensors_of_a_stack_names_those(path: Path) -> None:
    (key,) = keys_of(path, "attempt*/rank_00000/iter_00000000/stack*/c.0.0.0")
    data = bytearray((path / key).read_bytes())
    for chunk in (0, 2):
        data[chunk * 68] ^= 1
    (path / key).write_bytes(data)
    assert [one.record.partition(",")[0] for one in errors(path)] == ["layers.0", "layers.2"]


def test_a_lost_object_is_an_error_without_reading_any(path: Path) -> None:
    (key,) = keys_of(path, f"attempt*/rank_00000/iter_00000000/{LONG_NAME[:20]}*/**/c.0")
    (path / key).unlink()
    (found,) = errors(path, deep=False)
    assert (found.kind, found.key, found.rank, found.iteration) == (FindingKind.MISSING, key, 0, 0)
    assert found.record.startswith(LONG_NAME[:20])


def test_documents_below_a_lost_run_document_are_still_looked_at(path: Path) -> None:
    (path / "zarr.json").unlink()
    (found,) = errors(path)
    assert (found.kind, found.key) == (FindingKind.MISSING, "zarr.json")
    shutil.rmtree(path)
    with pytest.raises(RunNotFoundError, match="there is no run at"):
        check_run(open_backend(path))


def test_a_run_of_a_later_schema_is_not_judged(path: Path) -> None:
    forge(path, "zarr.json", lambda document: document["attributes"].update(ranktape_schema=99))
    with pytest.raises(RunFormatError, match="schema 99"):
        check_run(open_backend(path))


def test_an_attempt_whose_document_is_lost_is_an_error_only_where_something_was_committed(path: Path) -> None:
    (name,) = [one.name for one in path.glob("attempt*")]
    (path / name / "zarr.json").unlink()
    (found,) = errors(path)
    assert (found.key, found.mend) == (f"{name}/zarr.json", None)
    assert "8 commits" not in found.message
    assert "6 commits" in found.message
    shutil.rmtree(path / name)
    (path / "attempt_004-ab" / "commits").mkdir(parents=True)
    (path / "attempt_004-ab" / "commits" / "zarr.json").write_bytes(b"{}")
    report = check_run(open_backend(path))
    assert report.errors == []
    assert [(one.kind, one.key) for one in report.notes] == [(FindingKind.DEBRIS, "attempt_004-ab/")]


def test_what_is_not_ours_is_a_note(path: Path) -> None:
    (name,) = [one.name for one in path.glob("attempt*")]
    strange = [
        "notes.txt",
        f"{name}/README",
        f"{name}/commits/iter_00000000/rank_00000.gone/zarr.json",
        f"{name}/commits/iter_0/zarr.json",
        f"{name}/rank_7/zarr.json",
        f"{name}/rank_00000/notes",
        f"{name}/iterations/iter_00000000/c.1",
        f"{name}/closed/rank_9/zarr.json",
        f"{name}/dropped/iter_9/zarr.json",
        f"{name}/other/zarr.json",
    ]
    for key in strange:
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(b"?")
    report = check_run(open_backend(path))
    assert report.errors == []
    assert {one.key for one in report.notes} == set(strange)
    assert {one.kind for one in report.notes} == {FindingKind.FOREIGN}


def test_an_object_that_the_commit_does_not_name_is_debris(path: Path) -> None:
    (name,) = [one.name for one in path.glob("attempt*")]
    key = f"{name}/rank_00000/iter_00000000/stack_float32_9_4/c.0.0"
    (path / key).parent.mkdir()
    (path / key).write_bytes(b"values of a commit that was given up")
    report = check_run(open_backend(path))
    assert report.errors == []
    assert [(one.kind, one.key) for one in report.notes] == [(FindingKind.DEBRIS, key)]


def test_a_run_that_is_being_recorded_has_notes_and_no_errors(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = whole_run(url, close=False)
    open_iteration(backend, attempt=attempt, iteration=20)
    for array, info in tensors(20, 0):
        writers[0].write(array, info=info)
    writers[0].flush_stacks()
    report = check_run(backend, deep=True)
    assert report.errors == []
    assert [one.kind for one in report.notes] == [FindingKind.UNFINISHED] * 3
    assert "of an iteration that the rank has not committed" in report.notes[0].message
    assert "not complete: ranks 0, 1 have not committed it" in report.notes[1].message
    assert "no verdict closes the attempt" in report.notes[2].message


def test_a_listing_that_missed_what_came_while_it_was_made_is_no_error(tmp_path: Path) -> None:
    backend, _, _ = whole_run(str(tmp_path / "run"), close=False)

    def list_objects(prefix: str) -> list[Any]:
        found = backend.list_objects(prefix)
        return [info for info in found if "rank_00001/iter_00000010" not in info.key and "stack" not in info.key]

    assert check_run(wrapped(backend, list_objects=list_objects), deep=True).errors == []


def test_what_a_lost_coordinator_left_can_be_finished_and_is_no_error(tmp_path: Path) -> None:
    backend, attempt, writers = whole_run(str(tmp_path / "run"), close=False)
    record(backend, attempt, writers, iteration=20, finish=False)
    report = check_run(backend)
    assert report.errors == []
    assert [one.mend for one in report.notes] == ["write the iteration commit", None]
    for writer in writers:
        writer.close(reason="end")


def test_a_verdict_that_does_not_fit_is_found(path: Path) -> None:
    (name,) = [one.name for one in path.glob("attempt*")]
    key = f"{name}/verdict/zarr.json"
    whole = (path / key).read_bytes()
    for change, kind, is_error in [
        ({"complete": [0, 10, 20]}, FindingKind.MISSING, True),
        ({"complete": [0]}, FindingKind.STALE, False),
        ({"required": 2}, FindingKind.STALE, True),
        ({"met": False}, FindingKind.STALE, True),
    ]:
        (path / key).write_bytes(whole)
        forge(path, key, lambda document: document["attributes"].update(change))  # noqa: B023  # called here
        (found,) = check_run(open_backend(path)).findings
        assert (found.kind, found.is_error, found.key) == (kind, is_error, key)
    forge(path, key, lambda document: document.update(attributes={"problems": {}}))
    (found,) = check_run(open_backend(path)).findings
    assert (found.kind, found.is_error) == (FindingKind.UNFINISHED, False)


def test_a_plan_that_says_too_early_that_all_is_done_is_a_note(tmp_path: Path) -> None:
    backend, attempt, _ = whole_run(str(tmp_path / "run"), iterations=(0,), close=False, min_iterations=2)
    for is_done in (False, True):  # a rank that ended early ends the capture with what there is
        write_plan(backend, attempt=attempt, plan=IterationPlan(iterations=(0, 10), is_done=is_done))
        assert [one.kind for one in check_run(backend).findings] == [FindingKind.UNFINISHED]
    write_plan(backend, attempt=attempt, plan=IterationPlan(iterations=(0, 10), is_done=True, is_enough=True))
    stale, _ = check_run(backend).findings
    assert (stale.kind, stale.message) == (FindingKind.STALE, "the plan says enough is complete, 1 are")


def test_a_verdict_may_count_what_an_earlier_attempt_completed(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    whole_run(url, iterations=(0,), close=False)
    backend, attempt, writers = start(url, restart=1, world_size=2)
    record(backend, attempt, writers[:1], iteration=0, finish=False)
    write_verdict(backend, attempt=attempt)
    report = check_run(backend)
    assert report.errors == []
    assert "not complete: rank 1 has not committed it" in {one.message for one in report.notes}
    (document,) = (tmp_path / "run").glob("attempt_000*/iterations/iter_00000000/zarr.json")
    document.unlink()
    assert [one.attempt for one in check_run(backend).errors] == [1]


def test_a_rank_that_skipped_or_failed_is_told(tmp_path: Path) -> None:
    backend, attempt, writers = whole_run(str(tmp_path / "run"), close=False)
    open_iteration(backend, attempt=attempt, iteration=20)
    writers[0].mark(20, mark=Mark.SKIPPED, attributes={"reason": "no room"})
    notes = check_run(backend).notes
    assert notes[0].message == "not complete: ranks 0, 1 have not committed it (1 skipped or failed)"


def test_what_a_check_damned_cannot_be_read(path: Path) -> None:
    (key,) = keys_of(path, "attempt*/rank_00001/iter_00000010/large*/c.0.0")
    os.truncate(path / key, 1000)
    (found,) = errors(path)
    assert found.kind is FindingKind.SIZE
    (damaged,) = [one for one in open_run(path).select(module="large", rank=1, iteration=10)]  # noqa: C416 - one only
    with pytest.raises(DataError, match="large"):
        damaged.read()
