"""What shows in one place that something is wrong, before it is known whether something else is the cause."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.identity import IDENTITY
from ranktape.analyze.table import json_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey

_MAX_NAMED = 8
"""Ranks, or iterations, that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The number that stands out, and those that it stands out from."""

    figure: str
    """Which figure it is."""
    value: float
    """It itself."""
    expected: float | None = None
    """The median of its peers."""
    deviation: float | None = None
    """The robust z."""
    octaves: float | None = None
    """How far it is from them in powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Something that stands out in records of one place of the model."""

    kind: str
    """As `Finding.kind`."""
    severity: Severity
    """How bad it is."""
    score: float
    """As `Finding.score`."""
    text: str
    """What, in words that follow the place: `is all zero`."""
    evidence: str
    """The numbers."""
    positions: tuple[int, ...]
    """The records that show it, the worst first."""
    judgement: Judgement | None = None
    """The number that it is about; None where it is none."""
    ranks: frozenset[int] = frozenset()
    """The ranks of those records: which of them are wrong is not known, where there are several."""
    extra: dict[str, int | str] = field(default_factory=dict)
    """`sample`, or `channel`, where it is about one."""


def sign_of(
    survey: Survey,
    *,
    kind: str,
    severity: Severity,
    score: float,
    text: str,
    evidence: str,
    positions: Sequence[int] | NDArray[Any],
    judgement: Judgement | None = None,
    extra: dict[str, int | str] | None = None,
) -> Sign:
    """A sign with the ranks of its records."""
    chosen = tuple(int(position) for position in positions)
    ranks = frozenset(survey.fields["rank"][list(chosen)].tolist())
    return Sign(
        kind=kind,
        severity=severity,
        score=float(score),
        text=text,
        evidence=evidence,
        positions=chosen,
        judgement=judgement,
        ranks=ranks,
        extra=extra or {},
    )


def first_of(survey: Survey, sign: Sign) -> int:
    """Which of the records of a sign was recorded first."""
    return min(sign.positions, key=lambda position: when(survey, position))


def when(survey: Survey, position: int) -> tuple[int, int, int]:
    """When a record was made: its attempt, its iteration, and the order within its rank."""
    fields = survey.fields
    return int(fields["attempt"][position]), int(fields["iteration"][position]), int(survey.order[position])


def finding_of(survey: Survey, sign: Sign, *, consequences: Sequence[str] = (), severity: Severity) -> Finding:
    """The sign as a finding."""
    judged = sign.judgement
    return Finding(
        kind=sign.kind,
        severity=severity,
        score=sign.score,
        title=title_of(survey, sign),
        evidence=sign.evidence,
        where=where_of(survey, sign),
        places=sign.positions,
        figure="" if judged is None else judged.figure,
        value=None if judged is None else judged.value,
        expected=None if judged is None else judged.expected,
        deviation=None if judged is None else judged.deviation,
        octaves=None if judged is None else judged.octaves,
        consequences=tuple(consequences),
        command=command_of(survey, sign),
    )


def where_of(survey: Survey, sign: Sign) -> dict[str, Any]:
    """The fields in which all records of a sign agree, and what it is about beside them.

    Several ranks, or iterations, are a list under `ranks`, or `iterations`.
    """
    chosen = list(sign.positions)
    found: dict[str, Any] = {}
    for name in _PLACE:
        values = list(dict.fromkeys(survey.fields[name][chosen].tolist()))
        if len(values) == 1:
            found[name] = json_value(values[0])
        elif name in {"rank", "iteration"}:
            found[f"{name}s"] = sorted(int(value) for value in values)
    return found | sign.extra


def command_of(survey: Survey, sign: Sign) -> str:
    """The command to go on with, for the run at RUN."""
    where = where_of(survey, sign)
    question, fields = _COMMANDS.get(sign.kind, ("stats RUN", _PLACES))
    needless = {"layer_stack", "layer_idx"} if where.get("module") else {"module"}
    needless |= set() if survey.has_many_stacks else {"layer_stack"}
    needless |= set() if survey.has_many_quant_types else {"quant_type"}
    known = [name for name in fields if name in where and name not in needless]
    words = [f"--{name.replace('_', '-')} {shlex.quote(str(where[name]))}" for name in known]
    return " ".join(["ranktape analyze", question, *words])


def title_of(survey: Survey, sign: Sign) -> str:
    """The sentence that names the place and says what is wrong there."""
    return f"{place_of(survey, sign)} {sign.text}"


def place_of(survey: Survey, sign: Sign) -> str:
    """The place of a sign in words: `layers.2.query weight on rank 1`."""
    where = where_of(survey, sign)
    first = sign.positions[0]
    module = str(survey.fields["module"][first])
    layer = int(survey.fields["layer_idx"][first])
    is_one_site = "module" in where
    layer_type = str(survey.fields["layer_type"][first])
    named = module or (f"layer {layer} {layer_type}" if layer >= 0 else layer_type)
    if module.replace(".", "").isdigit():
        named = f"module {module}"
    words = [named, str(survey.fields["tensor_name"][first])] if is_one_site else [_several(survey, sign)]
    is_layer_unsaid = is_one_site and module and layer >= 0 and str(layer) not in module.split(".")
    details = [f"layer {layer}"] if is_layer_unsaid else []
    if survey.has_many_quant_types and "quant_type" in where:
        details.append(str(where["quant_type"]))
    if details:
        words.append(f"({', '.join(details)})")
    if "sample" in sign.extra:
        words.append(f"sample {sign.extra['sample']}")
    if "channel" in sign.extra:
        words.append(f"channel {sign.extra['channel']}")
    return " ".join([*words, *_on(survey, sign)])


def named_numbers(word: str, values: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2` or `ranks 0 to 999 (500 of them)`."""
    known = sorted(set(values))
    if len(known) == 1:
        return f"{word} {known[0]}"
    if len(known) <= _MAX_NAMED:
        return f"{word}s {', '.join(map(str, known))}"
    return f"{word}s {known[0]} to {known[-1]} ({len(known)} of them)"


