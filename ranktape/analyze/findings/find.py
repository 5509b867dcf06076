"""What is wrong in a run, and where: the question that the first screen of a report answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ranktape.analyze.findings.causes import merge_causes
from ranktape.analyze.findings.changes import changing
from ranktape.analyze.findings.channels import outlying_channels
from ranktape.analyze.findings.layers import differing_layers, vanishing_gradients
from ranktape.analyze.findings.ranks import differing_ranks
from ranktape.analyze.findings.replicas import differing_replicas
from ranktape.analyze.findings.samples import outlying_samples
from ranktape.analyze.findings.spoiled import lost, spoiled
from ranktape.analyze.findings.survey import Survey, survey
from ranktape.analyze.findings.thresholds import ROBUST_Z
from ranktape.analyze.findings.underflowing import underflowing

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.findings.finding import Finding
    from ranktape.analyze.findings.sign import Sign
    from ranktape.storage import Records


def find(
    records: Records, *, view: View | None = None, engine: Engine | None = None, with_channels: bool = False
) -> list[Finding]:
    """What is wrong and what stands out, the worst first; one finding for each cause.

    NaN and infinities are findings; all other figures are of finite values. Records of whole numbers are judged by the
    bits of their copies alone. Where histograms or statistics were kept, nothing is known of single samples and
    channels. No records, no findings.

    Every value is read once, unless it is known from an earlier question; with `with_channels` once more.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    if not len(records):
        return []
    known = survey(records, view=view, engine=engine)
    signs = [*all_signs(known)]
    if with_channels:
        signs.extend(outlying_channels(known, view=view, engine=engine))
    return merge_causes(known, signs)


def all_signs(
    known: Survey, *, across: Sequence[str] = (), figures: Sequence[str] = (), threshold: float = ROBUST_Z
) -> Iterator[Sign]:
    """Everything that stands out in what is known, cause or not; channels apart.

    With `across` or `figures` what stands out across ranks, layers or samples alone, and what no figure shows. Ranks
    and layers are compared by `figures`, samples by absmax.
    """
    named = {"figures": figures} if figures else {}
    if across or figures:
        yield from lost(known)
    else:
        yield from spoiled(known)
        yield from underflowing(known)
        yield from vanishing_gradients(known)
        yield from changing(known)
    if (not across or "sample" in across) and (not figures or "absmax" in figures):
        yield from outlying_samples(known, threshold=threshold)
    if not across or "rank" in across:
        yield from differing_ranks(known, threshold=threshold, **named)
        yield from differing_replicas(known)
    if not across or "layer" in across:
        yield from differing_layers(known, threshold=threshold, **named)
