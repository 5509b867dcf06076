"""Finds problems that a tensor's own values show: NaN, infinities, zeros, and gradients that underflow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ranktape.analyze.engine.metrics import NARROW_FORMAT, SATURATING
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import Finding, Severity, make_finding, number_text, percent_text, records_text
from ranktape.analyze.findings.survey import Codes, Floats, Mask, Survey, group_medians, group_members, row_codes
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.storage.format.dtypes import dtype_row

_SMALLEST = {row.min_subnormal: row.name for row in reversed(FORMATS.values())}
"""The format with each smallest number; if several share it, the first of `FORMATS`."""


def nonfinite(survey: Survey) -> Iterator[Finding]:
    """NaN, Inf, and values beyond the computation's dtype: one finding for each site and each time it starts."""
    nan, inf, captured = (survey.counts[name] for name in ("nan", "inf", "captured_inf"))
    is_new = (inf > captured) & (survey.fields["dtype"] != survey.dtypes) & survey.is_floating & ~survey.is_mask
    is_captured = (captured > 0) & survey.is_floating
    for rows in survey.by_site(is_captured, survey.shares(captured)):
        if survey.is_mask[rows].all():
            is_captured[rows] = False
            yield _count_finding(survey, captured, rows, "inf", "-Inf, as masks do", severity=Severity.LOW)
    episodes = survey.episodes((nan > 0) | is_captured | is_new)[survey.times]
    for counts, mask, kind, description in (
        (nan, nan > 0, "nan", "NaN"),
        (captured, is_captured, "inf", "Inf"),
        (inf - captured, is_new, "overflow", "values beyond the range of {dtype}, in which it was computed"),
    ):
        for rows in survey.by_site(mask, survey.shares(counts)):
            for number in np.unique(episodes[rows]):
                yield _count_finding(survey, counts, rows[episodes[rows] == number], kind, description)


def saturated(survey: Survey) -> Iterator[Finding]:
    """Values that equal the largest number of a dtype without infinities: one finding for each site."""
    counts = survey.masked_metric("saturated", np.isin(survey.dtypes, list(SATURATING))).astype(np.int64)
    mask = (survey.shares(counts) > limit.MIN_SATURATED_RATIO) & (counts > 1)
    for rows in survey.by_site(mask, survey.shares(counts)):
        description = "values saturated at the largest number of {dtype}"
        yield _count_finding(survey, counts, rows, "overflow", description, severity=Severity.MEDIUM)


def _count_finding(
    survey: Survey, counts: Codes, rows: Codes, kind: str, description: str, *, severity: Severity = Severity.HIGH
) -> Finding:
    """A finding about records of one site, given with the largest ratio first.

    Since lost values spread, it is about the first iteration, and later records only follow in `places`.
    """
    times = survey.times[rows]
    is_first = times == times.min()
    first_rows = rows[is_first]
    worst = int(first_rows[0])
    elements = int(survey.metrics["elements"][worst])
    ratio = float(counts[worst] / max(1, elements))
    suffix = f"; beyond the largest number of {survey.fields['dtype'][worst]}" * (kind == "inf" and severity == "high")
    skipped = rows[survey.skipped_times[times]]
    if skipped.size:
        iterations = survey.numbered("iteration", skipped)
        suffix += f"; the gradient scaler skipped the step{'s' * iterations.startswith('iterations')} of {iterations}"
    finding = make_finding(
        survey,
        places=first_rows,
        kind=kind,
        severity=severity,
        score=ratio,
        text=f"has {description.format(dtype=survey.dtypes[worst])}",
        evidence=(
            f"{int(counts[worst])} of {elements} elements ({percent_text(ratio)}) at worst{suffix}; first in iteration "
            f"{int(survey.fields['iteration'][worst])} on {survey.numbered('rank', first_rows)}, in "
            f"{records_text(len(rows))} in all"
        ),
        metric=f"overflow.{'nan.' if kind == 'nan' else ''}ratio",
        value=ratio,
    )
    return dataclasses.replace(finding, places=(*finding.places, *rows[~is_first].tolist()))


