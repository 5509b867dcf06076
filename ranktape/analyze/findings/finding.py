"""Describes one thing that is wrong in a run: how bad it is, what, where, and the evidence."""

from __future__ import annotations

import dataclasses
import enum
import shlex
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
"""Every kind of finding, with the question to ask next and the fields that it is asked about.

Of two kinds at one place the first says more, and is the title."""


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
    """One of `KINDS`."""
    severity: Severity
    score: float
    """How far it is from ordinary, comparable within a kind; larger is worse."""
    title: str
    """What and where, in one sentence."""
    evidence: str
    """The numbers that say so, beside those of the peers."""
    where: Mapping[str, Any]
    """The fields of records, and `sample` or `channel`, that name the place."""
    places: tuple[int, ...]
    """Rows of the selection that show it, the worst first; of NaN and infinities the earliest."""
    place: str = ""
    """Where, in the words that begin the title."""
    metric: str = ""
    """The metric that is judged; empty where there is none."""
    value: float | None = None
    """That metric at the worst place; None where there is none."""
    expected: float | None = None
    """The median of the same metric over the peers; None where there are none."""
    deviation: float | None = None
    """How far the value is from the peers, in MADs made comparable to standard deviations: the robust z."""
    binades: float | None = None
    """How far the value is from the peers, in powers of two; None for metrics that are not on such a scale."""
    consequences: tuple[str, ...] = ()
    """The titles of all findings that follow from this one, the nearest first."""
    alike: tuple[str, ...] = ()
    """The titles of findings of the same kind at other places, which none of them explains."""
    followed_by: tuple[int, ...] = ()
    """For each consequence the row that shows it worst; none where they are not seen in records."""
    command: str = ""
    """The command that looks closer, with RUN for the run."""

    @property
    def reason(self) -> str:
        """What the title says of the place."""
        return self.title.removeprefix(self.place).strip()

    def command_in(self, url: str) -> str:
        """The command that looks closer, to be pasted into a terminal; RUN stays where there is no URL."""
        return printable(self.command.replace(" RUN", f" {shlex.quote(url or 'RUN')}", 1))


def merged(found: Sequence[tuple[SourcePart, Finding]]) -> list[Finding]:
    """The findings of several sources: those of one kind at one place are one, the worst; the worst first."""
    groups: dict[tuple[str, str], list[tuple[SourcePart, Finding]]] = {}
    for part, one in found:
        groups.setdefault((one.kind, one.place), []).append((part, one))
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
                places=tuple(place for other, one in group for place in other.places[list(one.places)].tolist()),
                followed_by=tuple(part.places[list(worst.followed_by)].tolist()),
                command=worst.command and worst.command_in(part.records.reader.url),
            )
        )
    kinds = list(KINDS)
    return sorted(merged_findings, key=lambda one: (one.severity.order, kinds.index(one.kind), -one.score))


def headline(findings: Sequence[Finding], *, num_records: int) -> str:
    """What was found, in one sentence."""
    if not findings:
        return f"Nothing stands out in {num_records:,} record{'' if num_records == 1 else 's'}."
    severities = [finding.severity for finding in findings]
    parts = [f"{severities.count(one)} {one.value}" for one in dict.fromkeys(severities)]
    verb = "thing stands out" if len(findings) == 1 else "things stand out"
    return f"{len(findings):,} {verb}: {', '.join(parts)}."


def finding_of(
    survey: Survey, *, places: Sequence[int] | NDArray[Any], kind: str, score: float, text: str, **known: Any
) -> Finding:
    """A finding about records of one place of the model; `text` is the sentence that follows the place.

    `sample` or `channel` says which one it is about, and `options` are those of the command; all else is as in
    `Finding`.
    """
    chosen = [int(place) for place in places]
    where = _where(survey, chosen) | {name: known.pop(name) for name in ("sample", "channel") if name in known}
    place = _place(survey, chosen, where)
    known |= {"title": f"{place} {text}", "command": _command(survey, kind, where, known.pop("options", {}))}
    return Finding(kind=kind, score=float(score), where=where, places=tuple(chosen), place=place, **known)


