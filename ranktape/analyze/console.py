"""The one door to stdout and stderr for text of commands, whatever the terminal and whoever wrote the names in it."""

from __future__ import annotations

import json
import sys
from typing import IO, Any

import click

from ranktape.storage.places.failures import printable


def say(text: str, *, err: bool = False) -> None:
    """Write lines to stdout or stderr; control codes, and letters that the terminal lacks, become escapes."""
    click.echo(encodable(printable_lines(text), sys.stderr if err else sys.stdout), err=err)


def say_json(document: Any) -> None:
    """Write one JSON document to stdout; what is not ASCII becomes escapes."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def printable_lines(text: str) -> str:
    """The text with escapes for what a terminal would take as commands; line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def encodable(text: str, stream: IO[str]) -> str:
    """The text with escapes for what the stream cannot write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
