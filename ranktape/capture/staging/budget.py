"""How much host memory staged tensors may take on a rank."""

from __future__ import annotations

from ranktape.storage.memory import available_nbytes

MAX_DEFAULT_NBYTES = 512 << 20
"""The default takes no more than this: a ring is touched as a whole at the start."""

MIN_DEFAULT_NBYTES = 64 << 20
"""The default takes no less than this, where memory is scarce."""

_SHARE = 0.25


def default_host_budget_nbytes(*, num_local_ranks: int) -> int:
    """A quarter of the memory that the container and the machine leave, divided among the ranks of the host."""
    return int(min(MAX_DEFAULT_NBYTES, max(MIN_DEFAULT_NBYTES, available_nbytes() * _SHARE / num_local_ranks)))
