"""Writes lines of ours on stderr, where the training writes too."""

from __future__ import annotations

import sys


def write_line(text: str) -> None:
    """One line; a progress bar of the training stands below it then, and not before it."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None:
        sys.stderr.write(f"ranktape: {text}\n")
    else:
        tqdm.write(f"ranktape: {text}", file=sys.stderr)
    sys.stderr.flush()
