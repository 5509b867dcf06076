"""Describes one problem in a run: its severity, its place, and the evidence."""

from __future__ import annotations

import dataclasses
import enum
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.identity import IDENTITY
from ranktape.analyze.table import json_value
from ranktape.storage.places.failures import printable
from ranktape.storage.records.records import SOURCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey
    from ranktape.storage.records.records import SourcePart

_SITE = ("module", "layer_stack", "layer_idx", "tensor_name", "quant_type")
_TRACE = ("trace RUN", ("iteration", "rank"))

KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "triggered": _TRACE,
    "nan": _TRACE,
    "inf": _TRACE,
    "overflow": _TRACE,
    "gradient_underflow": ("distribution RUN --kind formats", (*_SITE, "iteration")),
    "sample_outlier": ("trace RUN", ("sample", "iteration", "rank")),
    "rank_differs": ("stats RUN --by iteration,rank", _SITE),
    "replica_differs": ("compare RUN --in-order", _SITE),
    "layer_differs": ("stats RUN --neighbours", ("tensor_name", "iteration")),
    "channel_outlier": ("stats RUN", _SITE),
    "zero": ("stats RUN", _SITE),
}
"""Every kind of finding, with the command that gives details and the fields that the command filters by.

If two kinds occur at one place, the one listed first is more informative and gives the title."""


