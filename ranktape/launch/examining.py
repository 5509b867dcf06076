"""Gives `ranktape doctor`: what this machine has of what ranktape needs, and how to get the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.table import Column, Kind, Table
from ranktape.launch.place import CommandAnswer, command_of, count_text
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.launch.machine import Examined

COLUMNS = (
    Column(name="area", kind=Kind.TEXT, is_key=True),
    Column(name="name", kind=Kind.TEXT, is_key=True),
    Column(name="found", kind=Kind.TEXT),
    Column(name="state", kind=Kind.TEXT),
)
"""One row is one thing that was looked at."""


def doctor(url: str | None = None, *, storage_options: Mapping[str, Any] | None = None) -> list[Examined]:
    """Look at what this machine has of what ranktape needs, and say how to get what is missing.

    Versions of Python and packages, backends of torch.distributed, GPUs, the C++ compiler of torch.compile, the
    compiled kernels, memory for the ring. At URL, where one is given, a small object is written, read and removed, and
    each is timed. Exits with 3 when something is lacking that a capture or an analysis needs.
    """
    from ranktape.launch.machine import examine

    return list(examine(url, storage_options=storage_options))


@command_of(doctor)
def command(found: Sequence[Examined], given: Mapping[str, Any]) -> CommandAnswer:  # noqa: ARG001 - its signature
    """One row for each thing; below, what is missing and the way to get it."""
    rows = tuple((one.area, one.name, printable(one.found), one.state.value) for one in found)
    missing = [one for one in found if one.way_out]
    notes = [f"{one.state.value}: {printable(one.name)}: {one.way_out}" for one in missing]
    lacking = [one.name for one in found if one.state.value == "lacking"]
    verdict = "nothing is lacking" if not lacking else f"{count_text(len(lacking), 'thing')} lacking"
    table = Table(title="this machine", columns=COLUMNS, rows=rows, notes=(*notes, verdict), is_whole=True)
    document = {"findings": [dataclasses.asdict(one) for one in found], "lacking": lacking}
    problem = f"{', '.join(map(printable, lacking))}: see the way out above" if lacking else None
    return CommandAnswer(text=table, document=document, problem=problem)
