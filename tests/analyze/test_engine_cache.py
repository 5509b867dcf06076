"""Is what was counted found again, never taken for something else, and in nobody's way?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine import cache
from ranktape.analyze.engine import engine as engine_module
from ranktape.analyze.engine.cache import CacheObject, Columns, DamagedObjectError, pack, record_keys
from ranktape.analyze.engine.digests import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.legacy.open import open_folder
from ranktape.errors import DataError
from ranktape.storage import Run, open_run
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.copy import copy_run
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.maintenance.runs import find_runs
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import StringColumn
from tests.analyze.engine_runs import FirstValue, assert_same_digests
from tests.analyze.pt_files import legacy_file
from tests.analyze.runs import describe_tensor, model_tensors, store
from tests.runs import start
from tests.s3 import S3Server


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKTAPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    engine_module.warn_once.cache_clear()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two ranks with ten layers each."""
    tensors = [
        describe_tensor(np.full(4, 100 * rank + layer, np.float32), rank=rank, layer_idx=layer)
        for rank in (0, 1)
        for layer in range(10)
    ]
    return store(tmp_path / "run", tensors)


@pytest.fixture
def measure(tmp_path: Path) -> FirstValue:
    """A measure that says how often it was asked."""
    (tmp_path / "trace").mkdir()
    return FirstValue(trace=tmp_path / "trace")


def ask(run: Run, measure: FirstValue, **filters: object) -> list[float]:
    """The first values, as one gets them who opens the run anew."""
    records = open_run(run.url).select(**filters)
    return [float(payload["first"][0]) for payload in Engine().measure(records, measure)]


def objects(run: Run) -> list[Path]:
    """What lies in the run's own cache."""
    return sorted(Path(run.url).glob(f"analysis/{cache.VERSION}/first_value/attempt_*/rank_*/iter_*/*.counts"))


EXPECTED = [float(100 * rank + layer) for rank in (0, 1) for layer in range(10)]


