"""Finds what a tensor's own values say: NaN, infinities, zeros, and gradients that underflow."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.metrics import NARROW_FORMAT, SATURATING
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import (
    Finding,
    Severity,
    finding_of,
    named_numbers,
    number_text,
    percent_text,
    records_text,
)
from ranktape.analyze.findings.survey import Codes, Floats, Mask, Survey, codes_of, medians_of, members_of
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.storage.format.dtypes import dtype_row

_SMALLEST = {row.min_subnormal: row.name for row in reversed(FORMATS.values())}
"""Formats by their smallest number; of those that share it the best known."""


def spoiled(survey: Survey) -> Iterator[Finding]:
    """NaN, infinities, values beyond the type that was computed with, and zeros: one for each place."""
    yield from lost(survey)
    counts = survey.asked("saturated", np.isin(survey.dtypes, list(SATURATING))).astype(np.int64)
    mask = (survey.shares(counts) > limit.MIN_SATURATED_RATIO) & (counts > 1)
    cut_off = "values cut off at the largest number of {seen}"
    for places in survey.by_site(mask, survey.shares(counts)):
        yield _counted(survey, counts, places, "overflow", cut_off, severity=Severity.MEDIUM)
    yield from _zero(survey)
    yield from _unused(survey)


def lost(survey: Survey) -> Iterator[Finding]:
    """What no metric of finite values shows: NaN, infinities, and what the type that was computed with made so."""
    nan, inf, captured = (survey.counts[name] for name in ("nan", "inf", "captured_inf"))
    is_new = (inf > captured) & (survey.fields["dtype"] != survey.dtypes) & survey.is_floating & ~survey.is_mask
    is_captured = (captured > 0) & survey.is_floating
    for places in survey.by_site(is_captured, survey.shares(captured)):
        if survey.is_mask[places].all():
            is_captured[places] = False
            yield _counted(survey, captured, places, "inf", "-Inf, as masks do", severity=Severity.LOW)
    # One finding for each place and each time that it began: after an iteration in which all is finite it is another.
    episodes = survey.episodes((nan > 0) | is_captured | is_new)[survey.times]
    for counts, mask, kind, what in (
        (nan, nan > 0, "nan", "NaN"),
        (captured, is_captured, "inf", "Inf"),
        (inf - captured, is_new, "overflow", "values beyond {seen}, which it was computed in"),
    ):
        for places in survey.by_site(mask, survey.shares(counts)):
            for number in np.unique(episodes[places]):
                yield _counted(survey, counts, places[episodes[places] == number], kind, what)


def _counted(
    survey: Survey, counts: Codes, places: Codes, kind: str, what: str, *, severity: Severity = Severity.HIGH
) -> Finding:
    """Records of one place, by the part of its elements that is counted."""
    times = survey.times[places]
    # What is lost spreads: where it begins is the place, and all others are counted.
    is_first = times == times.min()
    beginning = places[is_first]
    worst = int(beginning[0])
    elements = int(survey.metrics["elements"][worst])
    ratio = float(counts[worst] / max(1, elements))
    is_beyond = kind == "inf" and severity is Severity.HIGH
    more = f"; beyond the largest number of {survey.fields['dtype'][worst]}" if is_beyond else ""
    ranks = named_numbers("rank", survey.fields["rank"][beginning].tolist())
    skipped = set(survey.fields["iteration"][places[survey.skipped_times[times]]].tolist())
    if skipped:
        steps = "the step" if len(skipped) == 1 else "the steps"
        more += f"; the gradient scaler skipped {steps} of {named_numbers('iteration', skipped)}"
    found = finding_of(
        survey,
        places=beginning,
        kind=kind,
        severity=severity,
        score=ratio,
        text=f"has {what.format(seen=survey.dtypes[worst])}",
        evidence=(
            f"{int(counts[worst])} of {elements} elements ({percent_text(ratio)}) at worst{more}; first in iteration "
            f"{int(survey.fields['iteration'][worst])} on {ranks}, in {records_text(len(places))} in all"
        ),
        metric=f"overflow.{'nan.' if kind == 'nan' else ''}ratio",
        value=ratio,
    )
    return dataclasses.replace(found, places=(*found.places, *places[~is_first].tolist()))


def _zero(survey: Survey) -> Iterator[Finding]:
    """Places that are all zero in some record; gradients are judged by `underflowing`."""
    elements, iterations = survey.metrics["elements"], survey.fields["iteration"]
    mask = (survey.counts["zero"] == elements) & (elements > 0) & survey.is_floating & ~survey.is_gradient
    for places in survey.by_site(mask, -iterations):
        alike = survey.sites == survey.sites[places[0]]
        others = iterations[alike & ~mask]
        peers = (survey.roles == survey.roles[places[0]]) & ~alike
        # A layer of several that is always zero is none that is meant, if no other one ever is.
        is_alone = not others.size and np.unique(survey.sites[peers]).size > 1 and not mask[peers].any()
        # What is always zero, or begins so as what comes out of an adapter, is that by right.
        is_ordinary = not is_alone and (not others.size or iterations[places].max() < others.min())
        # Biases and the second matrix of an adapter begin as zeros.
        if is_ordinary and survey.is_weight[places[0]]:
            continue
        yield finding_of(
            survey,
            places=places,
            kind="zero",
            severity=Severity.LOW if is_ordinary else Severity.MEDIUM,
            score=len(places),
            text="is all zero",
            evidence=(
                f"{len(places)} of {int(alike.sum())} records of this place have no other value"
                + ", and none of other layers is all zero" * is_alone
            ),
            metric="absmax",
            value=0.0,
        )


def _unused(survey: Survey) -> Iterator[Finding]:
    """Modules that were given tensors without elements in all of their calls, as experts without a token."""
    is_activation = (survey.fields["operation"] == "forward") & survey.is_floating & ~survey.is_weight
    has_none = is_activation & (survey.metrics["elements"] == 0)
    modules = survey.codes("module")
    never = is_activation & has_none & ~np.isin(modules, modules[is_activation & ~has_none])
    if not (is_activation & ~has_none).any():
        return
    chosen = np.flatnonzero(never)
    for part in members_of(modules[chosen], survey.times[chosen], survey.order[chosen]):
        places = chosen[part]
        first = places[survey.sites[places] == survey.sites[places[0]]]
        iterations = named_numbers("iteration", survey.fields["iteration"][first].tolist())
        yield finding_of(
            survey,
            places=first,
            kind="zero",
            severity=Severity.LOW,
            score=len(first),
            text="has no element in any record: no token was sent to this module",
            evidence=f"{records_text(len(first))} of {iterations}, all of them empty",
            metric="elements",
            value=0.0,
        )


def underflowing(survey: Survey) -> Iterator[Finding]:
    """One for each place whose gradient underflows in its own type, and for each kind that 8 bits would flush.

    What was flushed already is zero. Rounding made the zeros where many of the other values are just above a smallest
    one; else masks, ReLU or tokens without a loss may have. A gradient that is nothing but zeros is lost if the layer's
    tensors of the forward pass are not, or the same gradient of other layers; that of a module without tokens is empty,
    and where all gradients of a backward pass are zero, it had no loss.
    """
    underflow = _Underflow(survey)
    yield from underflow.silent_passes()
    yield from underflow.findings()
    yield from _too_wide(survey)


class _Underflow:
    """Parts of each record that are small or zero, and what would be usual."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._subnormal = survey.shares(survey.counts["underflow"])
        self._zeros = survey.shares(survey.counts["zero"])
        is_judged = survey.is_gradient & survey.is_floating & ~_is_unreached(survey) & (survey.metrics["elements"] > 0)
        self._passes = survey.codes("attempt", "iteration", "rank", "microbatch")
        self._is_silent = is_judged & self._are_silent(is_judged, self._passes)
        self._is_judged = is_judged & (~self._is_silent | self._are_silent(is_judged, survey.times))
        # Zeros in that layer of the same kind which has the fewest, up to the iteration of the record.
        self._by_peers = _least_of_layers(survey, self._zeros, self._is_judged)
        # Zeros in that tensor of the forward pass of the same layer which has the most; NaN where none is known.
        self._by_forward = _most_of_forward(survey, self._zeros)

    def _are_silent(self, is_judged: Mask, groups: Codes) -> Mask:
        """Of passes, or iterations, whether all gradients of several modules are zero."""
        chosen = np.flatnonzero(is_judged)
        size = int(groups.max(initial=0)) + 1
        has_value = np.bincount(groups[chosen], weights=self._zeros[chosen] < 1, minlength=size) > 0
        modules = np.unique(np.column_stack((groups, self._survey.codes("module")))[chosen], axis=0)[:, 0]
        has_several = np.bincount(modules.astype(np.int64), minlength=size) > 1
        return (~has_value & has_several)[groups]

    def silent_passes(self) -> Iterator[Finding]:
        """One for all backward passes without a gradient in iterations in which others have some."""
        survey, silent = self._survey, np.flatnonzero(self._is_silent & ~self._is_judged)
        if not silent.size:
            return
        num_silent, num_passes = (len(np.unique(self._passes[one])) for one in (silent, survey.is_gradient))
        fields = {name: survey.fields[name][silent].tolist() for name in ("microbatch", "iteration", "rank")}
        where = ", ".join(named_numbers(name, values) for name, values in fields.items())
        # Labels may be missing by chance, but not each time.
        always, num_times = self._always_silent()
        severity, often = Severity.LOW, ""
        if always.size:
            severity = Severity.HIGH if num_times >= limit.MIN_SILENT_ITERATIONS else Severity.MEDIUM
            named = (named_numbers(name, survey.fields[name][always].tolist()) for name in ("rank", "microbatch"))
            often = f"; so in every iteration of {', '.join(named)}"
        yield finding_of(
            survey,
            places=silent,
            kind="zero",
            severity=severity,
            score=num_silent,
            text=(
                f"are all zero in {num_silent} of {num_passes} backward passes: no loss reached any layer there{often}"
            ),
            evidence=f"every gradient of these passes is zero, as of microbatches without labels; {where}",
            metric="silent passes",
            value=float(num_silent),
            options={"tensor_name": "grad_*", "by": "iteration,rank,microbatch", "metric": "absmax"},
        )

    def _always_silent(self) -> tuple[Codes, int]:
        """Gradients of the ranks and microbatches that have none in several iterations and all, and how many these are.

        Where it is so for different numbers of iterations, the largest of them.
        """
        survey, times = self._survey, self._survey.times
        is_asked = self._is_judged | self._is_silent
        # An iteration without any gradient says nothing of one rank.
        is_asked &= ~self._are_silent(is_asked, times)
        found, most = [], 0
        chosen = np.flatnonzero(is_asked)
        for part in members_of(survey.codes("rank", "microbatch")[chosen]):
            places = chosen[part]
            num_times = np.unique(times[places]).size
            if num_times > 1 and self._is_silent[places].all():
                found.append(places)
                most = max(most, num_times)
        return (np.concatenate(found) if found else chosen[:0]), most

    def findings(self) -> Iterator[Finding]:
        """Values that are subnormal, or zero by rounding; then gradients that are nothing else, or more than others."""
        survey, zeros, is_judged = self._survey, self._zeros, self._is_judged
        is_more = is_judged & (zeros - self._by_peers > limit.ZERO_EXCESS)
        beyond_forward = zeros - self._by_forward
        is_beyond = zeros - np.nan_to_num(self._by_forward) > limit.FLUSHED_RATIO
        is_rounded = _is_floored(survey, is_judged & is_beyond, is_more)
        is_empty = is_judged & (zeros == 1) & (is_more | (beyond_forward > limit.ZERO_EXCESS))
        is_small = is_judged & (self._subnormal > limit.LOST_RATIO)
        is_sparse = is_more & ~is_rounded & ~is_empty & ~is_small
        # Where nothing is left of other records of the place, or rounding made their zeros, it made these, too.
        is_of_lost = is_sparse & np.isin(survey.sites, survey.sites[is_rounded | is_empty])
        parts = self._subnormal + np.where(is_rounded | is_empty | is_of_lost, zeros, 0.0)
        for places in survey.by_site(is_small | is_rounded | is_empty | is_of_lost, parts):
            marked = places[(is_rounded | is_small)[places]]
            empty = places[is_empty[places]]
            # In one iteration all layers alike may begin with zeros.
            is_alone = bool((is_more & ~self._is_silent)[empty].any()) or np.unique(survey.times[empty]).size > 1
            is_often = is_alone and self._is_often(empty)
            is_serious = bool(marked.size) and parts[marked[0]] >= limit.LOST_RATIO_SERIOUS
            is_zero = not marked.size or bool(is_rounded[marked[0]])
            yield self._finding(
                places,
                "gradient_underflow",
                Severity.HIGH if is_serious or is_often else Severity.MEDIUM,
                self._rounded(int(marked[0]), empty, is_zero=is_zero) if marked.size else self._empty(empty),
                score=float(parts[places[0]]),
                is_subnormal=not is_zero,
            )
        for places in survey.by_site(is_sparse & ~is_of_lost, zeros):
            yield self._sparse(places)

    def _is_often(self, empty: Codes) -> bool:
        """Whether a place has lost half of its records, or in several iterations half of those of a rank."""
        if not empty.size or 2 * len(empty) >= self._num_records(empty):
            return bool(empty.size)
        survey, ranks = self._survey, self._survey.fields["rank"]
        is_here = self._is_judged & (survey.sites == survey.sites[empty[0]])
        return any(
            2 * len(own) >= int((is_here & (ranks == ranks[own[0]])).sum()) and np.unique(survey.times[own]).size > 1
            for own in (empty[part] for part in members_of(ranks[empty].astype(np.int64)))
        )

    def _num_records(self, places: Codes) -> int:
        return int((self._is_judged & (self._survey.sites == self._survey.sites[places[0]])).sum())

    def _rounded(self, worst: int, empty: Codes, *, is_zero: bool) -> str:
        """What is said of records of which rounding left something, beside those of which it left nothing."""
        survey, said = self._survey, []
        subnormal = float(self._subnormal[worst])
        if is_zero:
            floor = float(survey.metrics["smallest_nonzero"][worst])
            of_format = f", the smallest number of {_SMALLEST[floor]}" if floor in _SMALLEST else ""
            rest = f"all else is at least {number_text(floor)}{of_format}"
            said.append(f"rounding made {percent_text(float(self._zeros[worst]))} of it zero, and {rest}")
        if subnormal > limit.LOST_RATIO:
            said.append(
                f"{percent_text(subnormal)} of it is below the smallest normal number of {survey.dtypes[worst]}"
            )
        if empty.size:
            said.append(f"nothing is left of it in {len(empty)} of {records_text(self._num_records(empty))}")
        return "underflows: " + "; ".join(said)

    def _empty(self, places: Codes) -> str:
        """What is said of records that are nothing but zeros."""
        survey, worst = self._survey, int(places[0])
        num_records = self._num_records(places)
        often = "" if len(places) == num_records else f" in {len(places)} of {records_text(num_records)}"
        if self._is_silent[places].all():
            iterations = named_numbers("iteration", survey.fields["iteration"][places].tolist())
            return f"is all zero{often}, as every gradient of {iterations}: no loss reached them, or all underflowed"
        other = "that of other layers" if self._by_peers[worst] < limit.ZERO_EXCESS else "what its layer computed"
        return f"is all zero{often}, and {other} is not: it underflowed, or nothing reached it"

    def _sparse(self, places: Codes) -> Finding:
        """A gradient with far more zeros than in other layers, of which rounding made some, or none."""
        survey, worst = self._survey, int(places[0])
        part = percent_text(float(self._zeros[worst]))
        num_left = int(survey.metrics["elements"][worst] - survey.counts["zero"][worst])
        is_wide = dtype_row(str(survey.dtypes[worst])).itemsize > 1
        by_right = "tokens without a loss and ReLU have such gradients"
        if num_left * limit.FLOOR_RATIO < limit.MIN_FLOOR_ELEMENTS:
            text = f"is {part} zeros, and {num_left} other values do not tell whether rounding made them"
            return self._finding(places, "gradient_underflow", Severity.MEDIUM, f"{text}: {by_right}, too")
        if is_wide and self._num_coarse(worst) >= limit.COARSE_RATIO * num_left:
            text = (
                f"is {part} zeros, and all else has 4 significant bits at most: rounding to 8 bits may have made them"
            )
            return self._finding(places, "gradient_underflow", Severity.MEDIUM, f"{text}, or {by_right}")
        text = f"is {part} zeros without a mark of rounding: {by_right}"
        return self._finding(places, "zero", Severity.LOW, text)

    def _num_coarse(self, place: int) -> float:
        return float(self._survey.asked("coarse", np.arange(len(self._survey)) == place)[place])

    def _finding(
        self,
        places: Codes,
        kind: str,
        severity: Severity,
        text: str,
        *,
        score: float | None = None,
        is_subnormal: bool = False,
    ) -> Finding:
        """Judged by the part that is zero, or that is subnormal, beside the same gradient in other layers."""
        survey, worst = self._survey, int(places[0])
        is_peer = (survey.roles == survey.roles[worst]) & (survey.sites != survey.sites[worst])

        def usual(ratios: Floats) -> float | None:
            return float(np.median(ratios[is_peer])) if is_peer.any() else None

        zeros, ratios = usual(self._zeros), self._subnormal if is_subnormal else self._zeros
        beside = "" if zeros is None else f", in other layers {percent_text(zeros)}"
        absmax = float(np.nan_to_num(survey.metrics["absmax"][worst]))
        iterations = named_numbers("iteration", survey.fields["iteration"][places].tolist())
        return finding_of(
            survey,
            places=places,
            kind=kind,
            severity=severity,
            score=float(ratios[worst]) if score is None else score,
            text=text,
            evidence=(
                f"zero {percent_text(float(self._zeros[worst]))}{beside}; "
                f"subnormal {percent_text(float(self._subnormal[worst]))}; "
                f"absmax {number_text(absmax)}; in {records_text(len(places))} of {iterations}"
            ),
            metric=f"overflow.{'underflow' if is_subnormal else 'zero'}.ratio",
            value=float(ratios[worst]),
            expected=usual(ratios),
        )


