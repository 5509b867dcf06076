"""Checks that the commit of an iteration is there when all ranks have committed it, and says what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ranktape.storage.format import layout
from ranktape.storage.format.blob import blob_key, blob_nbytes
from ranktape.storage.format.catalogue import RecordTable
from ranktape.storage.format.commit import SUMMARY, RankCommit, summary_of
from ranktape.storage.format.layout import KeyKind, Mark
from ranktape.storage.maintenance.check_commit import RankResult
from ranktape.storage.maintenance.check_view import AttemptView, compare_catalogue
from ranktape.storage.maintenance.finding import CheckFinding, FindingKind, Findings, Mend
from ranktape.storage.query.columns import values_of

_MAX_NAMED = 3


def check_iteration(view: AttemptView, iteration: int, results: Mapping[int, RankResult | None]) -> list[CheckFinding]:
    """What is wrong with the commit of an iteration, whose ranks' commits are known."""
    found = Findings(attempt=view.attempt.number, iteration=iteration)
    opened = layout.document_key(layout.opened_path(view.attempt.path, iteration))
    is_opened = iteration in view.iterations[KeyKind.OPENED]
    has_marks = any(step == iteration for step, _ in view.marks)
    if iteration in view.dropped:
        if has_marks or is_opened or iteration in view.complete or any(step == iteration for step, _ in view.groups):
            found.note(
                FindingKind.DEBRIS,
                "the iteration was removed to keep the run small, and parts of it are left",
                key=layout.document_key(layout.dropped_path(view.attempt.path, iteration)),
                mend=Mend.FINISH_REMOVAL,
            )
        return found.items
    if has_marks and not is_opened and view.nbytes(opened) is None:
        # Another process writes it, and may have been lost before it did.
        say = found.error if iteration in view.complete else found.note
        what = "ranks have left markers, but the document of their group is missing"
        say(FindingKind.MISSING, what, key=opened, mend=Mend.RESTORE_GROUP)
    path = layout.iteration_path(view.attempt.path, iteration)
    key = layout.document_key(path)
    known = {rank: result for rank in view.attempt.launch.ranks if (result := results.get(rank)) is not None}
    is_known = len(known) == len(view.attempt.launch.ranks)
    can_finish = is_known and all(result.is_whole for result in known.values())
    if view.nbytes(key) is None:
        _check_missing(view, found, results, key=key, can_finish=can_finish)
        return found.items
    num_absent = len(set(view.attempt.launch.ranks) - results.keys())
    if num_absent and not view.is_open:
        found.error(FindingKind.MISSING, f"the iteration is complete, but {num_absent} more ranks have no commit in it")
    mend = Mend.REWRITE_COMMIT if can_finish else None
    document = _check_document(view, found, key, mend=mend)
    if document is None:
        return found.items
    commits = {rank: result.commit for rank, result in known.items()} if is_known else None
    if commits is not None:
        _check_summary(found, document["attributes"], commits, key=key, mend=mend)
    what = "the iteration's catalogue is"
    nbytes = blob_nbytes(document)
    if view.has_object(found, blob_key(path), nbytes=-1 if nbytes is None else nbytes, what=what, mend=mend):
        parts = [commit.catalogue for commit in commits.values()] if commits is not None else None
        catalogue = compare_catalogue(view, found, path, parts, what=f"{what} not that of its ranks", mend=mend)
        if catalogue is not None and is_known:
            found.read(lambda: _check_replicas(found, catalogue), key=blob_key(path), mend=mend)
    return found.items


def _check_missing(
    view: AttemptView, found: Findings, results: Mapping[int, RankResult | None], *, key: str, can_finish: bool
) -> None:
    """Of an iteration without a commit of its own."""
    mend = Mend.FINISH_ITERATION if can_finish else None
    assert found.iteration is not None
    if found.iteration in view.counted:
        what = "the verdict counts it, but the iteration commit is missing"
        found.error(FindingKind.MISSING, what, key=key, mend=mend)
    elif can_finish:
        what = "all ranks have committed it, and the iteration commit is not there: readers do not see it"
        found.note(FindingKind.UNFINISHED, what, key=key, mend=mend)
    elif without := [rank for rank in view.attempt.launch.ranks if results.get(rank) is None]:
        given_up = {Mark.SKIPPED, Mark.FAILED}
        num_lost = sum(bool(given_up & view.marks.get((found.iteration, rank), {}).keys()) for rank in without)
        verb = "has not committed it" if len(without) == 1 else "have not committed it"
        more = f" ({num_lost} skipped or failed)" if num_lost else ""
        found.note(FindingKind.UNFINISHED, f"not complete: {_ranks(without)} {verb}{more}")


