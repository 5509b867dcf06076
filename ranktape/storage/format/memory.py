"""How much memory is left, the refusal of what does not fit, budgets that threads share, and how a size is written."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ranktape.errors import ObjectTooLargeError


def available_nbytes(*, root: Path = Path("/")) -> int:
    """Bytes of memory that can still be taken, on the machine and in each memory cgroup that holds this process.

    Page cache that the kernel can drop (`inactive_file`) counts as available. `root` is where `/proc` and `/sys` are.
    """
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = _read(root / "proc/meminfo").splitlines()
    amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for group, names in _memory_cgroups(root):
        limit = _read(group / names.limit).strip()
        if not limit.isdigit() or int(limit) >= amounts[0]:
            continue
        rows = (line.split() for line in _read(group / "memory.stat").splitlines())
        droppable = sum(int(row[1]) for row in rows if row[0] == names.droppable)
        amounts.append(max(0, int(limit) - max(0, int(_read(group / names.usage) or 0) - droppable)))
    return min(amounts)


class _CgroupFiles(NamedTuple):
    """Names of the files of a memory cgroup, in one version of the interface."""

    limit: str
    usage: str
    droppable: str
    """The row of `memory.stat` with the page cache that the kernel drops first."""


_VERSION_2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@functools.cache
def _memory_cgroups(root: Path) -> list[tuple[Path, _CgroupFiles]]:
    """The cgroups that limit this process, the innermost first: its own and those around it."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        # A container that sees only its own part of the tree has its limits at the top, whatever the path says.
        inner = PurePosixPath(path.removeprefix("/"))
        found += [(top / part, names) for part in (inner, *inner.parents) if ".." not in part.parts]
    return found


def expect_memory(nbytes: int, *, place: str) -> None:
    """Make sure, before it is taken, that there is memory for so many bytes of what lies at a place.

    Raises:
        ObjectTooLargeError: there is not.
    """
    left = available_nbytes()
    if nbytes > left:
        raise ObjectTooLargeError(
            f"{place} takes {nbytes:,} bytes of memory, {left:,} are left here: it was not written by ranktape, or "
            f"has to be read on a larger machine"
        )


BUDGET_NBYTES = 256 << 20
"""Bytes of objects held in memory at once; one that is larger is held alone."""


class MemoryBudget:
    """Bytes that several threads may hold together; one that needs more than all of them holds them alone."""

    def __init__(self, nbytes: int = BUDGET_NBYTES) -> None:
        self._nbytes = nbytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Hold so many bytes; waits for others to give theirs back."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_taken or self._num_taken + nbytes <= self._nbytes)
            self._num_taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= nbytes
                self._changed.notify_all()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not on this system; the machine's count stands
        return ""


def nbytes_text(nbytes: float) -> str:
    """A size for people, in units of 1,000 bytes: `1.5 MB`."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:  # noqa: PLR2004  (decimal units)
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
