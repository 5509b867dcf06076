"""Says what a capture would take of memory, time and room, from what a few steps of the training have shown."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ranktape.capture.flight.held import ROOM_FOR_NEXT
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.settings.table import Policy
from ranktape.capture.staging.process import default_host_budget_nbytes
from ranktape.capture.writing.counting import kept_nbytes
from ranktape.capture.writing.storing import COUNT_FROM_NBYTES
from ranktape.errors import CaptureError, UsageError
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.memory import nbytes_text
from ranktape.storage.format.record_info import Keep
from ranktape.storage.recording import stack

ARRAY_OBJECTS = 2
"""An array is its document and its values."""

COMMIT_OBJECTS = 4
"""Of an iteration, for each rank: the catalogue with its document, the commit, the marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one iteration takes on one rank."""

    num_tensors: int
    """Tensors that are recorded."""
    nbytes: int
    """Bytes of their values."""
    staged_nbytes: int
    """Bytes that they take in the ring."""
    stored_nbytes: int
    """Bytes of what is kept of them, before it is packed."""
    num_objects: int
    """Objects in the store."""
    kept: dict[str, int]
    """For `values`, `histogram` and `statistics`: the tensors of which that is kept."""
    largest: str
    """The name of the largest tensor; empty where there is none."""
    largest_nbytes: int
    """Bytes that it takes in the ring."""


def footprint_of(headers: Sequence[tuple[bytes, int]], options: CaptureOptions) -> Footprint:
    """What tensors take whose headers are given, each with the bytes of its slot."""
    tensors = [(json.loads(header), nbytes) for header, nbytes in headers]
    kept = [_kept_of(header) for header, _ in tensors]
    largest, largest_nbytes = max(tensors, key=lambda one: one[1], default=(None, 0))
    return Footprint(
        num_tensors=len(tensors),
        nbytes=sum(_nbytes_of(header) for header, _ in tensors),
        staged_nbytes=sum(nbytes for _, nbytes in tensors),
        stored_nbytes=sum(one.nbytes for one in kept),
        num_objects=_num_arrays(kept, options) * ARRAY_OBJECTS + COMMIT_OBJECTS,
        kept=dict(sorted(Counter(one.keep for one in kept).items())),
        largest="" if largest is None else _name_of(**largest),
        largest_nbytes=largest_nbytes,
    )


def _name_of(*, module: str, layer_type: str, operation: str, phase: str, tensor_name: str, **_: Any) -> str:
    return f"{module or layer_type} {operation} {phase} {tensor_name}".strip()


def _nbytes_of(header: Mapping[str, Any]) -> int:
    return int(math.prod(header["shape"])) * numpy_dtype(header["dtype"]).itemsize


def _kept_of(header: Mapping[str, Any]) -> Any:
    """What a stack asks of the record that is kept of a tensor."""
    about = {name: str(header[name]) for name in ("keep", "dtype", "compute_dtype")}
    nbytes = kept_nbytes(nbytes=_nbytes_of(header), **about)
    return SimpleNamespace(**{**header, "shape": tuple(header["shape"]), "nbytes": nbytes})


def _num_arrays(kept: Sequence[Any], options: CaptureOptions) -> int:
    below = COUNT_FROM_NBYTES if options.policy == Policy.HISTOGRAM else stack.STACK_BELOW_NBYTES
    pending = stack.Pending()
    count = 0
    for info in kept:
        if not 0 < info.nbytes < below:
            count += 1
            continue
        # Only its size counts: no memory is behind it.
        array = np.broadcast_to(np.zeros(1, dtype=np.uint8), (info.nbytes,))
        full = pending.hold(stack.HeldTensor(array=array, info=info, site="", release=lambda: None))
        count += full is not None
        if pending.held_nbytes > stack.MAX_HELD_NBYTES:
            count += len(pending.take_all())
    return count + len(pending.take_all())


_MARGIN = 1.5
"""By how much more than what was measured a timeout should allow."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank has found out."""

    rank: int
    """Global rank."""
    host: str
    """Its machine."""
    num_local_ranks: int
    """Ranks on this machine."""
    num_steps: int
    """Steps of the training that have ended."""
    num_layers: dict[str, int]
    """Modules that are captured, by kind of layer."""
    layers: dict[str, list[str]]
    """Their names; of each kind the first thousand, but for rank 0, which has all."""
    footprint: Footprint
    """What a captured iteration takes."""
    num_expected: int
    """Tensors that were expected of it."""
    silent_sites: dict[str, str]
    """Those that were not there, by module, each with the reason."""
    coverage: str | None
    """How much of the model's weights hooks see; None where linear layers are not recorded."""
    silence: str | None
    """Why there was nothing to capture; None where there was."""
    problem: str | None
    """What disabled the capture; None where nothing did."""
    budget_nbytes: int
    """Of the ring."""
    available_nbytes: int
    """Host memory that could still be taken when the training began."""
    step_seconds: float | None
    """Of a step that is not captured; None where the training was too short."""
    captured_seconds: float | None
    """Of one that is."""
    write_rate: float
    """Bytes per second that the store took from this rank, while it took from the others."""
    free_nbytes: int | None
    """Left in the store; None where nobody can know."""

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RankPlan:
        """Rebuild what `dataclasses.asdict` made."""
        return cls(**{**document, "footprint": Footprint(**document["footprint"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a capture will cost."""

    url: str
    """The run, without credentials."""
    iterations: list[int]
    """Those that will be captured."""
    num_stored: int
    """How many of them are in the store at once."""
    ranks: list[RankPlan]
    """What each rank found out; by rank."""
    largest_rank: int
    """The one whose iterations take most."""
    iteration_nbytes: int
    """Bytes of an iteration in the store, from all ranks, before they are packed."""
    run_nbytes: int
    """Of the run, where every iteration is as large as that one."""
    num_objects: int
    """Objects of an iteration, from all ranks."""
    host_nbytes: int
    """Host memory for the rings of a machine, where it is most."""
    held_nbytes: int | None
    """Host budget of a rank in which a flight recorder holds all its values; None for a capture that holds nothing."""
    step_seconds: float | None
    """Of a step that is not captured, on the slowest rank; None where the training was too short."""
    captured_seconds: float | None
    """Of one that is, while there is room in the ring."""
    store_seconds: float
    """Until the store has taken an iteration, from the rank for which that takes longest."""
    captured_slowdown: float | None
    """How much longer a captured step takes than another one: 0.1 is a tenth."""
    sustained_slowdown: float | None
    """How much longer the training takes from the first captured iteration to the last, with waits for the store."""
    refusals: list[str]
    """Why it cannot work, each with the option to change; empty where it can."""


def make_forecast(
    ranks: Sequence[RankPlan], *, options: CaptureOptions, iterations: Sequence[int], url: str
) -> Forecast:
    """The forecast from what every rank has found out.

    Raises:
        CaptureError: no rank has seen a step of the training.
    """
    if not all(one.num_steps for one in ranks):
        raise CaptureError(
            "the script ended before a training step did, so that nothing can be planned: no optimizer stepped, and "
            "nobody called capture.step(); give --advance-on forward for a script that only runs its model forward"
        )
    largest = max(ranks, key=lambda one: one.footprint.staged_nbytes)
    num_stored = len(iterations) if options.keep_last is None else min(len(iterations), options.keep_last + 1)
    iteration_nbytes = sum(one.footprint.stored_nbytes for one in ranks)
    store_seconds = max(one.footprint.stored_nbytes / one.write_rate for one in ranks)
    step_seconds = max((one.step_seconds for one in ranks if one.step_seconds is not None), default=None)
    captured_seconds = max((one.captured_seconds for one in ranks if one.captured_seconds is not None), default=None)
    captured_slowdown = sustained_slowdown = None
    if step_seconds and captured_seconds is not None:
        added = max(0.0, captured_seconds - step_seconds)
        num_steps = (iterations[-1] - iterations[0]) / (len(iterations) - 1) if len(iterations) > 1 else 1.0
        others = step_seconds * num_steps
        # What the ring takes as a whole is waited for at the end, if at all.
        is_held = options.record_last is not None
        fits = is_held or largest.footprint.staged_nbytes * len(iterations) <= largest.budget_nbytes
        waits = 0.0 if fits else max(0.0, store_seconds - others - added)
        captured_slowdown, sustained_slowdown = added / step_seconds, (added + waits) / others
    return Forecast(
        url=url,
        iterations=list(iterations),
        num_stored=num_stored,
        ranks=list(ranks),
        largest_rank=largest.rank,
        iteration_nbytes=iteration_nbytes,
        run_nbytes=iteration_nbytes * num_stored,
        num_objects=sum(one.footprint.num_objects for one in ranks),
        host_nbytes=max(one.budget_nbytes * one.num_local_ranks for one in ranks),
        held_nbytes=_held_nbytes(largest, options),
        step_seconds=step_seconds,
        captured_seconds=captured_seconds,
        store_seconds=store_seconds,
        captured_slowdown=captured_slowdown,
        sustained_slowdown=sustained_slowdown,
        refusals=find_refusals(ranks, options=options, num_iterations=len(iterations), num_stored=num_stored),
    )


def _held_nbytes(largest: RankPlan, options: CaptureOptions) -> int | None:
    """The iterations before the running one, that one, the room that is kept for the next, and a gap at the end."""
    if options.record_last is None:
        return None
    one = largest.footprint
    return _whole(math.ceil(one.staged_nbytes * (options.record_last + 1 + ROOM_FOR_NEXT)) + one.largest_nbytes)


def spread(ranks: Sequence[RankPlan], *, num_ranks: int, num_hosts: int, options: CaptureOptions) -> list[RankPlan]:
    """What each of several ranks would find out that take as much as the only one, and share its store.

    Raises:
        UsageError: there are several already.
    """
    if len(ranks) > 1:
        raise UsageError(f"--num-ranks is for a plan in one process: this launch has {len(ranks)} ranks of its own")
    one = ranks[0]
    on_host = -(-num_ranks // num_hosts)
    budget = options.host_budget_nbytes or default_host_budget_nbytes(num_local_ranks=on_host)
    alike = dataclasses.replace(
        one, num_local_ranks=on_host, budget_nbytes=budget, write_rate=one.write_rate / num_ranks
    )
    return [alike, *(dataclasses.replace(alike, rank=rank, layers={}) for rank in range(1, num_ranks))]


def find_refusals(
    ranks: Sequence[RankPlan], *, options: CaptureOptions, num_iterations: int, num_stored: int
) -> list[str]:
    """Why it cannot work, each with the option to change and the value that would do."""
    silent = [one.silence for one in ranks if one.silence is not None]
    if len(silent) == len(ranks):
        return silent[:1]
    problems = [one for one in ranks if one.problem is not None]
    found = [f"the capture would disable itself on rank {one.rank}: {one.problem}" for one in problems]
    limits = (_memory_refusals, _space_refusals, _time_refusals)
    return [*found, *(text for limit in limits for text in limit(ranks, options, num_iterations, num_stored))]


def _memory_refusals(ranks: Sequence[RankPlan], options: CaptureOptions, *_counts: int) -> Iterator[str]:
    """The first of what does not fit into memory."""
    one = max(ranks, key=lambda rank: rank.footprint.largest_nbytes - rank.budget_nbytes)
    if one.footprint.largest_nbytes > one.budget_nbytes:
        yield (
            f"{one.footprint.largest} takes {one.footprint.largest_nbytes} bytes, and the host budget of rank "
            f"{one.rank} is {one.budget_nbytes}: give --host-budget-nbytes {_whole(one.footprint.largest_nbytes)}"
        )
        return
    one = max(ranks, key=lambda rank: rank.footprint.staged_nbytes - rank.budget_nbytes)
    if options.policy == Policy.SKIP and one.footprint.staged_nbytes > one.budget_nbytes:
        yield (
            f"an iteration takes {one.footprint.staged_nbytes} bytes, and the host budget of rank {one.rank} is "
            f"{one.budget_nbytes}: with --policy skip each one beyond the minimum would be skipped; give "
            f"--host-budget-nbytes {_whole(one.footprint.staged_nbytes)}, or --policy block"
        )
        return
    one = max(ranks, key=lambda rank: rank.budget_nbytes * rank.num_local_ranks - rank.available_nbytes)
    if one.budget_nbytes * one.num_local_ranks > one.available_nbytes:
        fits = one.available_nbytes // one.num_local_ranks // _MIB * _MIB
        yield (
            f"the host budgets of the {one.num_local_ranks} ranks on {one.host} take "
            f"{one.budget_nbytes * one.num_local_ranks} bytes, and {one.available_nbytes} are free there: give "
            f"--host-budget-nbytes {max(_MIB, fits)} or less"
        )


def _space_refusals(
    ranks: Sequence[RankPlan], options: CaptureOptions, _num_iterations: int, num_stored: int
) -> Iterator[str]:
    known = [one.free_nbytes for one in ranks if one.free_nbytes is not None]
    iteration = sum(one.footprint.stored_nbytes for one in ranks)
    if not known or iteration * num_stored <= min(known):
        return
    count = min(known) // iteration
    way_out = (
        f"give --max-iterations {count} (and --min-iterations no more than that)"
        if count
        else "not one fits: select less by --module or --select, or keep less by --keep statistics"
    )
    if count and options.record_last is not None:
        way_out = "give a smaller --record-last or --record-after"
    packed = " before compression" if any(one.footprint.kept.get(Keep.HISTOGRAM) for one in ranks) else ""
    yield (
        f"the run takes {nbytes_text(iteration * num_stored)}{packed} for {num_stored} iterations, and "
        f"{nbytes_text(min(known))} are free at its place: {way_out}"
    )


def _time_refusals(
    ranks: Sequence[RankPlan], options: CaptureOptions, num_iterations: int, _num_stored: int
) -> Iterator[str]:
    def seconds(one: RankPlan) -> float:
        staged = min(one.budget_nbytes, one.footprint.staged_nbytes * num_iterations)
        share = one.footprint.stored_nbytes / max(1, one.footprint.staged_nbytes)
        return staged * share / one.write_rate

    slowest = max(ranks, key=seconds)
    longest = seconds(slowest)
    if longest > options.finish_timeout_seconds:
        yield (
            f"when the training ends, storing what is left will take about {longest:.0f} s on rank {slowest.rank}: "
            f"give --finish-timeout-seconds {math.ceil(longest * _MARGIN)}"
        )


def _whole(nbytes: int) -> int:
    """A budget that so many bytes fit into, in whole mebibytes."""
    return -(-nbytes // _MIB) * _MIB
