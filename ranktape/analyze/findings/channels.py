"""Finds channels that are far larger than the others, and those that are never anything but zero.

A channel is a place along the last dimension. Digests do not know it: records are read once more, and what is found is
kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, read_values
from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.peers import octaves, robust_z
from ranktape.analyze.findings.sign import Judgement, Sign, count_text, factor_text, named_numbers, number_text, sign_of
from ranktape.analyze.findings.thresholds import CHANNEL_OCTAVES, MIN_CHANNELS, ROBUST_Z, SERIOUS_OCTAVES
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
    survey: Survey, *, view: View | None = None, engine: Engine | None = None, threshold: float = ROBUST_Z
) -> Iterator[Sign]:
    """A sign for each place with channels that stand out in most of its records, and one where channels are dead.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
    """
    measured = (engine or Engine()).measure(survey.records, ChannelMeasure(view=view or View.COMPUTE))
    places: dict[tuple[int, int], _Place] = {}
    for position, payload in enumerate(measured):
        absmax = payload["absmax"]
        if absmax.size < MIN_CHANNELS or not survey.is_floating[position]:
            continue
        key = (int(survey.sites[position]), absmax.size)
        place = places.setdefault(key, _Place.of(absmax.size))
        place.add(absmax, position=position, threshold=threshold)
    for place in places.values():
        yield from place.signs(survey)


@dataclass(slots=True, kw_only=True, eq=False)
class _Place:
    """What the channels of one place were in all of its records."""

    apart: NDArray[np.float64]
    """For each channel the sum over records of how far it is above the others, in octaves."""
    worst: NDArray[np.float64]
    """For each channel its largest value."""
    scores: NDArray[np.float64]
    """For each channel its largest robust z."""
    times: NDArray[np.int64]
    """In how many records each channel stood out."""
    usual: list[float]
    """The median of the channels, for each record."""
    positions: list[int]
    """The records."""

    @classmethod
    def of(cls, num_channels: int) -> _Place:
        """Nothing yet."""
        zeros = [np.zeros(num_channels) for _ in range(3)]
        times = np.zeros(num_channels, dtype=np.int64)
        return cls(apart=zeros[0], worst=zeros[1], scores=zeros[2], times=times, usual=[], positions=[])

    def add(self, absmax: NDArray[np.float64], *, position: int, threshold: float) -> None:
        """Take one more record."""
        self.positions.append(position)
        sizes = octaves(absmax)
        known = np.isfinite(sizes)
        np.maximum(self.worst, absmax, out=self.worst)
        if known.sum() < MIN_CHANNELS:
            return
        middle = float(np.median(sizes[known]))
        apart = np.where(known, sizes - middle, 0.0)
        spread = float(np.median(np.abs(apart[known])))
        scores = robust_z(apart, np.full(apart.size, spread))
        is_far = (scores > threshold) & (apart >= CHANNEL_OCTAVES * threshold / ROBUST_Z)
        self.apart += np.where(is_far, apart, 0.0)
        self.times += is_far
        np.maximum(self.scores, scores, out=self.scores)
        self.usual.append(2.0**middle)

    def signs(self, survey: Survey) -> Iterator[Sign]:
        """What stands out in at least half of the records, and what is always zero."""
        often = np.flatnonzero(self.times * 2 >= max(1, len(self.usual)))
        outlying = often[self.times[often] > 0]
        if 0 < outlying.size <= max(1, MAX_OUTLYING_RATIO * self.apart.size):
            yield self._outlying(survey, outlying)
        dead = np.flatnonzero(self.worst == 0)
        if 0 < dead.size < self.worst.size and not survey.is_gradient[self.positions[0]]:
            yield self._dead(survey, dead)

    def _outlying(self, survey: Survey, channels: NDArray[np.int64]) -> Sign:
        means = self.apart[channels] / self.times[channels]
        ordered = channels[np.argsort(-means, kind="stable")]
        channel, far = int(ordered[0]), float(means.max())
        value, expected = float(self.worst[channel]), float(np.median(self.usual))
        return sign_of(
            survey,
            kind="channel_outlier",
            severity=Severity.MEDIUM if far >= SERIOUS_OCTAVES else Severity.LOW,
            score=far,
            text=f"has an absmax of {factor_text(far)} times that of the other channels",
            evidence=(
                f"absmax {number_text(value)}, median of {self.apart.size} channels {number_text(expected)}; in "
                f"{int(self.times[channel])} of {count_text(len(self.positions), 'record')}; {_named(ordered)}"
            ),
            positions=self.positions,
            judgement=Judgement(
                figure="absmax", value=value, expected=expected, deviation=float(self.scores[channel]), octaves=far
            ),
            extra={"channel": channel},
        )

    def _dead(self, survey: Survey, channels: NDArray[np.int64]) -> Sign:
        return sign_of(
            survey,
            kind="zero",
            severity=Severity.LOW,
            score=channels.size / self.worst.size,
            text=f"has {channels.size} of {self.worst.size} channels that are zero everywhere",
            evidence=f"in all of {count_text(len(self.positions), 'record')}; {_named(channels)}",
            positions=self.positions,
            judgement=Judgement(figure="absmax", value=0.0, expected=float(np.median(self.usual or [0.0]))),
            extra={"channel": int(channels[0])},
        )


def _named(channels: NDArray[np.int64]) -> str:
    more = f" and {channels.size - _MAX_NAMED} more" if channels.size > _MAX_NAMED else ""
    return named_numbers("channel", channels[:_MAX_NAMED].tolist()) + more
