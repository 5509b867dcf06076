"""Which text does the demo train on?"""

from __future__ import annotations

from pathlib import Path

from ranktape.errors import UsageError

MIN_TEXT_NBYTES = 10_000
"""Less than this is learned by heart before the demo's last step."""


def read_text(path: str | None) -> bytes:
    """The corpus: the file at `path`, or Python's own reference documentation, which every machine has.

    Bytes are tokens, so any encoding will do.

    Raises:
        UsageError: the file is missing, unreadable, empty or too short.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"--text {path} cannot be read ({error.strerror}): give a readable file, or drop --text"
        ) from error
    if len(text) < MIN_TEXT_NBYTES:
        state = "is empty" if not text else f"has {len(text)} bytes"
        raise UsageError(f"--text {path} {state}: give at least {MIN_TEXT_NBYTES} bytes, or drop --text")
    return text