def test_what_another_version_counted_is_counted_again(
    run: Run, measure: FirstValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(run, measure)
    monkeypatch.setattr(cache, "VERSION", f"{cache.VERSION}0")
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 2 * len(EXPECTED)
    assert len(objects(run)) == 2


def test_the_second_question_reads_no_values(run: Run, measure: FirstValue) -> None:
    assert ask(run, measure) == EXPECTED
    assert len(objects(run)) == 2  # one for each rank's iteration
    for values in Path(run.url).glob("attempt_*/rank_*/iter_*/*/c*"):
        values.unlink()
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 20


def test_only_what_is_not_known_is_measured(run: Run, measure: FirstValue) -> None:
    assert ask(run, measure, layer_idx="3,7") == [3, 7, 103, 107]
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 20
    assert ask(run, measure, layer_idx="2-4") == [2, 3, 4, 102, 103, 104]
    assert measure.num_read() == 20


def test_without_the_cache_nothing_is_kept_or_used(run: Run, measure: FirstValue) -> None:
    for _ in range(2):
        assert len(list(Engine(use_cache=False).measure(run.select(), measure))) == 20
    assert measure.num_read() == 40
    assert not (Path(run.url) / "analysis").exists()


def test_a_record_with_another_checksum_is_measured_again(tmp_path: Path, measure: FirstValue) -> None:
    """The cache of one run put into another, whose attempt is made to have the same path."""
    first = store(tmp_path / "first", [describe_tensor(np.full(4, 1, np.float32))])
    second = store(tmp_path / "second", [describe_tensor(np.full(4, 2, np.float32))])
    assert ask(first, measure) == [1]
    shutil.copytree(Path(first.url) / "analysis", Path(second.url) / "analysis")
    (there,) = Path(second.url).glob("analysis/*/*/attempt_*")
    (attempt,) = Path(second.url).glob("attempt_*")
    there.rename(there.with_name(attempt.name))
    assert ask(second, measure) == [2]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "spoil",
    [lambda _: b"", lambda _: b"PK\x03\x04", truncated, changed],
    ids=["empty", "foreign", "truncated", "changed"],
)
def test_a_damaged_object_is_counted_again_and_replaced(
    run: Run, measure: FirstValue, spoil: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    ask(run, measure, layer_idx="3-9")
    before = objects(run)
    for path in before:
        path.write_bytes(spoil(path.read_bytes()))
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 14 + 20
    assert not set(before) & set(objects(run))  # other records, another name: the damaged ones are gone
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 34
    assert capsys.readouterr().err == ""


def test_what_is_packed_comes_back() -> None:
    arrays = {"a": np.arange(7, dtype=np.uint16), "b": np.array([[2.5], [np.nan], [1.0]]), "c": np.zeros((0, 3))}
    sizes = {"a": np.array([3, 0, 4]), "c": np.zeros(3, dtype=np.int64)}
    keys = record_keys([["x", "y", "z"]])
    content = CacheObject(pack(keys, Columns(arrays, sizes=sizes, num_records=3)))
    assert content.index_of(keys).tolist() == [0, 1, 2]
    assert content.index_of(record_keys([["z", "?", "x"]])).tolist() == [2, -1, 0]
    for name, array in arrays.items():
        np.testing.assert_array_equal(content.columns[name], array, strict=True)
    taken = content.columns.take(np.array([2, 0]))
    assert taken["a"].tolist() == [3, 4, 5, 6, 0, 1, 2]
    assert taken["b"].tolist() == [[1.0], [2.5]]
    joined = Columns.join([taken, Columns({"a": np.array([9], np.uint16)}, num_records=1)])
    assert joined["a"].tolist() == [3, 4, 5, 6, 0, 1, 2, 9]
    assert joined.sizes("b").tolist() == [1, 1, 0]
    with pytest.raises(DamagedObjectError, match="checksum"):
        CacheObject(pack(keys, taken)[:-1])


def test_a_key_is_that_of_one_record_alone() -> None:
    """In every column, and in their order."""
    names = [["a", "a", "b", "b", ""], ["b", "c", "c", "b", ""]]
    numbers = np.array([1, 2, 1, 2, 1])
    keys = record_keys([*names, numbers])
    swapped = record_keys([*names[::-1], numbers])
    assert len({key.tobytes() for key in (*keys, *swapped)}) == 2 * len(keys) - 2  # "b", "b" and "", "" alone
    assert record_keys([*names, numbers.astype(np.uint8)]).tolist() == keys.tolist()
    texts = StringColumn.of(names[0])
    assert record_keys([texts]).tolist() == record_keys([names[0]]).tolist()


def test_what_was_counted_is_answered_without_the_compiler(run: Run) -> None:
    loaded = []
    for _ in range(2):
        command = [sys.executable, "-c", _SAYS_MODULES, run.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        loaded.append("numba" in done.stderr.split())
    assert loaded == [True, False]


_SAYS_MODULES = """
import sys
from ranktape.analyze.cli import cli
for words in (["stats"], ["overflow", "--format", "fp8_e4m3"], ["trend"]):
    cli([words[0], sys.argv[1], *words[1:], "--json"], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
"""


def test_a_name_carries_every_version(run: Run) -> None:
    """What another version of a measure counted is not found, nor what followed from it."""
    questions = (
        ["overflow", "--format", "fp8_e4m3,mxfp8"],
        ["overflow", "--format", "nvfp4"],
        ["sweep", "--format", "fp8_e4m3,mxfp8"],
        ["sweep", "--format", "mxfp8", "--by", "rank"],
        ["stats"],
    )

    for command, *options in questions:
        done = CliRunner().invoke(cli, [command, run.url, *options, "--json"], catch_exceptions=False)
        assert done.exit_code == 0
    paths = Path(run.url).glob("analysis/**/*.counts")
    names = {path.relative_to(Path(run.url) / "analysis" / cache.VERSION).parts[0] for path in paths}
    assert len(names) >= 4
    assert all(re.search(r"_v\d[\d-]*(_|$)", name) for name in names), names


def test_a_run_that_cannot_be_written_has_its_cache_beside_it(tmp_path: Path, run: Run, measure: FirstValue) -> None:
    (Path(run.url) / "analysis").write_text("in the way")
    assert ask(run, measure) == EXPECTED
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 20
    assert (tmp_path / "run.analysis" / cache.VERSION / "first_value").is_dir()
    # And that is no run, and none is looked for in it.
    assert [one.path for one in find_runs(tmp_path)] == ["run"]


def test_and_else_in_the_users_cache(tmp_path: Path, run: Run, measure: FirstValue) -> None:
    (Path(run.url) / "analysis").write_text("in the way")
    (tmp_path / "run.analysis").write_text("in the way")
    assert ask(run, measure) == EXPECTED
    assert ask(run, measure) == EXPECTED
    assert measure.num_read() == 20
    assert len(list(tmp_path.glob("user/ranktape/*/*/first_value/**/*.counts"))) == 2


def test_where_nothing_can_be_kept_there_is_an_answer_and_one_line(
    tmp_path: Path, run: Run, measure: FirstValue, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run/analysis", "run.analysis", "user"):
        (tmp_path / name).write_text("in the way")
    assert ask(run, measure) == EXPECTED
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "warning: new measurements are not cached: " in said


def test_a_place_that_fails_while_it_is_written_costs_one_line(
    run: Run, measure: FirstValue, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a disk that fills up: the place was there when it was tried, and takes no object."""
    folder = Path(run.url) / "analysis" / cache.VERSION / measure.name
    folder.mkdir(parents=True)
    (attempt,) = Path(run.url).glob("attempt_*")
    (folder / attempt.name).write_text("in the way")
    assert ask(run, measure) == EXPECTED
    assert capsys.readouterr().err.count("are not cached") == 1


def test_nothing_stumbles_over_the_cache(tmp_path: Path, run: Run, measure: FirstValue) -> None:
    backend = open_backend(run.url)
    before = check_run(backend, deep=True).findings
    ask(run, measure)
    assert len(objects(run)) == 2
    assert check_run(backend, deep=True).findings == before
    assert not [finding for finding in repair_run(backend, dry_run=True).done if "analysis" in finding.key]
    assert [one.path for one in find_runs(tmp_path)] == ["run"]
    report = copy_run(backend, open_backend(tmp_path / "copy"))
    assert report.left_out == []
    assert not (tmp_path / "copy" / "analysis").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        members = dict(zarr.open_group(run.url, mode="r").members(max_depth=None))
    assert "analysis" in members
    assert not [name for name in members if name.startswith("analysis/")]


def test_a_run_that_is_overwritten_takes_its_cache_along(run: Run, measure: FirstValue) -> None:
    ask(run, measure)
    start(run.url, launch_id="another", overwrite=True)
    assert not (Path(run.url) / "analysis").exists()


def test_a_run_that_is_gone_is_not_called_damaged(run: Run, measure: FirstValue) -> None:
    """As it is for a worker on a machine where the path means nothing."""
    records = run.select()
    len(records.column("site"))
    shutil.rmtree(run.url)
    with pytest.raises(DataError, match=f"there is no run at {run.url}, seen from .*, or that machine cannot see it"):
        list(Engine(use_cache=False).measure(records, measure))


def test_on_s3_too(s3_server: S3Server, tmp_path: Path) -> None:
    url, options = s3_server.new_url(), s3_server.storage_options
    local = store(tmp_path / "run", model_tensors(num_ranks=2))
    copy_run(open_backend(local.url), open_backend(url, storage_options=options))
    first = list(digests(open_run(url, storage_options=options).select()))
    backend = open_backend(url, storage_options=options)
    cached = backend.list_keys("analysis")
    assert len(cached) == 3  # the document, and one object for each rank
    values = [key for key in backend.list_keys("") if key.endswith("/c.0.0.0") and "/stack_" in key]
    assert len(values) == 2
    backend.delete_keys(values)
    assert_same_digests(list(digests(open_run(url, storage_options=options).select())), first)


def test_files_are_known_by_size_and_time(tmp_path: Path, measure: FirstValue) -> None:
    import torch

    paths = [
        legacy_file(tmp_path / "files", torch.full((3,), float(number)), counter=number, layer_idx=number)
        for number in range(3)
    ]

    def ask_folder() -> list[float]:
        records = open_folder(tmp_path / "files").select()
        return [float(payload["first"][0]) for payload in Engine().measure(records, measure)]

    assert ask_folder() == [0, 1, 2]
    status = paths[1].stat()
    legacy_file(tmp_path / "files", torch.full((3,), 8.0), counter=1, layer_idx=1)
    os.utime(paths[1], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert ask_folder() == [0, 8, 2]
    assert measure.num_read() == 4
    # A copy that keeps the time, or a time set back, does not hide a change.
    status = paths[2].stat()
    legacy_file(tmp_path / "files", torch.full((3,), 9.0), counter=2, layer_idx=2)
    os.utime(paths[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ask_folder() == [0, 8, 9]
    # What was counted lies with the user, and nothing beside the files.
    assert sorted((tmp_path / "files").iterdir()) == paths
