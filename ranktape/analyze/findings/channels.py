"""Finds channels that are far larger than the others, and those that are never anything but zero.

A channel is a place along the last dimension. Digests do not know it: records are read once more, and what is found is
kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, read_values
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import (
    Finding,
    Severity,
    factor_text,
    finding_of,
    named_numbers,
    number_text,
    records_text,
)
from ranktape.analyze.findings.peers import binades, robust_z
from ranktape.analyze.numerics.pieces import pieces
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.cache_object import Payload
    from ranktape.analyze.findings.survey import Survey
    from ranktape.storage import Record

VERSION = 1
"""Of the payload; one more whenever what is in it changes."""

MAX_OUTLYING_RATIO = 0.05
"""Where more of the channels are large, being so is ordinary."""

_MAX_NAMED = 8
_MIN_DIMENSIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMeasure:
    """Measures the largest finite magnitude of each channel; nothing where values were not kept, or of vectors."""

    view: View = View.COMPUTE
    """Which numbers are judged."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return f"channels_v{VERSION}_{self.view}"

    def __call__(self, record: Record) -> Payload:
        """The largest magnitudes as `absmax`."""
        if record.keep != Keep.VALUES or len(record.shape) < _MIN_DIMENSIONS:
            return {"absmax": np.zeros(0)}
        return {"absmax": channel_absmax(read_values(record, view=self.view))}


def channel_absmax(array: NDArray[np.generic]) -> NDArray[np.float64]:
    """The largest finite magnitude at each place of the last dimension; 0 where nothing is finite."""
    found = np.zeros(array.shape[-1])
    for part in pieces(array.reshape(-1, array.shape[-1]), axis=1, block_size=array.shape[-1] or 1):
        magnitudes = np.abs(part if part.dtype.kind == "c" else part.astype(np.float64))
        np.maximum(found, np.where(np.isfinite(magnitudes), magnitudes, 0).max(axis=0, initial=0), out=found)
    return found


def outlying_channels(
    survey: Survey, *, view: View | None = None, engine: Engine | None = None, threshold: float = limit.ROBUST_Z
) -> Iterator[Finding]:
    """One for each place with channels that stand out in most of its records, and one where channels are dead.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
    """
    measured = (engine or Engine()).measure(survey.records, ChannelMeasure(view=view or View.COMPUTE))
    sites: dict[tuple[int, int], _Channels] = {}
    for place, payload in enumerate(measured):
        absmax = payload["absmax"]
        if absmax.size >= limit.MIN_CHANNELS and survey.is_floating[place]:
            key = int(survey.sites[place]), absmax.size
            sites.setdefault(key, _Channels(absmax.size)).add(absmax, place=place, threshold=threshold)
    for channels in sites.values():
        yield from channels.findings(survey)


class _Channels:
    """What the channels of one place were in all of its records."""

    def __init__(self, count: int) -> None:
        # For each channel: how far it was above the others, in binades, over the records in which it stood out; in how
        # many that was; its largest robust z; and its largest value.
        self._apart, self._times, self._scores, self._worst = np.zeros((4, count))
        self._usual: list[float] = []
        self._places: list[int] = []

    def add(self, absmax: NDArray[np.float64], *, place: int, threshold: float) -> None:
        """Take one more record."""
        self._places.append(place)
        np.maximum(self._worst, absmax, out=self._worst)
        sizes = binades(absmax)
        known = np.isfinite(sizes)
        if known.sum() < limit.MIN_CHANNELS:
            return
        middle = float(np.median(sizes[known]))
        apart = np.where(known, sizes - middle, 0.0)
        scores = robust_z(apart, float(np.median(np.abs(apart[known]))))
        is_far = (scores > threshold) & (apart >= limit.CHANNEL_BINADES * threshold / limit.ROBUST_Z)
        self._apart += np.where(is_far, apart, 0.0)
        self._times += is_far
        np.maximum(self._scores, scores, out=self._scores)
        self._usual.append(2.0**middle)

    def findings(self, survey: Survey) -> Iterator[Finding]:
        """What stands out in at least half of the records, and what is always zero."""
        count, usual = self._worst.size, float(np.median(self._usual or [0.0]))
        known: dict[str, Any] = {"places": self._places, "metric": "absmax", "expected": usual}
        of_all = records_text(len(self._places))
        outlying = np.flatnonzero((self._times * 2 >= max(1, len(self._usual))) & (self._times > 0))
        if 0 < outlying.size <= max(1, MAX_OUTLYING_RATIO * count):
            means = self._apart[outlying] / self._times[outlying]
            ordered = outlying[np.argsort(-means, kind="stable")]
            channel, far = int(ordered[0]), float(means.max())
            value = float(self._worst[channel])
            yield finding_of(
                survey,
                kind="channel_outlier",
                severity=Severity.MEDIUM if far >= limit.SERIOUS_BINADES else Severity.LOW,
                score=far,
                text=f"has an absmax of {factor_text(far)} times that of the other channels",
                evidence=(
                    f"absmax {number_text(value)}, median of {count} channels {number_text(usual)}; in "
                    f"{int(self._times[channel])} of {of_all}; {_named(ordered)}"
                ),
                value=value,
                deviation=float(self._scores[channel]),
                binades=far,
                channel=channel,
                **known,
            )
        dead = np.flatnonzero(self._worst == 0)
        if 0 < dead.size < count and not survey.is_gradient[self._places[0]]:
            yield finding_of(
                survey,
                kind="zero",
                severity=Severity.LOW,
                score=dead.size / count,
                text=f"has {dead.size} of {count} channels that are zero everywhere",
                evidence=f"in all of {of_all}; {_named(dead)}",
                value=0.0,
                channel=int(dead[0]),
                **known,
            )


def _named(channels: NDArray[np.int64]) -> str:
    more = f" and {channels.size - _MAX_NAMED} more" if channels.size > _MAX_NAMED else ""
    return named_numbers("channel", channels[:_MAX_NAMED].tolist()) + more
