"""What is known of something that is wrong in a run: how bad it is, what, where, and the evidence."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Severity(enum.StrEnum):
    """How bad something is, the worst first."""

    HIGH = "high"
    """Numbers are lost or wrong: NaN, Inf, ranks that disagree."""
    MEDIUM = "medium"
    """Something stands out from its peers, or much is below the normal numbers."""
    LOW = "low"
    """Worth knowing before the format becomes narrower."""

    @property
    def order(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong, or stands out.

    Texts may hold names that a stranger gave to a module: who shows them escapes them.
    """

    kind: str
    """What, in a word that programs compare: `overflow`, `replica_differs`, `sample_outlier`, ..."""
    severity: Severity
    """How bad it is."""
    score: float
    """How far it is from ordinary, comparable within a kind; larger is worse."""
    title: str
    """What and where, in one sentence."""
    evidence: str
    """The numbers that say so, beside those of the peers."""
    where: Mapping[str, Any]
    """The fields of records, and `sample` or `channel`, that name the place."""
    places: tuple[int, ...]
    """Where in the selection the records are that show it, the worst first."""
    figure: str = ""
    """The figure that is judged; empty where there is none."""
    value: float | None = None
    """That figure at the worst place; None where there is none."""
    expected: float | None = None
    """The median of the same figure over the peers; None where there are none."""
    deviation: float | None = None
    """How far the value is from the peers, in MADs made comparable to standard deviations: the robust z."""
    octaves: float | None = None
    """How far the value is from the peers, in powers of two; None for figures that are not on such a scale."""
    consequences: tuple[str, ...] = ()
    """The titles of all else that was found and follows from this one, the nearest first."""
    command: str = ""
    """The command that looks closer, with RUN for the run."""
