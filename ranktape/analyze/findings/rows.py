"""Gives findings as tables have them: the columns that say what stands out, where, and by how much."""

from __future__ import annotations

from typing import Any

from ranktape.analyze.findings.finding import Finding
from ranktape.analyze.table import Column, Kind

FIELDS = ("layer_stack", "layer_idx", "layer_type", "module", "operation", "tensor_name", "sample", "channel")
"""What of the place has a column of its own beside the iteration and the ranks."""

COLUMNS = (
    Column(name="kind", kind=Kind.TEXT),
    Column(name="where", kind=Kind.TEXT),
    Column(name="source", kind=Kind.TEXT, is_detail=True),
    Column(name="iteration", kind=Kind.INTEGER, is_detail=True),
    Column(name="ranks", kind=Kind.LIST, is_detail=True),
    Column(name="layer_stack", kind=Kind.TEXT, is_detail=True),
    Column(name="layer_idx", kind=Kind.INTEGER, is_detail=True),
    Column(name="layer_type", kind=Kind.TEXT, is_detail=True),
    Column(name="module", kind=Kind.TEXT, is_detail=True),
    Column(name="operation", kind=Kind.TEXT, is_detail=True),
    Column(name="tensor_name", kind=Kind.TEXT, is_detail=True),
    Column(name="sample", kind=Kind.TEXT, is_detail=True),
    Column(name="channel", kind=Kind.INTEGER, is_detail=True),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="metric", kind=Kind.TEXT),
    Column(name="value", kind=Kind.FLOAT),
    Column(name="expected", kind=Kind.FLOAT, head="median of peers"),
    Column(name="deviation", kind=Kind.FLOAT, head="robust z"),
    Column(name="binades", kind=Kind.FLOAT),
    Column(name="evidence", kind=Kind.TEXT, is_detail=True),
)
"""The columns of a row that is about one finding; its severity stands before them."""


def cells(finding: Finding) -> tuple[Any, ...]:
    """What those columns hold."""
    where = finding.where
    return (
        finding.kind,
        finding.place,
        where.get("source"),
        where.get("iteration"),
        where.get("ranks", [where["rank"]] if "rank" in where else []),
        *(where.get(name) for name in FIELDS),
        len(finding.places),
        finding.metric or None,
        finding.value,
        finding.expected,
        finding.deviation,
        finding.binades,
        finding.evidence,
    )
