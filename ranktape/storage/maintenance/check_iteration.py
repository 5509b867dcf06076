"""The check that the commit of an iteration is there when all ranks have committed it, and says what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ranktape.errors import DataError, ObjectTooLargeError, RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.blob import blob_key, blob_nbytes, split_checksum
from ranktape.storage.format.catalogue import Catalogue
from ranktape.storage.format.layout import Mark
from ranktape.storage.maintenance.check_view import differing_replicas, first_difference
from ranktape.storage.maintenance.finding import CheckFinding, FindingKind, Findings, Mend

if TYPE_CHECKING:
    from ranktape.storage.maintenance.check_commit import RankResult
    from ranktape.storage.maintenance.check_view import AttemptView

_MAX_NAMED = 3


def check_iteration(view: AttemptView, iteration: int, results: Mapping[int, RankResult | None]) -> list[CheckFinding]:
    """What is wrong with the commit of an iteration, whose ranks' commits are known."""
    found = Findings(attempt=view.attempt.number, iteration=iteration)
    if iteration in view.dropped:
        _note_leftovers(view, found, iteration)
        return found.items
    _check_opened(view, found, iteration)
    path = layout.iteration_path(view.attempt.path, iteration)
    key = layout.document_key(path)
    ranks = view.attempt.launch.ranks
    whole = [result for rank in ranks if (result := results.get(rank)) is not None and result.is_whole]
    can_finish = len(whole) == len(ranks)
    if view.nbytes(key) is None:
        _check_missing(view, found, results, can_finish=can_finish)
        return found.items
    num_absent = len(ranks) - sum(rank in ranks for rank in results)
    if num_absent and not view.is_open:
        found.error(FindingKind.MISSING, f"the iteration is complete, but {num_absent} more ranks have no commit in it")
    mend = Mend.REWRITE_COMMIT if can_finish else None
    document = _check_document(view, found, key, mend=mend)
    if document is None:
        return found.items
    by_rank = [results.get(rank) for rank in ranks]
    known = [result for result in by_rank if result is not None]
    if len(known) == len(ranks):
        _check_summary(found, document["attributes"], dict(zip(ranks, known, strict=True)), key=key, mend=mend)
    catalogue = _read_catalogue(view, found, path, document, mend=mend)
    if catalogue is not None and len(known) == len(ranks):
        _check_rows(found, catalogue, known, key=blob_key(path), mend=mend)
    return found.items


def _check_opened(view: AttemptView, found: Findings, iteration: int) -> None:
    key = layout.document_key(layout.opened_path(view.attempt.path, iteration))
    has_marks = any(step == iteration for step, _ in view.marks)
    if has_marks and iteration not in view.opened and view.nbytes(key) is None:
        # Another process writes it, and may have been lost before it did.
        say = found.error if iteration in view.complete else found.note
        say(
            FindingKind.MISSING,
            "ranks have left markers, but the document of their group is missing",
            key=key,
            mend=Mend.RESTORE_GROUP,
        )


def _check_missing(
    view: AttemptView, found: Findings, results: Mapping[int, RankResult | None], *, can_finish: bool
) -> None:
    """Of an iteration without a commit of its own."""
    iteration = found.iteration
    assert iteration is not None
    key = layout.document_key(layout.iteration_path(view.attempt.path, iteration))
    mend = Mend.FINISH_ITERATION if can_finish else None
    if iteration in view.counted:
        found.error(
            FindingKind.MISSING, "the verdict counts it, but the iteration commit is missing", key=key, mend=mend
        )
    elif can_finish:
        found.note(
            FindingKind.UNFINISHED,
            "all ranks have committed it, and the iteration commit is not there: readers do not see it",
            key=key,
            mend=mend,
        )
    else:
        _note_waiting(view, found, results)


def _note_leftovers(view: AttemptView, found: Findings, iteration: int) -> None:
    """Of an iteration that was removed to keep the run small."""
    ranks = [rank for step, rank in [*view.groups, *view.marks] if step == iteration]
    if ranks or iteration in view.complete | view.opened:
        found.note(
            FindingKind.DEBRIS,
            "the iteration was removed to keep the run small, and parts of it are left",
            key=layout.document_key(layout.dropped_path(view.attempt.path, iteration)),
            mend=Mend.FINISH_REMOVAL,
        )


