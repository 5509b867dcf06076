"""The check that everything a run says it holds is there, and is what was written.

One listing of each attempt, every document, and with `deep` every byte. What lies there is only read. An attempt
that no verdict closes may be recorded just now: what is not there yet is a note, what is wrong an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, RunFormatError, RunNotFoundError, StorageError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import read_attempt, read_run, run_attributes
from ranktape.storage.format.documents import document_checksum, is_document_intact, read_document
from ranktape.storage.format.layout import KeyKind, Mark
from ranktape.storage.maintenance.check_commit import check_commit
from ranktape.storage.maintenance.check_iteration import check_iteration
from ranktape.storage.maintenance.check_view import AttemptView, Listing, decode_stamped, sort_keys
from ranktape.storage.maintenance.copy import BUDGET_NBYTES, MemoryBudget
from ranktape.storage.maintenance.finding import AttemptAge, CheckFinding, CheckReport, FindingKind, Findings, Mend

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.maintenance.check_commit import RankResult
    from ranktape.storage.places.backend import Backend, Debris

_NUM_GROUPS = 4
"""Rank commits that are looked at side by side."""

_NUM_THREADS = 16
"""Requests in flight besides."""

_MAX_NAMED = 100
"""Foreign objects, and ranks that left nothing, that are named before the rest is counted."""

_REMEMBERED = ("num_records", "nbytes", "commit", "is_enough")
"""The attributes of markers and of the plan that are compared with something."""

_COMMITS = {KeyKind.RANK_COMMIT, KeyKind.ITERATION_COMMIT}

OnProgress = Callable[[int, int], object]
"""Called with the pieces of work that are done and all that are known."""


@dataclass(slots=True)
class _CheckTotals:
    """What a check went through."""

    num_iterations: int = 0
    num_records: int = 0
    num_objects: int = 0
    nbytes: int = 0
    num_done: int = 0
    num_known: int = 0


def check_run(backend: Backend, *, deep: bool = False, on_progress: OnProgress | None = None) -> CheckReport:
    """What is wrong with a run, precisely; nothing is changed.

    Args:
        backend: Where the run is.
        deep: Read every byte and compare it with its checksums; without it sizes are compared.
        on_progress: Called after each rank commit.

    Raises:
        RunNotFoundError: there is no run.
        RunFormatError: the run is of another schema.
        StorageError: the store cannot be read.
    """
    found = Findings()
    totals = _CheckTotals()
    names = backend.list_names("")
    attempts = _read_attempts(backend, names, found)
    has_attempts = any(layout.parse_attempt(name) is not None for name in names)
    _check_run_document(backend, found, has_attempts=has_attempts)
    _note_others(backend, names, found)
    progress = on_progress or (lambda _done, _known: None)
    ages = []
    complete: set[int] = set()
    dropped: set[int] = set()
    with ThreadPoolExecutor(_NUM_THREADS) as leaves, ThreadPoolExecutor(_NUM_GROUPS) as groups:
        for attempt in attempts:
            is_last = attempt is attempts[-1]
            check = _AttemptCheck(
                backend,
                attempt,
                is_last=is_last,
                deep=deep,
                leaves=leaves,
                earlier=complete | dropped,
            )
            found.items += check.look(groups, totals=totals, on_progress=progress)
            ages.append(check.age())
            complete |= check.view.complete
            dropped |= check.view.dropped
            found.items += check.look_at_verdict(complete, dropped)
    return CheckReport(
        url=backend.url,
        deep=deep,
        findings=tuple(found.items),
        ages=tuple(ages),
        num_iterations=totals.num_iterations,
        num_records=totals.num_records,
        num_objects=totals.num_objects,
        nbytes=totals.nbytes,
    )


def _note_others(backend: Backend, names: list[str], found: Findings) -> None:
    """What lies at the top of a run and is none of it, and what writers left unfinished."""
    for name in names:
        if not layout.is_part_of_run(name):
            found.note(FindingKind.FOREIGN, "no part of a run", key=name)
    for debris in _list_debris(backend, found):
        size = "" if debris.nbytes is None else f" ({debris.nbytes} bytes)"
        found.note(
            FindingKind.DEBRIS,
            f"a write that was not ended{size}: it is under way, or its writer was lost",
            key=debris.name,
            mend=Mend.REMOVE_DEBRIS,
            modified=debris.modified,
        )


def _list_debris(backend: Backend, found: Findings) -> list[Debris]:
    try:
        return backend.list_debris()
    except StorageError as error:
        # Many may read a run and not list its uploads, and some servers cannot.
        if error.is_transient:
            raise
        found.note(FindingKind.UNCHECKED, f"writes that were not ended were not looked for: {error}")
        return []


def _check_run_document(backend: Backend, found: Findings, *, has_attempts: bool) -> None:
    """Look at the document of the run."""
    key = layout.document_key("")
    data: bytes | None = None
    try:
        data = read_run(backend)
        run_attributes(data, place=backend.url)
        decode_stamped(data or b"", key=key, place=backend.url)
    except RunNotFoundError:
        if not has_attempts:
            raise
        found.error(FindingKind.MISSING, "the run's document is missing: nobody can open the run", key=key)
    except (DataError, RunFormatError) as error:
        # One that is whole, of another version or of something else, is not ours to judge.
        if not has_attempts or is_document_intact(data or b"", key=key):
            raise
        found.error(FindingKind.DAMAGED, str(error), key=key)


def _read_attempts(backend: Backend, names: list[str], found: Findings) -> list[Attempt]:
    attempts = []
    for name in names:
        number = layout.parse_attempt(name)
        if number is None:
            continue
        key = layout.document_key(name)
        try:
            attempt = read_attempt(backend, name)
        except (DataError, RunFormatError) as error:
            found.error(FindingKind.DAMAGED, f"{error}; nothing of the attempt can be read", attempt=number, key=key)
            continue
        if attempt is None:
            _check_without_document(backend, found, name, number)
        else:
            attempts.append(attempt)
    return sorted(attempts, key=lambda attempt: (attempt.number, attempt.path))


def _check_without_document(backend: Backend, found: Findings, name: str, number: int) -> None:
    """Of an attempt that readers pass over: debris, unless something in it was committed."""
    objects = backend.list_objects(name)
    keys = [layout.parse_key(info.key) for info in objects]
    num_commits = sum(key is not None and key.kind in _COMMITS for key in keys)
    if num_commits:
        found.error(
            FindingKind.MISSING,
            f"the attempt's document is missing, and {num_commits} commits are in it: nobody can read them",
            attempt=number,
            key=layout.document_key(name),
        )
        return
    found.note(
        FindingKind.DEBRIS,
        f"an attempt that did not begin, or that a late writer left: {len(objects)} objects",
        attempt=number,
        key=f"{name}/",
        mend=Mend.REMOVE_OBJECTS,
        modified=max((info.modified for info in objects), default=0.0),
    )


class _AttemptCheck:
    """The check of one attempt."""

    def __init__(
        self,
        backend: Backend,
        attempt: Attempt,
        *,
        is_last: bool,
        deep: bool,
        leaves: ThreadPoolExecutor,
        earlier: set[int],
    ) -> None:
        self._found = Findings(attempt=attempt.number)
        key = layout.document_key(attempt.path)
        if document_checksum(read_document(backend, attempt.path) or b"") is None:
            self._found.error(FindingKind.DAMAGED, "the attempt's document has lost its checksum", key=key)
        self._is_last = is_last
        self._seen: set[int] = set()
        self._is_enough = False
        # Read before the listing: what ranks write comes before it.
        self._verdict_key = layout.document_key(layout.verdict_path(attempt.path))
        is_closed = backend.exists(self._verdict_key)
        objects = {f"{attempt.path}/{info.key}": info for info in backend.list_objects(attempt.path)}
        self.view = AttemptView(
            backend=backend,
            attempt=attempt,
            objects=objects,
            is_open=is_last and not is_closed,
            is_closed=is_closed,
            deep=deep,
            leaves=leaves,
            memory=MemoryBudget(BUDGET_NBYTES),
        )
        self._verdict: dict[str, Any] | None = None
        self._verdict_error = ""
        self._stated: set[int] = set()
        if is_closed:
            try:
                self._verdict = (self.view.document(self._verdict_key) or {}).get("attributes", {})
                counted = self._verdict.get("complete")
                if isinstance(counted, list):
                    self._stated |= {step for step in counted if isinstance(step, int)}
            except (DataError, RunFormatError) as error:
                self._verdict_error = str(error)
        # Those of earlier attempts are counted too, and need not be complete in this one.
        self.view.counted |= self._stated - earlier

    def look(self, groups: ThreadPoolExecutor, *, totals: _CheckTotals, on_progress: OnProgress) -> list[CheckFinding]:
        """Everything but the verdict, which needs the other attempts."""
        view = self.view
        listing = sort_keys(view)
        self._note_foreign(listing)
        self._check_documents(listing)
        self._check_presence(listing)
        work = self._work()
        self._seen = set(work)
        totals.num_objects += len(view.objects)
        totals.nbytes += sum(info.nbytes for info in view.objects.values())
        totals.num_iterations += len(view.complete)
        totals.num_known += sum(map(len, work.values()))
        found = self._found.items
        for iteration, ranks in work.items():
            items: list[CheckFinding] = []
            results: dict[int, RankResult | None] = {}
            jobs = [groups.submit(check_commit, view, iteration, rank) for rank in ranks]
            for rank, job in zip(ranks, jobs, strict=True):
                wrong, results[rank] = job.result()
                items += wrong
                totals.num_done += 1
                on_progress(totals.num_done, totals.num_known)
            totals.num_records += sum(one.catalogue.num_rows for one in results.values() if one is not None)
            items += check_iteration(view, iteration, results)
            # A retention may have taken the iteration away while it was looked at.
            if not (view.is_open and items and view.backend.exists(self._dropped_key(iteration))):
                found += items
        return found

    def age(self) -> AttemptAge:
        """When the attempt was last written into."""
        view = self.view
        times = [info.modified for info in view.objects.values()]
        # One time that is not known may be the youngest.
        modified = max(times) if times and all(times) else 0.0
        return AttemptAge(path=view.attempt.path, is_closed=view.is_closed, modified=modified)

    def look_at_verdict(self, complete: set[int], dropped: set[int]) -> list[CheckFinding]:
        """Whether the verdict fits the iterations that are complete, or dropped, in this and earlier attempts."""
        found = Findings(attempt=self.view.attempt.number)
        key = self._verdict_key
        mend = Mend.WRITE_VERDICT if self._is_last else None
        view = self.view
        if self._is_enough and len(complete | dropped) < view.attempt.min_iterations:
            plan = layout.document_key(layout.plan_path(view.attempt.path))
            found.note(FindingKind.STALE, f"the plan says enough is complete, {len(complete | dropped)} are", key=plan)
        if not view.is_closed:
            how = "it is being recorded, or its processes were lost" if self._is_last else "its processes were lost"
            found.note(FindingKind.UNFINISHED, f"no verdict closes the attempt: {how}", key=key)
            return found.items
        verdict = self._verdict
        if verdict is None:
            found.error(FindingKind.DAMAGED, self._verdict_error, key=key, mend=mend)
            return found.items
        if "met" not in verdict:
            found.note(FindingKind.UNFINISHED, "the verdict was begun and not ended", key=key, mend=mend)
            return found.items
        stated = self._stated
        # Of an iteration that something is there of, the look at it has said so.
        gone = sorted(stated - complete - dropped - self._seen)
        late = sorted(complete - stated)
        if gone:
            found.error(FindingKind.MISSING, f"the verdict counts iterations {gone}, which are not complete", key=key)
        if late and self._is_last:
            found.note(FindingKind.STALE, f"iterations {late} were completed after the verdict", key=key, mend=mend)
        required = view.attempt.min_iterations
        # What was removed after the verdict stands in it, what was removed before it counts all the same.
        is_met = (len(stated) >= required, len(stated | dropped) >= required)
        if verdict.get("required") != required or verdict["met"] not in is_met:
            found.error(FindingKind.STALE, "the verdict does not follow from what it counts", key=key, mend=mend)
        return found.items

    def _dropped_key(self, iteration: int) -> str:
        return layout.document_key(layout.dropped_path(self.view.attempt.path, iteration))

    def _note_foreign(self, listing: Listing) -> None:
        for key in listing.foreign[:_MAX_NAMED]:
            self._found.note(FindingKind.FOREIGN, "no part of a run", key=key)
        rest = len(listing.foreign) - _MAX_NAMED
        if rest > 0:
            self._found.note(FindingKind.FOREIGN, f"{rest} more objects that are no part of a run")

    def _check_documents(self, listing: Listing) -> None:
        """Every document that is not part of a commit; the words of markers are kept."""
        view = self.view
        jobs = [view.leaves.submit(_words, view, key) for key in listing.documents]
        for key, job in zip(listing.documents, jobs, strict=True):
            marker = listing.markers.get(key)
            try:
                words = job.result()
            except (DataError, RunFormatError) as error:
                if marker is None or marker.mark is not Mark.COMMITTED:
                    mend = Mend.RESTORE_GROUP if key in listing.plain else None
                    self._found.error(FindingKind.DAMAGED, str(error), key=key, mend=mend)
                continue
            if words is None:  # gone since it was listed, as a retention does
                continue
            if key == layout.document_key(layout.plan_path(view.attempt.path)):
                self._is_enough = words.get("is_enough") is True
            if marker is not None:
                view.marks[marker.iteration, marker.rank][marker.mark or Mark.COMMITTED] = words

    def _check_presence(self, listing: Listing) -> None:
        """Documents that an attempt has from its beginning, and those that a closed one has at its end."""
        view = self.view
        path = view.attempt.path
        for group in layout.ATTEMPT_GROUPS:
            key = layout.document_key(f"{path}/{group}")
            if view.nbytes(key) is None:
                self._found.error(
                    FindingKind.MISSING, "the group's document is missing", key=key, mend=Mend.RESTORE_GROUP
                )
        for rank in sorted({rank for _, rank in view.groups} - listing.ranks):
            key = layout.document_key(layout.rank_path(path, rank))
            if view.nbytes(key) is None:
                self._found.error(
                    FindingKind.MISSING,
                    "the rank's document is missing",
                    rank=rank,
                    key=key,
                    mend=Mend.RESTORE_GROUP,
                )
        silent = sorted(set(view.attempt.launch.ranks) - listing.closed) if view.is_closed else []
        for rank in silent[:_MAX_NAMED]:
            key = layout.document_key(layout.closed_path(path, rank))
            self._found.note(FindingKind.UNFINISHED, "the rank left no last word: it was lost", rank=rank, key=key)
        rest = len(silent) - _MAX_NAMED
        if rest > 0:
            self._found.note(FindingKind.UNFINISHED, f"{rest} more ranks left no last word: they were lost")

    def _work(self) -> dict[int, list[int]]:
        """The ranks whose part of each iteration is to be looked at."""
        view = self.view
        seen: dict[int, set[int]] = {iteration: set() for iteration in view.opened | view.complete | view.dropped}
        for iteration, rank in [*view.groups, *view.marks]:
            seen.setdefault(iteration, set()).add(rank)
        every = view.attempt.launch.ranks
        for iteration in view.complete:
            # Of those of which nothing is there it is said, too, of the first of many one by one.
            absent = (rank for rank in every if rank not in seen[iteration])
            seen[iteration] |= set(itertools.islice(absent, _MAX_NAMED))
        return {iteration: [] if iteration in view.dropped else sorted(seen[iteration]) for iteration in sorted(seen)}


def _words(view: AttemptView, key: str) -> dict[str, Any] | None:
    """What is remembered of a document; None where there is none."""
    document = view.document(key)
    if document is None:
        return None
    attributes = document.get("attributes", {})
    return {name: attributes[name] for name in _REMEMBERED if name in attributes}
