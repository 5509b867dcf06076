"""The entry point of `python -m ranktape.analyze`."""

from __future__ import annotations

from ranktape.analyze.cli import cli

if __name__ == "__main__":
    cli(prog_name="python -m ranktape.analyze")