def zero(survey: Survey) -> Iterator[Finding]:
    """A finding for each site that is all zero in some record. For gradients, see `underflow`."""
    elements, iterations = survey.metrics["elements"], survey.fields["iteration"]
    mask = (survey.counts["zero"] == elements) & (elements > 0) & survey.is_floating & ~survey.is_gradient
    for rows in survey.by_site(mask, -iterations):
        is_site = survey.sites == survey.sites[rows[0]]
        other_iterations = iterations[is_site & ~mask]
        peers = (survey.roles == survey.roles[rows[0]]) & ~is_site
        # A layer that is always zero is not intended if no other layer ever is.
        is_alone = not other_iterations.size and np.unique(survey.sites[peers]).size > 1 and not mask[peers].any()
        # Otherwise, it is ordinary to be always zero, or zero at first like the output of an adapter.
        is_ordinary = not is_alone and (not other_iterations.size or iterations[rows].max() < other_iterations.min())
        # Biases and the second matrix of an adapter are initialized to zeros.
        if is_ordinary and survey.is_weight[rows[0]]:
            continue
        yield make_finding(
            survey,
            places=rows,
            kind="zero",
            severity=Severity.LOW if is_ordinary else Severity.MEDIUM,
            score=len(rows),
            text="is all zero",
            evidence=(
                f"{len(rows)} of {int(is_site.sum())} records of this tensor are all zero"
                + ", but no record of another layer is" * is_alone
            ),
            metric="absmax",
            value=0.0,
        )


def unused(survey: Survey) -> Iterator[Finding]:
    """Modules whose tensors were empty in all of their calls, such as experts without a token."""
    is_activation = (survey.fields["operation"] == "forward") & survey.is_floating & ~survey.is_weight
    has_some = is_activation & (survey.metrics["elements"] > 0)
    modules = survey.codes("module")
    chosen = np.flatnonzero(is_activation & ~np.isin(modules, modules[has_some]))
    if not has_some.any():
        return
    for part in group_members(modules[chosen], survey.times[chosen], survey.order[chosen]):
        rows = chosen[part]
        rows = rows[survey.sites[rows] == survey.sites[rows[0]]]
        yield make_finding(
            survey,
            places=rows,
            kind="zero",
            severity=Severity.LOW,
            score=len(rows),
            text="has no element in any record: no token was sent to this module",
            evidence=f"{records_text(len(rows))} of {survey.numbered('iteration', rows)}, all of them empty",
            metric="elements",
            value=0.0,
        )


def underflow(survey: Survey) -> Iterator[Finding]:
    """A finding for each site whose gradient underflows in its dtype, and one for backward passes without a gradient.

    Flushed values are zeros. Rounding made them if many other values are just above a smallest one; otherwise masks,
    ReLU or tokens without a loss may have. A gradient of all zeros is lost if the layer's tensors in the forward pass,
    or the same gradient of other layers, are not zero. A module without tokens has an empty gradient. If all gradients
    of a backward pass are zero, it had no loss.
    """
    gradients = _Gradients(survey)
    zeros, is_judged = gradients.zeros, gradients.is_judged
    if gradients.is_silent[~is_judged].any():
        yield gradients.silent_passes()
    is_more = is_judged & (zeros - gradients.in_layers > limit.ZERO_EXCESS)
    is_beyond = zeros - np.nan_to_num(gradients.in_forward) > limit.FLUSHED_RATIO
    is_rounded = _is_floored(survey, is_judged & is_beyond, is_more)
    is_empty = is_judged & (zeros == 1) & (is_more | (zeros - gradients.in_forward > limit.ZERO_EXCESS))
    is_small = is_judged & (gradients.subnormal > limit.LOST_RATIO)
    is_sparse = is_more & ~is_rounded & ~is_empty & ~is_small
    # If other records of the site are lost, or rounding made their zeros, rounding made these zeros, too.
    is_at_lost_site = is_sparse & np.isin(survey.sites, survey.sites[is_rounded | is_empty])
    parts = gradients.subnormal + np.where(is_rounded | is_empty | is_at_lost_site, zeros, 0.0)
    for rows in survey.by_site(is_small | is_rounded | is_empty | is_at_lost_site, parts):
        marked, empty = rows[(is_rounded | is_small)[rows]], rows[is_empty[rows]]
        # In one iteration, all layers alike can start with zeros.
        is_alone = bool((is_more & ~gradients.is_silent)[empty].any()) or np.unique(survey.times[empty]).size > 1
        is_serious = bool(marked.size) and parts[marked[0]] >= limit.LOST_RATIO_SERIOUS
        is_zero = not marked.size or bool(is_rounded[marked[0]])
        yield gradients.finding(
            rows,
            severity=Severity.HIGH if is_serious or (is_alone and gradients.is_often(empty)) else Severity.MEDIUM,
            text=gradients.rounded(int(marked[0]), empty, is_zero=is_zero) if marked.size else gradients.empty(empty),
            score=float(parts[rows[0]]),
            is_subnormal=not is_zero,
        )
    for rows in survey.by_site(is_sparse & ~is_at_lost_site, zeros):
        yield gradients.finding(rows, **gradients.sparse(int(rows[0])))


