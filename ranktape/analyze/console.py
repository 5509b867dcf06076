"""How does text reach a terminal that does not have all its letters?"""

from __future__ import annotations

import sys
from typing import IO

import click


def say(text: str, *, err: bool = False) -> None:
    """Write a line to stdout or stderr; letters that the terminal lacks become escapes."""
    click.echo(encodable(text, sys.stderr if err else sys.stdout), err=err)


def encodable(text: str, stream: IO[str]) -> str:
    """The text with escapes for what the stream cannot write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
