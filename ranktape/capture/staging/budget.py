"""How much host memory may staged tensors take on this rank?"""

from __future__ import annotations

import os
from pathlib import Path

MAX_DEFAULT_NBYTES = 512 << 20
"""The default takes no more than this: a ring is touched as a whole at the start."""

MIN_DEFAULT_NBYTES = 64 << 20
"""The default takes no less than this, where memory is scarce."""

_SHARE = 0.25


def default_host_budget_nbytes(*, num_local_ranks: int) -> int:
    """A quarter of the memory that the container and the machine leave, divided among the ranks of the host."""
    return int(min(MAX_DEFAULT_NBYTES, max(MIN_DEFAULT_NBYTES, available_nbytes() * _SHARE / num_local_ranks)))


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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not on this system; the machine's count stands
        return ""