class _Gradients:
    """The parts of each gradient that are subnormal or zero, compared with those of its peers."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self.subnormal, self.zeros = (survey.shares(survey.counts[name]) for name in ("underflow", "zero"))
        is_checked = survey.is_gradient & survey.is_floating & (survey.metrics["elements"] > 0)
        is_checked &= ~_is_unreached(survey)
        self._passes = survey.codes("attempt", "iteration", "rank", "microbatch")
        self.is_silent = is_checked & self._are_silent(is_checked, self._passes)
        """Gradients of passes in which every gradient is zero."""
        self._is_zero_iteration = is_checked & self._are_silent(is_checked, survey.times)
        self.is_judged = is_checked & (~self.is_silent | self._is_zero_iteration)
        self.in_layers = _fewest_in_layers(survey, self.zeros, self.is_judged)
        """The smallest ratio of zeros in any layer of the same kind, up to the iteration of the record."""
        self.in_forward = _most_in_forward(survey, self.zeros)
        """The largest ratio of zeros in a tensor of the layer's forward pass; NaN if none was recorded."""

    def _are_silent(self, mask: Mask, groups: Codes) -> Mask:
        """Whether all gradients of a pass, or of an iteration, are zero, if it has those of several modules."""
        chosen, size = np.flatnonzero(mask), int(groups.max(initial=0)) + 1
        has_value = np.bincount(groups[chosen], weights=self.zeros[chosen] < 1, minlength=size) > 0
        modules = np.unique(np.column_stack((groups, self._survey.codes("module")))[chosen], axis=0)[:, 0]
        has_several = np.bincount(modules.astype(np.int64), minlength=size) > 1
        return (~has_value & has_several)[groups]

    def silent_passes(self) -> Finding:
        """A finding about all backward passes without a gradient in iterations in which other passes have gradients."""
        survey, silent = self._survey, np.flatnonzero(self.is_silent & ~self.is_judged)
        num_silent, num_passes = (len(np.unique(self._passes[mask])) for mask in (silent, survey.is_gradient))
        # Labels can be missing by chance, but not every time. Iterations without any gradient are ignored.
        always: list[int] = []
        most = 0
        checked = np.flatnonzero((self.is_judged | self.is_silent) & ~self._is_zero_iteration)
        for part in group_members(survey.codes("rank", "microbatch")[checked]):
            rows = checked[part]
            num_times = np.unique(survey.times[rows]).size
            if num_times > 1 and self.is_silent[rows].all():
                always += rows.tolist()
                most = max(most, num_times)
        severity, suffix = Severity.LOW, ""
        if always:
            severity = Severity.HIGH if most >= limit.MIN_SILENT_ITERATIONS else Severity.MEDIUM
            named = (survey.numbered(name, always) for name in ("rank", "microbatch"))
            suffix = f"; in every iteration of {', '.join(named)}"
        where = ", ".join(survey.numbered(name, silent) for name in ("microbatch", "iteration", "rank"))
        return make_finding(
            survey,
            places=silent,
            kind="zero",
            severity=severity,
            score=num_silent,
            text=(f"are all zero in {num_silent} of {num_passes} backward passes: no loss reached any layer{suffix}"),
            evidence=f"every gradient of these passes is zero, as of microbatches without labels; {where}",
            metric="silent passes",
            value=float(num_silent),
            options={"tensor_name": "grad_*", "by": "iteration,rank,microbatch", "metric": "absmax"},
        )

    def _site_mask(self, row: int) -> Mask:
        mask: Mask = self.is_judged & (self._survey.sites == self._survey.sites[row])
        return mask

    def is_often(self, empty: Codes) -> bool:
        """Whether at least half of a site's records are lost, or of those of one rank in several iterations."""
        if not empty.size:
            return False
        survey, ranks, is_site = self._survey, self._survey.fields["rank"], self._site_mask(int(empty[0]))
        return 2 * empty.size >= is_site.sum() or any(
            2 * len(rank_rows) >= (is_site & (ranks == ranks[rank_rows[0]])).sum()
            and np.unique(survey.times[rank_rows]).size > 1
            for rank_rows in (empty[part] for part in group_members(ranks[empty].astype(np.int64)))
        )

    def rounded(self, worst: int, empty: Codes, *, is_zero: bool) -> str:
        """The text for a gradient that rounding lost in part, and for the records in which nothing is left."""
        survey, parts = self._survey, []
        subnormal = float(self.subnormal[worst])
        if is_zero:
            floor = float(survey.metrics["smallest_nonzero"][worst])
            format_text = f", the smallest number of {_SMALLEST[floor]}" if floor in _SMALLEST else ""
            others = f"all other values are at least {number_text(floor)}{format_text}"
            parts.append(f"rounding made {percent_text(float(self.zeros[worst]))} of it zero, and {others}")
        if subnormal > limit.LOST_RATIO:
            dtype = survey.dtypes[worst]
            parts.append(f"{percent_text(subnormal)} of it is below the smallest normal number of {dtype}")
        if empty.size:
            num_records = int(self._site_mask(int(empty[0])).sum())
            parts.append(f"all of it is zero in {len(empty)} of {records_text(num_records)}")
        return "underflows: " + "; ".join(parts)

    def empty(self, rows: Codes) -> str:
        """The text for records of all zeros."""
        num_records = int(self._site_mask(int(rows[0])).sum())
        frequency = "" if len(rows) == num_records else f" in {len(rows)} of {records_text(num_records)}"
        if self.is_silent[rows].all():
            iterations = self._survey.numbered("iteration", rows)
            reason = "no loss reached them, or all underflowed"
            return f"is all zero{frequency}, as is every gradient of {iterations}: {reason}"
        differs_from_layers = self.in_layers[rows[0]] < limit.ZERO_EXCESS
        peer = "the same gradient of other layers" if differs_from_layers else "the forward pass of its layer"
        return f"is all zero{frequency}, but {peer} is not: it underflowed, or no gradient reached it"

    def sparse(self, worst: int) -> dict[str, Any]:
        """Kind, severity and text for a gradient with far more zeros than other layers, with or without rounding."""
        survey, part = self._survey, percent_text(float(self.zeros[worst]))
        num_nonzero = int(survey.metrics["elements"][worst] - survey.counts["zero"][worst])
        exceptions = "tokens without a loss and ReLU have such gradients"
        medium: dict[str, Any] = {"severity": Severity.MEDIUM}
        if num_nonzero * limit.FLOOR_RATIO < limit.MIN_FLOOR_ELEMENTS:
            text = f"is {part} zeros, and {num_nonzero} other values are too few to tell whether rounding caused them"
            return medium | {"text": f"{text}: {exceptions}, too"}
        is_coarse = dtype_row(str(survey.dtypes[worst])).itemsize > 1 and (
            survey.masked_metric("coarse", np.arange(len(survey)) == worst)[worst] >= limit.COARSE_RATIO * num_nonzero
        )
        if is_coarse:
            text = "all other values have at most 4 significant bits: rounding to 8 bits may have caused them"
            return medium | {"text": f"is {part} zeros, and {text}, or {exceptions}"}
        text = f"is {part} zeros without signs of rounding: {exceptions}"
        return {"kind": "zero", "severity": Severity.LOW, "text": text}

    def finding(
        self,
        rows: Codes,
        *,
        severity: Severity,
        text: str,
        kind: str = "gradient_underflow",
        score: float | None = None,
        is_subnormal: bool = False,
    ) -> Finding:
        """A finding about the zero or the subnormal part, compared with the same gradient in other layers."""
        survey, worst = self._survey, int(rows[0])
        is_peer = (survey.roles == survey.roles[worst]) & (survey.sites != survey.sites[worst])
        ratios = self.subnormal if is_subnormal else self.zeros
        zeros, median = (
            float(np.median(values[is_peer])) if is_peer.any() else None for values in (self.zeros, ratios)
        )
        peer_text = "" if zeros is None else f", in other layers {percent_text(zeros)}"
        absmax = number_text(float(np.nan_to_num(survey.metrics["absmax"][worst])))
        occurrences = f"in {records_text(len(rows))} of {survey.numbered('iteration', rows)}"
        return make_finding(
            survey,
            places=rows,
            kind=kind,
            severity=severity,
            score=float(ratios[worst]) if score is None else score,
            text=text,
            evidence=(
                f"zero {percent_text(float(self.zeros[worst]))}{peer_text}; "
                f"subnormal {percent_text(float(self.subnormal[worst]))}; "
                f"absmax {absmax}; {occurrences}"
            ),
            metric=f"overflow.{'underflow' if is_subnormal else 'zero'}.ratio",
            value=float(ratios[worst]),
            expected=median,
        )


