"""Names the process whose training is recorded, among those that inherit one environment."""

from __future__ import annotations

import os

OWNER = "RANKTAPE_OWNER_PID"
"""Variable that names it; the processes that it starts find it in their environment and stand aside."""

LAUNCHED = "RANKTAPE_LAUNCHED"
"""Variable in which the launcher says what it records, to ranks that its script starts: JSON."""


def stand_aside() -> None:
    """From now on neither this process nor one that it starts begins a capture by itself."""
    os.environ[OWNER] = str(os.getpid())
