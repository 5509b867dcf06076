"""The key under which each part of a run lies.

zarr.json                                                   the run
lease_000/zarr.json                                         the launch that records into it, while it does
attempt_000-1f3a9c2e/zarr.json                              one start of the worker group
<attempt>/rank_00003/zarr.json                              one process of it
<attempt>/rank_00003/iter_00001234/zarr.json                rank commit, written last
<attempt>/rank_00003/iter_00001234/<site>/zarr.json         one large tensor
<attempt>/rank_00003/iter_00001234/stack_float32_64_0/zarr.json  small tensors of one dtype and shape
<attempt>/rank_00003/iter_00001234/catalogue/zarr.json      what was recorded, as columns
<attempt>/commits/iter_00001234/zarr.json                   the iteration was begun
<attempt>/commits/iter_00001234/rank_00003.committed/zarr.json   markers: one LIST tells all states
<attempt>/iterations/iter_00001234/zarr.json                iteration commit, written last: its catalogue
<attempt>/closed/rank_00003/zarr.json                       the rank will commit nothing more
<attempt>/dropped/iter_00001234/zarr.json                   the iteration was complete, and was removed (--keep-last)
<attempt>/plan/zarr.json                                    further iterations, when the first ones were not enough
<attempt>/verdict/zarr.json                                 whether the guaranteed minimum is there

The end of an attempt's name is drawn by lot when it begins: no key of it is ever a key of another attempt, even
of one in another run that has since been made at the same place. A late writer can therefore leave debris, but
change nothing. An attempt without its document is such debris, and readers pass it over.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

DOCUMENT = "zarr.json"
"""The document of every group and array."""

CATALOGUE = "catalogue"
"""The name of a rank's catalogue; the names of tensors have commas, and those of stacks begin with `stack_`."""

ANALYSIS = "analysis"
"""The array at the top of a run below which analysis keeps what it counted: it can be deleted, and is counted again.

An array, because plain Zarr looks for no members below one.
"""

_MAX_NAME_LENGTH = 200

MAX_KEY_LENGTH = 560
"""No key of a run is longer, below the run: attempt, rank, iteration, a tensor's name, and what a file is called while
it is written."""

ATTEMPT_GROUPS = ("commits", "iterations", "closed", "dropped")
"""The groups below an attempt, beside those of its ranks."""

# Numbers are spelled as below, so that one thing has one key, and fit into 64 bits.
_STEP = r"([0-9]{8}|[1-9][0-9]{8,17})"
_RANK = r"([0-9]{5}|[1-9][0-9]{5,8})"
_MARKER = re.compile(rf"iter_{_STEP}/rank_{_RANK}\.([a-z]+)/zarr\.json")
_ITERATION = re.compile(rf"iter_{_STEP}/zarr\.json")
_CLOSED = re.compile(rf"rank_{_RANK}/zarr\.json")
_ATTEMPT = re.compile(r"attempt_([0-9]{3}|[1-9][0-9]{3,8})(-[0-9a-f]+)?")
_LEASE = re.compile(r"lease_([0-9]{3}|[1-9][0-9]{3,8})")


class Mark(enum.StrEnum):
    """What became of one iteration on one rank."""

    COMMITTED = "committed"
    """Everything the rank recorded is stored and committed."""
    SKIPPED = "skipped"
    """The rank could not take the iteration and recorded nothing."""
    FAILED = "failed"
    """The rank began the iteration and did not end it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """One rank's word on one iteration, read off a key."""

    iteration: int
    """Training step."""
    rank: int
    """Global rank."""
    mark: Mark
    """What became of it."""


def lease_path(number: int) -> str:
    """The group that says which launch records into the run."""
    return f"lease_{number:03d}"


def attempt_path(number: int, *, token: str) -> str:
    """The group of one start of the worker group; the other functions take it as `attempt`."""
    return f"attempt_{number:03d}-{token}"


def rank_path(attempt: str, rank: int) -> str:
    """The group of one process."""
    return f"{attempt}/rank_{rank:05d}"