def _is_floored(survey: Survey, mask: Mask, is_more: Mask) -> Mask:
    """Whether records in the mask have many values close to the smallest one, as rounding leaves them.

    A few are enough if there are far more zeros than in other layers, and the smallest value is that of a format.
    """
    floored = survey.masked_metric("floored", mask)
    nonzero = survey.metrics["elements"] - survey.counts["zero"] - survey.counts["nan"]
    is_of_format = np.isin(survey.metrics["smallest_nonzero"], list(_SMALLEST))
    is_enough = (floored >= limit.MIN_FLOOR_ELEMENTS) | (is_more & is_of_format & (floored > 0))
    # A single value besides zero is no evidence: the gradient of a mean has only one.
    is_grid: Mask = (floored < nonzero) | is_of_format
    return mask & is_enough & (floored >= limit.FLOOR_RATIO * nonzero) & is_grid


def _most_in_forward(survey: Survey, zeros: Floats) -> Floats:
    fields = survey.fields
    # A module outside of the layer stack counts as a layer of its own.
    layers = np.where(fields["layer_idx"] < 0, fields["module"], "")
    groups = row_codes(layers, survey.times, survey.codes("rank", "layer_stack", "layer_idx"))
    # Biases start as zeros, and a mask can be all zeros; neither makes gradients zero.
    is_forward = (fields["operation"] == "forward") & survey.is_floating & ~survey.is_weight & ~survey.is_mask
    is_forward &= survey.metrics["elements"] > 0
    most = np.full(int(groups.max(initial=0)) + 1, -1.0)
    np.maximum.at(most, groups[is_forward], zeros[is_forward])
    return np.where(most < 0, np.nan, most)[groups]