def _is_floored(survey: Survey, mask: Mask, is_more: Mask) -> Mask:
    """Whether values of records in the mask end at a smallest one, as those do that rounding did not make zero.

    A few are enough where there are far more zeros than in other layers, and the smallest one is that of a format.
    """
    floored = survey.asked("floored", mask)
    nonzero = survey.metrics["elements"] - survey.counts["zero"] - survey.counts["nan"]
    is_of_format = np.isin(survey.metrics["smallest_nonzero"], list(_SMALLEST))
    is_enough = (floored >= limit.MIN_FLOOR_ELEMENTS) | (is_more & is_of_format & (floored > 0))
    # One number beside zero may be anything: a mean has such a gradient.
    is_grid: Mask = (floored < nonzero) | is_of_format
    return mask & is_enough & (floored >= limit.FLOOR_RATIO * nonzero) & is_grid


def _most_of_forward(survey: Survey, zeros: Floats) -> Floats:
    fields = survey.fields
    # Outside of the stack a module is a layer of its own.
    layers = np.where(fields["layer_idx"] < 0, fields["module"], "")
    groups = codes_of(layers, survey.codes("attempt", "iteration", "rank", "layer_stack", "layer_idx"))
    # Biases begin as zeros, and a mask may be all zeros: gradients are not zero because of them.
    is_forward = (fields["operation"] == "forward") & survey.is_floating & ~survey.is_weight & ~survey.is_mask
    is_forward &= survey.metrics["elements"] > 0
    most = np.full(int(groups.max(initial=0)) + 1, -1.0)
    np.maximum.at(most, groups[is_forward], zeros[is_forward])
    return np.where(most < 0, np.nan, most)[groups]


