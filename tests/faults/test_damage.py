"""Is every damage to every object of a run found by a check, and is nothing read that was not written?"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.errors import RanktapeError
from ranktape.storage import open_run
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import IterationPlan, write_plan
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.format.record_info import Keep
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import CheckSeverity
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.places.urls import open_backend
from tests.exhaustive import exhaustive
from tests.faults.truth import NUM_RANKS, Tensor, tensors, values
from tests.runs import describe, start
from tests.strategies import raw_bytes

ITERATIONS = (0, 1)

STATEMENTS = frozenset({"run", "attempt", "opened", "failed", "closed", "plan", "verdict"})
"""Kinds that say once what nothing else repeats: an older version, written whole under the same key, is as good."""

OLDER = "an older version"

OPTIONAL = frozenset({"failed", "plan"})
"""Kinds that are not always written: one that is gone cannot be told from one that never was."""

TENSORS = frozenset({"stack", "document of a stack", "tensor", "document of a tensor", "rank commit", "rank catalogue"})
"""Kinds that nothing can be made from again."""

LAST = slice(-1, None)

OTHERS = slice(-4, -1)
"""With the last, the tensors that one rank has of an iteration as objects of their own, each of another form."""

Truth = dict[tuple[int, int, str], bytes]
"""The bytes of every tensor by iteration, rank and module."""

KINDS = {
    "run": r"zarr\.json",
    "attempt": r"attempt_[^/]+/zarr\.json",
    "group of an attempt": r"attempt_[^/]+/(commits|iterations|closed|dropped)/zarr\.json",
    "rank": r"attempt_[^/]+/rank_\d+/zarr\.json",
    "rank commit": r"attempt_[^/]+/rank_\d+/iter_\d+/zarr\.json",
    "rank catalogue": r"attempt_[^/]+/rank_\d+/iter_\d+/catalogue/c\.0",
    "document of a rank catalogue": r"attempt_[^/]+/rank_\d+/iter_\d+/catalogue/zarr\.json",
    "stack": r"attempt_[^/]+/rank_\d+/iter_\d+/stack_[^/]+/c[.0]*",
    "document of a stack": r"attempt_[^/]+/rank_\d+/iter_\d+/stack_[^/]+/zarr\.json",
    "tensor": r"attempt_[^/]+/rank_\d+/iter_\d+/layers[^/]+/c[.0]*",
    "document of a tensor": r"attempt_[^/]+/rank_\d+/iter_\d+/layers[^/]+/zarr\.json",
    "opened": r"attempt_[^/]+/commits/iter_\d+/zarr\.json",
    "marker": r"attempt_[^/]+/commits/iter_\d+/rank_\d+\.committed/zarr\.json",
    "failed": r"attempt_[^/]+/commits/iter_\d+/rank_\d+\.failed/zarr\.json",
    "iteration commit": r"attempt_[^/]+/iterations/iter_\d+/zarr\.json",
    "merged catalogue": r"attempt_[^/]+/iterations/iter_\d+/c\.0",
    "closed": r"attempt_[^/]+/closed/rank_\d+/zarr\.json",
    "plan": r"attempt_[^/]+/plan/zarr\.json",
    "verdict": r"attempt_[^/]+/verdict/zarr\.json",
}
"""The kinds of objects of a run."""


def histogram(iteration: int, rank: int) -> Tensor:
    """A tensor of which only the counts of its codes are there."""
    counts = values((1 << 16,), np.uint32, seed=(7, iteration, rank, 0))
    fields = {"module": "layers.99.up", "keep": Keep.HISTOGRAM, "dtype": "bfloat16", "shape": (300, 1000)}
    return counts, describe(counts, iteration=iteration, rank=rank, **fields)


def recorded(iteration: int, rank: int, *, version: int) -> list[Tensor]:
    return [*tensors(iteration, rank, version=version), histogram(iteration, rank)]


def write(url: Path, *, version: int) -> None:
    """A run with every kind of object."""
    backend, attempt, writers = start(str(url), world_size=NUM_RANKS, min_iterations=len(ITERATIONS))
    write_plan(backend, attempt=attempt, plan=IterationPlan(iterations=ITERATIONS, is_done=bool(version)))
    for iteration in ITERATIONS:
        open_iteration(backend, attempt=attempt, iteration=iteration)
        for rank, writer in enumerate(writers):
            for array, info in recorded(iteration, rank, version=version):
                writer.write(array, info=info)
            writer.commit(iteration, expected=[], silent_sites={"layers.5.down": f"never fired {version}"})
        finish_iteration(backend, attempt=attempt, iteration=iteration)
    open_iteration(backend, attempt=attempt, iteration=2)
    for writer in writers:
        writer.mark(2, mark=layout.Mark.FAILED, attributes={"reason": f"version {version}"})
        writer.close(reason=f"version {version}")
    write_verdict(backend, attempt=attempt, problems={"rank 0": f"version {version}"})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A run, and an older version of it: the same keys, other values."""
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda nbytes: "5a" * nbytes)
        for version, name in enumerate(("run", "older")):
            write(folder / name, version=version)
    yield folder / "run", folder / "older"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return {
        (iteration, rank, info.module): raw_bytes(array)
        for iteration in ITERATIONS
        for rank in range(NUM_RANKS)
        for array, info in recorded(iteration, rank, version=0)
    }