def count_text(count: int, word: str) -> str:
    """`1 record` or `7 records`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def number_text(value: float) -> str:
    """A number as sentences have it."""
    return f"{value:.4g}"


def percent_text(ratio: float) -> str:
    """A part of a whole in percent; only a true zero is 0, and only a true whole is 100."""
    text = f"{100 * ratio:.3g} %"
    return "<100 %" if text == "100 %" and ratio < 1 else text


def factor_text(octaves: float) -> str:
    """A factor as people say it, `20`, `4,096` or `1/8`; beyond a million as a power of two."""
    if abs(octaves) > _MAX_SAID_OCTAVES:
        return f"2^{octaves:.0f}"
    factor = 2.0 ** abs(octaves)
    text = f"{factor:.2g}" if factor < 99.5 else f"{float(f'{factor:.4g}'):,.0f}"  # noqa: PLR2004 - two digits
    return text if octaves >= 0 else f"1/{text}"


_PLACES = ("module", "layer_stack", "layer_idx", "tensor_name", "quant_type")

_COMMANDS = {
    **dict.fromkeys(("nan", "inf", "overflow"), ("trace RUN", ("iteration", "rank"))),
    "sample_outlier": ("trace RUN", ("sample", "iteration", "rank")),
    "gradient_underflow": ("distribution RUN --kind formats", (*_PLACES, "iteration")),
    "rank_differs": ("stats RUN --by iteration,rank", _PLACES),
    "layer_differs": ("stats RUN --neighbours", ("tensor_name", "iteration")),
    "gradient_exploding": ("stats RUN --neighbours", ("tensor_name", "iteration")),
    "gradient_vanishing": ("stats RUN --neighbours", ("tensor_name", "iteration")),
    "trend": ("trend RUN", _PLACES),
}
"""For each kind the question to ask next, and the fields of the place that it takes; others have statistics."""

_MAX_SAID_OCTAVES = 20.0
"""Beyond it a factor has too many digits to be read."""

_PLACE = tuple(name for name in IDENTITY if name not in {"attempt", "dtype", "compute_dtype", "shape"})


def _several(survey: Survey, sign: Sign) -> str:
    chosen = list(sign.positions)
    modules = list(dict.fromkeys(survey.fields["module"][chosen].tolist()))
    names = list(dict.fromkeys(survey.fields["tensor_name"][chosen].tolist()))
    shown = names[0] if len(names) == 1 else f"{len(names)} tensors"
    if not any(modules):
        return f"{shown} of {named_numbers('layer', survey.fields['layer_idx'][chosen].tolist())}"
    return f"{shown} of {len(modules)} modules, {modules[0] or '(no module)'} first,"


def _on(survey: Survey, sign: Sign) -> list[str]:
    """The ranks of a sign, unless it is about all of them."""
    num_ranks = int(survey.num_ranks[sign.positions[0]])
    if num_ranks == 1:
        return [f"on {named_numbers('rank', sign.ranks)}"] if survey.has_many_ranks else []
    return ["on all ranks"] if len(sign.ranks) >= num_ranks else [f"on {named_numbers('rank', sign.ranks)}"]