def _fewest_in_layers(survey: Survey, zeros: Floats, mask: Mask) -> Floats:
    """For each record, the smallest median ratio of zeros in any layer of its kind, up to its iteration.

    Later iterations do not count, because the gradients of an adapter start as zeros in all layers.
    """
    minimum = np.zeros(len(survey))
    chosen = np.flatnonzero(mask)
    attempts, times = survey.fields["attempt"][chosen], survey.times[chosen]
    usual = group_medians(row_codes(survey.sites[chosen], times), zeros[chosen])
    for part in group_members(row_codes(survey.roles[chosen], attempts), times):
        steps, firsts = np.unique(times[part], return_index=True)
        fewest = np.minimum.accumulate(np.minimum.reduceat(usual[part], firsts))
        minimum[chosen[part]] = fewest[np.searchsorted(steps, times[part])]
    return minimum


def _is_unreached(survey: Survey) -> Mask:
    """Whether the record's module had only empty inputs at that moment, such as an expert without a token."""
    moments = row_codes(survey.times, survey.codes("rank", "microbatch", "module"))
    is_empty = survey.metrics["elements"] == 0
    # An empty tensor beside others, such as an empty cache, does not prevent gradients.
    is_reached = (survey.fields["operation"] == "forward") & ~survey.is_weight & ~is_empty
    return np.isin(moments, moments[is_empty]) & ~np.isin(moments, moments[is_reached])


def too_wide(survey: Survey) -> Iterator[Finding]:
    """Gradients whose range is wider than that of the widest 8-bit format: one finding for each tensor name."""
    is_judged = survey.is_gradient & survey.is_floating
    # If its largest value is scaled into the format's top binade, a narrower tensor has no value that is flushed.
    narrow = FORMATS[NARROW_FORMAT]
    least_range = math.log2(narrow.maximum / 2 / narrow.flush_limit)
    flushed = survey.masked_metric("flushed", is_judged & (survey.metrics["log2_range"] >= least_range))
    names = survey.fields["tensor_name"]
    for name in sorted(set(names[is_judged & (flushed > limit.FLUSHED_RATIO)].tolist())):
        is_named = is_judged & (names == name)
        chosen = np.flatnonzero(is_named & (flushed > limit.FLUSHED_RATIO))
        ordered = chosen[np.argsort(-flushed[chosen], kind="stable")]
        ratio, least = float(flushed[ordered[0]]), percent_text(limit.FLUSHED_RATIO)
        yield make_finding(
            survey,
            places=ordered,
            kind="gradient_underflow",
            severity=Severity.LOW,
            score=ratio,
            text=f"would lose {percent_text(ratio)} in {NARROW_FORMAT}, even with its own scale",
            evidence=f"{len(chosen)} of {int(is_named.sum())} records of {name} would lose more than {least}",
            metric=f"flushed in {NARROW_FORMAT}",
            value=ratio,
        )