class Severity(enum.StrEnum):
    """The severity of a finding, the worst first."""

    HIGH = "high"
    """Numbers are lost or wrong: NaN, Inf, ranks that disagree."""
    MEDIUM = "medium"
    """A value is far from its peers, or many values are subnormal."""
    LOW = "low"
    """Worth knowing before a narrower format is used."""

    @property
    def order(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A value that is wrong, or far from its peers.

    The texts can contain module names from an untrusted source: escape them for display.
    """

    kind: str
    """One of `KINDS`."""
    severity: Severity
    score: float
    """The size of the deviation, comparable within a kind; larger is worse."""
    title: str
    """The place and the problem, in one sentence."""
    evidence: str
    """The numbers that show the problem, with those of the peers."""
    where: Mapping[str, Any]
    """The fields of records, and `sample` or `channel`, that identify the place."""
    places: tuple[int, ...]
    """Rows of the selection that show it, the worst first; for NaN and infinities, the earliest first."""
    place: str = ""
    """The place, as written at the start of the title."""
    metric: str = ""
    """The metric that is judged; empty if there is none."""
    value: float | None = None
    """The metric at the worst place; None if there is no metric."""
    expected: float | None = None
    """The median of the metric over the peers; None if there are no peers."""
    deviation: float | None = None
    """The robust z: the distance of the value from its peers, in MADs scaled to standard deviations."""
    binades: float | None = None
    """The distance of the value from its peers, in powers of two; None for metrics without such a scale."""
    consequences: tuple[str, ...] = ()
    """The titles of all findings that follow from this one, the nearest first."""
    alike: tuple[str, ...] = ()
    """The titles of findings of the same kind at other places that do not explain one another."""
    followed_by: tuple[int, ...] = ()
    """For each consequence, the row that shows it worst; empty if the consequences are not in records."""
    command: str = ""
    """The command that gives details, with RUN as a placeholder for the run."""

    @property
    def reason(self) -> str:
        """The title without the place."""
        return self.title.removeprefix(self.place).strip()

    def command_in(self, url: str) -> str:
        """The command that gives details, ready for a terminal. If the URL is empty, RUN is not replaced."""
        return printable(self.command.replace(" RUN", f" {shlex.quote(url or 'RUN')}", 1))


def merged(findings: Sequence[tuple[SourcePart, Finding]]) -> list[Finding]:
    """The findings of several sources, the worst first. Those of one kind at one place become one, the worst."""
    groups: dict[tuple[str, str], list[tuple[SourcePart, Finding]]] = {}
    for part, finding in findings:
        groups.setdefault((finding.kind, finding.place), []).append((part, finding))
    merged_findings = []
    for group in groups.values():
        group.sort(key=lambda pair: (pair[1].severity.order, -pair[1].score))
        part, worst = group[0]
        names = ", ".join(dict.fromkeys(other.name for other, _ in group))
        merged_findings.append(
            dataclasses.replace(
                worst,
                title=f"{names}: {worst.title}",
                place=f"{names}: {worst.place}",
                where={SOURCE: names, **worst.where},
                places=tuple(row for other, finding in group for row in other.places[list(finding.places)].tolist()),
                followed_by=tuple(part.places[list(worst.followed_by)].tolist()),
                command=worst.command and worst.command_in(part.records.reader.url),
            )
        )
    kinds = list(KINDS)
    return sorted(
        merged_findings, key=lambda finding: (finding.severity.order, kinds.index(finding.kind), -finding.score)
    )


def headline(findings: Sequence[Finding], *, num_records: int) -> str:
    """The number of findings of each severity, in one sentence."""
    if not findings:
        return f"No findings in {num_records:,} record{'' if num_records == 1 else 's'}."
    severities = [finding.severity for finding in findings]
    parts = [f"{severities.count(severity)} {severity.value}" for severity in dict.fromkeys(severities)]
    noun = "finding" if len(findings) == 1 else "findings"
    return f"{len(findings):,} {noun}: {', '.join(parts)}."


def make_finding(
    survey: Survey, *, places: Sequence[int] | NDArray[Any], kind: str, score: float, text: str, **fields: Any
) -> Finding:
    """A finding about records of one place in the model; `text` is the rest of the title, after the place.

    `sample` or `channel` adds that index to `where`, and `options` are options of the command. All other arguments
    are fields of `Finding`.
    """
    chosen = [int(row) for row in places]
    where = _where(survey, chosen) | {name: fields.pop(name) for name in ("sample", "channel") if name in fields}
    row = _place_text(survey, chosen, where)
    fields |= {"title": f"{row} {text}", "command": _command(survey, kind, where, fields.pop("options", {}))}
    return Finding(kind=kind, score=float(score), where=where, places=tuple(chosen), place=row, **fields)


def deviation_finding(
    survey: Survey,
    *,
    peers: str,
    occurrences: str,
    value: float,
    deviation: float,
    binades: float,
    text: str = "",
    **fields: Any,
) -> Finding:
    """A finding about a metric that is far from that of its peers; `occurrences` is the end of the evidence."""
    metric, expected = fields["metric"], divide_by_binades(binades, value)
    sentence = text or f"has an {metric} of {factor_text(binades)} times that of {peers}"
    peer_text = f"{peers} {number_text(expected)}: {number_text(abs(binades))} binades"
    return make_finding(
        survey,
        score=abs(binades),
        text=sentence.replace("an rms", "an RMS").replace(" in rms", " in RMS"),
        evidence=f"{metric} {number_text(value)}, {peer_text}, robust z {number_text(abs(deviation))}; {occurrences}",
        **fields | {"value": value, "expected": expected, "deviation": deviation, "binades": binades},
    )


def divide_by_binades(binades: float, value: float) -> float:
    """A positive number divided by 2**binades, even if that exceeds float64; the largest float64 if it overflows."""
    mantissa, exponent = math.frexp(value)
    integer = math.floor(binades)
    try:
        return math.ldexp(mantissa / 2.0 ** (binades - integer), exponent - integer)
    except OverflowError:
        return sys.float_info.max


def records_text(count: int) -> str:
    """`1 record` or `7 records`."""
    return f"{count} record" if count == 1 else f"{count} records"


def number_text(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def percent_text(ratio: float) -> str:
    """A ratio in percent; 0 % and 100 % only if it is exactly 0 or 1."""
    text = f"{100 * ratio:.3g} %"
    return "<100 %" if text == "100 %" and ratio < 1 else text


def factor_text(binades: float) -> str:
    """A factor as `20`, `4,096` or `1/8`; above a million, or below a millionth, as a power of two."""
    if abs(binades) > 20:  # noqa: PLR2004 - more digits cannot be read
        return f"2^{binades:.0f}"
    factor = 2.0 ** abs(binades)
    text = f"{factor:.2g}" if factor < 99.5 else f"{float(f'{factor:.4g}'):,.0f}"  # noqa: PLR2004 - two digits
    return text if binades >= 0 else f"1/{text}"


def _where(survey: Survey, places: list[int]) -> dict[str, Any]:
    """The fields in which all records agree; several ranks or iterations as lists, `ranks` and `iterations`."""
    where: dict[str, Any] = {}
    for name in IDENTITY:
        values = list(dict.fromkeys(survey.fields[name][places].tolist()))
        if len(values) == 1 and name not in {"attempt", "dtype", "compute_dtype", "shape"}:
            where[name] = json_value(values[0])
        elif len(values) > 1 and name in {"rank", "iteration"}:
            where[f"{name}s"] = sorted(int(value) for value in values)
    return where


def _command(survey: Survey, kind: str, where: Mapping[str, Any], options: Mapping[str, str]) -> str:
    question, fields = KINDS[kind]
    needless = {"layer_stack", "layer_idx"} if where.get("module") else {"module"}
    needless |= set() if survey.has_many_stacks else {"layer_stack"}
    needless |= set() if survey.has_many_quant_types else {"quant_type"}
    filters = {name: where[name] for name in fields if name in where and name not in needless} | dict(options)
    arguments = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in filters.items()]
    return " ".join(["ranktape analyze", question, *arguments])


def _place_text(survey: Survey, places: list[int], where: Mapping[str, Any]) -> str:
    """The place as text, such as `layers.2.query weight on rank 1`."""
    if "module" in where:
        fields = {name: survey.fields[name][places[0]] for name in ("module", "layer_idx", "layer_type", "tensor_name")}
        module, layer = str(fields["module"]), int(fields["layer_idx"])
        named = module or (f"layer {layer} {fields['layer_type']}" if layer >= 0 else str(fields["layer_type"]))
        if module.replace(".", "").isdigit():
            named = f"module {module}"
        parts = [named, str(fields["tensor_name"])]
        is_layer_missing = module and layer >= 0 and str(layer) not in module.split(".")
        details = [f"layer {layer}"] if is_layer_missing else []
    else:
        modules = list(dict.fromkeys(survey.fields["module"][places].tolist()))
        names = set(survey.fields["tensor_name"][places].tolist())
        owner = f"{len(modules)} modules, {modules[0] or '(no module)'} first,"
        if not any(modules):
            owner = survey.numbered("layer_idx", places)
        parts, details = [f"{names.pop() if len(names) == 1 else f'{len(names)} tensors'} of {owner}"], []
    if survey.has_many_quant_types and "quant_type" in where:
        details.append(str(where["quant_type"]))
    if details:
        parts.append(f"({', '.join(details)})")
    parts += [f"{name} {where[name]}" for name in ("sample", "channel") if name in where]
    num_ranks = int(survey.num_ranks[places[0]])
    if num_ranks > 1 and len(set(survey.fields["rank"][places].tolist())) >= num_ranks:
        parts.append("on all ranks")
    elif num_ranks > 1 or survey.has_many_ranks:
        parts.append(f"on {survey.numbered('rank', places)}")
    return " ".join(parts)
