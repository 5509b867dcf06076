"""Checks that everything that was committed to a run exists and is unchanged.

A check takes one listing of each attempt and reads every document and, with `deep`, every byte. It changes nothing. An
attempt without a verdict may still be recording: objects that are missing there are notes, wrong ones are errors.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ranktape.errors import DataError, RunFormatError, RunNotFoundError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, read_attempt, read_run, run_attributes
from ranktape.storage.format.documents import converted, is_document_intact
from ranktape.storage.format.layout import KeyKind, Mark
from ranktape.storage.format.live import Answer, Request, Trigger
from ranktape.storage.maintenance import OnProgress, Work
from ranktape.storage.maintenance.check_iteration import (
    AttemptView,
    RankResult,
    check_iteration,
    check_rank,
    decode_stamped,
)
from ranktape.storage.maintenance.copy import SPILLED_KEY
from ranktape.storage.maintenance.finding import CheckFinding, CheckReport, FindingKind, Findings, Repair
from ranktape.storage.places.backend import Backend, ObjectInfo

_NUM_GROUPS = 4
"""The number of rank commits that are checked concurrently."""

_NUM_THREADS = 16
"""The number of concurrent requests."""

_MAX_NAMED = 100
"""The number of foreign objects or absent ranks that are named before the rest is counted."""

_REMEMBERED = ("commit", "is_enough", SPILLED_KEY)
"""The attributes of markers and of the plan that are checked."""


def check_run(backend: Backend, *, deep: bool = False, on_progress: OnProgress | None = None) -> CheckReport:
    """Find everything that is wrong with a run, without changing it.

    Args:
        backend: The store of the run.
        deep: Read every byte and compare checksums; without it, sizes are compared.
        on_progress: Called after each rank commit.

    Raises:
        RunNotFoundError: there is no run.
    """
    report = CheckReport(url=backend.url, deep=deep)
    findings = Findings(items=report.findings)
    names = backend.list_names("")
    attempts = _read_attempts(backend, names, findings)
    _check_run_document(backend, findings, has_attempts=any(layout.parse_attempt(name) is not None for name in names))
    for name in names:
        if not layout.is_part_of_run(name):
            findings.note(FindingKind.FOREIGN, "no part of a run", key=name)
    for debris in _list_unfinished(backend, findings):
        size = f" ({debris.nbytes} bytes)" if debris.nbytes else ""
        findings.note(
            FindingKind.DEBRIS,
            f"a write that was not ended{size}: it is under way, or its writer was lost",
            key=debris.key,
            mend=Repair.REMOVE_UNFINISHED_WRITE,
            modified=debris.modified,
        )
    report.num_attempts = len(attempts)
    complete: set[int] = set()
    dropped: set[int] = set()
    work = Work(on_progress)
    with ThreadPoolExecutor(_NUM_THREADS) as leaves, ThreadPoolExecutor(_NUM_GROUPS) as groups:
        for attempt in attempts:
            is_last = attempt is attempts[-1]
            check = _AttemptCheck(backend, attempt, is_last=is_last, leaves=leaves, report=report)
            check.look(groups, work=work, earlier=complete | dropped)
            complete |= check.view.complete
            dropped |= check.view.dropped
            check.check_verdict(complete, dropped)
    return report


def _list_unfinished(backend: Backend, findings: Findings) -> list[ObjectInfo]:
    try:
        return backend.list_unfinished()
    except StorageError as error:
        # Permission to read a run often excludes listing uploads, and some servers cannot list them.
        if error.is_transient:
            raise
        findings.note(FindingKind.UNCHECKED, f"writes that were not ended were not looked for: {error}")
        return []


def _check_run_document(backend: Backend, findings: Findings, *, has_attempts: bool) -> None:
    key = layout.document_key("")
    data: bytes | None = None
    try:
        data = read_run(backend)
        run_attributes(data, place=backend.url)
        decode_stamped(data or b"", key=key, place=backend.url)
    except RunNotFoundError:
        if not has_attempts:
            raise
        findings.error(FindingKind.MISSING, "the run's document is missing: nobody can open the run", key=key)
    except (DataError, RunFormatError) as error:
        # An intact document of another version or of something else is not checked.
        if not has_attempts or is_document_intact(data or b"", key=key):
            raise
        findings.error(FindingKind.DAMAGED, str(error), key=key)


def _read_attempts(backend: Backend, names: list[str], findings: Findings) -> list[Attempt]:
    attempts = []
    for name in names:
        number = layout.parse_attempt(name)
        if number is None:
            continue
        key = layout.document_key(name)
        try:
            attempt = read_attempt(backend, name)
        except (DataError, RunFormatError) as error:
            findings.error(FindingKind.DAMAGED, f"{error}; nothing of the attempt can be read", attempt=number, key=key)
            continue
        if attempt is None:
            _check_without_document(backend, findings, name, number)
        else:
            attempts.append(attempt)
    return sorted(attempts, key=lambda attempt: (attempt.number, attempt.path))


def _check_without_document(backend: Backend, findings: Findings, name: str, number: int) -> None:
    """Check an attempt without a document, which readers ignore: its objects are leftovers, except for commits."""
    objects = backend.list_objects(name)
    keys = [layout.parse_key(info.key) for info in objects]
    commits = {KeyKind.RANK_COMMIT, KeyKind.ITERATION_COMMIT}
    num_commits = sum(key is not None and key.kind in commits for key in keys)
    if num_commits:
        message = f"the attempt's document is missing, and {num_commits} commits are in it: they cannot be read"
        findings.error(FindingKind.MISSING, message, attempt=number, key=layout.document_key(name))
        return
    findings.note(
        FindingKind.DEBRIS,
        f"an attempt that did not begin, or that a late writer left: {len(objects)} objects",
        attempt=number,
        key=f"{name}/",
        mend=Repair.REMOVE_OBJECTS,
        modified=max((info.modified for info in objects), default=0.0),
    )


class _AttemptCheck:
    """The check of one attempt."""

    def __init__(
        self, backend: Backend, attempt: Attempt, *, is_last: bool, leaves: ThreadPoolExecutor, report: CheckReport
    ) -> None:
        self._report = report
        self._findings = Findings(attempt=attempt.number, items=report.findings)
        self._is_last = is_last
        self._seen: set[int] = set()
        self._is_enough = False
        # Read before the listing, because ranks write everything else before the verdict.
        self._verdict_key = layout.document_key(layout.verdict_path(attempt.path))
        self._is_closed = backend.exists(self._verdict_key)
        objects = {f"{attempt.path}/{info.key}": info for info in backend.list_objects(attempt.path)}
        self.view = AttemptView(
            backend=backend,
            attempt=attempt,
            objects=objects,
            is_open=is_last and not self._is_closed,
            deep=report.deep,
            leaves=leaves,
        )
        mend = Repair.WRITE_VERDICT if is_last else None
        document = self._findings.read(lambda: self.view.document(self._verdict_key), key=self._verdict_key, mend=mend)
        self._verdict: dict[str, Any] | None = (document or {}).get("attributes")
        counted = (self._verdict or {}).get("complete")
        self._stated = {step for step in counted if isinstance(step, int)} if isinstance(counted, list) else set()

    def look(self, groups: ThreadPoolExecutor, *, work: Work, earlier: set[int]) -> None:
        """Check everything except the verdict, given the complete iterations of `earlier` attempts."""
        view, report = self.view, self._report
        # Iterations of earlier attempts need not be complete in this one.
        view.counted = self._stated - earlier
        foreign = "no part of a run"
        self._note_each(FindingKind.FOREIGN, dict.fromkeys(view.foreign), foreign, f"objects that are {foreign}")
        self._check_documents()
        self._check_presence()
        due = self._work()
        self._seen = set(due)
        modified = [info.modified for info in view.objects.values()]
        if not self._is_closed:
            # If one time is unknown, so is the latest.
            report.unclosed[view.attempt.path] = max(modified) if modified and all(modified) else 0.0
        report.num_objects += len(view.objects)
        report.nbytes += sum(info.nbytes for info in view.objects.values())
        report.num_iterations += len(view.complete)
        work.num_known += sum(map(len, due.values()))
        for iteration, ranks in due.items():
            items: list[CheckFinding] = []
            results: dict[int, RankResult | None] = {}
            jobs = {rank: groups.submit(check_rank, view, iteration, rank) for rank in ranks}
            for rank, job in jobs.items():
                wrong, results[rank] = job.result()
                items += wrong
                work.step()
            is_cut_off = any(result is not None and result.commit.cut_off for result in results.values())
            report.num_partial += is_cut_off and iteration in view.complete
            report.num_records += sum(result.commit.num_records for result in results.values() if result is not None)
            items += check_iteration(view, iteration, results)
            # The iteration may have been removed (`--keep-last`) during the check.
            dropped = layout.document_key(layout.dropped_path(view.attempt.path, iteration))
            if not (view.is_open and items and view.backend.exists(dropped)):
                report.findings += items

    def check_verdict(self, complete: set[int], dropped: set[int]) -> None:
        """Check that the verdict agrees with the complete and dropped iterations of this and earlier attempts."""
        findings, attempt, verdict, stated = self._findings, self.view.attempt, self._verdict, self._stated
        key = self._verdict_key
        mend = Repair.WRITE_VERDICT if self._is_last else None
        required = attempt.min_iterations
        if self._is_enough and len(complete | dropped) < required:
            plan = layout.document_key(layout.plan_path(attempt.path))
            findings.note(
                FindingKind.STALE, f"the plan says enough is complete, {len(complete | dropped)} are", key=plan
            )
        if not self._is_closed:
            how = "it is being recorded, or its processes were lost" if self._is_last else "its processes were lost"
            findings.note(FindingKind.UNFINISHED, f"no verdict closes the attempt: {how}", key=key)
        elif verdict is not None and "met" not in verdict:
            findings.note(FindingKind.UNFINISHED, "the verdict was begun and not ended", key=key, mend=mend)
        elif verdict is not None:
            # If an iteration has any objects, its own check has reported it.
            if incomplete := sorted(stated - complete - dropped - self._seen):
                message = f"the verdict counts iterations {incomplete}, which are not complete"
                findings.error(FindingKind.MISSING, message, key=key)
            late = sorted((complete | self.view.finishable) - stated)
            if late and self._is_last:
                message = f"iterations {late} were committed by all ranks after the verdict"
                findings.note(FindingKind.STALE, message, key=key, mend=mend)
            # Iterations removed after the verdict are in it; those removed before it also count for the minimum.
            is_met = (len(stated) >= required, len(stated | dropped) >= required)
            if verdict.get("required") != required or verdict["met"] not in is_met:
                findings.error(FindingKind.STALE, "the verdict does not follow from what it counts", key=key, mend=mend)

    def _note_each(self, kind: FindingKind, keys: dict[str, int | None], message: str, plural_message: str) -> None:
        """Add one note for each of the first keys, with its rank if it has one, and one for the rest."""
        for key, rank in itertools.islice(keys.items(), _MAX_NAMED):
            self._findings.note(kind, message, rank=rank, key=key)
        if len(keys) > _MAX_NAMED:
            self._findings.note(kind, f"{len(keys) - _MAX_NAMED} more {plural_message}")

    def _check_documents(self) -> None:
        """Check every document that is not part of a commit, and remember the attributes of markers."""
        view = self.view
        jobs = {key: view.leaves.submit(_remembered, view, key, parsed.kind) for key, parsed in view.documents.items()}
        for key, job in jobs.items():
            parsed = view.documents[key]
            try:
                fields = job.result()
            except (DataError, RunFormatError) as error:
                if parsed.mark is not Mark.COMMITTED:
                    self._findings.error(FindingKind.DAMAGED, str(error), key=key)
                continue
            if fields is None:  # removed since it was listed, by `--keep-last` for instance
                continue
            if parsed.kind is KeyKind.PLAN:
                self._is_enough = fields.get("is_enough") is True
            if parsed.mark is not None:
                view.marks[parsed.iteration, parsed.rank][parsed.mark] = fields

    def _check_presence(self) -> None:
        """Check the documents that every attempt has, and those that every closed attempt has."""
        view, path = self.view, self.view.attempt.path
        ranks = sorted({rank for _, rank in view.groups} - view.ranks[KeyKind.RANK])
        due: list[tuple[str, str, int | None]] = [(f"{path}/{group}", "group", None) for group in layout.ATTEMPT_GROUPS]
        due += [(layout.rank_path(path, rank), "rank", rank) for rank in ranks]
        for group_path, kind, rank in due:
            key = layout.document_key(group_path)
            if view.nbytes(key) is None:
                self._findings.error(FindingKind.MISSING, f"the {kind}'s document is missing", rank=rank, key=key)
        if self._is_closed:
            silent = sorted(set(view.attempt.launch.ranks) - view.ranks[KeyKind.CLOSED])
            keys: dict[str, int | None] = {layout.document_key(layout.closed_path(path, rank)): rank for rank in silent}
            message = "the rank did not write that it ended: it was lost"
            self._note_each(
                FindingKind.UNFINISHED, keys, message, "ranks did not write that they ended: they were lost"
            )

    def _work(self) -> dict[int, list[int]]:
        """The ranks to check for each iteration."""
        view = self.view
        seen: dict[int, set[int]] = {iteration: set() for iteration in set().union(*view.iterations.values())}
        for iteration, rank in [*view.groups, *view.marks]:
            seen.setdefault(iteration, set()).add(rank)
        for iteration in view.complete:
            # Absent ranks are reported too, the first ones one by one.
            absent = (rank for rank in view.attempt.launch.ranks if rank not in seen[iteration])
            seen[iteration] |= set(itertools.islice(absent, _MAX_NAMED))
        return {iteration: [] if iteration in view.dropped else sorted(seen[iteration]) for iteration in sorted(seen)}


_DECLARED: dict[KeyKind, type] = {KeyKind.TRIGGER: Trigger, KeyKind.REQUEST: Request, KeyKind.ANSWER: Answer}


def _remembered(view: AttemptView, key: str, kind: KeyKind) -> dict[str, Any] | None:
    """The attributes of a document that are checked later; None if there is no document."""
    document = view.document(key)
    if document is None:
        return None
    attributes = document["attributes"]
    if kind in _DECLARED:
        converted(attributes, _DECLARED[kind], place=view.place(key))
    return {name: attributes[name] for name in _REMEMBERED if name in attributes}