def _check_document(view: AttemptView, found: Findings, key: str, *, mend: Mend | None) -> dict[str, Any] | None:
    num_before = len(found.items)
    document = found.read(lambda: view.document(key), key=key, mend=mend)
    if document is None:
        if not view.is_open and len(found.items) == num_before:
            found.error(FindingKind.MISSING, "the iteration commit was listed and is gone", key=key)
        return None
    attributes = document.get("attributes", {})
    stated = tuple(attributes.get(name) for name in ("complete", "iteration", "expected_ranks"))
    if stated != (True, found.iteration, list(view.attempt.launch.ranks)):
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
    found: Findings, attributes: Mapping[str, Any], by_rank: Mapping[int, RankCommit], *, key: str, mend: Mend | None
) -> None:
    actual = summary_of(by_rank)
    for name in SUMMARY:
        if attributes.get(name) == actual.get(name):
            continue
        if name != "commits":
            message = f"{name} of the iteration commit does not match the commits of the ranks"
        elif name in attributes:
            message = "the iteration commit was made from other rank commits than there are"
        else:
            continue  # an early version wrote no checksums
        found.error(FindingKind.MISMATCH, message, key=key, mend=mend)


def _check_replicas(found: Findings, catalogue: RecordTable) -> None:
    weights = []
    for site, must_agree, ranks in _differing_replicas(catalogue):
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


_REPLICATE = "replicate"
_PARTIAL = "partial"

_WEIGHTS = frozenset({"weight", "bias"})
"""The names of tensors that all data-parallel ranks hold; others hold parts of them."""

_WHAT = ("rank", "site", "placement", "checksum", "tensor_name", "shape", "dtype", "keep")


def _differing_replicas(table: RecordTable) -> Iterator[tuple[str, bool, list[int]]]:
    """The tensors of an iteration whose copies on several ranks differ: path, whether they must agree, the ranks.

    Copies must agree where their placement says that they are replicas. A `weight` without a placement is a copy
    where training is data-parallel and a part where it is not: nobody knows, and so it need not agree.
    """
    columns = {name: values_of(table.column(name)) for name in _WHAT}
    keys: dict[str, str | None] = {}
    copies: dict[tuple[Any, ...], dict[int, Any]] = {}
    for row in range(table.num_rows):
        placement = columns["placement"][row]
        if placement not in keys:
            keys[placement] = replica_key(placement)
        must_agree = keys[placement] is not None
        if not must_agree and (placement != "null" or columns["tensor_name"][row] not in _WEIGHTS):
            continue
        form = tuple(columns[name][row] for name in ("site", "shape", "dtype", "keep"))
        copy = copies.setdefault((*form, must_agree, keys[placement]), {})
        copy[int(columns["rank"][row])] = columns["checksum"][row]
    for (site, *_, must_agree, _), checksums in copies.items():
        if len(set(checksums.values())) > 1:
            yield site, must_agree, sorted(checksums)


def replica_key(placement: str) -> str | None:
    """What copies of one part of a tensor have in common, from the JSON of a placement; None where there are none.

    All of the placement but the coordinates along mesh axes over which the tensor is replicated. A sum that is
    not made yet (`partial`) has no copies.
    """
    document = json.loads(placement)
    if not isinstance(document, dict) or document.get(_PARTIAL):
        return None
    placements = document.get("placements")
    coordinates = document.get("coordinates")
    if not isinstance(placements, list) or not isinstance(coordinates, list) or len(placements) != len(coordinates):
        return None
    words = [str(word).lower() for word in placements]
    if any(word.startswith(_PARTIAL) for word in words) or not any(word.startswith(_REPLICATE) for word in words):
        return None
    fixed = [None if word.startswith(_REPLICATE) else at for word, at in zip(words, coordinates, strict=True)]
    return json.dumps({**document, "coordinates": fixed}, sort_keys=True)
