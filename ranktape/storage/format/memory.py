"""How much memory is left, the refusal of what does not fit into it, and how a size is written."""

from __future__ import annotations

import os
from pathlib import Path

from ranktape.errors import ObjectTooLargeError


def available_nbytes() -> int:
    """Bytes of memory that can still be taken: by the machine's count, and by the cgroup's where there is one."""
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = _read(Path("/proc/meminfo")).splitlines()
    amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    pairs = (
        (group / "memory.max", group / "memory.current"),
        (group / "memory/memory.limit_in_bytes", group / "memory/memory.usage_in_bytes"),
    )
    for limit, usage in pairs:
        values = _read(limit).strip(), _read(usage).strip()
        if all(value.isdigit() for value in values):
            amounts.append(max(0, int(values[0]) - int(values[1])))
    return min(amounts)


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