def _least_of_layers(survey: Survey, zeros: Floats, mask: Mask) -> Floats:
    """For each record the part of zeros that was usual, up to its iteration, in that layer of its kind with the fewest.

    Up to it: the gradients of an adapter begin as zeros in all layers, and that they do so once more is worth a word.
    """
    found = np.zeros(len(survey))
    chosen = np.flatnonzero(mask & (survey.metrics["elements"] > 0))
    iterations, attempts = survey.fields["iteration"][chosen], survey.fields["attempt"][chosen]
    usual = medians_of(codes_of(survey.sites[chosen], attempts, iterations), zeros[chosen])
    kinds = codes_of(survey.roles[chosen], attempts)
    least: dict[int, dict[int, float]] = defaultdict(dict)
    order = np.argsort(iterations, kind="stable")
    for kind, now, value in zip(kinds[order].tolist(), iterations[order].tolist(), usual[order].tolist(), strict=True):
        course = least[kind]
        before = course[next(reversed(course))] if course else np.inf
        course[now] = min(before, value)
    found[chosen] = [least[kind][now] for kind, now in zip(kinds.tolist(), iterations.tolist(), strict=True)]
    return found


def _is_unreached(survey: Survey) -> Mask:
    """Whether a module had no element to compute with at the same moment: an expert to which no token was sent."""
    moments = survey.codes("rank", "attempt", "iteration", "microbatch", "module")
    is_empty = survey.metrics["elements"] == 0
    # Beside other inputs an empty one, as a cache that holds nothing yet, keeps no gradient away.
    is_reached = (survey.fields["operation"] == "forward") & ~survey.is_weight & ~is_empty
    return np.isin(moments, moments[is_empty]) & ~np.isin(moments, moments[is_reached])