def kind_of(key: str) -> str:
    (kind,) = (kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, key))
    return kind


def keys_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def damages(run: Path, older: Path, key: str) -> Iterator[tuple[str, bytes | None]]:
    """What an object may become: a name for it, and its bytes (None: it is gone)."""
    data = (run / key).read_bytes()
    yield "gone", None
    yield "empty", b""
    yield "cut by a byte", data[:-1]
    yield "cut in half", data[: len(data) // 2]
    yield "longer by a line", data + b"\n"
    for place in (0, len(data) // 2, len(data) - 1):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        yield f"bit flipped in byte {place}", bytes(flipped)
    yield "zeros", bytes(len(data))
    former = (older / key).read_bytes()
    if former != data:
        yield OLDER, former
    for other in keys_of(run):
        foreign = (run / other).read_bytes()
        if other != key and kind_of(other) == kind_of(key) and foreign != data:
            yield f"that of {other}", foreign
            return


def read_problems(run: Path, truth: Truth) -> tuple[list[str], list[str]]:
    """What reading everything refuses, and where it gives values that were not written."""
    refused, wrong = [], []
    try:
        records = open_run(run).select()
    except RanktapeError as error:
        return [str(error)], []
    for record in records:
        info = record.info
        try:
            found = raw_bytes(record.histogram() if info.keep == Keep.HISTOGRAM else record.read())
        except RanktapeError as error:
            refused.append(str(error))
            continue
        if found != truth[info.iteration, info.rank, info.module]:
            wrong.append(repr(record))
    return refused, wrong


def test_a_run_has_every_kind_of_object_and_a_check_finds_nothing_wrong(
    written: tuple[Path, Path], truth: Truth
) -> None:
    run, _ = written
    assert {kind_of(key) for key in keys_of(run)} == set(KINDS)
    report = check_run(open_backend(run), deep=True)
    (finding,) = report.findings
    assert (finding.iteration, finding.severity) == (2, CheckSeverity.NOTE)  # it failed, and says so
    assert read_problems(run, truth) == ([], [])
    assert report.num_records == len(truth)


@pytest.mark.parametrize(
    "which", [LAST, pytest.param(OTHERS, marks=exhaustive("make test damages one object of each kind"))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_found_and_no_wrong_value_is_read(
    kind: str, which: slice, written: tuple[Path, Path], truth: Truth
) -> None:
    run, older = written
    missed: list[Any] = []
    for key in [key for key in keys_of(run) if kind_of(key) == kind][which]:
        data = (run / key).read_bytes()
        for name, damaged in damages(run, older, key):
            if (kind in STATEMENTS and name == OLDER) or (kind in OPTIONAL and damaged is None):
                continue
            if damaged is None:
                (run / key).unlink()
            else:
                (run / key).write_bytes(damaged)
            missed += [(name, key, problem) for problem in unnoticed(run, key, truth, is_gone=damaged is None)]
            (run / key).write_bytes(data)
    assert not missed, "\n".join(map(str, missed))


def unnoticed(run: Path, key: str, truth: Truth, *, is_gone: bool) -> list[str]:
    """What a check or a reader do not notice of the damage to one object."""
    try:
        findings = check_run(open_backend(run), deep=True).findings
        # Another document is whole by itself: what lies beside it is not what it says.
        is_apart = kind_of(key) in {"rank commit", "document of a rank catalogue"}
        folder = key.removesuffix(layout.DOCUMENT) if is_apart else key
        named = [finding for finding in findings if finding.key.startswith(folder)]
        # Some of what is gone may not have been written yet, or is told by other objects as well.
        is_found = bool(named) if is_gone else any(finding.severity == CheckSeverity.ERROR for finding in named)
    except RanktapeError as error:
        findings, is_found = [], key in str(error) or str(run) in str(error)
    refused, wrong = read_problems(run, truth)
    found = [f"read: {place}" for place in wrong]
    if not is_found:
        found.append(f"check: {[str(finding) for finding in findings]}")
    if any(str(run) not in message for message in refused):
        found.append(f"refused without its place: {refused[:3]}")
    return found


@pytest.mark.parametrize("kind", KINDS)
@exhaustive("make test repairs in tests/storage/test_repair.py")
def test_a_repair_changes_no_tensor_that_is_whole(kind: str, written: tuple[Path, Path], tmp_path: Path) -> None:
    run, older = written
    key = [key for key in keys_of(run) if kind_of(key) == kind][-1]
    harmed: list[Any] = []
    for number, (name, damaged) in enumerate(damages(run, older, key)):
        if name not in {"gone", "cut in half", OLDER} and not name.startswith("that of"):
            continue
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        (copy / key).unlink() if damaged is None else (copy / key).write_bytes(damaged)
        with contextlib.suppress(RanktapeError):  # nobody can tell what is left of some runs
            repair_run(open_backend(copy), min_age_seconds=0.0)
        kept = [other for other in keys_of(run) if other != key and kind_of(other) in TENSORS]
        harmed += [
            (name, other)
            for other in kept
            if not (copy / other).exists() or (copy / other).read_bytes() != (run / other).read_bytes()
        ]
        shutil.rmtree(copy)
    assert not harmed, "\n".join(map(str, harmed))