def _note_waiting(view: AttemptView, found: Findings, results: Mapping[int, RankResult | None]) -> None:
    assert found.iteration is not None
    ranks = view.attempt.launch.ranks
    without = [rank for rank in ranks if results.get(rank) is None]
    lost = [rank for rank in without if {Mark.SKIPPED, Mark.FAILED} & set(view.marks.get((found.iteration, rank), {}))]
    if not without:
        return
    word = "has not committed it" if len(without) == 1 else "have not committed it"
    more = f" ({len(lost)} skipped or failed)" if lost else ""
    found.note(FindingKind.UNFINISHED, f"not complete: {_ranks(without)} {word}{more}")


def _check_document(view: AttemptView, found: Findings, key: str, *, mend: Mend | None) -> dict[str, Any] | None:
    try:
        document = view.document(key)
    except (DataError, RunFormatError) as error:
        found.error(FindingKind.DAMAGED, str(error), key=key, mend=mend)
        return None
    if document is None:
        if not view.is_open:
            found.error(FindingKind.MISSING, "the iteration commit was listed and is gone", key=key)
        return None
    attributes = document.get("attributes", {})
    ranks = list(view.attempt.launch.ranks)
    stated = tuple(attributes.get(name) for name in ("complete", "iteration", "expected_ranks"))
    if stated != (True, found.iteration, ranks):
        found.error(
            FindingKind.DAMAGED,
            f"the iteration commit is of another iteration, or not of all ranks: (complete, iteration, expected "
            f"ranks) is {stated}",
            key=key,
            mend=mend,
        )
        return None
    return document


def _check_summary(
    found: Findings, attributes: Mapping[str, Any], by_rank: Mapping[int, RankResult], *, key: str, mend: Mend | None
) -> None:
    results = by_rank.values()
    actual: dict[str, Any] = {
        "num_records": sum(result.catalogue.num_rows for result in results),
        "nbytes": sum(result.nbytes for result in results),
        "silent_sites": {str(rank): one.silent_sites for rank, one in by_rank.items() if one.silent_sites},
    }
    if "commits" in attributes:
        actual["commits"] = [result.checksum for result in results]
    for name, value in actual.items():
        if attributes.get(name) != value:
            what = "other rank commits" if name == "commits" else f"another {name}"
            found.error(
                FindingKind.MISMATCH, f"the iteration commit was made from {what} than there are", key=key, mend=mend
            )


def _read_catalogue(
    view: AttemptView, found: Findings, path: str, document: Mapping[str, Any], *, mend: Mend | None
) -> Catalogue | None:
    key = blob_key(path)
    place = view.place(key)
    nbytes = view.nbytes(key)
    if nbytes is None:
        found.error(FindingKind.MISSING, "the iteration's catalogue is lost: the object is missing", key=key, mend=mend)
        return None
    if nbytes != (expected := blob_nbytes(document)):
        found.error(FindingKind.SIZE, f"the object has {nbytes} bytes instead of {expected}", key=key, mend=mend)
        return None
    try:
        with view.memory.taken(2 * nbytes):
            data = split_checksum(view.backend.get(key), place=place)
            return Catalogue.from_bytes(data, place=place, attempt=view.attempt.path)
    except (DataError, RunFormatError) as error:
        found.error(FindingKind.DAMAGED, str(error), key=key, mend=mend)
    except ObjectTooLargeError as error:
        found.note(FindingKind.UNCHECKED, str(error), key=key)
    return None


def _check_rows(
    found: Findings, catalogue: Catalogue, results: list[RankResult], *, key: str, mend: Mend | None
) -> None:
    try:
        difference = first_difference([result.catalogue for result in results], catalogue)
    except (DataError, RunFormatError) as error:
        found.error(FindingKind.DAMAGED, str(error), key=key, mend=mend)
        return
    if difference:
        found.error(
            FindingKind.MISMATCH,
            f"the iteration's catalogue is not that of its ranks: {difference}",
            key=key,
            mend=mend,
        )
        return
    weights = []
    for site, must_agree, ranks in differing_replicas(catalogue):
        if must_agree:
            found.error(FindingKind.REPLICAS, f"replicas on {_ranks(ranks)} hold different values", record=site)
        else:
            weights.append(site)
    if weights:
        listed = ", ".join(weights[:_MAX_NAMED]) + (", ..." if len(weights) > _MAX_NAMED else "")
        found.note(
            FindingKind.REPLICAS,
            f"{len(weights)} weights differ between ranks (right where ranks hold parts of a model): {listed}",
        )


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[: 2 * _MAX_NAMED]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (", ..." if len(ranks) > 2 * _MAX_NAMED else "")
