"""Are the runs below a place found, with what they are, however they are broken?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import RunNotFoundError, StorageError, UsageError
from ranktape.launch.run_status import status
from ranktape.storage import open_run
from ranktape.storage.format.documents import encode_document, group_document
from ranktape.storage.maintenance import runs
from ranktape.storage.maintenance.runs import RunState, find_runs, suggest_nearest
from ranktape.storage.places.local import LocalBackend
from tests.s3 import S3Server
from tests.storage.whole_run import whole_run

LABELS: dict[str, dict[str, Any]] = {
    "later": {"ranktape_schema": 99},
    "strange": {"ranktape_schema": 1, "created": 1e300},
}
"""Documents of runs that are made by hand."""


def test_the_attempts_of_a_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, attempt, _ = whole_run(str(tmp_path / "run"))
    read: list[str] = []
    get = LocalBackend.get

    def noted(self: LocalBackend, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        read.append(key)
        return get(self, key, max_nbytes=max_nbytes)

    monkeypatch.setattr(LocalBackend, "get", noted)
    for ask in (lambda: find_runs(tmp_path), lambda: status(str(tmp_path / "run"))):
        read.clear()
        ask()
        assert read.count(f"{attempt.path}/zarr.json") == 1
        assert read.count(f"{attempt.path}/iterations/iter_00000000/zarr.json") == 1


def states(url: str | Path, **options: Any) -> dict[str, RunState]:
    """The runs by their paths."""
    return {run.path: run.state for run in find_runs(url, **options)}


def test_runs_are_found_at_every_level_and_not_inside_of_one_another(tmp_path: Path) -> None:
    whole_run(str(tmp_path / "a"))
    whole_run(str(tmp_path / "b" / "deep er" / "ü%20"), min_iterations=5)
    whole_run(str(tmp_path / "c"), iterations=(0,), close=False)
    whole_run(str(tmp_path / "a" / "inside"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    found = find_runs(tmp_path)
    assert [(run.path, run.state) for run in found] == [
        ("a", RunState.MET),
        ("b/deep er/ü%20", RunState.UNMET),
        ("c", RunState.OPEN),
    ]
    first = found[0]
    assert (first.iterations, first.world_size, first.num_attempts, first.num_records) == ((0, 10), 2, 1, 24)
    assert first.nbytes == sum(record.nbytes for record in open_run(tmp_path / "a").select())
    assert first.created is not None
    assert first.created > 1.7e9
    assert first.url == str(tmp_path / "a")
    assert first.message.startswith("minimum met: 2 of 1")
    assert states(tmp_path / "a") == {"": RunState.MET}
    assert states(f"file://{tmp_path}/b/deep%20er") == {"ü%20": RunState.UNMET}
    assert states(tmp_path, max_depth=1) == {"a": RunState.MET, "c": RunState.OPEN}


@pytest.mark.s3
def test_runs_are_found_below_a_prefix(s3_server: S3Server) -> None:
    url = s3_server.new_url()
    client = s3_server.client()
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    document = encode_document(group_document({"ranktape_schema": 1}), key="zarr.json")
    for name in ("x", "y/z"):
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}/zarr.json", Body=document)
    client.put_object(Bucket=bucket, Key=f"{prefix}/data/c.0", Body=b"values")
    assert states(url, storage_options=s3_server.storage_options) == {"x": RunState.EMPTY, "y/z": RunState.EMPTY}


def test_what_cannot_be_read_is_named_and_hides_nothing(tmp_path: Path) -> None:
    whole_run(str(tmp_path / "good"))
    whole_run(str(tmp_path / "cut"))
    whole_run(str(tmp_path / "verdict"))
    (tmp_path / "cut" / "zarr.json").write_bytes((tmp_path / "cut" / "zarr.json").read_bytes()[:60])
    (verdict,) = (tmp_path / "verdict").glob("attempt*/verdict/zarr.json")
    verdict.write_bytes(b"{}")
    for name, attributes in LABELS.items():
        (tmp_path / name).mkdir()
        data = encode_document(group_document(attributes), key="zarr.json")
        (tmp_path / name / "zarr.json").write_bytes(data)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    found = {run.path: run for run in find_runs(tmp_path)}
    assert {path: run.state.value for path, run in found.items()} == {
        "cut": "unreadable",
        "good": "met",
        "later": "unreadable",
        "strange": "empty",
        "verdict": "met",
    }
    assert "schema 99" in found["later"].message
    assert found["strange"].created is None


@pytest.mark.parametrize(
    ("nbytes", "match"),
    [(0, "attempts, but no document"), (None, "attempts, but no document"), (1 << 40, "is larger than")],
    ids=["empty", "missing", "sparse"],
)
def test_a_run_with_a_damaged_document_is_listed_and_hides_no_other(
    tmp_path: Path, nbytes: int | None, match: str
) -> None:
    for name in ("a", "b"):
        whole_run(str(tmp_path / name), iterations=(0,))
    document = tmp_path / "a" / "zarr.json"
    document.unlink() if nbytes is None else os.truncate(document, nbytes)
    damaged, whole = find_runs(tmp_path)
    assert (damaged.path, damaged.state, whole.state) == ("a", RunState.UNREADABLE, RunState.MET)
    assert match in damaged.message
    (alone,) = find_runs(tmp_path / "a")
    assert alone.state is RunState.UNREADABLE


def test_places_without_anything_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunNotFoundError, match=r"there is nothing at .*nowhere: check the URL"):
        find_runs(tmp_path / "nowhere")
    with pytest.raises(RunNotFoundError, match="there is nothing at"):
        find_runs(tmp_path)
    for name in "abc":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(runs, "MAX_NAMES", 2)
    with pytest.raises(UsageError, match="more than 2 names below"):
        find_runs(tmp_path)


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    list_names = LocalBackend.list_names

    def refuse(self: LocalBackend, prefix: str) -> list[str]:
        if prefix == "closed":
            raise StorageError("permission denied")
        return list_names(self, prefix)

    monkeypatch.setattr(LocalBackend, "list_names", refuse)
    (found,) = find_runs(tmp_path)
    assert (found.path, found.state, found.message) == ("closed", RunState.UNREADABLE, "permission denied")


@pytest.mark.parametrize(
    ("typed", "match"),
    [
        ("experiment-1", r"there is no run at .*experiment-1: check the URL; beside it there is experiment_1$"),
        ("other", r"there is no run at .*other: check the URL; beside it there is experiment_1$"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(tmp_path: Path, typed: str, match: str) -> None:
    whole_run(str(tmp_path / "experiment_1"), iterations=())
    with pytest.raises(RunNotFoundError, match=match), suggest_nearest(tmp_path / typed):
        open_run(tmp_path / typed)
    with pytest.raises(RunNotFoundError, match=match), suggest_nearest(f"file://{tmp_path}/{typed}"):
        open_run(tmp_path / typed)


def test_a_suggestion_is_not_made_where_nobody_can_look() -> None:
    with pytest.raises(RunNotFoundError, match=r"^gone$"), suggest_nearest("s3://bucket"):
        raise RunNotFoundError("gone")
    with pytest.raises(RunNotFoundError, match=r"^gone$"), suggest_nearest("nosuch://a/b"):
        raise RunNotFoundError("gone")
