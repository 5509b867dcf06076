"""Gives the kinds of words that command lines take: paths with a name, JSON objects, and any number of sources."""

from __future__ import annotations

import os
from typing import Any

import click

from ranktape.storage.places.urls import parse_storage_options


class NamedPath(click.Path):
    """A path on the command line; an empty one, which would be the working directory, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, if it has a name."""
        if not os.fspath(value):
            self.fail("an empty path is not allowed: give a name, or . for the working directory", param, ctx)
        return super().convert(value, param, ctx)


class JsonObject(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """The options of a store on the command line; what they hold is shown in no message."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """The object.

        Raises:
            UsageError: it is none.
        """
        return parse_storage_options(value) if isinstance(value, str) else value


class SourcesArgument(click.Argument):
    """One or more sources: all words but those of the arguments after them."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The sources; where none is left, what the user left out is the last argument, which took the one word."""
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter as error:
            error.param = [one for one in ctx.command.params if isinstance(one, click.Argument)][-1]
            raise