def far_finding(
    survey: Survey,
    *,
    peers: str,
    seen: str,
    value: float,
    deviation: float,
    binades: float,
    text: str = "",
    **known: Any,
) -> Finding:
    """A metric that is far from that of its peers; `seen` ends the evidence, and says in how many records it is."""
    metric, expected = known["metric"], value / 2.0**binades
    sentence = text or f"has an {metric} of {factor_text(binades)} times that of {peers}"
    beside = f"{peers} {number_text(expected)}: {number_text(abs(binades))} binades"
    return finding_of(
        survey,
        score=abs(binades),
        text=sentence.replace("an rms", "an RMS").replace(" in rms", " in RMS"),
        evidence=f"{metric} {number_text(value)}, {beside}, robust z {number_text(abs(deviation))}; {seen}",
        **known | {"value": value, "expected": expected, "deviation": deviation, "binades": binades},
    )


def records_text(count: int) -> str:
    """`1 record` or `7 records`."""
    return f"{count} record" if count == 1 else f"{count} records"


def number_text(value: float) -> str:
    """A number as sentences have it."""
    return f"{value:.4g}"


def percent_text(ratio: float) -> str:
    """A part of a whole in percent; only a true zero is 0, and only a true whole is 100."""
    text = f"{100 * ratio:.3g} %"
    return "<100 %" if text == "100 %" and ratio < 1 else text


def factor_text(binades: float) -> str:
    """A factor as people say it, `20`, `4,096` or `1/8`; beyond a million as a power of two."""
    if abs(binades) > 20:  # noqa: PLR2004 - more digits cannot be read
        return f"2^{binades:.0f}"
    factor = 2.0 ** abs(binades)
    text = f"{factor:.2g}" if factor < 99.5 else f"{float(f'{factor:.4g}'):,.0f}"  # noqa: PLR2004 - two digits
    return text if binades >= 0 else f"1/{text}"


def _where(survey: Survey, places: list[int]) -> dict[str, Any]:
    """The fields in which all of the records agree; several ranks, or iterations, as a list of `ranks`."""
    found: dict[str, Any] = {}
    for name in IDENTITY:
        values = list(dict.fromkeys(survey.fields[name][places].tolist()))
        if len(values) == 1 and name not in {"attempt", "dtype", "compute_dtype", "shape"}:
            found[name] = json_value(values[0])
        elif len(values) > 1 and name in {"rank", "iteration"}:
            found[f"{name}s"] = sorted(int(value) for value in values)
    return found


def _command(survey: Survey, kind: str, where: Mapping[str, Any], options: Mapping[str, str]) -> str:
    question, fields = KINDS[kind]
    needless = {"layer_stack", "layer_idx"} if where.get("module") else {"module"}
    needless |= set() if survey.has_many_stacks else {"layer_stack"}
    needless |= set() if survey.has_many_quant_types else {"quant_type"}
    known = {name: where[name] for name in fields if name in where and name not in needless} | dict(options)
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in known.items()]
    return " ".join(["ranktape analyze", question, *words])


def _place(survey: Survey, places: list[int], where: Mapping[str, Any]) -> str:
    """The place in words: `layers.2.query weight on rank 1`."""
    if "module" in where:
        fields = {name: survey.fields[name][places[0]] for name in ("module", "layer_idx", "layer_type", "tensor_name")}
        module, layer = str(fields["module"]), int(fields["layer_idx"])
        named = module or (f"layer {layer} {fields['layer_type']}" if layer >= 0 else str(fields["layer_type"]))
        if module.replace(".", "").isdigit():
            named = f"module {module}"
        words = [named, str(fields["tensor_name"])]
        is_layer_unsaid = module and layer >= 0 and str(layer) not in module.split(".")
        details = [f"layer {layer}"] if is_layer_unsaid else []
    else:
        modules = list(dict.fromkeys(survey.fields["module"][places].tolist()))
        names = set(survey.fields["tensor_name"][places].tolist())
        of = f"{len(modules)} modules, {modules[0] or '(no module)'} first,"
        if not any(modules):
            of = survey.numbered("layer_idx", places)
        words, details = [f"{names.pop() if len(names) == 1 else f'{len(names)} tensors'} of {of}"], []
    if survey.has_many_quant_types and "quant_type" in where:
        details.append(str(where["quant_type"]))
    if details:
        words.append(f"({', '.join(details)})")
    words += [f"{name} {where[name]}" for name in ("sample", "channel") if name in where]
    num_ranks = int(survey.num_ranks[places[0]])
    if num_ranks > 1 and len(set(survey.fields["rank"][places].tolist())) >= num_ranks:
        words.append("on all ranks")
    elif num_ranks > 1 or survey.has_many_ranks:
        words.append(f"on {survey.numbered('rank', places)}")
    return " ".join(words)