def _too_wide(survey: Survey) -> Iterator[Finding]:
    """Gradients whose range is wider than that of the widest 8-bit format, by name of the tensor."""
    is_judged = survey.is_gradient & survey.is_floating
    # With its largest number scaled into the format's last binade, a narrower tensor has nothing that is flushed.
    narrow = FORMATS[NARROW_FORMAT]
    least_range = math.log2(narrow.maximum / 2 / narrow.flush_limit)
    flushed = survey.asked("flushed", is_judged & (survey.metrics["log2_range"] >= least_range))
    mask = is_judged & (flushed > limit.FLUSHED_RATIO)
    names: NDArray[np.object_] = survey.fields["tensor_name"]
    least = percent_text(limit.FLUSHED_RATIO)
    for name in sorted(set(names[mask].tolist())):
        chosen = np.flatnonzero(mask & (names == name))
        ordered = chosen[np.argsort(-flushed[chosen], kind="stable")]
        ratio, total = float(flushed[ordered[0]]), int((is_judged & (names == name)).sum())
        yield finding_of(
            survey,
            places=ordered,
            kind="gradient_underflow",
            severity=Severity.LOW,
            score=ratio,
            text=f"would lose {percent_text(ratio)} in {NARROW_FORMAT}, even with a scale of its own",
            evidence=f"{len(chosen)} of {total} records of {name} would lose more than {least}",
            metric=f"flushed in {NARROW_FORMAT}",
            value=ratio,
        )
