"""Which process is the one whose training is recorded, when RANKTAPE_CAPTURE is in the environment of several?"""

from __future__ import annotations

import os

OWNER = "RANKTAPE_OWNER_PID"
"""Variable that names it; the processes that it starts find it in their environment and stand aside."""


def stand_aside() -> None:
    """From now on neither this process nor one that it starts begins a capture by itself."""
    os.environ[OWNER] = str(os.getpid())