def rank_iteration_path(attempt: str, rank: int, iteration: int) -> str:
    """The group of one iteration on one rank: the unit of commit."""
    return f"{rank_path(attempt, rank)}/iter_{iteration:08d}"


def catalogue_path(attempt: str, rank: int, iteration: int) -> str:
    """The array that holds the catalogue of one iteration on one rank."""
    return f"{rank_iteration_path(attempt, rank, iteration)}/{CATALOGUE}"


def stack_name(number: int, *, dtype: str, shape: Sequence[int], layout: str) -> str | None:
    """The name of an array of small tensors, below their iteration; None where it would be too long for a name."""
    extents = "x".join(str(extent) for extent in shape) or "scalar"
    letters = f"_{layout}" if layout.isascii() and layout.isalnum() else ""
    name = f"stack_{dtype}_{extents}{letters}_{number}"
    return name if len(name) <= _MAX_NAME_LENGTH else None


def commits_path(attempt: str) -> str:
    """The group of all markers."""
    return f"{attempt}/commits"


def opened_path(attempt: str, iteration: int) -> str:
    """The group whose presence says that an iteration was begun."""
    return f"{commits_path(attempt)}/iter_{iteration:08d}"


def marker_path(attempt: str, iteration: int, rank: int, mark: Mark) -> str:
    """The group whose presence is one rank's word on one iteration."""
    return f"{opened_path(attempt, iteration)}/rank_{rank:05d}.{mark}"


def iterations_path(attempt: str) -> str:
    """The group of all iteration commits."""
    return f"{attempt}/iterations"


def iteration_path(attempt: str, iteration: int) -> str:
    """The array that holds the merged catalogue of an iteration; its document is the commit."""
    return f"{iterations_path(attempt)}/iter_{iteration:08d}"


def closed_path(attempt: str, rank: int) -> str:
    """The group that says that a rank will commit nothing more."""
    return f"{attempt}/closed/rank_{rank:05d}"


def dropped_path(attempt: str, iteration: int) -> str:
    """The group that says that a complete iteration was removed on purpose."""
    return f"{attempt}/dropped/iter_{iteration:08d}"


def plan_path(attempt: str) -> str:
    """The group that names the iterations to capture, where the options' were not enough."""
    return f"{attempt}/plan"


def verdict_path(attempt: str) -> str:
    """The group that says whether the guaranteed minimum is there."""
    return f"{attempt}/verdict"


def document_key(path: str) -> str:
    """The key of the document of the group or array at `path`; the empty path is the run itself."""
    return f"{path}/{DOCUMENT}" if path else DOCUMENT


def parse_attempt(name: str) -> int | None:
    """The number in the name of an attempt's group; None for other names."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def parse_lease(name: str) -> int | None:
    """The number in the name of a lease's group; None for other names."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def is_part_of_run(name: str) -> bool:
    """Whether a name at the top of a run is one that the layout gives."""
    return name in {DOCUMENT, ANALYSIS} or parse_attempt(name) is not None or parse_lease(name) is not None


def parse_marker(key: str) -> Marker | None:
    """The marker at a key below `commits_path`; None for other keys."""
    match = _MARKER.fullmatch(key)
    if match is None or match[3] not in set(Mark):
        return None
    return Marker(iteration=int(match[1]), rank=int(match[2]), mark=Mark(match[3]))


def parse_iteration(key: str) -> int | None:
    """The iteration whose group's document is at a key such as `iter_00000003/zarr.json`; None for other keys."""
    match = _ITERATION.fullmatch(key)
    return int(match[1]) if match else None


def parse_rank(name: str) -> int | None:
    """The rank whose group has a name; None for other names."""
    return parse_closed(f"{name}/{DOCUMENT}")


def parse_closed(key: str) -> int | None:
    """The rank whose closing is at a key below `closed`; None for other keys."""
    match = _CLOSED.fullmatch(key)
    return int(match[1]) if match else None
